"""A LATENT as a job takes it, and a job's result as a LATENT."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import comfy.k_diffusion.sampling
import comfy.latent_formats
import comfy.model_management
import comfy.sample
import comfy.utils
import torch
from torch import Tensor

from ..ipc.errors import ConfigError
from ..mesh.shape import WanShape
from ..mesh.vae_shape import TI2V_CHANNELS, VAE_STRIDE
from ..solvers.schedules import Schedule
from ..solvers.table import find_solver

Latent = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class SamplingTensors:
    """A LATENT as a sampling job takes it, float32 on the CPU, normalised latent space.

    noisy, clean [B, C, T, h, w]; mask [B, 1 or C, T, h, w]; frame_mask [B, T]; step_noise [K, B, C, T, h, w].
    """

    noisy: Tensor
    clean: Tensor | None
    mask: Tensor | None
    frame_mask: Tensor | None
    step_noise: Tensor | None


def latent_format(channels: int) -> Any:
    """How ComfyUI normalises the latents of the VAE with so many channels."""
    formats = comfy.latent_formats
    return formats.Wan22() if channels == TI2V_CHANNELS else formats.Wan21()


def fit_latent(latent: Latent, shape: WanShape) -> dict[str, Any]:
    """The LATENT as this ComfyUI's own samplers take it: an empty one may be made for another model, or for images."""
    out = dict(latent)
    samples = out.get("samples")
    if isinstance(samples, Tensor) and samples.dim() in (4, 5) and samples.numel():
        fit = comfy.sample.fix_empty_latent_channels
        # What it takes beside the samples, such as their stride, later versions read from the LATENT and remove.
        strides = {key: out.pop(key) for key in latent if key in inspect.signature(fit).parameters}
        model = SimpleNamespace(get_model_object=lambda _: latent_format(shape.out_dim))
        out["samples"] = fit(model, samples, **strides)
    return out


def latent_for_model(latent: Latent, shape: WanShape) -> Tensor:
    """The samples of a LATENT, float32. Raises ConfigError for what a model of this shape cannot denoise."""
    nodes = (
        "Wan22ImageToVideoLatent or WanDistImageToVideoLatent"
        if shape.out_dim == TI2V_CHANNELS
        else "EmptyHunyuanLatentVideo or WanImageToVideo"
    )
    needs = (
        f"this model needs [batch, {shape.out_dim}, frames, height/{shape.vae_stride}, width/{shape.vae_stride}]: "
        f"use {nodes}"
    )
    return _plain_samples(latent, channels=shape.out_dim, needs=needs)


def latent_for_vae(latent: Latent) -> Tensor:
    """The samples of a LATENT, float32. Raises ConfigError for what the Wan2.2 VAE cannot decode."""
    needs = (
        f"the Wan2.2 VAE needs [batch, {TI2V_CHANNELS}, frames, height/{VAE_STRIDE}, width/{VAE_STRIDE}]: decode "
        "latents of 16 channels, as from Wan2.1 and A14B models, with ComfyUI's own VAELoader and VAEDecode"
    )
    return _plain_samples(latent, channels=TI2V_CHANNELS, needs=needs)


def _plain_samples(latent: Latent, *, channels: int, needs: str) -> Tensor:
    samples = latent.get("samples")
    if not isinstance(samples, Tensor) or getattr(samples, "is_nested", False):
        raise ConfigError(f"the LATENT holds no plain tensor; {needs}")
    if samples.dim() != 5 or samples.shape[1] != channels or samples.numel() == 0:
        raise ConfigError(f"the latent has shape {list(samples.shape)}; {needs}")
    if not bool(torch.isfinite(samples).all()):
        raise ConfigError(
            "the latent holds NaN or infinite values; whatever made it went wrong: sample it again with the dtype "
            "bfloat16 or float32"
        )
    return samples.to("cpu", torch.float32)


def prepare_sampling(
    latent: Latent,
    shape: WanShape,
    *,
    seed: int,
    sampler: str,
    schedule: Schedule,
    add_noise: bool = True,
) -> SamplingTensors:
    """Noise, normalise and mask a LATENT as a stock KSampler does for this model, seed and sigmas.

    Without add_noise the latent has its noise already; what a solver adds after its steps comes from the seed still.
    """
    samples = latent_for_model(latent, shape)
    noise = torch.zeros_like(samples)
    if add_noise:
        noise, samples = _with_noise(latent, samples, seed)
    # ComfyUI leaves an all-zero latent as it is, which is the mean of the normalised space.
    clean = (
        latent_format(shape.out_dim).process_in(samples)
        if torch.count_nonzero(samples)
        else samples
    )
    mask = latent.get("noise_mask")
    frame_mask = None
    if mask is not None:
        mask = full_mask(mask, noise.shape)
        if shape.has_frame_times:
            frame_mask = mask.mean(dim=(1, 3, 4))
        if bool((mask == mask[:, :1]).all()):
            mask = mask[:, :1]
    return SamplingTensors(
        noisy=schedule.start * noise + (1 - schedule.start) * clean,
        clean=clean if mask is not None else None,
        mask=mask,
        frame_mask=frame_mask,
        step_noise=_step_noise(noise, seed, schedule) if find_solver(sampler).needs_noise else None,
    )


def _with_noise(latent: Latent, samples: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """The seed's noise and the samples; where one side has one sample, it serves all of the other."""
    batch_index = latent.get("batch_index")
    # ComfyUI draws the noise in the latent's own dtype.
    given = latent["samples"]
    like = given.cpu() if given.is_floating_point() else samples
    try:
        noise = comfy.sample.prepare_noise(like, seed, batch_index).float()
        noise, samples = torch.broadcast_tensors(noise, samples)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"no noise can be made of seed {seed} for {samples.shape[0]} samples with the batch_index {batch_index}: "
            f"{error}; take a seed from 0 to 2**64 - 1, and a batch_index for each sample, or none"
        ) from error
    return noise, samples


def full_mask(mask: Tensor, shape: torch.Size) -> Tensor:
    """A noise_mask of whatever shape as ComfyUI spreads it over a latent. Raises ConfigError where it cannot."""
    if not isinstance(mask, Tensor) or mask.dim() < 2 or 0 in mask.shape:
        raise ConfigError(
            f"the latent's noise_mask has shape {list(getattr(mask, 'shape', []))}; it must be [batch, height, width] "
            "or [batch, 1, frames, height, width]"
        )
    mask = comfy.utils.reshape_mask(mask.to("cpu", torch.float32), shape)
    if mask.shape != shape or not bool(torch.isfinite(mask).all()):
        raise ConfigError(
            f"the latent's noise_mask covers {list(mask.shape)} of {list(shape)} or holds NaN; "
            "use a mask of one channel with values from 0 to 1"
        )
    return mask


def _step_noise(noise: Tensor, seed: int, schedule: Schedule) -> Tensor | None:
    """Fresh noise of each step that does not end at 0, from ComfyUI's own rule on ComfyUI's own device."""
    points = schedule.sigmas
    pairs = [pair for pair in zip(points[:-1], points[1:], strict=True) if pair[1] > 0]
    if not pairs:
        return None
    like = noise.to(comfy.model_management.get_torch_device())
    sampler = comfy.k_diffusion.sampling.default_noise_sampler(like, seed=seed)
    return torch.stack([sampler(sigma, following).cpu() for sigma, following in pairs])


def finish_sampling(latent: Latent, result: Tensor) -> dict[str, Any]:
    """The LATENT that a stock KSampler would return for the sampled, normalised `result`."""
    return {**latent, "samples": latent_format(result.shape[1]).process_out(result)}


def resize_latent(latent: Tensor, *, height: int, width: int) -> Tensor:
    """A latent [B, C, T, *, *] in another size, as ComfyUI fits image conditioning to a video; float32 on the CPU."""
    resized: Tensor = comfy.utils.common_upscale(
        latent.to("cpu", torch.float32), width, height, "bilinear", "center"
    )
    return resized


def mean_latent(like: Tensor) -> Tensor:
    """Raw latent whose normalised value is 0 everywhere."""
    out: Tensor = latent_format(like.shape[1]).process_out(torch.zeros_like(like))
    return out
