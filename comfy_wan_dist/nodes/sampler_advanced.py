"""WanDistSamplerAdvanced: some steps of a schedule, as a stock KSamplerAdvanced would do them on one GPU."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..comfyui.conditioning import Conditioning
from ..comfyui.latent import Latent
from ..comfyui.schedule import build_schedule, sigmas_schedule
from ..ipc.errors import ConfigError
from ..jobs.handle import ModelHandle
from ..jobs.sampling import SamplerInputs, sample_latent
from ..solvers.schedules import MAX_STEPS, cut_schedule
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

ENABLE, DISABLE = "enable", "disable"


class SamplerAdvanced(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanDistSamplerAdvanced",
            display_name="Wan Dist Sampler (Advanced)",
            category=CATEGORY,
            description="Denoise a Wan latent on all GPUs of the model's mesh from one step of a schedule to another, "
            "so that several of these nodes do one run. Gives the same latent as ComfyUI's KSamplerAdvanced behind "
            "ModelSamplingSD3.",
            inputs=[
                model_input(),
                io.Combo.Input(
                    "add_noise",
                    options=[ENABLE, DISABLE],
                    default=ENABLE,
                    tooltip="Add noise to the latent before the first step. Disable it where the latent comes with "
                    "leftover noise from a sampler before.",
                ),
                seed_input("noise_seed", stock="KSamplerAdvanced"),
                *solver_inputs(),
                *prompt_and_latent_inputs(),
                io.Int.Input(
                    "start_at_step",
                    default=0,
                    min=0,
                    max=MAX_STEPS,
                    tooltip="First step to do, counted from 0. If there is none before end_at_step, the latent stays "
                    "as it is.",
                ),
                io.Int.Input(
                    "end_at_step",
                    default=MAX_STEPS,
                    min=0,
                    max=MAX_STEPS,
                    tooltip="Step to end before; where the next sampler starts. From steps on: go to the end.",
                ),
                io.Combo.Input(
                    "return_with_leftover_noise",
                    options=[DISABLE, ENABLE],
                    default=DISABLE,
                    tooltip="If it ends before the last step: leave in the noise that the next sampler is to go on "
                    "from. Disabled, the last of the steps removes all noise.",
                ),
                sigmas_input("steps, scheduler and shift"),
                *expert_inputs(),
            ],
            outputs=sampling_outputs(),
        )

    @classmethod
    async def execute(
        cls,
        model: ModelHandle,
        add_noise: str,
        noise_seed: int,
        steps: int,
        cfg: float,
        sampler_name: str,
        scheduler: str,
        shift: float,
        positive: Conditioning,
        negative: Conditioning,
        latent_image: Latent,
        start_at_step: int,
        end_at_step: int,
        return_with_leftover_noise: str,
        sigmas: Any = None,
        boundary: float = 0.0,
        low_noise_cfg: float = 0.0,
    ) -> io.NodeOutput:
        validate_types(cls.execute, {name: type(value) for name, value in locals().items()})
        is_noised = _is_enabled("add_noise", add_noise)
        has_leftover = _is_enabled("return_with_leftover_noise", return_with_leftover_noise)
        if sigmas is None:
            whole = build_schedule(
                sampler=sampler_name, scheduler=scheduler, steps=steps, shift=shift, denoise=1.0
            )
        else:
            whole = sigmas_schedule(sigmas)
        schedule = cut_schedule(
            whole, start=start_at_step, end=end_at_step, leftover_noise=has_leftover
        )
        given = SamplerInputs(
            model=model,
            positive=positive,
            negative=negative,
            latent=latent_image,
            seed=noise_seed,
            add_noise=is_noised,
            solver=sampler_name,
            cfg=cfg,
            low_noise_cfg=low_noise_cfg,
            boundary=boundary,
        )
        latent, report = await sample_latent(given, schedule)
        if not schedule.timesteps:
            return io.NodeOutput(latent, report)
        note = (
            f"{len(schedule.timesteps)} of {len(whole.timesteps)} steps from step {start_at_step} on, "
            f"{'noise added' if is_noised else 'no noise added'}, sigmas {schedule.listed()}"
        )
        unused = "" if sigmas is None else "; not used: steps, scheduler, shift"
        return io.NodeOutput(latent, f"{note}{unused}\n\n{report}")


def _is_enabled(name: str, value: str) -> bool:
    if value not in (ENABLE, DISABLE):
        raise ConfigError(f"{name} is {value!r}; it must be {ENABLE!r} or {DISABLE!r}")
    return value == ENABLE
