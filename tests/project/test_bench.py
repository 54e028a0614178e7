"""The benchmarks: verdicts, rows and files, and every section once with tiny sizes. No measured number counts here."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import signal
import time
from pathlib import Path

import pytest
import torch
import vae_programs

from benchmarks import bench, bridge, denoise, gpu, transfer, vae
from benchmarks.chart import draw_chart
from benchmarks.models import Workload
from benchmarks.timing import (
    TOO_NOISY,
    Comparison,
    Row,
    Sense,
    build_row,
    interleave,
    median_is_below,
)
from comfy_wan_dist.mesh.shape import LatentGrid, WanShape
from comfy_wan_dist.mesh.vae_split import LatentSize
from devtools.rank_pool import RankPool

TINY = Workload(
    shape=WanShape(dim=256, ffn_dim=256, num_layers=1, in_dim=48, out_dim=48, text_dim=64),
    grid=LatentGrid(frames=2, rows=2, columns=2),
    dtype=torch.float32,
)
AT_MOST = Comparison(case="case", ours="ours", other="other", limit=1.0)
AT_LEAST = Comparison(
    case="case", ours="ours", other="other", limit=0.9, sense=Sense.AT_LEAST, other_part=0.5
)


def row(section: str, case: str, *, ok: bool | None = True, limit: float | None = 1.0) -> Row:
    return Row(section=section, case=case, ours_s=1.0, other_s=2.0, ratio=0.5, limit=limit, ok=ok)


# ---- verdicts


def test_six_rounds_on_one_side_are_a_verdict_and_five_are_not() -> None:
    assert median_is_below([0.9] * 6, 1.0) is True
    assert median_is_below([1.1] * 6, 1.0) is False
    assert median_is_below([0.9] * 5, 1.0) is None
    assert median_is_below([], 1.0) is None


def test_a_single_outlier_needs_more_rounds_but_does_not_prevent_a_verdict() -> None:
    assert median_is_below([5.0, *[0.9] * 6], 1.0) is None
    assert median_is_below([5.0, *[0.9] * 9], 1.0) is True


def test_at_most_compares_our_time_with_the_limit() -> None:
    assert AT_MOST.is_met({"ours": [0.9] * 6, "other": [1.0] * 6}) is True
    assert AT_MOST.is_met({"ours": [1.1] * 6, "other": [1.0] * 6}) is False


def test_at_least_compares_the_share_with_the_limit() -> None:
    # The other does twice the work in 2 s: a share of 1 / 1.05 and of 1 / 1.2.
    assert AT_LEAST.is_met({"ours": [1.05] * 6, "other": [2.0] * 6}) is True
    assert AT_LEAST.is_met({"ours": [1.2] * 6, "other": [2.0] * 6}) is False


def test_row_quotes_medians_and_the_median_of_paired_ratios() -> None:
    # A slow phase of the machine hits both of a pair: the ratio stays.
    times = {"ours": [1.0, 1.0, 9.0], "other": [2.0, 2.0, 18.0]}
    found = build_row("s", AT_MOST, times)
    assert (found.ours_s, found.other_s, found.ratio) == (1.0, 2.0, 0.5)
    assert found.ok is None
    assert TOO_NOISY in found.note


def test_row_without_limit_has_no_verdict_and_no_complaint() -> None:
    comparison = dataclasses.replace(AT_MOST, limit=None)
    found = build_row("s", comparison, {"ours": [1.0], "other": [2.0]})
    assert (found.ok, found.note) == (None, "")


# ---- interleaving


def test_interleave_alternates_the_order_and_stops_at_a_verdict() -> None:
    calls: list[str] = []

    def thing(name: str, seconds: float) -> float:
        calls.append(name)
        return seconds

    things = {"ours": lambda: thing("ours", 1.0), "other": lambda: thing("other", 2.0)}
    times = interleave(things, [AT_MOST], budget_s=1e9)
    assert times == {"ours": [1.0] * 6, "other": [2.0] * 6}
    # Warm-up, forth, back, forth ...
    assert calls[:8] == ["ours", "other"] * 2 + ["other", "ours"] + ["ours", "other"]


@pytest.mark.parametrize(("budget_s", "rounds"), [(0.0, 6), (15.0, 7)])
def test_interleave_gives_up_when_the_budget_is_spent_but_not_before_a_verdict_was_possible(
    budget_s: float, rounds: int
) -> None:
    flips = iter([0.5, 1.5] * 100)
    things = {"ours": lambda: next(flips), "other": lambda: 1.0}
    times = interleave(things, [AT_MOST], budget_s=budget_s)
    assert len(times["ours"]) == rounds
    assert build_row("s", AT_MOST, times).ok is None


def test_interleave_goes_on_while_one_of_several_limits_has_no_verdict() -> None:
    flips = iter([0.5, 1.5] * 100)
    things = {"ours": lambda: next(flips), "other": lambda: 1.0}
    times = interleave(things, [AT_MOST], budget_s=1e9, max_rounds=20)
    assert len(times["ours"]) == 20


# ---- files


def test_one_section_replaces_only_its_own_rows(tmp_path: Path) -> None:
    bench.write_results(tmp_path, [row("denoise", "old"), row("transfer", "kept")])
    bench.write_results(tmp_path, [row("denoise", "new")])
    rows = json.loads((tmp_path / "bench.json").read_text())
    assert {(r["section"], r["case"]) for r in rows} == {("transfer", "kept"), ("denoise", "new")}
    assert rows[0].keys() >= {"section", "case", "ours_s", "other_s", "ratio", "limit", "ok"}
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_chart_is_drawn_with_and_without_rows(tmp_path: Path) -> None:
    skipped = dataclasses.replace(row("s", "skipped"), ratio=None)
    at_least = dataclasses.replace(row("s", "share"), sense=Sense.AT_LEAST.value)
    rows = [row("s", "met"), row("s", "missed", ok=False), row("s", "noisy", ok=None)]
    for name, drawn in (("none", [skipped]), ("one", rows), ("both", [*rows, at_least])):
        path = tmp_path / f"{name}.png"
        draw_chart([dataclasses.asdict(r) for r in drawn], path)
        assert path.stat().st_size > 1000


@pytest.mark.parametrize(("ok", "status"), [(True, 0), (False, 1), (None, 1)])
def test_only_strict_turns_a_limit_that_is_not_met_into_an_exit_status(
    ok: bool | None, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*, budget_s: float, report: bench.Report) -> None:
        report(row("denoise", "case", ok=ok))
        report(row("denoise", "no limit", ok=None, limit=None))

    monkeypatch.setattr(bench, "OUT", tmp_path)
    monkeypatch.setattr(bench, "SECTIONS", {"denoise": (measure, 1.0)})
    assert bench.main(["--section", "denoise"]) == 0
    assert bench.main(["--section", "denoise", "--strict"]) == status


# ---- sections


def test_one_rank_rows_compare_with_both_others(rank_pool: RankPool, comfyui_path: Path) -> None:
    (rows,) = rank_pool.run(1, denoise.one_rank, TINY, 0.0)
    assert [r.limit for r in rows] == [1.0, None, 1.0, None]
    assert all(r.ratio is not None and r.ratio > 0 and r.rounds >= 6 for r in rows)


def test_two_rank_rows_are_the_same_on_both_ranks(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(2, denoise.two_ranks, TINY, 0.0)
    assert first == second
    limits = {r.case: (r.sense, r.limit) for r in first if r.limit is not None}
    assert limits == {
        "cfg2 / ceiling, 8 tokens fp32": ("at least", 0.97),
        "ulysses2 / ceiling, 8 tokens fp32": ("at least", 0.87),
        "tp2 / ceiling, 8 tokens fp32": ("at least", 0.78),
        "ulysses2 / diffusers, 8 tokens fp32": ("at most", 0.95),
    }


def test_long_sequences_have_higher_limits() -> None:
    many = dataclasses.replace(TINY, grid=denoise.GRIDS[1])
    limits = {c.ours: c.limit for c in denoise.two_rank_comparisons(many) if c.limit is not None}
    assert limits == {"cfg2": 0.97, "ulysses2": 0.95, "tp2": 0.90, "ulysses2 with text": 0.98}


def test_vae_rows_compare_with_both_others_and_with_one_rank(
    rank_pool: RankPool, comfyui_path: Path
) -> None:
    size = LatentSize(frames=2, height=1, width=2)
    (rows,) = rank_pool.run(1, vae.one_rank, vae.TINY, size, 0.0)
    assert [(r.sense, r.limit) for r in rows] == [("at most", 1.0)] * 2
    assert all(r.ratio is not None and r.ratio > 0 and r.rounds >= 3 for r in rows)
    first, second = rank_pool.run(2, vae.two_ranks, vae.TINY, size, 0.0)
    assert first == second
    assert [(r.sense, r.limit) for r in first] == [("at least", 1.8), ("at least", None)]


def test_vae_memory_row_tells_growth_from_none() -> None:
    small, large = (LatentSize(frames=frames, height=2, width=2) for frames in (1, 3))
    row = vae.memory_row(vae.TINY, small, large)
    assert row.ratio is not None
    assert row.ok == (row.ratio <= vae.GROWTH)
    with RankPool() as pool:
        ((size, peak),) = pool.run(1, vae_programs.peak_of_a_tensor)
    assert peak >= size * 0.9


def bridge_rows(rank: int) -> list[Row]:
    rows: list[Row] = []
    bridge.measure(
        budget_s=0.0,
        report=rows.append,
        idle=(1, 48, 2, 4, 4),
        idle_meshes=("single",),
        real=(dataclasses.replace(TINY.shape, text_dim=4096), TINY.grid),
        real_meshes=("cfg2",),
    )
    return rows


def test_bridge_rows_compare_with_the_loop_in_the_group_and_with_the_native_model(
    rank_pool: RankPool, comfyui_path: Path
) -> None:
    (rows,) = rank_pool.run(1, bridge_rows)
    assert [(r.case.partition(",")[0], r.limit) for r in rows] == [
        ("a call that computes nothing / tokens + 5 ms", 1.0),
        ("own MODEL / WanDistSampler", None),
        ("own MODEL / native MODEL", None),
    ]
    assert all(r.ratio is not None and r.ratio > 0 for r in rows)


def test_transfer_rows_are_well_formed_and_nothing_is_left_running() -> None:
    payload = transfer.job_payload(latent=(1, 4, 2, 4, 4), mask=(1, 1, 2, 4, 4), text=(1, 8, 16))
    rows: list[Row] = []
    before = multiprocessing.active_children()
    transfer.measure(budget_s=0.0, report=rows.append, payload=payload, others=("pipe",))
    assert [r.limit for r in rows] == [0.5]
    assert rows[0].ratio is not None
    assert set(multiprocessing.active_children()) <= set(before)


def test_transfer_refuses_a_trip_that_does_not_read() -> None:
    payload = transfer.job_payload(latent=(1, 1, 1, 2, 2), mask=(1, 1, 1, 2, 2), text=(1, 2, 2))
    idle = transfer.stopwatch(lambda: payload.arrays[0] * 0, payload)
    with pytest.raises(RuntimeError, match="the worker read"):
        idle()


# ---- gpu.py


def test_gpu_run_writes_every_part_even_if_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_bench: gpu.Bench) -> gpu.Result:
        raise ValueError("broken on purpose")

    parts = {name: part for name, part in gpu.PARTS.items() if name != "compiled"}
    monkeypatch.setattr(gpu, "PARTS", {"broken": (fail, 1.0), **parts})
    assert gpu.main(["--tiny", "--out", str(tmp_path)]) == 1
    (path,) = tmp_path.iterdir()
    report = json.loads(path.read_text())
    assert "broken on purpose" in report["parts"]["broken"]["error"]
    good = {name: part for name, part in report["parts"].items() if name != "broken"}
    assert good.keys() == parts.keys()
    assert not any(gpu.has_failed(part) for part in good.values())
    # A whole video of 4 T - 3 frames, timed as such.
    vae, grid = good["vae"], gpu.TINY.grid
    assert (vae["frames"], vae["height"], vae["width"]) == (
        4 * grid.frames - 3,
        32 * grid.rows,
        32 * grid.columns,
    )
    assert vae["seconds"] > vae["first_chunk_s"] + (grid.frames - 2) * vae["later_chunk_s"]
    assert report["machine"]["torch"]


def test_gpu_part_that_takes_too_long_is_given_up() -> None:
    run = gpu.Bench(device=torch.device("cpu"), sizes=gpu.TINY, parts={})

    def hang(_bench: gpu.Bench) -> gpu.Result:
        time.sleep(30)
        return {}

    assert "longer than" in str(gpu.run_part(run, hang, budget_s=0.1, left_s=10)["error"])
    assert "no time" in str(gpu.run_part(run, hang, budget_s=1, left_s=0)["error"])
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_missed_parity_limit_is_a_failure() -> None:
    assert gpu.has_failed({"vae": {"ok": False}})
    assert not gpu.has_failed({"vae": {"ok": True}, "seconds": 1.0})


def test_forward_flops_are_those_of_the_published_count() -> None:
    flops = gpu.forward_flops(gpu.FULL.transformer, gpu.FULL.grid.tokens)
    assert flops == pytest.approx(517e12, rel=0.003)
