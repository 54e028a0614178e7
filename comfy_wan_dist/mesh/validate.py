"""What a mesh must satisfy, checked before any process starts."""

from __future__ import annotations

from ..ipc.errors import MeshError
from .degrees import MeshDegrees
from .devices import DeviceList
from .shape import LatentGrid, WanShape


def validate_devices(degrees: MeshDegrees, devices: DeviceList, *, machines: int = 1) -> None:
    """Refuse a mesh with more ranks than `devices` on each machine."""
    count = devices.count * machines
    if degrees.world_size > count:
        on_each = "" if machines == 1 else f" on each of {machines} machines"
        raise MeshError(
            f"mesh {degrees} needs {degrees.world_size} devices but {count} "
            f"{'is' if count == 1 else 'are'} given ({devices}{on_each}); "
            "choose a smaller mesh or name more devices"
        )


def allowed_tp(shape: WanShape) -> list[int]:
    return [
        t
        for t in range(1, shape.num_heads + 1)
        if shape.num_heads % t == 0 and shape.ffn_dim % t == 0
    ]


def allowed_ulysses(shape: WanShape, tp: int) -> list[int]:
    heads = shape.num_heads // tp
    return [u for u in range(1, heads + 1) if heads % u == 0]


def validate_model(degrees: MeshDegrees, shape: WanShape) -> None:
    """Refuse degrees that do not divide the model's heads and FFN channels or exceed its blocks."""
    if degrees.tp not in allowed_tp(shape):
        raise MeshError(
            f"tp{degrees.tp} does not divide this model's {shape.num_heads} heads and {shape.ffn_dim} FFN channels; "
            f"tp may be {_listed(allowed_tp(shape))}"
        )
    if degrees.ulysses not in allowed_ulysses(shape, degrees.tp):
        per_rank = "" if degrees.tp == 1 else f" ({shape.num_heads} / tp{degrees.tp})"
        raise MeshError(
            f"ulysses{degrees.ulysses} does not divide the {shape.num_heads // degrees.tp} heads per rank{per_rank}; "
            f"ulysses may be {_listed(allowed_ulysses(shape, degrees.tp))}"
        )
    if degrees.pp > shape.num_layers:
        raise MeshError(
            f"pp{degrees.pp} is more stages than the model's {shape.num_layers} blocks; lower pp"
        )


def validate_grid(degrees: MeshDegrees, grid: LatentGrid, *, batch: int) -> None:
    """Refuse a latent with fewer samples or tokens than shards."""
    if batch < degrees.dp:
        raise MeshError(
            f"mesh {degrees} gives each of {degrees.dp} planes a sample but the batch has {batch}; lower dp"
        )
    shards = degrees.cp * (degrees.tp if degrees.sp else 1)
    if grid.tokens < shards:
        raise MeshError(
            f"mesh {degrees} cuts the video into {shards} token shards but it has only {grid.tokens} tokens; "
            "use a larger video or smaller degrees of ring and ulysses"
        )


def _listed(values: list[int]) -> str:
    return ", ".join(str(value) for value in values)
