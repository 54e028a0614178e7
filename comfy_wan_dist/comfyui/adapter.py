"""The only file that touches ComfyUI: its folders, progress, interrupt, and its LATENT and CONDITIONING.

Everything it returns is plain: paths, numbers and CPU float32 tensors.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.k_diffusion.sampling
import comfy.latent_formats
import comfy.model_management
import comfy.model_sampling
import comfy.sample
import comfy.samplers
import comfy.utils
import folder_paths
import torch
from PIL.Image import Image as PILImage
from torch import Tensor

from ..ipc.errors import ConfigError, ModelFileError
from ..mesh.devices import DeviceList
from ..mesh.shape import TI2V_CHANNELS, WanShape
from ..model_file.files import GGUF_SUFFIX, NO_PICKLES, SUFFIXES
from ..model_file.offered import folder_named, listed_names
from ..solvers.schedules import Schedule, flow_timesteps, given_sigmas, wan_official

Latent = Mapping[str, Any]
Conditioning = Sequence[Sequence[Any]]

OFFICIAL_SCHEDULER = "wan_official"
SAMPLERS = ("uni_pc", "uni_pc_bh2", "euler", "lcm", "wan_unipc")
IMAGE_KEYS = ("concat_latent_image", "concat_mask")
FILE_FOLDER_LABELS = ("input", "output")
COMPONENTS = {"diffusion_models": "transformer", "vae": "vae"}
"""What diffusers calls the models in ComfyUI's folders."""

# ---- folders ---------------------------------------------------------------------------------------------------


def list_models(folder: str) -> list[str]:
    """Names of the models in a folder of COMPONENTS and in that for diffusers; model_list.py says which."""
    files: list[str] = folder_paths.get_filename_list(folder)
    if folder == "diffusion_models":
        files = [*files, *(name for name in gguf_files(folder) if name not in files)]
    return listed_names(
        files,
        folder_paths.get_folder_paths(folder),
        folder_paths.get_folder_paths("diffusers"),
        component=COMPONENTS[folder],
    )


def list_loras() -> list[str]:
    """Names of the files in the folders of LoRAs."""
    names: list[str] = folder_paths.get_filename_list("loras")
    return names


def lora_path(name: str) -> str:
    """Full path of a LoRA. Raises ConfigError when it is gone, ModelFileError for what is never opened."""
    if not name.endswith(SUFFIXES):
        raise ModelFileError(f"{name!r} is not a .safetensors file; {NO_PICKLES}")
    path = folder_paths.get_full_path("loras", name)
    if path is None:
        raise ConfigError(
            f"{name!r} is not in the loras folders of ComfyUI; refresh the list and choose again"
        )
    return str(path)


def gguf_files(folder: str) -> list[str]:
    """Names of the GGUF files in a model folder, which ComfyUI's own lists leave out."""
    roots = folder_paths.get_folder_paths(folder)
    files = {file for root in roots for file in folder_paths.recursive_search(root, [".git"])[0]}
    return sorted(file for file in files if file.endswith(GGUF_SUFFIX))


def model_path(folder: str, name: str) -> str:
    """Full path of a model, a file or a folder. Raises ConfigError when it is gone."""
    path = folder_named(
        name, folder_paths.get_folder_paths(folder), folder_paths.get_folder_paths("diffusers")
    ) or folder_paths.get_full_path(folder, name)
    if path is None:
        raise ConfigError(
            f"{name!r} is not in the {folder} folders of ComfyUI; refresh the list and choose again"
        )
    return str(path)


def validate_model_name(folder: str, name: str) -> str | bool:
    """For a node's `validate_inputs`, which thereby takes names that are good but not listed."""
    try:
        model_path(folder, name)
    except ConfigError as error:
        return str(error)
    return True


def list_conditioning() -> list[str]:
    """Names of .safetensors files in the input and output folders, each ending in its folder's label."""
    names = []
    for label in FILE_FOLDER_LABELS:
        base = Path(folder_paths.get_directory_by_type(label))
        found = sorted(path.relative_to(base).as_posix() for path in base.rglob("*.safetensors"))
        names += [f"{name} [{label}]" for name in found]
    return names


def conditioning_path(name: str) -> Path:
    """Path of a name that `list_conditioning` gave; a bare name means the input folder. Raises ConfigError."""
    label = next((label for label in FILE_FOLDER_LABELS if name.endswith(f" [{label}]")), None)
    bare = name.removesuffix(f" [{label}]") if label else name
    # Compared as text: a link that lies in the folder is the user's own choice.
    base = os.path.abspath(folder_paths.get_directory_by_type(label or "input"))
    path = Path(os.path.normpath(os.path.join(base, bare)))
    if not path.is_relative_to(base) or not path.is_file():
        raise ConfigError(
            f"{name!r} is not a file in ComfyUI's input or output folder; refresh the list"
        )
    return path


def new_output_path(prefix: str, suffix: str) -> tuple[Path, str, str]:
    """A new file under the output folder as ComfyUI numbers them: its path, name and subfolder."""
    folder, stem, counter, subfolder, _ = folder_paths.get_save_image_path(
        prefix, folder_paths.get_output_directory()
    )
    name = f"{stem}_{counter:05}_{suffix}"
    return Path(folder) / name, name, subfolder


def log_folder() -> Path:
    """Where the groups' logs are kept."""
    return Path(folder_paths.get_user_directory()) / "wan_dist_logs"


# ---- devices ---------------------------------------------------------------------------------------------------


def visible_cuda() -> int:
    """CUDA devices that ComfyUI uses; 0 when it runs on the CPU."""
    if comfy.model_management.cpu_state != comfy.model_management.CPUState.GPU:
        return 0
    return torch.cuda.device_count()


def cuda_devices() -> list[tuple[str, int]]:
    """Name and bytes of memory of each CUDA device that ComfyUI uses."""
    found = (torch.cuda.get_device_properties(index) for index in range(visible_cuda()))
    return [(device.name, device.total_memory) for device in found]


def free_devices(devices: DeviceList) -> None:
    """Ask ComfyUI to move its own models off the CUDA devices that a group is about to fill."""
    if devices.kind != "cuda":
        return
    for index in devices.indices:
        comfy.model_management.free_memory(1e30, torch.device("cuda", index))
    comfy.model_management.soft_empty_cache()


# ---- progress and interrupt ------------------------------------------------------------------------------------


def check_interrupt() -> None:
    """Raise ComfyUI's own exception if the user asked to stop; only the executing node may call it."""
    comfy.model_management.throw_exception_if_processing_interrupted()


class ProgressReporter:
    """ComfyUI's progress bar for the executing node."""

    def __init__(self) -> None:
        self._bar = comfy.utils.ProgressBar(1)

    def update(self, done: int, total: int) -> None:
        self._bar.update_absolute(done, total)


# ---- schedules -------------------------------------------------------------------------------------------------


def list_schedulers() -> list[str]:
    return [*comfy.samplers.SCHEDULER_NAMES, OFFICIAL_SCHEDULER]


def build_schedule(
    *, sampler: str, scheduler: str, steps: int, shift: float, denoise: float
) -> Schedule:
    """Sigmas exactly as a stock KSampler behind ModelSamplingSD3(shift) would use them, or Wan's official ones.

    Empty for denoise 0, where KSampler returns its input.
    """
    if not (math.isfinite(shift) and shift > 0 and 0 <= denoise <= 1):
        raise ConfigError(
            f"shift is {shift} and denoise {denoise}; shift must be above 0 and denoise from 0 to 1"
        )
    if sampler not in SAMPLERS:
        raise ConfigError(f"sampler {sampler!r} is not offered; choose {', '.join(SAMPLERS)}")
    if scheduler == OFFICIAL_SCHEDULER:
        return wan_official(steps, shift, denoise=denoise)
    if scheduler not in comfy.samplers.SCHEDULER_NAMES:
        raise ConfigError(
            f"scheduler {scheduler!r} is not offered; choose {', '.join(list_schedulers())}"
        )
    # The official solver is unknown to KSampler; it takes all sigmas, as euler does.
    known = "euler" if sampler == "wan_unipc" else sampler
    stock = comfy.samplers.KSampler(
        _FlowModel(shift),
        steps,
        torch.device("cpu"),
        sampler=known,
        scheduler=scheduler,
        denoise=denoise,
    )
    # float32 rounding of the shift may lead just above 1: ComfyUI does not mind, the solvers do.
    sigmas = tuple(min(sigma, 1.0) if sigma < 1.001 else sigma for sigma in stock.sigmas.tolist())
    if not all(map(math.isfinite, sigmas)):
        raise ConfigError(
            f"scheduler {scheduler!r} gives no finite sigmas for {steps} steps at shift {shift}; "
            "use more steps or another scheduler"
        )
    return Schedule(
        sigmas=sigmas, timesteps=flow_timesteps(sigmas), start=sigmas[0] if sigmas else 0.0
    )


def sigmas_schedule(sigmas: Any) -> Schedule:
    """The schedule of a SIGMAS, whichever node made it. Raises ConfigError."""
    if not isinstance(sigmas, Tensor) or sigmas.dim() != 1:
        got = f"shape {list(sigmas.shape)}" if isinstance(sigmas, Tensor) else type(sigmas).__name__
        raise ConfigError(
            f"the SIGMAS are no list of numbers but {got}; use a node that makes SIGMAS, such as OptimalStepsScheduler"
        )
    return given_sigmas(sigmas.tolist())


class _FlowModel:
    """As much of a MODEL as ComfyUI's KSampler asks for its sigmas."""

    load_device = torch.device("cpu")

    def __init__(self, shift: float) -> None:
        self._sampling = comfy.model_sampling.ModelSamplingDiscreteFlow()
        self._sampling.set_parameters(shift=shift, multiplier=1000)

    def get_model_object(self, name: str) -> Any:
        if name != "model_sampling":
            raise KeyError(name)
        return self._sampling


# ---- LATENT and CONDITIONING -----------------------------------------------------------------------------------


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
        f"the Wan2.2 VAE needs [batch, {TI2V_CHANNELS}, frames, height/16, width/16]: decode latents of 16 channels, "
        "as from Wan2.1 and A14B models, with ComfyUI's own VAELoader and VAEDecode"
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
    latent: Latent, shape: WanShape, *, seed: int, sampler: str, schedule: Schedule
) -> SamplingTensors:
    """Noise, normalise and mask a LATENT as a stock KSampler does for this model, seed and sigmas."""
    samples = latent_for_model(latent, shape)
    batch_index = latent.get("batch_index")
    if batch_index is not None and len(batch_index) != samples.shape[0]:
        raise ConfigError(
            f"the latent has {samples.shape[0]} samples but a batch_index of {len(batch_index)}; they must be as many"
        )
    # ComfyUI draws the noise in the latent's own dtype.
    given = latent["samples"]
    like = given.cpu() if given.is_floating_point() else samples
    noise = comfy.sample.prepare_noise(like, seed, batch_index).float()
    # ComfyUI leaves an all-zero latent as it is, which is the mean of the normalised space.
    clean = (
        latent_format(shape.out_dim).process_in(samples)
        if torch.count_nonzero(samples)
        else samples
    )
    mask = latent.get("noise_mask")
    frame_mask = None
    if mask is not None:
        if not shape.has_frame_times:
            raise ConfigError(
                "the latent has a noise_mask, which Wan Dist applies with TI2V models only; leave it out, and give "
                "images to an I2V model by WanImageToVideo"
            )
        mask = full_mask(mask, noise.shape)
        frame_mask = mask.mean(dim=(1, 3, 4))
        if bool((mask == mask[:, :1]).all()):
            mask = mask[:, :1]
    return SamplingTensors(
        noisy=schedule.start * noise + (1 - schedule.start) * clean,
        clean=clean if mask is not None else None,
        mask=mask,
        frame_mask=frame_mask,
        step_noise=_step_noise(noise, seed, schedule) if sampler == "lcm" else None,
    )


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
    out = dict(latent)
    out["samples"] = latent_format(result.shape[1]).process_out(result)
    return out


def prompt_embedding(
    conditioning: Conditioning, *, label: str, text_dim: int, takes_image: bool = False
) -> Tensor:
    """The one embedding [1, S, text_dim] of a CONDITIONING. Raises ConfigError for whatever else it asks for.

    takes_image: an image conditioning may come along (prompts.py).
    """
    if len(conditioning) != 1:
        raise ConfigError(
            f"the {label} conditioning has {len(conditioning)} entries; Wan Dist takes one: connect a single "
            "CLIPTextEncode and leave out ConditioningCombine and scheduling"
        )
    embedding, options = conditioning[0][0], conditioning[0][1]
    defaults = {"strength": 1.0, "start_percent": 0.0, "end_percent": 1.0}
    extra = sorted(
        key
        for key, value in options.items()
        if value is not None
        and key != "pooled_output"
        and not (takes_image and key in IMAGE_KEYS)
        and not (isinstance(value, (int, float)) and value == defaults.get(key))
    )
    if extra:
        raise ConfigError(
            f"the {label} conditioning carries {', '.join(extra)}, which Wan Dist does not apply; "
            + ("use an I2V model" if set(extra) <= set(IMAGE_KEYS) else "leave it out")
            + ", or connect the output of CLIPTextEncode directly"
        )
    if (
        not isinstance(embedding, Tensor)
        or embedding.dim() != 3
        or embedding.shape[0] != 1
        or embedding.shape[-1] != text_dim
    ):
        shape = list(embedding.shape) if isinstance(embedding, Tensor) else type(embedding).__name__
        raise ConfigError(
            f"the {label} conditioning has shape {shape}; this model needs [1, tokens, {text_dim}]: "
            "encode the prompt with the umT5 text encoder of Wan (CLIPLoader, type wan)"
        )
    if not bool(torch.isfinite(embedding).all()):
        raise ConfigError(
            f"the {label} conditioning holds NaN or infinite values; encode the prompt again"
        )
    return embedding.to("cpu", torch.float32)


def resize_latent(latent: Tensor, *, height: int, width: int) -> Tensor:
    """A latent [B, C, T, *, *] in another size, as ComfyUI fits image conditioning to a video; float32 on the CPU."""
    resized: Tensor = comfy.utils.common_upscale(
        latent.to("cpu", torch.float32), width, height, "bilinear", "center"
    )
    return resized


# ---- images ----------------------------------------------------------------------------------------------------


def fit_images(images: Tensor, *, width: int, height: int) -> Tensor:
    """Scale and centre-crop images [F, H, W, 3+] as Wan22ImageToVideoLatent does; returns [F, height, width, 3]."""
    if images.dim() != 4 or 0 in images.shape or images.shape[-1] < 3:
        raise ConfigError(
            f"the images have shape {list(images.shape)}; they must be [frames, height, width, 3]"
        )
    scaled = comfy.utils.common_upscale(
        images[..., :3].movedim(-1, 1), width, height, "bilinear", "center"
    )
    fitted: Tensor = scaled.movedim(1, -1).to("cpu", torch.float32).contiguous()
    return fitted


def as_image(frames: Tensor) -> Tensor:
    """Frames in 0..1, or uint8 in 0..255, as an IMAGE; the latter are copied, as LoadImage would have them."""
    return frames if frames.is_floating_point() else frames.float().div_(255)


def image_of(picture: PILImage) -> Tensor:
    """A PIL picture as IMAGE [1, H, W, 3] in 0..1."""
    width, height = picture.size
    pixels = torch.frombuffer(bytearray(picture.convert("RGB").tobytes()), dtype=torch.uint8)
    return pixels.view(1, height, width, 3).float() / 255


def mean_latent(like: Tensor) -> Tensor:
    """Raw latent whose normalised value is 0 everywhere."""
    out: Tensor = latent_format(like.shape[1]).process_out(torch.zeros_like(like))
    return out
