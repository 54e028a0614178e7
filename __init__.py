"""ComfyUI's way into the pack. Importing it does no work."""

from .comfy_wan_dist.extension import comfy_entrypoint

WEB_DIRECTORY = "./web"
"""ComfyUI serves web/docs as the help pages of the nodes."""

__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]
