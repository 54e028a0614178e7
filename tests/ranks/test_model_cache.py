"""Models that a rank keeps between jobs: which are read again, and which go when there is no room.

Covered: two ranks, with memory as each test has it, what every job reads and gives.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from comfy_wan_dist.ipc.errors import ConfigError
from comfy_wan_dist.ipc.messages import ModelSpec, VAESpec
from comfy_wan_dist.mesh.memory import load_bytes, weight_bytes
from comfy_wan_dist.mesh.shape import WanShape
from devtools.checkpoints import TINY_VAE, write_transformer, write_vae
from devtools.mesh_runs import (
    Case,
    LocalJob,
    Schedule,
    build_local_runner,
    build_request,
    lora_spec,
    mesh_degrees,
    model_spec,
)
from devtools.rank_pool import RankPool
from devtools.vae_runs import build_decode, vae_spec
from workers.resident.memory import Room
from workers.resident.slot import HeldModel, ModelSlot

SHAPE = WanShape(dim=256, ffn_dim=128, num_layers=2, in_dim=48, out_dim=48, text_dim=16, freq_dim=8)
CASE = Case(name="small", frames=2, height=4, width=4)
SCHEDULE = Schedule(solver="euler", sigmas=(1.0, 0.5, 0.0), guidance=1.0)
MESH = "tp2"
LOTS = 2**40


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSpec]:
    folder = tmp_path_factory.mktemp("models")
    specs = {}
    for seed, name in enumerate("abc"):
        write_transformer(folder / f"{name}.safetensors", SHAPE, seed=seed)
        specs[name] = model_spec(folder / f"{name}.safetensors")
    return specs


@pytest.fixture(scope="module")
def vae(tmp_path_factory: pytest.TempPathFactory) -> VAESpec:
    path = tmp_path_factory.mktemp("vae") / "vae.safetensors"
    write_vae(path, TINY_VAE, seed=2)
    return vae_spec(path)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A job, what all memory of the device is meanwhile, as each rank sees it, and what the host's has to spare."""

    spec: ModelSpec | VAESpec
    memory: tuple[int, int] = (LOTS, LOTS)
    host: tuple[int, int] = (LOTS, LOTS)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a job ended on a rank. held: file names of its models, the latest last; those in host memory in brackets."""

    error: str
    bytes_read: int
    held: tuple[str, ...]
    result: Tensor


def run_moments(rank: int, moments: Sequence[Moment]) -> list[Ended]:
    """One after the other on one runner, whose device has memory of its own and shares it among the ranks."""
    runner, agreement = build_local_runner(rank, MESH)
    inputs = CASE.inputs(SHAPE, is_guided=False)

    def slots() -> list[ModelSlot]:
        return [runner._transformers.low_noise, runner._transformers.model]

    def label(slot: ModelSlot) -> str:
        name = "" if slot.held is None else Path(slot.held.spec.path).stem
        return f"({name})" if slot.is_offloaded else name

    def run(moment: Moment) -> Ended:
        def free() -> int:
            used = sum(slot.device_bytes() for slot in slots())
            return moment.memory[rank] - 2 * used

        request: Any
        if isinstance(moment.spec, ModelSpec):
            request, tensors = build_request(moment.spec, inputs, SCHEDULE, mesh=MESH)
        else:
            request, tensors = build_decode(moment.spec, torch.ones(1, 48, 1, 4, 4))
        error, bytes_read = "", 0
        with (
            mock.patch.object(Room, "free", side_effect=free),
            mock.patch.object(Room, "spare_on_host", return_value=moment.host[rank]),
            mock.patch.object(Room, "has_host", True),
        ):
            try:
                bytes_read = runner.run(request, LocalJob(tensors, agreement)).bytes_read  # type: ignore[arg-type]
            except ConfigError as refused:
                error = str(refused)
        agreement.take_failure()
        return Ended(
            error=error,
            bytes_read=bytes_read,
            held=tuple(filter(None, map(label, slots()))),
            result=tensors[-1].clone(),
        )

    return [run(moment) for moment in moments]


@pytest.fixture
def run(rank_pool: RankPool) -> Callable[..., list[Ended]]:
    """Moments on two ranks, which must end alike; what rank 0 says of each."""

    def run(*moments: Moment) -> list[Ended]:
        first, second = rank_pool.run(2, run_moments, moments)
        for one, other in zip(first, second, strict=True):
            assert (one.error, one.held) == (other.error, other.held)
            assert (one.bytes_read > 0) == (other.bytes_read > 0)
        return first

    return run


def held(ended: Sequence[Ended]) -> list[str]:
    return [" ".join(each.held) for each in ended]


def was_read(ended: Sequence[Ended]) -> list[bool]:
    return [each.bytes_read > 0 for each in ended]


# Of both ranks together, as on a CPU.
LOAD = 2 * load_bytes(SHAPE, mesh_degrees(MESH), stage=0, dtype="float32")
WEIGHTS = 2 * weight_bytes(SHAPE, mesh_degrees(MESH), stage=0, dtype="float32")
TWO = round(WEIGHTS + LOAD / 0.9 + 2**25)
ONE_TO_LOAD = LOAD + WEIGHTS // 2
ONE_TO_RUN = LOAD + WEIGHTS + WEIGHTS // 2


def test_two_models_change_places_without_being_read_again(
    run: Callable[..., list[Ended]], specs: Mapping[str, ModelSpec]
) -> None:
    ended = run(*(Moment(spec=specs[name], memory=(TWO, TWO)) for name in "ababa"))
    assert held(ended) == ["a", "a b", "b a", "a b", "b a"]
    assert was_read(ended) == [True, True, False, False, False]
    assert ended[0].bytes_read == ended[1].bytes_read
    assert torch.equal(ended[2].result, ended[0].result)
    assert torch.equal(ended[3].result, ended[1].result)
    assert not torch.equal(ended[0].result, ended[1].result)


@pytest.mark.parametrize("memory", [(LOTS, ONE_TO_LOAD), (ONE_TO_RUN, LOTS)])
def test_where_two_do_not_fit_on_each_rank_the_other_one_goes(
    run: Callable[..., list[Ended]], specs: Mapping[str, ModelSpec], memory: tuple[int, int]
) -> None:
    """To host memory, or, where that has no room on either rank, altogether."""
    for host, expected in (
        ((LOTS, LOTS), ["a", "(a) b", "(b) a"]),
        ((LOTS, WEIGHTS // 4), ["a", "b", "a"]),
    ):
        ended = run(*(Moment(spec=specs[name], memory=memory, host=host) for name in "aba"))
        assert held(ended) == expected
        assert was_read(ended) == [True, True, "(" not in expected[2]]
        assert torch.equal(ended[2].result, ended[0].result)


def test_of_three_the_one_not_used_for_longest_goes(
    run: Callable[..., list[Ended]], specs: Mapping[str, ModelSpec]
) -> None:
    ended = run(*(Moment(spec=specs[name]) for name in "abacab"))
    assert held(ended) == ["a", "a b", "b a", "a c", "c a", "a b"]
    assert was_read(ended) == [True, True, False, True, False, True]


def test_jobs_that_fail_cost_no_model_that_would_have_stayed(
    run: Callable[..., list[Ended]], specs: Mapping[str, ModelSpec], tmp_path: Path
) -> None:
    """Before anything is loaded, and half-way."""
    stale = replace(specs["c"], mtime_ns=1)
    ended = run(*(Moment(spec=each) for each in (specs["a"], specs["b"], stale, specs["c"])))
    assert "changed after the job was made" in ended[2].error
    assert held(ended) == ["a", "a b", "a b", "b c"]

    path = tmp_path / "lora.safetensors"
    save_file({"diffusion_model.head.head.diff_b": torch.full((192,), torch.nan)}, path)
    broken = replace(specs["c"], loras=(lora_spec(path, 1.0),))
    jobs = (specs["a"], specs["b"], broken, specs["c"], specs["b"])
    ended = run(*(Moment(spec=each) for each in jobs))
    assert "NaN" in ended[2].error
    assert held(ended) == ["a", "a b", "b", "b c", "c b"]
    assert was_read(ended)[4] is False


def test_model_that_does_not_fit_alone_is_refused(
    run: Callable[..., list[Ended]], specs: Mapping[str, ModelSpec]
) -> None:
    small = (LOTS, LOAD - 1)
    ended = run(
        Moment(spec=specs["a"]), Moment(spec=specs["b"], memory=small), Moment(spec=specs["a"])
    )
    assert ended[1].error.startswith("the 2 ranks of mesh tp2 together need")
    assert held(ended) == ["a", "(a)", "a"]


def test_replaced_file_is_read_and_what_it_was_goes(
    run: Callable[..., list[Ended]], specs: Mapping[str, ModelSpec], tmp_path: Path
) -> None:
    path = tmp_path / "changing.safetensors"
    write_transformer(path, SHAPE, seed=7)
    old = model_spec(path)
    path.write_bytes(Path(specs["a"].path).read_bytes())
    os.utime(path, ns=(1, old.mtime_ns + 1))
    new = model_spec(path)
    slot = ModelSlot()
    assert not slot.is_outdated_by(new)
    slot.held = HeldModel(spec=old, loaded=mock.Mock(), changes={})
    assert slot.is_outdated_by(new)
    assert not slot.is_outdated_by(replace(old, dtype="bfloat16"))
    assert not slot.is_outdated_by(replace(new, path="other"))
    ended = run(Moment(spec=specs["a"]), Moment(spec=new))
    assert was_read(ended) == [True, True]
    assert torch.equal(ended[0].result, ended[1].result)


def test_models_make_room_for_the_vae(
    run: Callable[..., list[Ended]], specs: Mapping[str, ModelSpec], vae: VAESpec
) -> None:
    two = [Moment(spec=specs[name]) for name in "ab"]
    # The first decode loads the VAE, the second has it.
    expected, _ = run(*two, Moment(spec=vae), Moment(spec=vae))[2:]
    tight = 2 * WEIGHTS + vae.file_bytes // 2
    ended = run(*two, Moment(spec=vae, memory=(LOTS, tight)), Moment(spec=specs["b"]))
    assert held(ended) == ["a", "a b", "(a) (b)", "(a) b"]
    assert was_read(ended)[3] is False
    # A rank writes its share of the frames only.
    torch.testing.assert_close(ended[2].result, expected.result, rtol=0, atol=0, equal_nan=True)
    narrow = 2 * WEIGHTS + 2**14
    ended = run(*two, Moment(spec=vae), Moment(spec=vae, memory=(narrow, narrow)))
    assert held(ended) == ["a", "a b", "a b", "(a) (b)"]


def test_models_take_turns_in_host_memory_once_one_is_there(
    run: Callable[..., list[Ended]], specs: Mapping[str, ModelSpec], vae: VAESpec
) -> None:
    narrow = WEIGHTS + 2**14
    start = (
        Moment(spec=specs["a"]),
        Moment(spec=vae),
        Moment(spec=vae, memory=(narrow, narrow)),
        Moment(spec=specs["b"]),
    )
    ended = run(*start, Moment(spec=specs["a"]))
    assert held(ended) == ["a", "a", "(a)", "(a) b", "(b) a"]
    assert was_read(ended)[4] is False
    assert torch.equal(ended[4].result, ended[0].result)
    ended = run(*start, Moment(spec=specs["a"], memory=(ONE_TO_RUN, LOTS)))
    assert held(ended)[4] == "(b) a"
    assert torch.equal(ended[4].result, ended[0].result)
