"""WanDistLoadModel: name a model file and how to spread it."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..comfyui.folders import list_models, model_path, validate_model_name
from ..jobs import session
from ..jobs.handle import DTYPES, ModelHandle, fingerprint
from ..mesh.machines import MAX_MACHINES
from ..model_file.header import read_model_file
from .inputs import CATEGORY, WanDistModel, validate_types

NO_EXPERT = "none"


class LoadModel(io.ComfyNode):
    """Checks the file and the mesh; the group starts and loads when the first sampler needs it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        models = list_models("diffusion_models")
        return io.Schema(
            node_id="WanDistLoadModel",
            display_name="Wan Dist Load Model",
            category=CATEGORY,
            description="Choose a Wan file (TI2V-5B, T2V-A14B, I2V-A14B, Wan2.1 T2V) and how to spread it over several "
            "GPUs. The model is loaded by a "
            "background worker group when a sampler first needs it, and stays there.",
            inputs=[
                io.Combo.Input(
                    "model_name",
                    options=models,
                    tooltip="File or folder in models/diffusion_models, or folder of diffusers in models/diffusers: 16 "
                    "or 32 bits, fp8 with or without scales, or GGUF.",
                ),
                io.Combo.Input(
                    "dtype",
                    options=list(DTYPES),
                    default="auto",
                    tooltip="Type of the weights and of the matrix products. auto: bfloat16 on GPUs, the file's own "
                    "type on the CPU. Quantised weights stay so in memory and are unpacked to it when they are used.",
                ),
                io.String.Input(
                    "mesh",
                    default="auto",
                    tooltip="How to cut the work: auto, single, or axes with degrees in the order dp, cfg, pp, ring, "
                    "ulysses, tp, such as dp2-cfg2-ulysses2. dp runs videos side by side, cfg (1 or 2) splits prompt "
                    "and negative prompt, pp the blocks, ring and ulysses the video's tokens, tp the weights; at the "
                    "end sp (with tp) saves activations, fsdp weights. The product of the degrees is the number of "
                    "GPUs used.",
                ),
                io.String.Input(
                    "devices",
                    default="all",
                    tooltip="GPUs to use on each machine: all, or indices such as 0,1,2,3. cpu:4 runs 4 ranks on the "
                    "CPU.",
                ),
                io.Boolean.Input(
                    "compile",
                    default=False,
                    tooltip="Compile the blocks with torch.compile: the first run of each size takes a minute or more "
                    "longer, later ones are faster.",
                ),
                io.Int.Input(
                    "machines",
                    default=1,
                    min=1,
                    max=MAX_MACHINES,
                    optional=True,
                    tooltip="Machines that make one video together, 1 to 16, this one included. On each other one run: "
                    "python -m comfy_wan_dist worker --join, followed by head_address.",
                ),
                io.String.Input(
                    "head_address",
                    default="",
                    optional=True,
                    tooltip="With several machines: HOST:PORT at which the others reach this one, such as "
                    "192.168.1.10:29400. Any free port from 1 to 65535, in a network that you trust.",
                ),
                io.Combo.Input(
                    "low_noise_model",
                    options=[NO_EXPERT, *models],
                    default=NO_EXPERT,
                    optional=True,
                    tooltip="For a model in two experts, such as T2V-A14B: its file for low noise, beside the one for "
                    "high noise as model_name. Both stay on the GPUs, or take turns there if they do not fit together.",
                ),
            ],
            outputs=[WanDistModel.Output(display_name="model")],
        )

    @classmethod
    def validate_inputs(
        cls, model_name: str | None, low_noise_model: str | None = NO_EXPERT
    ) -> str | bool:
        names = _chosen(model_name, low_noise_model)
        answers = (validate_model_name("diffusion_models", name) for name in names)
        return next((answer for answer in answers if answer is not True), True)

    @classmethod
    def fingerprint_inputs(
        cls, model_name: str | None, low_noise_model: str | None = NO_EXPERT, **others: Any
    ) -> str:
        names = _chosen(model_name, low_noise_model)
        paths = [model_path("diffusion_models", name) for name in names]
        return " ".join(fingerprint(read_model_file(path)) for path in paths)

    @classmethod
    def execute(
        cls,
        model_name: str,
        dtype: str,
        mesh: str,
        devices: str,
        compile: bool,
        machines: int = 1,
        head_address: str = "",
        low_noise_model: str = NO_EXPERT,
    ) -> io.NodeOutput:
        validate_types(cls.execute, {name: type(value) for name, value in locals().items()})
        low_noise_path = ""
        if low_noise_model != NO_EXPERT:
            low_noise_path = model_path("diffusion_models", low_noise_model)
        handle = ModelHandle(
            path=model_path("diffusion_models", model_name),
            dtype=dtype,
            mesh=mesh,
            devices=devices,
            compile=compile,
            machines=machines,
            head_address=head_address,
            low_noise_path=low_noise_path,
        )
        session.resolve(handle)
        return io.NodeOutput(handle)


def _chosen(*names: str | None) -> list[str]:
    """The names of the model's one or two files; what is linked is None until the node is executed."""
    return [name for name in names if name not in (None, NO_EXPERT)]
