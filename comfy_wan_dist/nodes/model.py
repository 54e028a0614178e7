"""WanDistModel: a MODEL for ComfyUI's own samplers."""

from __future__ import annotations

from comfy_api.latest import io

from ..comfyui.remote_model import build_model
from ..jobs import session
from ..jobs.forwards import SamplerRuns
from ..jobs.handle import HIGH_NOISE, LOW_NOISE, ModelHandle
from .inputs import CATEGORY, WanDistModel, validate_types


class Model(io.ComfyNode):
    """Checks the files; the group starts and loads when a sampler first calls the model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanDistModel",
            display_name="Wan Dist Model",
            category=CATEGORY,
            description="A MODEL for KSampler, SamplerCustomAdvanced, LoraLoaderModelOnly and whatever else takes one. "
            "The samplers run in ComfyUI; each of their calls of the model runs on all GPUs of its mesh.",
            inputs=[
                WanDistModel.Input("model", tooltip="From Wan Dist Load Model or Wan Dist LoRA."),
                io.Combo.Input(
                    "expert",
                    options=[HIGH_NOISE, LOW_NOISE],
                    default=HIGH_NOISE,
                    optional=True,
                    tooltip="Of a model with a low_noise_model the one that predicts; not used for others. Both stay "
                    "on the GPUs, or take turns there if they do not fit together.",
                ),
            ],
            outputs=[io.Model.Output(display_name="MODEL")],
        )

    @classmethod
    def execute(cls, model: ModelHandle, expert: str = HIGH_NOISE) -> io.NodeOutput:
        validate_types(cls.execute, {name: type(value) for name, value in locals().items()})
        runs = SamplerRuns(model, expert=expert)
        return io.NodeOutput(build_model(session.resolve(model).shape, runs))
