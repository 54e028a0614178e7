"""The VAE keeps to its memory: smaller parts, then the transformer's weights moved away, then tiles, all of them exact.

Covered on the CPU over gloo in float32: tiles against one process, with too little around them noticed; the choice of a
split for a limit, and its figures against the tensors alive; jobs through the runner with a budget, refused and
stopped; weights moved to the host and back. Not covered: CUDA, where there is such a thing as a device's own memory.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from rank_programs import with_fault
from torch import Tensor, nn
from vae_kit import (
    CONFIG,
    DECODE,
    ENCODE,
    SMALL,
    OneProcess,
    build_one_process,
    errors,
    run_jobs,
    write_vae_file,
)
from vae_programs import Turn, TurnEnd, VAEJob, nothing_around_a_part, sample_and_decode

from comfy_wan_dist.ipc.errors import ConfigError, InsufficientMemoryError
from comfy_wan_dist.ipc.messages import ModelSpec, VAESpec
from comfy_wan_dist.mesh.degrees import MeshDegrees
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.mesh.vae_memory import (
    Direction,
    VAEMemory,
    choose_split_within,
    refuse_memory,
    tiled_splits,
)
from comfy_wan_dist.mesh.vae_shape import VAEConfig
from comfy_wan_dist.mesh.vae_split import LatentSize, SpaceAxis, VAESplit
from devtools.checkpoints import write_transformer
from devtools.mesh_runs import CASES, Schedule, mesh_degrees, model_spec, relative_error
from devtools.rank_pool import RankPool
from devtools.vae_runs import (
    CPU,
    LIMIT,
    build_seeded_vae,
    joined,
    live_bytes,
    make_inputs,
    vae_rank,
)
from workers.parallel.groups import PlaneGroups
from workers.parallel.vae import share as vae_share
from workers.parallel.vae.share import apply_vae_split
from workers.resident.offloaded import OffloadedWeights, weight_bytes
from workers.vae import tiles
from workers.vae.layers import FrameHistory
from workers.vae.run import decode_chunks_into, encode_chunks_into
from workers.vae.writer import LateWriter, Leaving, Made

COLUMNS = SpaceAxis.COLUMNS


def tiled(frames: int, height: int, width: int, *, space: int = 1, tiles: int) -> VAESplit:
    """`frames` are those of the latent."""
    size = LatentSize(frames=frames, height=height, width=width)
    return VAESplit(size=size, axis=size.longer, space=space, time=1, tiles=tiles)


@pytest.fixture(scope="module")
def single() -> OneProcess:
    return build_one_process()


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> VAESpec:
    return write_vae_file(tmp_path_factory.mktemp("vae"))


# ---- tiles

SPLITS = {
    1: (tiled(3, 2, 41, tiles=4), tiled(2, 33, 3, tiles=3), tiled(1, 1, 2, tiles=2)),
    # What a tile needs lies on one neighbour, and on several.
    2: (tiled(2, 1, 61, space=2, tiles=2), tiled(3, 13, 3, space=2, tiles=3)),
    3: (
        tiled(2, 3, 17, space=3, tiles=2),
        tiled(2, 2, 7, space=3, tiles=2),
        # One rank has no part, and the second one a tile less.
        tiled(3, 2, 5, space=2, tiles=3),
    ),
}


@pytest.mark.parametrize("world_size", SPLITS)
def test_tiles_match_one_process(world_size: int, rank_pool: RankPool, single: OneProcess) -> None:
    splits = SPLITS[world_size]
    answers = rank_pool.run(world_size, vae_rank, world_size, CONFIG, splits)
    for each, runs in zip(splits, zip(*answers, strict=True), strict=True):
        decode_error, encode_error = errors(list(runs), single(each.size))
        assert decode_error <= LIMIT, each
        assert encode_error <= LIMIT, each


TOO_NEAR = {
    # Of the encoder's finest level float64 shows nothing either: see the next test.
    DECODE: ((6, 12, 10, 7), (13, 6, 10, 7), (13, 12, 5, 7), (13, 12, 10, 6)),
    ENCODE: (None, (76, 30, 14, 4), (76, 34, 10, 4), (76, 34, 14, 2)),
}


@pytest.mark.parametrize(
    ("direction", "level"),
    [(at, level) for at in TOO_NEAR for level in range(4) if TOO_NEAR[at][level]],
)
def test_too_little_around_the_tiles_at_one_level_shows(direction: int, level: int) -> None:
    split = tiled(2, 1, 96, tiles=3)
    name = ("decode_reach", "encode_reach")[direction]
    near = TOO_NEAR[direction][level]
    assert near is not None
    assert [a < b for a, b in zip(near, getattr(tiles, name)(CONFIG), strict=True)].count(True) == 1
    # In float64: little of random weights' answer comes from far away. Pictures are float32 all the same.
    vae = build_seeded_vae(CONFIG).double()
    plane = PlaneGroups(layout=MeshDegrees(), rank=0)
    inputs = make_inputs(CONFIG, split.size)
    latent, frames = inputs.latent.double(), inputs.frames.double()

    def run(cut: VAESplit) -> Tensor:
        share = apply_vae_split(vae, cut, plane)
        with torch.inference_mode():
            if direction == DECODE:
                pictures = torch.empty_like(inputs.frames)
                list(decode_chunks_into(vae, latent, pictures, share=share, device=CPU))
                return pictures
            result = torch.empty_like(latent)
            list(encode_chunks_into(vae, frames, result, share=share, device=CPU))
            return result

    whole, right = run(replace(split, tiles=1)), run(split)
    with (
        mock.patch.object(tiles, name, return_value=near),
        mock.patch.object(vae_share, "decode_reach", tiles.decode_reach),
    ):
        wrong = run(split)
    limit = 2e-7 if direction == DECODE else 1e-14
    assert relative_error(right, whole) < limit < relative_error(wrong, whole)


def test_tiles_see_as_far_as_gradients_reach() -> None:
    """With weights that cannot cancel, the gradient of one position is nonzero wherever it depends on."""
    vae = build_seeded_vae(CONFIG).double()
    for parameter in vae.parameters():
        parameter.abs_().add_(0.1)
    length, at = 41, 20
    middle = torch.rand(1, 1, 1, length, 32, dtype=torch.float64, requires_grad=True)
    x = middle
    for stage in vae.decoder.upsamples:
        x = stage(x, FrameHistory())
    vae.decoder.leave(x, FrameHistory())[:, :, :, 8 * at : 8 * at + 8].sum().backward()
    assert reached(middle) == range(at - 13, at + 1 + 13)
    assert tiles.decode_reach(CONFIG)[0] == 13

    patches = torch.rand(1, 1, 8, 8 * length, 12, dtype=torch.float64, requires_grad=True)
    x = vae.encoder.conv1(patches, FrameHistory())
    for stage in vae.encoder.downsamples:
        x = stage(x, FrameHistory())
    x[:, :, :, at].sum().backward()
    assert reached(patches) == range(8 * at - 61, 8 * at + 8 + 68)
    # As far on both sides, and in whole pairs at every level.
    assert tiles.encode_reach(CONFIG)[0] == 76


def reached(x_bthwc: Tensor) -> range:
    assert x_bthwc.grad is not None
    columns = x_bthwc.grad.abs().sum((0, 1, 2, 4)).nonzero().flatten().tolist()
    return range(columns[0], columns[-1] + 1)


def test_parts_that_tiles_do_not_see_beyond_show(rank_pool: RankPool, single: OneProcess) -> None:
    split = tiled(2, 2, 12, space=2, tiles=2)
    answers = rank_pool.run(2, with_fault, nothing_around_a_part, vae_rank, 2, CONFIG, (split,))
    decode_error, encode_error = errors([run for (run,) in answers], single(split.size))
    assert decode_error > 10 * LIMIT
    assert encode_error <= LIMIT  # there a rank has all pictures


def test_tiles_that_do_not_fit_are_refused() -> None:
    size = LatentSize(frames=5, height=3, width=6)
    for space, time, count in ((2, 1, 4), (1, 2, 2), (1, 1, 0)):
        with pytest.raises(ValueError, match="tiles do not fit"):
            VAESplit(size=size, axis=COLUMNS, space=space, time=time, tiles=count)


# ---- the choice

DECODER = VAEMemory(direction=Direction.DECODE, dim=10, item_bytes=2)


def test_limit_chooses_the_split_and_tiles_come_last() -> None:
    size = LatentSize(frames=9, height=3, width=3)

    def choose(limit: int) -> VAESplit | None:
        return choose_split_within(size, ranks=6, need=DECODER.bytes, limit=limit)

    both = choose(2**30)
    assert both is not None
    assert (both.space, both.time) == (3, 2)
    space = VAESplit(size=size, axis=COLUMNS, space=3, time=1)
    need, least = DECODER.bytes(both), DECODER.bytes(space)
    assert least < need
    assert choose(need) == both
    assert choose(need - 1) == choose(least) == space
    assert choose(least - 1) is None  # a part is one column


def test_largest_tiles_that_fit_are_taken() -> None:
    size = LatentSize(frames=31, height=44, width=80)
    parts = VAESplit(size=size, axis=COLUMNS, space=2, time=1)
    options = tiled_splits(size, ranks=2)
    lengths = [len(option.tile_ranges(0)[0]) for option in options]
    assert lengths == sorted(set(lengths), reverse=True)
    assert (lengths[0], lengths[-1]) == (20, 1)
    needs = [DECODER.bytes(option) for option in (parts, *options)]
    assert needs == sorted(needs, reverse=True)
    for need, option in zip(needs[1:], options, strict=True):
        assert choose_split_within(size, ranks=2, need=DECODER.bytes, limit=need) == option
    assert "in 2 tiles one after another" in options[0].explain(2)
    assert choose_split_within(size, ranks=2, need=DECODER.bytes, limit=needs[-1] - 1) is None


def test_refusal_says_whose_limit_it_is_and_the_least_that_would_do() -> None:
    size = LatentSize(frames=2, height=3, width=3)
    memory = VAEMemory(direction=Direction.DECODE, dim=2**16, item_bytes=4)

    def refuse(budget: int | None, free_bytes: int) -> Exception:
        return refuse_memory(size, ranks=1, memory=memory, budget=budget, free_bytes=free_bytes)

    assert type(refuse(2**20, 2**30)) is ConfigError
    assert type(refuse(2**40, 2**30)) is type(refuse(None, 2**30)) is InsufficientMemoryError
    assert (
        "even in the smallest tiles, but 1.00 GiB is free; use more devices, a smaller video or vae_dtype bfloat16"
    ) in str(refuse(None, 2**30))
    assert "but 0.50 GiB is the budget; use a larger memory, more devices, a" in str(
        refuse(2**29, 2**30)
    )
    half = replace(memory, item_bytes=2)
    assert str(refuse_memory(size, ranks=1, memory=half, budget=None, free_bytes=1)).endswith(
        "use more devices or a smaller video"
    )


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_least_that_a_refusal_names_is_enough(ranks: int, direction: Direction) -> None:
    memory = VAEMemory(direction=direction, dim=256, item_bytes=2)
    for height in range(30, 45):
        size = LatentSize(frames=2, height=height, width=80)
        options = tiled_splits(size, ranks=ranks)
        least = min(map(memory.bytes, options))

        def choose(limit: int, size: LatentSize = size) -> VAESplit | None:
            return choose_split_within(size, ranks=ranks, need=memory.bytes, limit=limit)

        message = str(
            refuse_memory(size, ranks=ranks, memory=memory, budget=least - 1, free_bytes=2**40)
        )
        said = re.search(r"at least ([\d.]+) GiB .* but ([\d.]+) GiB", message)
        assert said is not None
        enough, had = (round(float(text) * 2**30) for text in said.groups())
        assert choose(had) is None
        assert choose(enough) is not None


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("at_once", [1, 2])
def test_bytes_are_those_of_the_tensors_alive_at_once(at_once: int, direction: Direction) -> None:
    """Of the real layers; a difference of two sizes, since views count the weights as well."""
    is_decode = direction is Direction.DECODE
    config = (
        VAEConfig(encoder_dim=8, decoder_dim=64)
        if is_decode
        else VAEConfig(encoder_dim=64, decoder_dim=8)
    )
    memory = VAEMemory(direction=direction, dim=64, item_bytes=2)
    frames = 1 + 2 * at_once
    splits = [tiled(frames, 20, width, tiles=1) for width in (40, 80)]
    small, large = (
        live_bytes(config, split, is_decode=is_decode, at_once=at_once) for split in splits
    )
    beyond = (at_once - 1) * direction.value.per_frame * 64 * 2 * 20 * 40
    said = memory.bytes(splits[1]) - memory.bytes(splits[0])
    assert large - small == pytest.approx(said + beyond, rel=0.03)
    if at_once == 1:
        for width, count in ((160, 4), (64, 4)):
            split = tiled(frames, 20, width, tiles=count)
            alive = live_bytes(config, split, is_decode=is_decode)
            weights = small - memory.bytes(splits[0])
            assert alive - weights == pytest.approx(memory.bytes(split), rel=0.05)


# ---- jobs through the runner

WIDE = LatentSize(frames=3, height=1, width=60)


def test_budget_is_kept_with_tiles_and_the_note_says_so(
    rank_pool: RankPool, spec: VAESpec, single: OneProcess
) -> None:
    inputs, expected = make_inputs(CONFIG, WIDE), single(WIDE)

    def least(direction: Direction) -> int:
        memory = VAEMemory(direction=direction, dim=8, item_bytes=4)
        return memory.bytes(tiled(3, 1, 60, space=2, tiles=3))

    decoded, encoded, whole = run_jobs(
        rank_pool,
        "cfg2",
        spec,
        VAEJob(latent=inputs.latent, memory_bytes=least(Direction.DECODE)),
        VAEJob(frames=inputs.frames, channels=48, memory_bytes=least(Direction.ENCODE)),
        VAEJob(latent=inputs.latent),
    )
    for ends, direction in ((decoded, DECODE), (encoded, ENCODE), (whole, DECODE)):
        assert {end.error for end in ends} == {"no error"}
        result = joined([end.result for end in ends])
        assert relative_error(result, expected[direction]) <= LIMIT
        is_tiled = ends is not whole
        for end in ends:
            assert ("each part in 3 tiles" in end.stats.note) == is_tiled
            assert "columns in 2 parts of 30" in end.stats.note
        reported = [done for _, done, _ in ends[0].reports]
        assert reported == sorted(set(reported))
        assert reported[-1] == 3
    sends = [sum(line.calls for line in end.stats.ledger) for end in (decoded[0], whole[0])]
    assert sends[0] < sends[1] / 3  # only the middle exchanges something


def test_job_beyond_its_memory_is_refused_before_anything_is_sent(
    rank_pool: RankPool, spec: VAESpec
) -> None:
    inputs = make_inputs(CONFIG, SMALL)
    *refused, good = run_jobs(
        rank_pool,
        "cfg2",
        spec,
        VAEJob(latent=inputs.latent, memory_bytes=1000),
        VAEJob(frames=inputs.frames, channels=48, memory_bytes=1000),
        VAEJob(latent=inputs.latent, memory_bytes=2**30),
    )
    for end in (end for ends in refused for end in ends):
        assert end.error.startswith("ConfigError: a video of 112x48 takes the VAE at least")
        assert "on each rank of 2 beside the models" in end.error
        assert "but 0.00 GiB is the budget" in end.error
        assert end.stats.ledger == ()
        assert torch.isnan(end.result).all()
    assert {end.error for end in good} == {"no error"}


def test_stop_between_tiles_is_heard_and_the_next_job_runs(
    rank_pool: RankPool, spec: VAESpec, single: OneProcess
) -> None:
    latent = make_inputs(CONFIG, WIDE).latent
    memory = VAEMemory(direction=Direction.DECODE, dim=8, item_bytes=4)
    budget = memory.bytes(tiled(3, 1, 60, space=2, tiles=2))
    # The middle's three steps, the first tile's, one of the second.
    stopped, good = run_jobs(
        rank_pool,
        "cfg2",
        spec,
        VAEJob(latent=latent, memory_bytes=budget, stop=(1, 8)),
        VAEJob(latent=latent),
    )
    assert {end.error.split(":")[0] for end in stopped} == {"JobCancelled"}
    assert stopped[0].reports == [("decode", 1, 3), ("decode", 2, 3)]
    assert relative_error(joined([end.result for end in good]), single(WIDE)[DECODE]) <= LIMIT


# ---- weights in host memory

SHAPE = WanShape(dim=256, ffn_dim=512, num_layers=2, in_dim=48, out_dim=48, text_dim=64)
EULER = Schedule(solver="euler", sigmas=(1.0, 0.5, 0.0), guidance=1.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path = tmp_path_factory.mktemp("model") / "m.safetensors"
    write_transformer(path, SHAPE, seed=4)
    return model_spec(path)


SAMPLE = Turn()
PLENTY = 2**30


def run_turns(
    rank_pool: RankPool, mesh: str, model: ModelSpec, vae: VAESpec, *turns: Turn, **options: Any
) -> list[list[TurnEnd]]:
    """For each turn how it ended on each rank."""
    answers = rank_pool.run(
        mesh_degrees(mesh).world_size,
        partial(sample_and_decode, **options),
        mesh,
        model,
        vae,
        CASES[0].inputs(SHAPE, is_guided=False),
        EULER,
        make_inputs(CONFIG, WIDE).latent,
        turns,
    )
    return [list(ends) for ends in zip(*answers, strict=True)]


def assert_decoded(ends: list[TurnEnd], single: OneProcess) -> None:
    assert {end.error for end in ends} == {"no error"}
    assert relative_error(joined([end.result for end in ends]), single(WIDE)[DECODE]) <= LIMIT


@pytest.mark.parametrize("mesh", ["single", "tp2", "ulysses2-fsdp", "pp2"])
def test_transformer_makes_room_for_the_vae_and_comes_back(
    mesh: str, rank_pool: RankPool, spec: VAESpec, model: ModelSpec, single: OneProcess
) -> None:
    decode = Turn(is_decode=True, free_bytes=(1000, PLENTY))
    first, decoded, again = run_turns(rank_pool, mesh, model, spec, SAMPLE, decode, SAMPLE)
    assert_decoded(decoded, single)
    assert torch.equal(first[0].result, again[0].result)
    for before, between, after in zip(first, decoded, again, strict=True):
        assert before.held == after.held > 0 == between.held
        assert after.stats.bytes_read == 0
        assert "tiles" not in between.stats.note


def test_tiles_are_taken_where_the_weights_make_too_little_room(
    rank_pool: RankPool, spec: VAESpec, model: ModelSpec, single: OneProcess
) -> None:
    memory = VAEMemory(direction=Direction.DECODE, dim=8, item_bytes=4)
    free_bytes = (1000, memory.bytes(tiled(3, 1, 60, tiles=4)))
    decode = Turn(is_decode=True, free_bytes=free_bytes)
    _, decoded = run_turns(rank_pool, "single", model, spec, SAMPLE, decode)
    assert_decoded(decoded, single)
    assert "each part in 4 tiles" in decoded[0].stats.note


def test_weights_that_left_some_ranks_only_leave_the_others_next_time(
    rank_pool: RankPool, spec: VAESpec, model: ModelSpec, single: OneProcess
) -> None:
    first, failed, decoded, again = run_turns(
        rank_pool,
        "tp2",
        model,
        spec,
        SAMPLE,
        Turn(is_decode=True, free_bytes=(1000,)),
        Turn(is_decode=True, free_bytes=(1000, PLENTY)),
        SAMPLE,
        no_host_memory_on=1,
    )
    assert {end.error for end in failed} == {"RemoteError: rank 1: MemoryError: none left"}
    assert [end.held > 0 for end in failed] == [False, True]
    assert_decoded(decoded, single)
    assert [end.held for end in decoded] == [0, 0]
    assert torch.equal(first[0].result, again[0].result)


def test_weights_of_transformer_and_vae_that_do_not_fit_side_by_side_take_turns(
    rank_pool: RankPool, spec: VAESpec, model: ModelSpec, single: OneProcess
) -> None:
    decode = Turn(is_decode=True, free_bytes=(PLENTY,), usable=(1000,))
    sample = Turn(usable=(1000,))
    turns = (SAMPLE, decode, sample, replace(decode, usable=(PLENTY,)), SAMPLE)
    ends = run_turns(rank_pool, "tp2", model, spec, *turns)
    for decoded in (ends[1], ends[3]):
        assert_decoded(decoded, single)
        assert all(end.stats.bytes_read > 0 for end in decoded)
    assert [end[0].held > 0 for end in ends] == [True, False, True, True, True]
    for again in (ends[2], ends[4]):
        assert torch.equal(ends[0][0].result, again[0].result)
        assert {end.stats.bytes_read for end in again} == {0}


def test_parked_weights_keep_their_values_and_what_they_share() -> None:
    model = nn.Linear(5, 7)
    alias = model.weight.detach()[2:4]
    before, shared = {name: x.clone() for name, x in model.state_dict().items()}, alias.clone()
    parked = OffloadedWeights(model)
    assert weight_bytes(model) == 0
    parked.bring_back()
    parked.bring_back()  # once more does nothing
    assert weight_bytes(model) == 4 * (5 * 7 + 7)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert torch.equal(alias, shared)


# ---- the way out


def test_late_writer_writes_each_step_while_the_next_one_is_made() -> None:
    on_its_way: list[Tensor] = []
    log: list[str] = []

    def leave(pixels: Tensor) -> Leaving:
        assert not on_its_way, "the last one has not been waited for"
        on_its_way.append(pixels)
        log.append("leaves")

        def wait() -> None:
            on_its_way.clear()
            log.append("is there")

        return pixels, wait

    writer = LateWriter(leave)
    result = torch.full((3, 1, 1, 3), torch.nan)

    def step(frame: int, value: float) -> Made:
        return Made(pictures=torch.full((1, 1, 1, 3), value), place=result[frame : frame + 1])

    assert writer.put(step(0, -1.0), 1) == 0
    assert torch.isnan(result).all()
    assert writer.put(None, 2) == 1
    assert writer.put(step(2, 1.0), 3) == 2
    assert result[:, 0, 0, 0].nan_to_num(7).tolist() == [0.0, 7.0, 7.0]
    assert list(writer.finish()) == [3]
    assert result[2, 0, 0, 0] == 1.0
    assert log == ["leaves", "is there", "leaves", "is there"]
