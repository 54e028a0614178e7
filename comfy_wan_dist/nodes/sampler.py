"""WanDistSampler: denoise a latent on the worker group, as a stock KSampler would on one GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

from comfy_api.latest import io

from ..comfyui.conditioning import Conditioning, read_prompt
from ..comfyui.latent import Latent, finish_sampling, fit_latent, prepare_sampling
from ..comfyui.schedule import build_schedule, list_schedulers, sigmas_schedule
from ..ipc.errors import ConfigError
from ..jobs import session
from ..jobs.experts import choose_experts
from ..jobs.handle import ModelHandle
from ..jobs.sampling import Sampling, sample
from ..solvers.schedules import FEW_STEP, FEW_STEP_SOLVER, Schedule
from ..solvers.table import solver_names
from .inputs import CATEGORY, WanDistModel, cfg_input, validate_types

NO_PRESET = "off"


class Sampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanDistSampler",
            display_name="Wan Dist Sampler",
            category=CATEGORY,
            description="Denoise a Wan latent on all GPUs of the model's mesh. A batch is shared out over the "
            "planes of a dp mesh. Same seed, sampler, scheduler and shift give the same video as ComfyUI's KSampler "
            "behind ModelSamplingSD3.",
            inputs=[
                WanDistModel.Input("model", tooltip="From Wan Dist Load Model or Wan Dist LoRA."),
                io.Conditioning.Input(
                    "positive",
                    tooltip="What the video should show: CLIPTextEncode with the umT5 encoder.",
                ),
                io.Conditioning.Input(
                    "negative", tooltip="What it should not show. Not used at cfg 1."
                ),
                io.Latent.Input(
                    "latent_image",
                    tooltip="From Wan22ImageToVideoLatent or Wan Dist Image To Video Latent for TI2V models; from "
                    "EmptyHunyuanLatentVideo or WanImageToVideo for A14B and Wan2.1.",
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=True,
                    tooltip="Seed of the noise; the same as in KSampler.",
                ),
                io.Int.Input(
                    "steps", default=20, min=1, max=10000, tooltip="Denoising steps, 1 to 10000."
                ),
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
                io.Float.Input(
                    "denoise",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="Share of the schedule to run, 0 to 1: below 1 it starts from the given latent.",
                ),
                io.Combo.Input(
                    "few_step",
                    options=[NO_PRESET, *FEW_STEP],
                    default=NO_PRESET,
                    optional=True,
                    tooltip="Settings of a distilled model: FastWan2.2-TI2V-5B or Wan2.2-TI2V-5B-Turbo. Other than off "
                    "it samples with lcm, cfg 1 and the model's own sigmas, and steps, cfg, sampler_name, scheduler, "
                    "shift and denoise are not used.",
                ),
                io.Sigmas.Input(
                    "sigmas",
                    optional=True,
                    tooltip="From ManualSigmas, OptimalStepsScheduler or another node that needs no MODEL, falling "
                    "from 1 to 0. If connected, steps, scheduler, shift and denoise are not used.",
                ),
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
            ],
            outputs=[
                io.Latent.Output(display_name="latent"),
                io.String.Output(
                    display_name="report",
                    tooltip="The LoRAs, the mesh, the time, the memory, and what the GPUs sent to each other, as text.",
                ),
            ],
        )

    @classmethod
    async def execute(
        cls,
        model: ModelHandle,
        positive: Conditioning,
        negative: Conditioning,
        latent_image: Latent,
        seed: int,
        steps: int,
        cfg: float,
        sampler_name: str,
        scheduler: str,
        shift: float,
        denoise: float,
        few_step: str = NO_PRESET,
        sigmas: Any = None,
        boundary: float = 0.0,
        low_noise_cfg: float = 0.0,
    ) -> io.NodeOutput:
        validate_types(cls.execute, {name: type(value) for name, value in locals().items()})
        note = ""
        if few_step != NO_PRESET:
            schedule, note = _few_step(few_step, model, has_sigmas=sigmas is not None)
            sampler_name, cfg, low_noise_cfg = FEW_STEP_SOLVER, 1.0, 0.0
        elif sigmas is not None:
            schedule = sigmas_schedule(sigmas)
            note = f"sigmas {_listed(schedule)}; not used: steps, scheduler, shift, denoise\n\n"
        else:
            schedule = build_schedule(
                sampler=sampler_name, scheduler=scheduler, steps=steps, shift=shift, denoise=denoise
            )
        for name, value in (("cfg", cfg), ("low_noise_cfg", low_noise_cfg), ("boundary", boundary)):
            if not abs(value) <= 1e30:  # NaN, or beyond what ranks compute in
                raise ConfigError(f"{name} is {value}; it must be a number from -1e30 to 1e30")
        resolved = session.resolve(model)
        latent_image = fit_latent(latent_image, resolved.shape)
        if not schedule.timesteps:
            return io.NodeOutput(latent_image, "no steps: nothing was computed")
        experts = choose_experts(
            resolved,
            schedule,
            cfg=float(cfg),
            low_noise_cfg=float(low_noise_cfg) or None,
            boundary=boundary or None,
        )
        tensors = prepare_sampling(
            latent_image, resolved.shape, seed=seed, sampler=sampler_name, schedule=schedule
        )
        prompt = partial(read_prompt, shape=resolved.shape, tensors=tensors)
        sampling = Sampling(
            tensors=tensors,
            cond=prompt(positive, label="positive"),
            uncond=prompt(negative, label="negative") if experts.is_guided else None,
            schedule=schedule,
            solver=sampler_name,
            experts=experts,
        )
        latent, report = await sample(sampling, resolved)
        return io.NodeOutput(finish_sampling(latent_image, latent), note + report)


def _few_step(name: str, model: ModelHandle, *, has_sigmas: bool) -> tuple[Schedule, str]:
    """A preset's schedule, and what the report says of it. Raises ConfigError."""
    if name not in FEW_STEP:
        offered = ", ".join(map(repr, FEW_STEP))
        raise ConfigError(f"few_step {name!r} is not offered; choose {offered} or {NO_PRESET!r}")
    if has_sigmas:
        raise ConfigError(
            f"few_step is {name!r} and sigmas are connected; set few_step to off or disconnect the sigmas"
        )
    if model.low_noise_path:
        raise ConfigError(
            f"few_step {name!r} is for a model with one expert; set few_step to off, and for A14B with LoRAs for 4 "
            "steps take euler, simple, shift 5, 4 steps and cfg 1"
        )
    schedule = FEW_STEP[name]
    return schedule, (
        f"few_step {name}: {FEW_STEP_SOLVER}, cfg 1, sigmas {_listed(schedule)}; not used: steps, cfg, sampler_name, "
        "scheduler, shift, denoise\n\n"
    )


def _listed(schedule: Schedule) -> str:
    shown = [f"{sigma:.6g}" for sigma in schedule.sigmas]
    return ", ".join(shown if len(shown) <= 12 else [*shown[:10], "...", shown[-1]])
