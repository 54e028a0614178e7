"""WanDistModel: a MODEL for ComfyUI's own samplers."""

from __future__ import annotations

from comfy_api.latest import io

from ..comfyui.remote_model import build_model
from ..jobs import session
from ..jobs.forwards import SamplerRuns
from ..jobs.handle import ModelHandle
from .inputs import CATEGORY, WanDistModel


class Model(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanDistModel",
            display_name="Wan Dist Model",
            category=CATEGORY,
            description="A MODEL for KSampler, SamplerCustomAdvanced, LoraLoaderModelOnly and whatever else takes one. "
            "The samplers run in ComfyUI, and each of their calls of the model on all GPUs of its mesh.",
            inputs=[
                WanDistModel.Input(
                    "model", tooltip="From Wan Dist Load Model or Wan Dist LoRA, with one expert."
                ),
            ],
            outputs=[io.Model.Output(display_name="MODEL")],
        )

    @classmethod
    def execute(cls, model: ModelHandle) -> io.NodeOutput:
        resolved = session.resolve(model)
        return io.NodeOutput(build_model(resolved.shape, SamplerRuns(model)))
