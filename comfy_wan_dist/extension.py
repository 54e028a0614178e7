"""The list of nodes that ComfyUI asks for. The nodes are imported when it asks, not before."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from comfy_api.latest import ComfyExtension


async def comfy_entrypoint() -> ComfyExtension:
    """Called by ComfyUI once at start-up."""
    from comfy_api.latest import ComfyExtension, io

    from .nodes.image_to_video_latent import ImageToVideoLatent
    from .nodes.load_conditioning import LoadConditioning
    from .nodes.load_model import LoadModel
    from .nodes.lora import LoRA
    from .nodes.model import Model
    from .nodes.plan import PlanMesh
    from .nodes.sampler import Sampler
    from .nodes.sampler_advanced import SamplerAdvanced
    from .nodes.save_conditioning import SaveConditioning
    from .nodes.vae_decode import VAEDecode

    class WanDistExtension(ComfyExtension):
        async def get_node_list(self) -> list[type[io.ComfyNode]]:
            return [
                LoadModel,
                Sampler,
                SamplerAdvanced,
                VAEDecode,
                ImageToVideoLatent,
                SaveConditioning,
                LoadConditioning,
                PlanMesh,
                LoRA,
                Model,
            ]

    return WanDistExtension()
