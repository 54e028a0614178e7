"""What WAN_DIST_MODEL carries between nodes: a description, not a live object.

ComfyUI caches, drops and revives outputs as it likes; whoever needs the model finds or starts the group that the
description names. Reading the file's header again is cheap and notices a replaced file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..ipc.errors import ConfigError
from ..ipc.messages import LoraSpec, ModelSpec, VAESpec
from ..mesh.choice import choose_mesh
from ..mesh.degrees import MeshDegrees, parse_mesh
from ..mesh.devices import DeviceList, parse_devices
from ..mesh.dtypes import BY_CODE, COMPUTED, FLOATS
from ..mesh.machines import Machines, parse_machines, validate_machines
from ..mesh.memory import weight_bytes
from ..mesh.shape import WanShape
from ..mesh.validate import validate_devices, validate_model
from ..model_file.header import ModelFile, content_of, read_model_file
from ..model_file.lora import HALVES, LoraFile, changed_shape, read_lora
from ..model_file.vae import read_vae_file
from ..model_file.wan import read_wan_file, validate_experts

AUTO = "auto"
DTYPES = (AUTO, *sorted(COMPUTED))
MAX_STRENGTH = 100.0
BOTH, HIGH_NOISE, LOW_NOISE = EXPERTS = ("both", "high noise", "low noise")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraHandle:
    """A LoRA file, how strongly to merge it, -100 to 100 and not 0, and into which expert of a model that has two."""

    path: str
    strength: float
    expert: str = BOTH


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelHandle:
    """A transformer's file or folder and how to spread it. Most fields are as the loader's widgets say.

    devices: on each machine. head_address: of this one, for the others; read only if there are any.
    loras: in the order in which they are merged. low_noise_path: of the second expert; empty for a model without.
    """

    path: str
    dtype: str
    mesh: str
    devices: str
    compile: bool
    machines: int = 1
    head_address: str = ""
    loras: tuple[LoraHandle, ...] = ()
    low_noise_path: str = ""

    def with_lora(self, path: str, strength: float, expert: str = BOTH) -> ModelHandle:
        """This model with one LoRA more; strength 0 means without it. Raises ConfigError."""
        if expert not in EXPERTS:
            raise ConfigError(
                f"the LoRA's expert is {expert!r}; choose {', '.join(map(repr, EXPERTS))}"
            )
        if expert != BOTH and not self.low_noise_path:
            raise ConfigError(
                f"the LoRA's expert is {expert!r}, but the model has one expert; choose {BOTH!r}, or a low_noise_model "
                "in Wan Dist Load Model"
            )
        if not abs(strength) <= MAX_STRENGTH:  # nor NaN
            raise ConfigError(
                f"the LoRA's strength is {strength}; it must be a number from {-MAX_STRENGTH:g} to {MAX_STRENGTH:g}"
            )
        if strength == 0:
            return self
        lora = LoraHandle(path=path, strength=float(strength), expert=expert)
        return replace(self, loras=(*self.loras, lora))


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedModel:
    """A handle checked against the file and the machine.

    degrees: the mesh that a group is started for. If it `is_auto`, each job gets the mesh that suits it best.
    devices: of this machine, one for each of its ranks. machines: None for this one alone.
    device_memory: bytes of the smallest device, if that is known. loras: what they change, in the handle's order.
    low_noise: the second expert, if there is one. shape: as it is held, LoRAs merged; of two experts the larger one's.
    notes: on the files, for the report.
    """

    spec: ModelSpec
    shape: WanShape
    degrees: MeshDegrees
    devices: DeviceList
    is_auto: bool
    device_memory: int | None = None
    machines: Machines | None = None
    loras: tuple[LoraFile, ...] = ()
    low_noise: ModelSpec | None = None
    notes: tuple[str, ...] = ()
    handle: ModelHandle

    @property
    def lora_lines(self) -> tuple[str, ...]:
        """A line for each LoRA: what it changes, and what of it is left out."""
        return tuple(
            file.describe(lora.strength)
            + ("" if lora.expert == BOTH else f" (only in the {lora.expert} expert)")
            for file, lora in zip(self.loras, self.handle.loras, strict=True)
        )


def resolve_model(
    handle: ModelHandle, *, visible_cuda: int, cuda_memory: int | None = None
) -> ResolvedModel:
    """Read the files' headers, choose the mesh if it is `auto`, and check that all of it goes together.

    cuda_memory: bytes of the smallest visible device; with it `auto` cuts the weights where they do not fit.
    Raises ModelFileError, MeshError, ConfigError.
    """
    devices = parse_devices(handle.devices, visible_cuda=visible_cuda)
    machines = parse_machines(handle.machines, handle.head_address)
    degrees = parse_mesh(handle.mesh)
    is_auto = degrees is None
    if degrees is not None:
        validate_machines(degrees, machines)
        validate_devices(degrees, devices, machines=handle.machines)
    file = read_wan_file(read_model_file(handle.path))
    lora_files = [read_model_file(lora.path) for lora in handle.loras]
    loras = tuple(
        _read_lora(each, file.shape, _halves(handle, lora.expert))
        for lora, each in zip(handle.loras, lora_files, strict=True)
    )
    changed = {name for lora in loras for name in lora.patches}
    shape = changed_shape(file.shape, changed)
    dtype = resolve_dtype(handle.dtype, devices=devices, code=file.dtype)
    device_memory = cuda_memory if devices.kind == "cuda" else None
    low_file = None
    if handle.low_noise_path:
        low_file = read_wan_file(read_model_file(handle.low_noise_path))
        validate_experts(file, low_file)
        low_shape = changed_shape(low_file.shape, changed)
        shape = max(shape, low_shape, key=lambda each: whole_bytes(each, dtype))
    if degrees is None:
        degrees = choose_mesh(
            shape,
            device_count=devices.count * handle.machines,
            machines=handle.machines,
            guided=True,
            device_memory=device_memory,
            dtype=dtype,
        )
    validate_model(degrees, shape)
    build_spec = partial(
        _build_spec, handle, lora_files, dtype=dtype, has_content=machines is not None
    )
    return ResolvedModel(
        handle=handle,
        spec=build_spec(file.file, HIGH_NOISE),
        loras=loras,
        low_noise=None if low_file is None else build_spec(low_file.file, LOW_NOISE),
        shape=shape,
        degrees=degrees,
        devices=devices.take(degrees.world_size // handle.machines),
        machines=machines,
        is_auto=is_auto,
        device_memory=device_memory,
        notes=tuple(each.note for each in (file, low_file) if each and each.note),
    )


def _halves(handle: ModelHandle, expert: str) -> tuple[str, ...]:
    """Which halves of a LoRA file for two experts are merged into this one or both."""
    if not handle.low_noise_path:
        return ("",)
    return HALVES if expert == BOTH else (HALVES[expert == LOW_NOISE],)


def _read_lora(file: ModelFile, shape: WanShape, halves: Sequence[str]) -> LoraFile:
    """What the file changes in any of the experts that take these halves of it."""
    read = [read_lora(file, shape, half=half) for half in halves]
    return replace(
        read[0],
        patches={name: patch for each in read for name, patch in each.patches.items()},
        unknown=tuple(dict.fromkeys(key for each in read for key in each.unknown)),
    )


def whole_bytes(shape: WanShape, dtype: str) -> int:
    return weight_bytes(shape, MeshDegrees(), stage=0, dtype=dtype)


def _build_spec(
    handle: ModelHandle,
    lora_files: Sequence[ModelFile],
    file: ModelFile,
    expert: str,
    *,
    dtype: str,
    has_content: bool,
) -> ModelSpec:
    """One expert with its LoRAs. lora_files: of the handle's. has_content: for ranks that may open other files."""

    def content(each: ModelFile) -> str:
        return content_of(each) if has_content else ""

    return ModelSpec(
        **_identity(file),
        dtype=dtype,
        compile=handle.compile,
        content=content(file),
        loras=tuple(
            LoraSpec(
                **_identity(each),
                strength=lora.strength,
                content=content(each),
                half=_halves(handle, expert)[0],
            )
            for lora, each in zip(handle.loras, lora_files, strict=True)
            if lora.expert in (BOTH, expert)
        ),
    )


def _identity(file: ModelFile) -> dict[str, Any]:
    """What a spec knows a file again by."""
    return {"path": file.path, "file_bytes": file.file_bytes, "mtime_ns": file.mtime_ns}


def resolve_vae(path: str, dtype: str, *, devices: DeviceList) -> VAESpec:
    """The VAE at `path`, a file or folder, as a job names it. Raises ModelFileError for what is no Wan2.2 VAE."""
    file = read_model_file(path, component="vae")
    read_vae_file(file)
    file_dtype = next((entry.dtype for entry in file.entries.values()), "F32")
    return VAESpec(**_identity(file), dtype=resolve_dtype(dtype, devices=devices, code=file_dtype))


def resolve_dtype(asked: str, *, devices: DeviceList, code: str) -> str:
    """`auto` is bfloat16 on CUDA; on the CPU the type that files call `code`, or float32 if none is computed in that.

    Raises ConfigError.
    """
    if asked not in DTYPES:
        raise ConfigError(f"dtype {asked!r} is not known; choose {', '.join(DTYPES)}")
    if asked != AUTO:
        return asked
    if devices.kind == "cuda":
        return "bfloat16"
    return BY_CODE[code].name if code in FLOATS else "float32"


def fingerprint(file: ModelFile) -> str:
    """Changes when the file is replaced."""
    return f"{file.file_bytes}-{file.mtime_ns}"
