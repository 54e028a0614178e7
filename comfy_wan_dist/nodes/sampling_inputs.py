"""What the sampler nodes ask for and give back alike."""

from __future__ import annotations

from comfy_api.latest import io

from ..comfyui.schedule import list_schedulers
from ..solvers.table import solver_names
from .inputs import WanDistModel, cfg_input


def model_input() -> io.Input:
    return WanDistModel.Input("model", tooltip="From Wan Dist Load Model or Wan Dist LoRA.")


def prompt_and_latent_inputs() -> list[io.Input]:
    return [
        io.Conditioning.Input(
            "positive",
            tooltip="What the video should show: CLIPTextEncode with the umT5 encoder.",
        ),
        io.Conditioning.Input("negative", tooltip="What it should not show. Not used at cfg 1."),
        io.Latent.Input(
            "latent_image",
            tooltip="From Wan22ImageToVideoLatent or Wan Dist Image To Video Latent for TI2V models; from "
            "EmptyHunyuanLatentVideo or WanImageToVideo for A14B and Wan2.1.",
        ),
    ]


def seed_input(name: str, *, stock: str) -> io.Int.Input:
    """stock: the node of ComfyUI that draws the same noise."""
    return io.Int.Input(
        name,
        default=0,
        min=0,
        max=0xFFFFFFFFFFFFFFFF,
        control_after_generate=True,
        tooltip=f"Seed of the noise; the same as in {stock}.",
    )


def solver_inputs() -> list[io.Input]:
    """steps, cfg, sampler_name, scheduler and shift."""
    return [
        io.Int.Input("steps", default=20, min=1, max=10000, tooltip="Denoising steps, 1 to 10000."),
        cfg_input("Guidance scale, 0 to 100. At 1 the negative prompt is not computed."),
        io.Combo.Input(
            "sampler_name",
            options=list(solver_names()),
            default="uni_pc",
            tooltip="ComfyUI's samplers by their names; wan_unipc is the UniPC of the official Wan code.",
        ),
        io.Combo.Input(
            "scheduler",
            options=list_schedulers(),
            default="simple",
            tooltip="ComfyUI's schedulers; wan_official is the schedule of the official Wan code.",
        ),
        io.Float.Input(
            "shift",
            default=8.0,
            min=0.01,
            max=100.0,
            step=0.01,
            tooltip="Shift of the noise schedule, as in ModelSamplingSD3: 8 in ComfyUI's template, 5 in the "
            "official code.",
        ),
    ]


def sigmas_input(unused: str) -> io.Sigmas.Input:
    """unused: what of the node's inputs connected sigmas replace."""
    return io.Sigmas.Input(
        "sigmas",
        optional=True,
        tooltip="From ManualSigmas, OptimalStepsScheduler or another node that needs no MODEL, falling "
        f"from 1 to 0. If connected, {unused} are not used.",
    )


def expert_inputs() -> list[io.Input]:
    """boundary and low_noise_cfg."""
    return [
        io.Float.Input(
            "boundary",
            default=0.0,
            min=0.0,
            max=1.0,
            step=0.005,
            round=0.001,
            optional=True,
            tooltip="For a model with a low_noise_model, 0 to 1: the second expert predicts where the noise is "
            "below this. 0: the model's own, 0.875 for text-to-video, 0.9 for image-to-video.",
        ),
        cfg_input(
            "Guidance scale of the low_noise_model, 0 to 100. 0: the same as cfg.",
            name="low_noise_cfg",
            default=0.0,
            optional=True,
        ),
    ]


def sampling_outputs() -> list[io.Output]:
    return [
        io.Latent.Output(display_name="latent"),
        io.String.Output(
            display_name="report",
            tooltip="The LoRAs, the mesh, the time, the memory, and what the GPUs sent to each other, as text.",
        ),
    ]
