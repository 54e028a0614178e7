"""WanDistLoRA: one LoRA more for a model."""

from __future__ import annotations

import logging
from typing import Any

from comfy_api.latest import io

from ..comfyui.folders import list_loras, lora_path
from ..jobs import session
from ..jobs.handle import BOTH, EXPERTS, MAX_STRENGTH, ModelHandle, fingerprint
from ..model_file.header import read_model_file
from .inputs import CATEGORY, WanDistModel, validate_types

logger = logging.getLogger("comfy_wan_dist")


class LoRA(io.ComfyNode):
    """Checks the file against the model; the group merges it when a sampler needs it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanDistLoRA",
            display_name="Wan Dist LoRA",
            category=CATEGORY,
            description="Merge a LoRA into the model's weights on all GPUs, as LoraLoaderModelOnly does on one. Chain "
            "as many as you like; they are merged in the order of the chain.",
            inputs=[
                WanDistModel.Input(
                    "model", tooltip="From Wan Dist Load Model or another Wan Dist LoRA."
                ),
                io.Combo.Input(
                    "lora_name",
                    options=list_loras(),
                    tooltip="File in models/loras: safetensors, made for this model, with keys in any usual spelling.",
                ),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=-MAX_STRENGTH,
                    max=MAX_STRENGTH,
                    step=0.01,
                    tooltip="How strongly to merge it, -100 to 100; 0 leaves it out.",
                ),
                io.Combo.Input(
                    "expert",
                    options=list(EXPERTS),
                    default=BOTH,
                    optional=True,
                    tooltip="Of a model with a low_noise_model: the expert that the LoRA was made for; otherwise both.",
                ),
            ],
            outputs=[WanDistModel.Output(display_name="model")],
        )

    @classmethod
    def fingerprint_inputs(cls, lora_name: str | None, strength: float, **others: Any) -> str:
        if strength == 0 or lora_name is None:  # linked
            return ""
        return fingerprint(read_model_file(lora_path(lora_name)))

    @classmethod
    def execute(
        cls, model: ModelHandle, lora_name: str, strength: float, expert: str = BOTH
    ) -> io.NodeOutput:
        validate_types(cls.execute, {name: type(value) for name, value in locals().items()})
        if strength == 0:
            return io.NodeOutput(model)
        handle = model.with_lora(lora_path(lora_name), strength, expert)
        file = session.resolve(handle).loras[-1]
        level = logging.WARNING if file.unknown else logging.INFO
        logger.log(level, "[wan-dist] LoRA %s", file.describe(strength, most=len(file.unknown)))
        return io.NodeOutput(handle)
