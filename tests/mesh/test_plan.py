"""The planner: which mesh it names and why, memory against what a model allocates, seconds, devices, and the texts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import rank_programs

from comfy_wan_dist.ipc.errors import ConfigError
from comfy_wan_dist.ipc.messages import Done, LedgerLine
from comfy_wan_dist.mesh import choice
from comfy_wan_dist.mesh.choice import choose_job_mesh, choose_mesh, explain_mesh, peak_bytes
from comfy_wan_dist.mesh.degrees import MeshDegrees, parse_mesh
from comfy_wan_dist.mesh.devices import GB
from comfy_wan_dist.mesh.layout import coordinates
from comfy_wan_dist.mesh.memory import block_bytes, rank_memory, weight_bytes
from comfy_wan_dist.mesh.report import job_text
from comfy_wan_dist.mesh.shape import T2V_14B, TI2V_5B, LatentGrid, WanShape, video_grid
from comfy_wan_dist.mesh.validate import validate_model
from comfy_wan_dist.mesh.workload import Workload
from comfy_wan_dist.planning.chart import WIDTH, draw_plan
from comfy_wan_dist.planning.hardware import (
    DEVICES,
    EFFICIENCY,
    Calibration,
    DevicePool,
    cpu_device,
    find_device,
    known_pool,
    parse_pool,
)
from comfy_wan_dist.planning.plan import Plan, make_plan
from comfy_wan_dist.planning.report import plan_text, plan_values, shown_options
from comfy_wan_dist.planning.seconds import predict_seconds
from devtools.checkpoints import TINY_TRANSFORMER, write_transformer
from devtools.mesh_runs import Case, Schedule, mesh_degrees, model_spec
from devtools.rank_pool import RankPool

GRID = video_grid(TI2V_5B, height=704, width=1280, frames=121)


def job(
    *, guided: bool = True, batch: int = 1, dtype: str = "bfloat16", shape: WanShape = TI2V_5B
) -> Workload:
    return Workload(shape=shape, grid=GRID, steps=50, guided=guided, batch=batch, dtype=dtype)


def plan(devices: str, *, guided: bool = True, batch: int = 1, dtype: str = "bfloat16") -> Plan:
    return make_plan(job(guided=guided, batch=batch, dtype=dtype), parse_pool(devices))


# ---- what auto chooses


def test_auto_weighs_no_more_meshes_than_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 1024 devices there are tens of thousands of them: a minute or more for the node."""
    weighed = []

    def weigh(work: Workload, mesh: MeshDegrees) -> int:
        weighed.append(mesh)
        return peak_bytes(work, mesh)

    monkeypatch.setattr(choice, "peak_bytes", weigh)
    mesh = choose_mesh(TI2V_5B, device_count=1024, guided=True, device_memory=80 * GB)
    assert mesh.world_size == 1024
    assert weighed[-1] == mesh
    assert len(weighed) < 100


@pytest.mark.parametrize(
    ("devices", "guided", "mesh"),
    [
        (1, True, "single"),
        (2, True, "cfg2"),
        (2, False, "ulysses2"),
        (3, True, "ulysses3"),
        (4, True, "cfg2-ulysses2"),
        (4, False, "ulysses4"),
        (5, True, "ring5"),
        (5, False, "ring5"),
        (6, True, "cfg2-ulysses3"),
        (7, True, "ring7"),
        (8, True, "cfg2-ulysses4"),
        (8, False, "ulysses8"),
        (10, True, "cfg2-ring5"),
        (16, True, "cfg2-ulysses8"),
        (16, False, "ring2-ulysses8"),
        (32, True, "cfg2-ring2-ulysses8"),
        (32, False, "ring4-ulysses8"),
        (48, True, "cfg2-ulysses24"),
        (64, True, "cfg2-ring4-ulysses8"),
    ],
)
def test_auto_takes_guidance_then_ulysses_then_a_ring(
    devices: int, guided: bool, mesh: str
) -> None:
    chosen = choose_mesh(TI2V_5B, device_count=devices, guided=guided)
    assert str(chosen) == mesh
    validate_model(chosen, TI2V_5B)


@pytest.mark.parametrize(
    ("devices", "gigabytes", "mesh"),
    [
        (2, 24, "cfg2"),
        (2, 13, "ulysses2"),  # whole weights still fit, but not beside a whole video's activations
        (2, 11, "tp2"),
        (8, 11.45, "ulysses8"),
        (8, 7, "cfg2-ulysses2-tp2"),
        (8, 3.5, "tp8-sp"),
    ],
)
def test_auto_cuts_weights_only_as_far_as_memory_asks(
    devices: int, gigabytes: float, mesh: str
) -> None:
    memory = round(gigabytes * GB)
    chosen = choose_mesh(TI2V_5B, device_count=devices, guided=True, device_memory=memory)
    assert str(chosen) == mesh
    assert peak_bytes(job(), chosen) <= memory


def test_auto_takes_stages_only_where_nothing_else_fits() -> None:
    # Two heads, so tp goes no further than 2, and blocks that outweigh all activations.
    deep = replace(TI2V_5B, dim=256, ffn_dim=256, num_layers=4000)
    cut = peak_bytes(job(shape=deep, guided=False), mesh_degrees("ring2-tp2-sp"))

    def chosen(memory: int) -> str:
        return str(choose_mesh(deep, device_count=4, guided=False, device_memory=memory))

    assert chosen(80 * GB) == "ring2-ulysses2"
    assert chosen(cut) == "ring2-tp2-sp"
    assert chosen(cut - 1) == "ring2-ulysses2-fsdp"
    shared = peak_bytes(job(shape=deep, guided=False), mesh_degrees("ring2-tp2-sp-fsdp"))
    assert chosen(shared) == "ring2-tp2-sp-fsdp"
    assert chosen(shared - 1) == "pp2-tp2"


def test_auto_job_avoids_a_mesh_on_which_the_job_does_not_fit() -> None:
    plane = mesh_degrees("ulysses2")

    def chosen(memory: int | None) -> str:
        return str(choose_job_mesh(plane, job(), is_auto=True, device_memory=memory))

    assert chosen(None) == chosen(80 * GB) == "cfg2"
    assert chosen(peak_bytes(job(), mesh_degrees("cfg2")) - 1) == "ulysses2"


@pytest.mark.parametrize(
    ("mesh", "memory", "words"),
    [
        ("cfg2-ulysses4", None, ("prompt and the negative prompt", "24 heads allow it")),
        ("ring5", None, ("the 24 heads of a rank cannot be shared by 5 ranks",)),
        ("tp2", 11 * GB, ("with whole ones a rank needs", "of 11.0 GB")),
        ("tp2-sp", 80 * GB, ("worth it for memory", "saves activations")),
        ("dp2-pp2", None, ("send each other nothing", "stages wait")),
        ("single", None, ("nothing is sent",)),
    ],
)
def test_reasons_name_every_axis(mesh: str, memory: int | None, words: tuple[str, ...]) -> None:
    reason = explain_mesh(mesh_degrees(mesh), job(), device_memory=memory)
    for axis in mesh.replace("-sp", "").split("-"):
        assert f"{axis}:" in reason
    for word in words:
        assert word in reason


# ---- the plan


@pytest.mark.parametrize(
    ("devices", "guided", "latency", "throughput"),
    [
        ("8xH100-SXM", True, "cfg2-ulysses4", "dp8"),
        ("8xH100-SXM", False, "ulysses8", "dp8"),
        ("5xH100-SXM", True, "ring5", "dp5"),
        ("4x3090", True, "cfg2-ulysses2", "dp4"),
        ("H200", True, "single", "single"),
    ],
)
def test_plan_names_the_best_for_latency_and_for_throughput(
    devices: str, guided: bool, latency: str, throughput: str
) -> None:
    found = plan(devices, guided=guided)
    assert found.latency is not None
    assert found.throughput is not None
    assert str(found.latency.option.mesh) == latency == str(found.auto.option.mesh)
    assert str(found.throughput.option.mesh) == throughput
    assert found.throughput.option.videos_per_hour >= found.latency.option.videos_per_hour
    best = min(option.seconds.video for option in found.options if option.mesh.dp == 1)
    assert found.latency.option.seconds.video <= 1.03 * best


def test_plan_of_a_batch_that_no_node_makes_is_refused() -> None:
    with pytest.raises(ConfigError, match="a batch of 4097 videos cannot be planned; 4096 are"):
        plan("8xH100-SXM", batch=4097)


def test_plan_gives_a_batch_to_sub_planes() -> None:
    found = plan("8xH100-SXM", batch=4)
    assert found.latency is not None
    assert str(found.auto.option.mesh) == "dp4-cfg2"
    assert found.latency.option.mesh == found.auto.option.mesh
    one = plan("2xH100-SXM").auto.option
    assert found.auto.option.seconds.video == pytest.approx(one.seconds.video, rel=0.01)
    assert found.auto.option.videos_per_hour == pytest.approx(4 * one.videos_per_hour, rel=0.01)


def test_plan_says_when_nothing_fits() -> None:
    small = replace(DEVICES[0], memory=2 * GB)
    found = make_plan(job(), DevicePool(devices=(small, small)))
    assert found.latency is found.throughput is None
    assert not any(option.fits for option in found.options)
    assert "none, as no mesh of these devices has the memory" in plan_text(found)
    assert draw_plan(found).size[0] == WIDTH


def test_every_option_is_valid_and_listed_once() -> None:
    options = plan("8xH100-SXM").options
    assert len({option.mesh for option in options}) == len(options) > 50
    for option in options:
        validate_model(option.mesh, TI2V_5B)
        assert option.mesh.world_size <= 8
        assert parse_mesh(str(option.mesh)) == option.mesh
        sent = dict(option.sent)
        assert ("tp" in sent) == (option.mesh.tp > 1)
        assert ("cfg" in sent) == (option.mesh.cfg > 1)
        assert ("pp" in sent) == (option.mesh.pp > 1)


# ---- memory


@pytest.mark.parametrize(
    "mesh", ["single", "tp2", "pp2", "pp2-tp4", "ulysses2-fsdp", "ring3-fsdp", "cfg2-pp2-tp2-fsdp"]
)
def test_weight_bytes_equal_what_a_rank_holds_after_a_job(
    mesh: str, rank_pool: RankPool, tmp_path: Path
) -> None:
    dtypes = ("float32", "bfloat16")
    write_transformer(tmp_path / "m.safetensors", TINY_TRANSFORMER, seed=0)
    degrees = mesh_degrees(mesh)
    held = rank_pool.run(
        degrees.world_size,
        rank_programs.held_weight_bytes,
        mesh,
        [model_spec(tmp_path / "m.safetensors", dtype=dtype) for dtype in dtypes],
        Case(name="any", frames=2, height=4, width=4).inputs(TINY_TRANSFORMER),
        Schedule(solver="euler", sigmas=(1.0, 0.0), guidance=5.0),
    )
    for rank, bytes_held in enumerate(held):
        stage = coordinates(degrees, rank)["pp"]
        assert bytes_held == [
            weight_bytes(TINY_TRANSFORMER, degrees, stage=stage, dtype=dtype) for dtype in dtypes
        ]


def test_fsdp_cuts_blocks_and_leaves_the_rest_whole() -> None:
    whole, cut = (
        weight_bytes(TI2V_5B, mesh_degrees(mesh), stage=0, dtype="bfloat16")
        for mesh in ("ulysses8", "ulysses8-fsdp")
    )
    blocks = TI2V_5B.num_layers * block_bytes(TI2V_5B, tp=1, parts=1, dtype="bfloat16")
    assert cut == pytest.approx(whole - 7 / 8 * blocks, rel=0.01)
    assert blocks > 0.95 * whole


def test_fsdp_is_planned_where_replicas_do_not_fit() -> None:
    small = replace(device().weakest, memory=11 * GB)
    options = make_plan(job(), DevicePool(devices=(small,) * 4)).options
    meshes = {str(option.mesh): option for option in options}
    assert not meshes["ulysses4"].fits
    assert meshes["ulysses4-fsdp"].fits
    assert meshes["ulysses4-fsdp"].memory.total < meshes["ulysses4"].memory.total / 1.5
    assert "fsdp" in dict(meshes["ulysses4-fsdp"].sent)
    assert not any(option.mesh.fsdp for option in plan("4xH100-SXM").options)


def test_a_job_on_a_plane_with_fsdp_is_never_cut_into_sub_planes() -> None:
    plane = mesh_degrees("ulysses4-fsdp")
    mesh = choose_job_mesh(plane, job(batch=4), is_auto=True)
    assert str(mesh) == "cfg2-ulysses2-fsdp"


def test_sequence_parallel_saves_between_the_pairs() -> None:
    without, with_sp = (rank_memory(job(), mesh_degrees(mesh), 0) for mesh in ("tp4", "tp4-sp"))
    assert with_sp.weights == without.weights
    assert with_sp.activations < without.activations


# ---- seconds

EVEN = Calibration(rate=1e12, memory=1e12, link=1e9, latency=0.0)


def device(**changes: float) -> DevicePool:
    measured = replace(EVEN, **changes)
    one = cpu_device(ranks=1, memory=100 * GB, measure=lambda ranks: measured)
    return DevicePool(devices=(one,) * 8)


def test_seconds_are_arithmetic_plus_what_is_sent() -> None:
    fast_link = device(link=1e30).weakest
    single = predict_seconds(job(), MeshDegrees(), fast_link)
    halved = predict_seconds(job(), MeshDegrees(ulysses=2), fast_link)
    assert single.exchange == single.waiting == 0
    assert halved.step == pytest.approx(single.step / 2, rel=1e-3)
    # 4 * 79.92 MiB in each of 30 blocks and 2 branches, half of it over the link of 1 GB/s.
    slow = predict_seconds(job(), MeshDegrees(ulysses=2), device().weakest)
    assert slow.exchange == pytest.approx(60 * 4 * 79.92 * 2**20 / 2 / 1e9, rel=1e-3)
    late = predict_seconds(job(), MeshDegrees(ulysses=2), device(link=1e30, latency=1.0).weakest)
    assert late.exchange == pytest.approx(60 * 2)


def test_pipeline_waits_for_its_bubble() -> None:
    fast = device(link=1e30).weakest
    two_branches = predict_seconds(job(), MeshDegrees(pp=2), fast)
    assert two_branches.waiting / two_branches.step == pytest.approx(1 / 3, abs=1e-6)
    four_samples = predict_seconds(job(batch=4), MeshDegrees(pp=2), fast)
    assert four_samples.waiting / four_samples.step == pytest.approx(1 / 9, abs=1e-6)


def test_ring_hides_a_part_of_its_transfers() -> None:
    ring, ulysses = (
        predict_seconds(job(), mesh, device(memory=1e30).weakest)
        for mesh in (MeshDegrees(ring=2), MeshDegrees(ulysses=2))
    )
    # At degree 2 both send the same.
    assert ring.exchange == pytest.approx(ulysses.exchange / 2, rel=1e-3)


# ---- devices


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("8xH100-SXM", "8xH100-SXM"),
        ("h200", "1xH200-SXM"),
        ("2x4090, 2xRTX3090", "2xRTX4090,2xRTX3090"),
        ("4XA100", "4xA100-SXM"),
    ],
)
def test_device_lists(text: str, names: str) -> None:
    assert str(parse_pool(text)) == names


@pytest.mark.parametrize("text", ["", "8x", "0xH100", "8xZ80", "H100;H200", "9999xH100"])
def test_device_lists_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="devices"):
        parse_pool(text)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM"),
        ("NVIDIA T4", None),
        ("", None),
    ],
)
def test_devices_are_found_by_the_drivers_name(name: str, found: str | None) -> None:
    device = find_device(name)
    assert (device.name if device else None) == found


def test_pool_of_this_machine_keeps_its_own_memory() -> None:
    pool = known_pool([("NVIDIA GeForce RTX 3090", 23 * GB), ("NVIDIA H100 80GB HBM3", 79 * GB)])
    weakest = pool.weakest
    assert weakest.memory == 23 * GB
    assert weakest.half.rate == 71e12 * EFFICIENCY  # the RTX 3090's
    slow, fast = (parse_pool(name).weakest.half for name in ("RTX3090", "H100-SXM"))
    assert (slow.memory, slow.link) < (fast.memory, fast.link)
    assert (weakest.half.memory, weakest.half.link) == (slow.memory, slow.link)
    assert weakest.half.latency == max(slow.latency, fast.latency)
    assert weakest.name == "RTX3090 + H100-SXM"
    with pytest.raises(ConfigError, match="no figures for 'Tesla T4'"):
        known_pool([("Tesla T4", 16 * GB)])


# ---- texts


def test_text_shows_named_meshes_and_says_what_is_guessed() -> None:
    found = plan("8xH100-SXM")
    text = plan_text(found)
    rows = [line.split()[0] for line in text.splitlines() if line]
    for option in shown_options(found):
        assert str(option.mesh) in rows
    assert {"cfg2-ulysses4", "dp8", "single"} <= set(rows)
    assert "Seconds are no measurement" in text
    assert "measured here" in plan_text(make_plan(job(), device()))


def test_text_says_that_the_size_has_padding() -> None:
    for height, words in (
        (704, "1280 x 704 pixels (width x height), "),
        (720, "1280 x 736 pixels"),
    ):
        grid = video_grid(TI2V_5B, height=height, width=1280, frames=81)
        text = plan_text(make_plan(replace(job(), grid=grid), device()))
        assert text.startswith(words)
        assert ("padding included" in text) == (height == 720)


@pytest.mark.parametrize(("gigabytes", "is_marked"), [(80, False), (12, True)])
def test_legend_explains_the_mark_where_a_row_has_it(gigabytes: int, is_marked: bool) -> None:
    found = replace(DEVICES[0], memory=gigabytes * GB)
    text = plan_text(make_plan(job(), DevicePool(devices=(found, found))))
    assert (" ! " in text) == ("! does not fit." in text) == is_marked


def test_values_are_plain_json() -> None:
    values = plan_values(plan("8xH100-SXM"))
    assert json.loads(json.dumps(values)) == json.loads(json.dumps(values, default=str))
    first = values["meshes"][0]
    assert first["memory"]["total"] == sum(
        first["memory"][part] for part in ("weights", "text", "state", "activations", "working")
    )


def test_chart_bars_are_as_long_as_the_seconds() -> None:
    found = plan("2x4090")
    image = draw_plan(found)
    blue = [
        sum(image.getpixel((x, y)) == (0x2F, 0x6F, 0xB2) for x in range(WIDTH))
        for y in range(image.height)
    ]
    options = shown_options(found)
    lengths = [length for length in blue[115::40]][: len(options)]
    longest = max(option.seconds.steps * option.seconds.compute for option in options)
    for option, length in zip(options, lengths, strict=True):
        share = option.seconds.steps * option.seconds.compute / longest
        assert length / max(lengths) == pytest.approx(share, abs=0.02)


def test_job_text_adds_up_the_ranks() -> None:
    line = LedgerLine(
        op="all_to_all", axis="ulysses", dtype="bfloat16", calls=3, bytes=2**20, seconds=0.25
    )
    slower = replace(line, seconds=0.5)
    answers = [
        Done(
            id="a",
            rank=rank,
            seconds=rank + 0.5,
            bytes_read=7,
            ledger=(line if rank else slower,),
            peak_bytes=(rank + 1) * 2**29,
        )
        for rank in (0, 1)
    ]
    text = job_text("mesh ulysses2", answers)
    assert text.splitlines()[0] == "mesh ulysses2, 2 ranks, 1.50 s, 14 bytes read from disk"
    assert text.splitlines()[1] == "peak memory by rank 0.50, 1.00 GiB"
    assert text.splitlines()[-1].split() == [
        "ulysses",
        "all_to_all",
        "bfloat16",
        "6",
        "2.00",
        "1.00",
        "0.500",
    ]
    shared = job_text("mesh pp2", answers, requests=3)
    assert shared.splitlines()[0].endswith("bytes read from disk, 3 requests in one run")
    silent = [replace(answer, ledger=()) for answer in answers]
    assert "nothing was sent" in job_text("mesh single", silent)


@pytest.mark.parametrize(
    ("height", "width", "frames"), [(15, 1280, 121), (704, 0, 121), (0, 32, 1), (32, 32, 0)]
)
def test_video_sizes_refused(height: int, width: int, frames: int) -> None:
    with pytest.raises(ConfigError, match="must be 16 or more, frames 1 or more"):
        video_grid(TI2V_5B, height=height, width=width, frames=frames)


def test_video_sizes_are_those_of_the_latent_nodes() -> None:
    """Whole strides of pixels, whole steps of frames; an odd number of strides is padded."""
    odd = LatentGrid(frames=30, rows=22, columns=40, is_padded=True)
    assert video_grid(TI2V_5B, height=700, width=1280, frames=120) == odd
    assert video_grid(TI2V_5B, height=720, width=1280, frames=117).rows == 23
    assert video_grid(TI2V_5B, height=718, width=1295, frames=117) == replace(odd, is_padded=False)
    assert video_grid(T2V_14B, height=360, width=640, frames=81).rows == 23
    assert not video_grid(T2V_14B, height=720, width=1280, frames=81).is_padded
