"""One video to be made, in the numbers that decide what it costs, and what one rank of a mesh has of it.

Not covered: the text encoder, and the VAE, whose work all ranks share whatever the mesh (vae_split.py).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..ipc.errors import ConfigError
from ..ipc.messages import ForwardRequest, SampleRequest, TensorRef
from .degrees import MeshDegrees
from .dtypes import BY_NAME, COMPUTED
from .layout import coordinates
from .parameters import stage_blocks
from .shape import LatentGrid, WanShape, latent_grid
from .shards import ShardRange, TokenShards, shard_range, token_shards

MAX_BATCH = 4096
"""As many as ComfyUI's own nodes make in one job. The plan looks at each sample of a batch."""
KEPT_TEXTS = 2
"""Batches of prompts that ranks keep encoded between single forwards: the prompt and the negative prompt where they
differ in length, and are asked for in turn."""
TEXT_TOKENS = 512
"""A prompt's tokens: ComfyUI and the official code pad to this length, and padding is attended."""


class Counting(enum.Enum):
    """Which loop is counted."""

    RUN = "run"
    """What this project runs: text keys and values once per prompt, latents that stay sharded, in float32."""
    LITERATURE = "literature"
    """What papers count: text keys and values anew in each step, and each step's prediction gathered and exchanged
    whole, in the weights' dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A sampling job.

    guided: with a negative prompt. text_tokens: of the prompt and of the negative prompt. text_batch: embeddings per
    prompt, 1 or `batch`. kept_texts: how many times as much of them is kept as a forward needs. timestep_rows:
    distinct timesteps in a forward, 2 if the first frame is given.
    """

    shape: WanShape
    grid: LatentGrid
    steps: int
    guided: bool
    batch: int = 1
    dtype: str = "bfloat16"
    text_tokens: tuple[int, int] = (TEXT_TOKENS, TEXT_TOKENS)
    text_batch: int = 1
    kept_texts: int = 1
    timestep_rows: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in COMPUTED:
            raise ConfigError(f"dtype {self.dtype!r} is not known; use {', '.join(COMPUTED)}")
        if min(self.steps, self.batch, self.grid.tokens) < 1:
            raise ConfigError(
                f"{self.steps} steps of {self.batch} videos of {self.grid.tokens} tokens cannot be planned; "
                "each must be 1 or more"
            )
        if self.batch > MAX_BATCH:
            raise ConfigError(
                f"a batch of {self.batch} videos cannot be planned; {MAX_BATCH} are the most"
            )

    @property
    def item_bytes(self) -> int:
        """Bytes of one weight or activation."""
        return BY_NAME[self.dtype].bytes


def requested_workload(request: SampleRequest, shape: WanShape) -> Workload:
    """A request for a latent [B, C, T, h, w] in the numbers that decide what it takes with a model of `shape`.

    Raises ConfigError.
    """
    batch, _, frames, height, width = request.noisy.shape
    return Workload(
        shape=shape,
        grid=latent_grid(frames=frames, height=height, width=width),
        steps=len(request.timesteps),
        guided=request.uncond is not None,
        batch=batch,
        dtype=request.model.dtype,
        text_tokens=(_text_tokens(request.cond), _text_tokens(request.uncond or request.cond)),
        text_batch=request.cond.shape[0] if request.cond.shape else 1,
        timestep_rows=1 if request.frame_mask is None else 2,
    )


def forward_workload(request: ForwardRequest, shape: WanShape) -> Workload:
    """`requested_workload` of a single forward. Raises ConfigError."""
    batch, _, frames, height, width = request.x.shape
    return Workload(
        shape=shape,
        grid=latent_grid(frames=frames, height=height, width=width),
        steps=1,
        guided=False,
        batch=batch,
        dtype=request.model.dtype,
        text_tokens=(_text_tokens(request.text),) * 2,
        text_batch=batch,
        kept_texts=KEPT_TEXTS,
        timestep_rows=min(2, request.timesteps.shape[-1]),
    )


def _text_tokens(text: TensorRef) -> int:
    return text.shape[1] if len(text.shape) == 3 else 1  # another one is refused before the run


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShare:
    """What one rank of a job's mesh does.

    degrees: that mesh. place: the rank's coordinates. blocks: those of its stage. branches: the text tokens of each
    branch that it computes.
    micro_batch: samples in one forward; forwards: how many of them it takes part in each step.
    """

    job: Workload
    degrees: MeshDegrees
    place: dict[str, int]
    samples: ShardRange
    shards: TokenShards
    blocks: int
    branches: tuple[int, ...]
    micro_batch: int
    forwards: int
    text_batch: int
    is_first_stage: bool
    is_last_stage: bool

    @property
    def ring_blocks(self) -> tuple[int, ...]:
        """Tokens that each ring rank holds: what its Ulysses group holds together."""
        sizes, width = self.shards.cp.sizes, self.degrees.ulysses
        return tuple(sum(sizes[first : first + width]) for first in range(0, len(sizes), width))


def rank_share(job: Workload, degrees: MeshDegrees, rank: int) -> RankShare:
    """The share of rank `rank` in the job's own mesh."""
    place = coordinates(degrees, rank)
    samples = shard_range(job.batch, parts=degrees.dp, rank=place["dp"])
    branches = job.text_tokens if job.guided else job.text_tokens[:1]
    if len(branches) == 2 and degrees.cfg == 2:
        branches = (branches[place["cfg"]],)
    # Stages take one sample at a time, so that all of them have work.
    split = samples.size if degrees.pp > 1 else 1
    return RankShare(
        job=job,
        degrees=degrees,
        place=place,
        samples=samples,
        shards=token_shards(
            job.grid.tokens,
            cp=(degrees.cp, place["ring"] * degrees.ulysses + place["ulysses"]),
            sp=(degrees.tp, place["tp"]) if degrees.sp else (1, 0),
        ),
        blocks=stage_blocks(job.shape.num_layers, stages=degrees.pp, stage=place["pp"]).size,
        branches=branches,
        micro_batch=samples.size // split,
        forwards=len(branches) * split,
        text_batch=1 if job.text_batch == 1 else samples.size,
        is_first_stage=place["pp"] == 0,
        is_last_stage=place["pp"] == degrees.pp - 1,
    )


def bubble(*, stages: int, micro_batches: int) -> float:
    """Share of the time that pipeline stages of equal length wait, each passing its micro-batches on in turn.

    Source: GPipe (arXiv 1811.06965).
    """
    busy = stages * micro_batches
    return 1 - busy / (stages * (micro_batches + stages - 1))
