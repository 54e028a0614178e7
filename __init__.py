"""ComfyUI's way into the pack. Importing it does no work."""

from .comfy_wan_dist.extension import comfy_entrypoint

__all__ = ["comfy_entrypoint"]
