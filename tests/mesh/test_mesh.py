"""The mesh: its spelling, rank tables, refusals, shards, devices, choice and memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comfy_wan_dist.ipc.errors import ConfigError, MeshError
from comfy_wan_dist.mesh.choice import fitting_mesh
from comfy_wan_dist.mesh.degrees import AXES, MeshDegrees, parse_mesh
from comfy_wan_dist.mesh.devices import DeviceList, parse_devices
from comfy_wan_dist.mesh.layout import coordinates, groups, rank_at
from comfy_wan_dist.mesh.memory import load_bytes, weight_bytes
from comfy_wan_dist.mesh.shape import TI2V_5B, LatentGrid
from comfy_wan_dist.mesh.shards import ShardRange, shard_range
from comfy_wan_dist.mesh.validate import (
    allowed_tp,
    allowed_ulysses,
    validate_devices,
    validate_grid,
    validate_model,
)
from workers.parallel.collectives import AxisGroup, Ledger


def tp_group(size: int, rank: int = 0) -> AxisGroup:
    return AxisGroup(axis="tp", ranks=tuple(range(size)), rank=rank, group=None, ledger=Ledger())


def cuda(count: int) -> DeviceList:
    return DeviceList(kind="cuda", indices=tuple(range(count)))


# ---- spelling


@pytest.mark.parametrize(
    ("text", "degrees"),
    [
        ("single", MeshDegrees()),
        ("cfg2", MeshDegrees(cfg=2)),
        ("ulysses2-tp2", MeshDegrees(ulysses=2, tp=2)),
        ("dp2-cfg2-ulysses2", MeshDegrees(dp=2, cfg=2, ulysses=2)),
        ("pp3", MeshDegrees(pp=3)),
        ("ring5", MeshDegrees(ring=5)),
        ("tp2-sp", MeshDegrees(tp=2, sp=True)),
        ("ulysses2-fsdp", MeshDegrees(ulysses=2, fsdp=True)),
        ("cfg2-tp2-sp-fsdp", MeshDegrees(cfg=2, tp=2, sp=True, fsdp=True)),
        (
            "dp2-cfg2-pp3-ring4-ulysses5-tp6",
            MeshDegrees(dp=2, cfg=2, pp=3, ring=4, ulysses=5, tp=6),
        ),
    ],
)
def test_mesh_has_one_spelling(text: str, degrees: MeshDegrees) -> None:
    assert parse_mesh(text) == degrees
    assert str(degrees) == text


@given(st.fixed_dictionaries({axis: st.integers(1, 2 if axis == "cfg" else 1024) for axis in AXES}))
def test_mesh_round_trip(degrees: dict[str, Any]) -> None:
    mesh = MeshDegrees(**degrees)
    assert parse_mesh(str(mesh)) == mesh


@pytest.mark.parametrize("text", ["auto", "", " AUTO "])
def test_auto_is_no_mesh_yet(text: str) -> None:
    assert parse_mesh(text) is None


@pytest.mark.parametrize("text", [" Ulysses2 - TP2 ", "ulysses2-tp2", "cfg1-ulysses2-tp2"])
def test_parse_forgives_capitals_spaces_and_degrees_of_1(text: str) -> None:
    assert parse_mesh(text) == MeshDegrees(ulysses=2, tp=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp", "'tp' is not an axis with a degree"),
        ("2", "'2' is not an axis with a degree"),
        ("sp2", "'sp2' is not an axis with a degree"),
        ("tp2,cfg2", "not an axis with a degree"),
        ("tp-2", "not an axis with a degree"),
        ("tp2-", "'' is not an axis"),
        ("tp\u00b2", "not an axis with a degree"),
        ("tp2-tp2", "names tp twice"),
        ("tp2-cfg2", "write cfg2-tp2"),
        ("tp0", "degree of tp is 0; it must be a whole number from 1 to 1024"),
        ("tp2000", "degree of tp is 2000"),
        ("cfg3", "cfg3 is not possible"),
        ("sp", "'sp' is not an axis with a degree"),
        ("fsdp-tp2", "'fsdp' is not an axis with a degree"),
        ("tp2-fsdp-sp", "flags go last, each once, in the order sp, fsdp"),
        ("ulysses2-fsdp-fsdp", "flags go last, each once"),
        ("ulysses2-sp", "write tp2-sp or leave sp out"),
        ("tp2-fsdp", "write ulysses2-fsdp or leave fsdp out"),
        ("dp2-fsdp", "write ulysses2-fsdp or leave fsdp out"),
    ],
)
def test_parse_refuses(text: str, message: str) -> None:
    with pytest.raises(MeshError) as refusal:
        parse_mesh(text)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("degree", [0, -1, 1.5, "2", None])
def test_degrees_must_be_positive_whole_numbers(degree: object) -> None:
    with pytest.raises(MeshError, match="whole number"):
        MeshDegrees(tp=degree)  # type: ignore[arg-type]


# ---- rank tables


@pytest.mark.parametrize(
    ("mesh", "axes", "expected"),
    [
        ("ulysses2-tp2", ("tp",), [(0, 1), (2, 3)]),
        ("ulysses2-tp2", ("ring", "ulysses"), [(0, 2), (1, 3)]),
        ("dp2-ulysses2-tp2", ("tp",), [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("dp2-ulysses2-tp2", ("ring", "ulysses"), [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("cfg2-ulysses2-tp2", ("cfg",), [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("cfg2-ulysses2-tp2", ("ulysses",), [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("cfg2-ulysses2-tp2", ("tp",), [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("ring2-ulysses2", ("ring", "ulysses"), [(0, 1, 2, 3)]),
        ("ring2-ulysses2", ("ring",), [(0, 2), (1, 3)]),
    ],
)
def test_groups(mesh: str, axes: tuple[str, ...], expected: Sequence[tuple[int, ...]]) -> None:
    degrees = parse_mesh(mesh)
    assert degrees is not None
    assert groups(degrees, axes) == expected


def test_rank_follows_the_formula_and_the_order_of_places() -> None:
    degrees = MeshDegrees(dp=2, cfg=2, pp=3, ring=2, ulysses=3, tp=2)
    assert degrees.world_size == 144
    assert degrees.plane_size == 72
    assert degrees.cp == 6
    for rank in range(degrees.world_size):
        place = coordinates(degrees, rank)
        dp, cfg, pp, ring, ulysses, tp = place.values()
        assert list(place) == list(AXES)
        assert rank == rank_at(degrees, place)
        assert rank == ((((dp * 2 + cfg) * 3 + pp) * 2 + ring) * 3 + ulysses) * 2 + tp


@pytest.mark.parametrize("axis", AXES)
def test_groups_of_an_axis_hold_each_rank_once(axis: str) -> None:
    degrees = MeshDegrees(dp=2, cfg=2, pp=3, ring=2, ulysses=3, tp=2)
    found = groups(degrees, (axis,))
    assert sorted(rank for ranks in found for rank in ranks) == list(range(degrees.world_size))
    for ranks in found:
        assert [coordinates(degrees, rank)[axis] for rank in ranks] == list(
            range(degrees.degree(axis))
        )


def test_coordinates_refuse_a_rank_outside() -> None:
    with pytest.raises(ValueError, match="rank 4 is outside a world of 4"):
        coordinates(MeshDegrees(tp=4), 4)


# ---- refusals


def test_mesh_larger_than_its_devices_is_refused() -> None:
    validate_devices(MeshDegrees(tp=4), cuda(4))
    with pytest.raises(MeshError, match=r"mesh tp4 needs 4 devices but 2 are given \(0,1\)"):
        validate_devices(MeshDegrees(tp=4), cuda(2))
    with pytest.raises(MeshError, match=r"1 is given \(cpu:1\)"):
        validate_devices(MeshDegrees(tp=2), parse_devices("cpu:1", visible_cuda=0))


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (
            MeshDegrees(tp=5),
            "tp5 does not divide this model's 24 heads and 14336 FFN channels; tp may be 1, 2, 4, 8",
        ),
        # 3 divides the heads but not the FFN.
        (MeshDegrees(tp=3), "tp may be 1, 2, 4, 8"),
        (
            MeshDegrees(ulysses=5),
            "ulysses5 does not divide the 24 heads per rank; ulysses may be 1, 2, 3, 4, 6, 8, 12, 24",
        ),
        (
            MeshDegrees(ulysses=4, tp=4),
            "ulysses4 does not divide the 6 heads per rank (24 / tp4); ulysses may be 1, 2, 3, 6",
        ),
        (MeshDegrees(pp=31), "pp31 is more stages than the model's 30 blocks"),
    ],
)
def test_degrees_that_do_not_divide_the_model_are_refused(mesh: MeshDegrees, message: str) -> None:
    with pytest.raises(MeshError) as refusal:
        validate_model(mesh, TI2V_5B)
    assert message in str(refusal.value)


def test_every_allowed_degree_is_accepted_and_no_other() -> None:
    for tp in range(1, 30):
        for ulysses in range(1, 30):
            mesh = MeshDegrees(tp=tp, ulysses=ulysses)
            divides = 24 % tp == 0 and 14336 % tp == 0 and (24 // tp) % ulysses == 0
            if divides:
                validate_model(mesh, TI2V_5B)
                assert tp in allowed_tp(TI2V_5B)
                assert ulysses in allowed_ulysses(TI2V_5B, tp)
            else:
                with pytest.raises(MeshError):
                    validate_model(mesh, TI2V_5B)


def test_grid_with_fewer_tokens_than_shards_is_refused() -> None:
    grid = LatentGrid(frames=1, rows=1, columns=3)
    validate_grid(MeshDegrees(ulysses=3), grid, batch=1)
    with pytest.raises(MeshError, match="4 token shards but it has only 3 tokens"):
        validate_grid(MeshDegrees(ulysses=4), grid, batch=1)


# ---- shards


@pytest.mark.parametrize(
    ("length", "parts", "sizes"),
    [
        (27, 4, (7, 7, 7, 6)),
        (27280, 2, (13640, 13640)),
        (3, 4, (1, 1, 1, 0)),
        (12090, 8, (1512, 1512) + 6 * (1511,)),
    ],
)
def test_shard_sizes(length: int, parts: int, sizes: tuple[int, ...]) -> None:
    assert shard_range(length, parts=parts, rank=0).sizes == sizes


@given(st.integers(0, 10**6), st.integers(1, 64))
def test_shards_tile_the_whole(length: int, parts: int) -> None:
    shards = [shard_range(length, parts=parts, rank=rank) for rank in range(parts)]
    assert shards[0].start == 0
    assert shards[-1].stop == length
    assert all(a.stop == b.start for a, b in zip(shards, shards[1:], strict=False))
    assert max(s.size for s in shards) - min(s.size for s in shards) <= 1
    assert shards[-1] == ShardRange(sizes=shards[0].sizes, rank=parts - 1)


# ---- devices


@pytest.mark.parametrize(
    ("text", "visible", "kind", "indices", "printed"),
    [
        ("all", 4, "cuda", (0, 1, 2, 3), "0,1,2,3"),
        ("", 1, "cuda", (0,), "0"),
        ("ALL", 0, "cpu", (0,), "cpu:1"),
        ("cpu", 4, "cpu", (0,), "cpu:1"),
        ("cpu:4", 0, "cpu", (0, 1, 2, 3), "cpu:4"),
        (" 3, 1 ", 4, "cuda", (3, 1), "3,1"),
    ],
)
def test_devices(
    text: str, visible: int, kind: str, indices: tuple[int, ...], printed: str
) -> None:
    devices = parse_devices(text, visible_cuda=visible)
    assert devices == DeviceList(kind=kind, indices=indices)
    assert str(devices) == printed
    assert parse_devices(printed, visible_cuda=4) == devices


def test_first_devices_are_taken_in_order() -> None:
    assert parse_devices("3,1,2", visible_cuda=4).take(2).indices == (3, 1)


@pytest.mark.parametrize(
    ("text", "visible", "message"),
    [
        ("0,0", 2, "names a device twice"),
        ("0,2", 2, r"CUDA device 2, .*visible: 0 to 1"),
        ("0", 0, r"CUDA device 0, .*visible: none"),
        ("cpu:0", 0, "from 1 to 64"),
        ("cpu:65", 0, "from 1 to 64"),
        ("gpu:0", 1, "not understood; write all, CUDA indices"),
        ("0-3", 4, "not understood"),
        ("-1", 4, "not understood"),
        ("0,", 4, "not understood"),
        ("cuda:0", 1, "not understood"),
    ],
)
def test_devices_refused(text: str, visible: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_devices(text, visible_cuda=visible)


# ---- choice


# ---- memory


def test_weights_of_ti2v_5b() -> None:
    assert weight_bytes(TI2V_5B, MeshDegrees(), stage=0, dtype="float32") == 4 * 4_999_787_712


def fitting(free_bytes: int, *, device_count: int = 8, share_memory: bool = False) -> str:
    return str(
        fitting_mesh(
            TI2V_5B,
            device_count=device_count,
            share_memory=share_memory,
            free_bytes=free_bytes,
            dtype="bfloat16",
        )
    )


def need_of(mesh: str) -> int:
    degrees = parse_mesh(mesh)
    assert degrees is not None
    return load_bytes(TI2V_5B, degrees, stage=0, dtype="bfloat16")


@pytest.mark.parametrize(
    ("free_bytes", "mesh"),
    [
        (need_of("single"), "cfg2-ulysses4"),
        (need_of("single") - 1, "cfg2-ulysses2-tp2"),
        (need_of("tp2") - 1, "cfg2-tp4"),
        (need_of("tp4") - 1, "tp8"),
        (need_of("tp8"), "tp8"),
        (need_of("tp8") - 1, "pp2-tp4"),
        (2**30, "None"),
    ],
)
def test_fitting_mesh_is_the_one_that_auto_likes_best(free_bytes: int, mesh: str) -> None:
    assert fitting(free_bytes) == mesh


@pytest.mark.parametrize(
    ("free_bytes", "mesh"),
    [
        (8 * need_of("single"), "cfg2-ulysses4"),
        (12 * 2**30, "tp2"),
        (need_of("single"), "single"),
        # Whatever is cut: ranks that share one memory need more of it together, the more they are.
        (need_of("single") - 1, "None"),
    ],
)
def test_fitting_mesh_counts_all_ranks_where_they_share_memory(free_bytes: int, mesh: str) -> None:
    assert fitting(free_bytes, share_memory=True) == mesh


def test_fitting_mesh_stays_within_the_world() -> None:
    assert fitting(need_of("tp2"), device_count=2) == "tp2"
    assert fitting(need_of("tp4"), device_count=2) == "None"
