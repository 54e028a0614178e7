"""The messages between ComfyUI's process and the ranks, and the JSON form of all messages.

A message is one frozen dataclass. On the wire it is `{"version", "kind", "body"}`; `kind` is the class name,
the body is checked field by field against the annotations, so that a wrong message fails here and not later.
Tensors never travel in a message: a `TensorRef` points into a shared buffer whose descriptor rides on the frame.

A new kind of job is one more class in `Request`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import ConfigError, ProtocolError, VersionMismatch
from .machine_messages import Arrive, Join, Refuse

PROTOCOL_VERSION = 7
MAX_MESSAGE_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRef:
    """A contiguous tensor in shared memory: the frame's descriptor number `buffer`, at `offset` bytes."""

    buffer: int
    offset: int
    dtype: str
    shape: tuple[int, ...]


# ---- client to ranks -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSpec:
    """A file as the node saw it: size and mtime_ns tell one that has replaced it."""

    path: str
    file_bytes: int
    mtime_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSpec(FileSpec):
    """A LoRA to have merged into a model; strength is not 0. content: as in ModelSpec. half: as `read_lora` has it."""

    strength: float
    content: str = ""
    half: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec(FileSpec):
    """A transformer to have loaded. Two specs that differ are two models.

    content: what tells other machines' files with other weights (`content_of`); empty for one machine.
    loras: merged in this order.
    """

    dtype: str
    compile: bool
    content: str = ""
    loras: tuple[LoraSpec, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class VAESpec(FileSpec):
    """A VAE to have loaded."""

    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LowNoise:
    """The second expert of a model that has two: it predicts from step `from_step` on, above 0, with its guidance."""

    model: ModelSpec
    from_step: int
    guidance: float


COND, UNCOND = "cond", "uncond"
"""The branches of guidance: the prompt's and the negative prompt's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """What the prompt of a branch brings beside its text.

    name: as WanShape.conditions has it, which also says what `tensor`, float32, must be. batch_dim: where its samples
    lie; a length of 1 there serves all.
    """

    name: str
    branch: str
    tensor: TensorRef
    batch_dim: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """Denoise one batch of latents.

    mesh: how to cut this job; it needs the same weights on each rank as the mesh that the group was started with.
    sigmas: N+1 values, the last 0 or above. timesteps: N values in [0, 1000], what the model is told at each step.
    noisy, clean: [B, C, T, h, w] float32, normalised latent space; `noisy` is what the run begins with, with `start` as
    its share of noise; `clean` is kept where mask [B, 1 or C, T, h, w] float32 is 0. frame_mask [B, T] float32 scales
    each latent frame's timestep.
    cond, uncond: [1 or B, S, text_dim] float32; without uncond there is no guidance.
    conditions: for models that take some, such as the image of I2V, [1 or B, D, T, h, w]: a mask of 4 channels, then a
    normalised latent.
    step_noise [K, B, C, T, h, w] float32: fresh noise of solvers that re-noise, for each of the K sigmas after the
    first that are above 0.
    result: [B, C, T, h, w] float32, written by rank 0.
    low_noise: who takes over from `model` on the way; the solver goes on as if nothing had changed.
    """

    id: str
    model: ModelSpec
    mesh: str
    solver: str
    sigmas: tuple[float, ...]
    timesteps: tuple[float, ...]
    start: float
    guidance: float
    noisy: TensorRef
    clean: TensorRef | None
    mask: TensorRef | None
    frame_mask: TensorRef | None
    cond: TensorRef
    uncond: TensorRef | None
    step_noise: TensorRef | None
    result: TensorRef
    conditions: tuple[Condition, ...] = ()
    low_noise: LowNoise | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardRequest:
    """Predict the velocity of a batch once, without guidance.

    x, result: [B, C, T, h, w] float32. timesteps [B, 1 or T] float32 in [0, 1000], for all latent frames or for each.
    text [B, S, text_dim] float32. prompts: a name for each sample's text; what ranks keep of a prompt between requests
    they know again by it, so equal names mean equal texts.
    mesh, conditions: as for sampling; all conditions are the prompt's.
    """

    id: str
    model: ModelSpec
    mesh: str
    x: TensorRef
    timesteps: TensorRef
    text: TensorRef
    prompts: tuple[str, ...]
    result: TensorRef
    conditions: tuple[Condition, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRequest:
    """Latent [B, C, T, h, w] float32 in raw VAE space -> frames [B*(4T-3), 16h, 16w, 3].

    result: float32 in 0..1, or uint8 in 0..255, rounded. Each rank writes its part.
    memory_bytes: what a rank may take for it beside its models; None for what it has free.
    """

    id: str
    vae: VAESpec
    latent: TensorRef
    result: TensorRef
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeRequest:
    """Frames [F, H, W, 3] float32 in 0..1, F = 4k+1, H and W multiples of 16 -> raw latent [1, C, k+1, H/16, W/16].

    Each rank writes its part of the result. memory_bytes: as for decoding.
    """

    id: str
    vae: VAESpec
    frames: TensorRef
    result: TensorRef
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancel:
    """Stop job `id` at its next step or chunk; a job that is over or unknown is no error."""

    id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Shutdown:
    """End the process after the running job's next step."""


# ---- ranks to client -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """First message of a rank, before it imports torch."""

    token: str
    rank: int
    pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """The rank has joined its group and waits for jobs."""

    rank: int
    device: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """`done` of `total` units of `phase` ("load" counts bytes, "sample" steps, "decode" and "encode" latent frames)."""

    id: str
    phase: str
    done: int
    total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerLine:
    """What one rank sent through one collective of one axis during a job.

    seconds: how long the calls held the rank, waiting for others included; lines that differ only here are equal.
    """

    op: str
    axis: str
    dtype: str
    calls: int
    bytes: int
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The rank finished job `id`. bytes_read counts what it asked of model files for this job.

    peak_bytes: the most memory that it held meanwhile, models included: on a GPU torch's tensors, on the CPU whatever
    the process has in memory, shared tensors too. note: how the ranks shared the work, for people.
    """

    id: str
    rank: int
    seconds: float
    bytes_read: int
    ledger: tuple[LedgerLine, ...]
    peak_bytes: int = 0
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The rank could not do job `id`.

    error: a class name of CONFIG_ERRORS, "JobCancelled", or another exception's name. Every rank answers every
    job; a rank that stopped because another one failed says so with `rank` = the rank that failed first.
    fatal: the rank ends after this message.
    """

    id: str
    rank: int
    error: str
    message: str
    traceback: str
    fatal: bool


TransformerRequest = SampleRequest | ForwardRequest
Request = TransformerRequest | DecodeRequest | EncodeRequest
Message = (
    Request | Cancel | Shutdown | Hello | Ready | Progress | Done | Failed | Arrive | Join | Refuse
)
KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in typing.get_args(Message)}

RESULT = "result"
"""The field of every job that names the tensor to be written; all other tensors are read."""


def tensor_refs(request: Request) -> dict[str, TensorRef]:
    """The tensors that a request names, by field; conditions by their number."""
    values = {each.name: getattr(request, each.name) for each in dataclasses.fields(request)}
    for number, condition in enumerate(getattr(request, "conditions", ())):
        values[f"conditions.{number}"] = condition.tensor
    return {name: value for name, value in values.items() if isinstance(value, TensorRef)}


def with_tensor_refs(request: SampleRequest, refs: Mapping[str, TensorRef]) -> SampleRequest:
    """The request with other tensors, by the names that `tensor_refs` gives them."""
    conditions = tuple(
        dataclasses.replace(condition, tensor=refs.get(f"conditions.{number}", condition.tensor))
        for number, condition in enumerate(request.conditions)
    )
    fields: dict[str, Any] = {name: ref for name, ref in refs.items() if "." not in name}
    return dataclasses.replace(request, conditions=conditions, **fields)


def encode(message: Message) -> bytes:
    """Message as UTF-8 JSON. Raises ConfigError for NaN and infinity, which JSON has not."""
    body = {
        "version": PROTOCOL_VERSION,
        "kind": type(message).__name__,
        "body": dataclasses.asdict(message),
    }
    try:
        return json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    except ValueError as error:
        raise ConfigError(
            f"a {type(message).__name__} holds a number that is not finite; "
            "use finite numbers for cfg, shift and sigmas"
        ) from error


def decode(data: bytes) -> Message:
    """Inverse of `encode`. Raises VersionMismatch, and ProtocolError on anything else."""
    try:
        envelope = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a message is not JSON: {error}") from error
    if not isinstance(envelope, dict):
        raise ProtocolError(f"a message is {envelope!r}; it must be an object")
    version = envelope.get("version")
    if version != PROTOCOL_VERSION:
        kind = VersionMismatch if isinstance(version, int) else ProtocolError
        raise kind(
            f"protocol version {version!r} was received; this side speaks {PROTOCOL_VERSION}"
        )
    name = envelope.get("kind")
    if not isinstance(name, str) or name not in KINDS:
        raise ProtocolError(f"unknown kind of message {name!r}")
    message: Message = from_plain(KINDS[name], envelope.get("body"), name)
    return message


def from_plain(kind: Any, value: Any, where: str) -> Any:
    """Build an annotated type from JSON values; `where` names the field in errors."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        if not isinstance(value, dict) or set(value) != set(hints):
            got = sorted(value) if isinstance(value, dict) else value
            raise ProtocolError(f"{where} has fields {got}; it needs {sorted(hints)}")
        fields = {
            name: from_plain(hint, value[name], f"{where}.{name}") for name, hint in hints.items()
        }
        return kind(**fields)
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (option for option in typing.get_args(kind) if option is not type(None))
        return None if value is None else from_plain(inner, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ProtocolError(f"{where} is {value!r}; it must be a list")
        item = typing.get_args(kind)[0]
        return tuple(from_plain(item, part, where) for part in value)
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    raise ProtocolError(f"{where} is {value!r}; it must be {getattr(kind, '__name__', kind)}")
