"""WanDistSampler: denoise a latent on the worker group, as a stock KSampler would on one GPU."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..comfyui.conditioning import Conditioning
from ..comfyui.latent import Latent
from ..comfyui.schedule import build_schedule, sigmas_schedule
from ..ipc.errors import ConfigError
from ..jobs.handle import ModelHandle
from ..jobs.sampling import SamplerInputs, sample_latent
from ..solvers.schedules import FEW_STEP, FEW_STEP_SOLVER, Schedule
from .inputs import CATEGORY, validate_types
from .sampling_inputs import (
    expert_inputs,
    model_input,
    prompt_and_latent_inputs,
    sampling_outputs,
    seed_input,
    sigmas_input,
    solver_inputs,
)

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
                model_input(),
                *prompt_and_latent_inputs(),
                seed_input("seed", stock="KSampler"),
                *solver_inputs(),
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
                sigmas_input("steps, scheduler, shift and denoise"),
                *expert_inputs(),
            ],
            outputs=sampling_outputs(),
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
            note = f"sigmas {schedule.listed()}; not used: steps, scheduler, shift, denoise\n\n"
        else:
            schedule = build_schedule(
                sampler=sampler_name, scheduler=scheduler, steps=steps, shift=shift, denoise=denoise
            )
        given = SamplerInputs(
            model=model,
            positive=positive,
            negative=negative,
            latent=latent_image,
            seed=seed,
            solver=sampler_name,
            cfg=cfg,
            low_noise_cfg=low_noise_cfg,
            boundary=boundary,
        )
        latent, report = await sample_latent(given, schedule)
        return io.NodeOutput(latent, note + report)


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
        f"few_step {name}: {FEW_STEP_SOLVER}, cfg 1, sigmas {schedule.listed()}; not used: steps, cfg, sampler_name, "
        "scheduler, shift, denoise\n\n"
    )
