"""The VAE on several ranks is the VAE on one, and every broken exchange shows.

Covered on the CPU over gloo in float32: decoding and encoding, cut in space, in time and both, against one process
and against diffusers; the choice of a split; the faults of `vae_programs`; jobs through the runner, refused, stopped
and repeated. Not covered: CUDA and NCCL.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import vae_programs
from rank_programs import Fault, with_fault
from safetensors.torch import load_file, save_file
from vae_kit import (
    CONFIG,
    DECODE,
    ENCODE,
    SMALL,
    OneProcess,
    build_one_process,
    chosen_split,
    errors,
    run_jobs,
    write_vae_file,
)
from vae_programs import VAEJob, run_vae_jobs

from comfy_wan_dist.ipc.messages import LedgerLine, VAESpec
from comfy_wan_dist.mesh.vae_split import LatentSize, SpaceAxis, VAESplit
from devtools.checkpoints import TINY_VAE, vae_weights
from devtools.mesh_runs import relative_error
from devtools.rank_pool import RankPool
from devtools.references import build_diffusers_vae
from devtools.vae_runs import (
    LIMIT,
    build_seeded_vae,
    decode,
    joined,
    make_inputs,
    vae_rank,
    vae_spec,
)

ROWS, COLUMNS = SpaceAxis.ROWS, SpaceAxis.COLUMNS


def split(frames: int, height: int, width: int, *, space: int = 1, time: int = 1) -> VAESplit:
    """`frames` are those of the video."""
    size = LatentSize(frames=(frames - 1) // 4 + 1, height=height, width=width)
    return VAESplit(size=size, axis=size.longer, space=space, time=time)


SPLITS = {
    1: (split(9, 3, 3),),
    2: (
        split(1, 3, 5, space=2),
        split(5, 5, 3, space=2),
        split(9, 3, 3, space=2),
        split(33, 3, 5, space=2),
        split(17, 3, 5, time=2),
        split(33, 5, 3, time=2),
    ),
    3: (
        split(1, 7, 3, space=3),
        split(5, 3, 5, space=3),
        split(9, 3, 3, space=3),
        split(33, 3, 5, space=3),
        split(25, 3, 2, time=3),
        split(33, 1, 3, time=3),
    ),
    4: (
        split(1, 5, 7, space=4),
        split(9, 5, 4, space=4),
        split(33, 3, 5, space=4),
        split(33, 3, 3, time=4),
        split(17, 3, 5, space=2, time=2),
        split(33, 5, 3, space=2, time=2),
        split(41, 5, 3, space=2, time=2),
    ),
    6: (
        split(1, 3, 7, space=6),
        split(5, 7, 3, space=6),
        split(9, 3, 6, space=6),
        split(33, 3, 7, space=6),
        split(49, 1, 2, time=6),
        split(17, 3, 7, space=3, time=2),
        split(33, 5, 3, space=3, time=2),
        split(33, 3, 5, space=2, time=3),
        # Two ranks have no part, and in the last chunk only one of two in time.
        split(21, 3, 5, space=2, time=2),
    ),
}


def name_of(each: VAESplit) -> str:
    size = each.size
    return f"{size.frames}x{size.height}x{size.width}-space{each.space}-time{each.time}"


@pytest.fixture(scope="module")
def single() -> OneProcess:
    return build_one_process()


@pytest.mark.parametrize("world_size", SPLITS)
def test_split_matches_one_process(
    world_size: int,
    rank_pool: RankPool,
    single: OneProcess,
) -> None:
    splits = SPLITS[world_size]
    answers = rank_pool.run(world_size, vae_rank, world_size, CONFIG, splits)
    for each, runs in zip(splits, zip(*answers, strict=True), strict=True):
        expected = single(each.size)
        # Few pixels are cut off at 0 or 1, where an error would not show.
        assert ((expected[0] == 0) | (expected[0] == 1)).float().mean() < 0.3
        decode_error, encode_error = errors(list(runs), expected)
        assert decode_error <= LIMIT, name_of(each)
        assert encode_error <= LIMIT, name_of(each)


def test_split_in_space_and_time_matches_diffusers(rank_pool: RankPool) -> None:
    both = split(17, 3, 5, space=2, time=2)
    runs = [run for (run,) in rank_pool.run(4, vae_rank, 4, TINY_VAE, (both,))]
    reference = build_diffusers_vae(TINY_VAE, vae_weights(TINY_VAE, seed=2))
    inputs = make_inputs(TINY_VAE, both.size)
    with torch.inference_mode():
        pictures = (reference.decode(inputs.latent).sample[0].permute(1, 2, 3, 0) + 1) / 2
        pixels = inputs.frames.permute(3, 0, 1, 2).unsqueeze(0) * 2 - 1
        latent = reference.encode(pixels).latent_dist.mode()
    decode_error, encode_error = errors(runs, (pictures, latent))
    assert decode_error <= LIMIT
    assert encode_error <= LIMIT


IN_SPACE, IN_TIME = split(9, 3, 6, space=2), split(25, 2, 3, time=2)
FAULTS: tuple[tuple[Fault, VAESplit, tuple[int, ...]], ...] = (
    (vae_programs.no_causal_halo, IN_SPACE, (DECODE, ENCODE)),
    (vae_programs.no_halo_of_one_convolution, IN_SPACE, (DECODE, ENCODE)),
    (vae_programs.no_upsample_halo, IN_SPACE, (DECODE,)),
    (vae_programs.no_downsample_halo, IN_SPACE, (ENCODE,)),
    (vae_programs.attention_not_gathered, IN_SPACE, (DECODE, ENCODE)),
    (vae_programs.halos_from_the_wrong_side, IN_SPACE, (DECODE, ENCODE)),
    (vae_programs.no_relay_to_spatial, IN_TIME, (DECODE, ENCODE)),
    (vae_programs.no_relay_to_doubling, IN_TIME, (DECODE,)),
    (vae_programs.no_relay_to_halving, IN_TIME, (ENCODE,)),
    (vae_programs.no_relay_between_chunks, IN_TIME, (DECODE, ENCODE)),
    (vae_programs.first_frame_in_history, IN_TIME, (DECODE,)),
    (vae_programs.first_frame_not_in_history, IN_TIME, (ENCODE,)),
)


@pytest.mark.parametrize(
    ("fault", "cut", "directions"), FAULTS, ids=lambda x: getattr(x, "__name__", "")
)
def test_parity_check_notices(
    fault: Fault,
    cut: VAESplit,
    directions: tuple[int, ...],
    rank_pool: RankPool,
    single: OneProcess,
) -> None:
    answers = rank_pool.run(2, with_fault, fault, vae_rank, 2, CONFIG, (cut,))
    found = errors([run for (run,) in answers], single(cut.size))
    for direction in (DECODE, ENCODE):
        assert (found[direction] > 10 * LIMIT) == (direction in directions)


def test_group_rank_taken_for_plane_rank_is_noticed() -> None:
    both = split(17, 2, 2, space=2, time=2)
    with RankPool() as pool, pytest.raises(RuntimeError, match="rank . of 4 failed"):
        pool.run(4, with_fault, vae_programs.group_rank_as_plane_rank, vae_rank, 4, CONFIG, (both,))


# ---- the ledger

# Of CONFIG's decoder: (channels of the input, level) of every convolution over rows and columns but the resampling
# ones, of the resampling ones, which come after the step to the next level, and of those over time alone.
SPATIAL_CONVOLUTIONS = (
    [(48, 0), *[(32, 0)] * 4]
    + [(32, 0)] * 6
    + [(32, 1)] * 6
    + [(32, 2), *[(16, 2)] * 5]
    + [(16, 3), *[(8, 3)] * 5]
    + [(8, 3)]
)
RESAMPLING = [(32, 1), (32, 2), (16, 3)]
TIME_CONVOLUTIONS = [(32, 0), (32, 1)]
ITEM = 4


def frames_at(level: int, latent_frames: int, *, is_start: bool) -> int:
    factor = (1, 2, 4, 4)[level]
    return factor * latent_frames - (factor - 1 if is_start else 0)


def test_ledger_of_a_decode_cut_in_space(rank_pool: RankPool) -> None:
    cut = split(9, 3, 7, space=3)
    ledgers = [run.decode_ledger for (run,) in rank_pool.run(3, vae_rank, 3, CONFIG, (cut,))]
    edge = sum(
        frames_at(level, 1, is_start=chunk == 0) * 3 * 2**level * channels * ITEM
        for chunk in range(3)
        for channels, level in SPATIAL_CONVOLUTIONS + RESAMPLING
    )
    # Keys and values of 32 channels of the longest part, 3 of 7 columns.
    gathered = LedgerLine(
        op="all_gather", axis="vae_space", dtype="float32", calls=3, bytes=3 * 3 * 3 * 2 * 32 * ITEM
    )
    for rank, neighbours in enumerate((1, 2, 1)):
        sent = LedgerLine(
            op="send",
            axis="vae_space",
            dtype="float32",
            calls=neighbours * 33 * 3,
            bytes=neighbours * edge,
        )
        assert ledgers[rank] == (gathered, sent)


def test_ledger_of_a_decode_cut_in_time(rank_pool: RankPool) -> None:
    cut = split(33, 2, 3, time=2)
    assert cut.chunks() == ((3, 2), (2, 2))
    ledgers = [run.decode_ledger for (run,) in rank_pool.run(2, vae_rank, 2, CONFIG, (cut,))]
    tails = sum(
        2 * 2 * 3 * 4**level * channels * ITEM
        for channels, level in SPATIAL_CONVOLUTIONS + TIME_CONVOLUTIONS
    )
    # The first rank sends in both chunks, the second one only in the first, for the next.
    for rank, chunks in enumerate((2, 1)):
        assert ledgers[rank] == (
            LedgerLine(
                op="send", axis="vae_time", dtype="float32", calls=32 * chunks, bytes=tails * chunks
            ),
        )


# ---- jobs through the runner


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> VAESpec:
    return write_vae_file(tmp_path_factory.mktemp("vae"))


@pytest.mark.parametrize("mesh", ["single", "cfg2", "tp2", "pp3", "cfg2-ulysses2", "ring2-tp2-sp"])
def test_all_ranks_take_part_whatever_the_mesh(
    mesh: str,
    rank_pool: RankPool,
    spec: VAESpec,
    single: OneProcess,
) -> None:
    inputs, expected = make_inputs(CONFIG, SMALL), single(SMALL)
    jobs = (VAEJob(latent=inputs.latent), VAEJob(frames=inputs.frames, channels=CONFIG.z_dim))
    for ends, direction in zip(
        run_jobs(rank_pool, mesh, spec, *jobs), (DECODE, ENCODE), strict=True
    ):
        assert {end.error for end in ends} == {"no error"}
        assert all(not torch.isnan(end.result).all() for end in ends)
        result = joined([end.result for end in ends])
        assert relative_error(result, expected[direction]) <= LIMIT
        phase = ("decode", "encode")[direction]
        assert ends[0].reports == [(phase, done, 3) for done in (1, 2, 3)]
        # The file is read once, for the first job.
        assert all((end.stats.bytes_read > 0) == (direction == DECODE) for end in ends)


def test_only_ranks_of_the_head_share_the_work_of_several_machines(
    rank_pool: RankPool, spec: VAESpec, single: OneProcess
) -> None:
    """Only they see the memory that the result goes to."""
    job = VAEJob(latent=make_inputs(CONFIG, SMALL).latent)
    answers = rank_pool.run(4, run_vae_jobs, "ulysses4", spec, (job,), 2)
    results = [ends[0].result for ends in answers]
    assert all(bool(torch.isnan(result).all()) for result in results[2:])
    assert relative_error(joined(results[:2]), single(SMALL)[DECODE]) <= LIMIT


def test_samples_of_a_batch_are_decoded_one_after_another(
    rank_pool: RankPool, spec: VAESpec
) -> None:
    latent = make_inputs(CONFIG, SMALL, batch=2).latent
    (ends,) = run_jobs(rank_pool, "cfg2", spec, VAEJob(latent=latent))
    pictures = joined([end.result for end in ends])
    expected = decode(build_seeded_vae(CONFIG), latent)
    for sample in range(2):
        actual = pictures[9 * sample : 9 * (sample + 1)]
        assert relative_error(actual, (expected[sample].permute(1, 2, 3, 0) + 1) / 2) <= LIMIT
    assert ends[0].reports[-1] == ("decode", 6, 6)


def test_uint8_frames_are_the_float32_ones_rounded(rank_pool: RankPool, spec: VAESpec) -> None:
    latent = make_inputs(CONFIG, SMALL).latent
    jobs = (VAEJob(latent=latent), VAEJob(latent=latent, dtype=torch.uint8))
    for exact, rounded in zip(*run_jobs(rank_pool, "cfg2", spec, *jobs), strict=True):
        assert rounded.error == "no error"
        # Each rank writes its part only.
        expected = exact.result.nan_to_num(0).mul(255).round().to(torch.uint8)
        assert rounded.result.dtype == torch.uint8
        assert torch.equal(rounded.result, expected)
        assert len(expected.unique()) > 200


def test_every_rank_says_its_peak_memory(spec: VAESpec) -> None:
    # Ranks of its own: a used process has memory at hand that it need not ask for.
    large, small = (LatentSize(frames=2, height=n, width=n) for n in (24, 2))
    jobs = [VAEJob(latent=make_inputs(CONFIG, size).latent) for size in (small, large)]
    with RankPool() as pool:
        before, during = (
            [end.stats.peak_bytes for end in ends] for ends in run_jobs(pool, "cfg2", spec, *jobs)
        )
    written = 5 * 384 * 192 * 3 * 4  # a rank's half of the large result
    for rank in range(2):
        assert before[rank] > 50 * 2**20  # torch alone
        assert during[rank] > before[rank] + written


def test_peak_memory_is_the_most_since_its_reset() -> None:
    # A process of its own: others give back what earlier tests had while this one looks.
    with RankPool() as pool:
        (seen,) = pool.run(1, vae_programs.peak_around_a_large_tensor)
    before, during, after = seen
    assert during > before + vae_programs.LARGE / 2
    assert after < before + vae_programs.LARGE / 2


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_stopped_job_ends_within_a_chunk_and_the_next_one_runs(
    rank: int,
    rank_pool: RankPool,
    spec: VAESpec,
    single: OneProcess,
) -> None:
    inputs, expected = make_inputs(CONFIG, SMALL), single(SMALL)
    stopped, decoded, halted, encoded = run_jobs(
        rank_pool,
        "pp3",
        spec,
        VAEJob(latent=inputs.latent, stop=(rank, 2)),
        VAEJob(latent=inputs.latent),
        VAEJob(frames=inputs.frames, channels=CONFIG.z_dim, stop=(rank, 3)),
        VAEJob(frames=inputs.frames, channels=CONFIG.z_dim),
    )
    assert {end.error.split(":")[0] for end in stopped + halted} == {"JobCancelled"}
    assert stopped[0].reports == [("decode", 1, 3)]
    assert halted[0].reports == [("encode", 1, 3), ("encode", 2, 3)]
    # What was done is there, and nothing more: one pixel frame.
    frames = joined([end.result[:1] for end in stopped])
    assert relative_error(frames, expected[DECODE][:1]) <= LIMIT
    assert all(torch.isnan(end.result[1:]).all() for end in stopped)
    for ends, direction in ((decoded, DECODE), (encoded, ENCODE)):
        assert relative_error(joined([end.result for end in ends]), expected[direction]) <= LIMIT


def test_bad_input_is_refused_before_anything_is_sent(rank_pool: RankPool, spec: VAESpec) -> None:
    inputs = make_inputs(CONFIG, SMALL, batch=2)
    with_nan = inputs.latent.clone()
    with_nan[1, 2, 1, 2, 4] = torch.nan
    cases = (
        (VAEJob(latent=with_nan), "NaN or infinite values, first in frame 2 of 3 of sample 2"),
        (VAEJob(latent=with_nan[1:]), "NaN or infinite values, first in frame 2 of 3;"),
        (
            VAEJob(latent=inputs.latent, dtype=torch.float16),
            "frames were asked for as torch.float16",
        ),
        (VAEJob(latent=inputs.latent[:, :4]), "the latent has 4 channels; this VAE decodes 48"),
        (VAEJob(frames=inputs.frames, channels=6), "latent of 6 channels was asked for"),
        (VAEJob(frames=inputs.frames[:8], channels=48), "the images have shape [8, 48, 112, 3]"),
        (VAEJob(frames=inputs.frames[:, :40], channels=48), "width that are multiples of 16"),
    )
    *refused, good = run_jobs(
        rank_pool, "cfg2", spec, *(job for job, _ in cases), VAEJob(latent=inputs.latent)
    )
    for ends, (_, words) in zip(refused, cases, strict=True):
        for end in ends:
            assert end.error.startswith("ConfigError: ")
            assert words in end.error
            assert end.stats.ledger == ()
            assert torch.isnan(end.result).all()
    assert {end.error for end in good} == {"no error"}


@pytest.mark.parametrize("mesh", ["single", "cfg2"])
def test_values_that_overflow_are_said_with_the_dtype_to_take(
    mesh: str, rank_pool: RankPool, spec: VAESpec, tmp_path: Path
) -> None:
    """Weights that are fine in bfloat16 and not in float16, in the residual blocks of both directions."""
    weights = load_file(spec.path)
    for name, weight in weights.items():
        if name.endswith("residual.6.weight"):
            weight *= 3e4
    save_file(weights, tmp_path / "vae.safetensors")
    narrow = replace(vae_spec(tmp_path / "vae.safetensors"), dtype="float16")
    inputs = make_inputs(CONFIG, SMALL)
    jobs = (
        VAEJob(latent=inputs.latent),
        VAEJob(latent=inputs.latent, dtype=torch.uint8),
        VAEJob(frames=inputs.frames),
    )
    for ends in run_jobs(rank_pool, mesh, narrow, *jobs):
        for end in ends:
            assert end.error == (
                "ConfigError: the VAE made NaN or infinite values in float16; set vae_dtype to bfloat16 or float32, or "
                "check that its file is whole"
            )
    for ends in run_jobs(rank_pool, mesh, replace(narrow, dtype="bfloat16"), *jobs):
        assert {end.error for end in ends} == {"no error"}


def test_lack_of_memory_is_an_answer_and_the_next_job_runs(
    rank_pool: RankPool, spec: VAESpec
) -> None:
    jobs = (VAEJob(latent=make_inputs(CONFIG, SMALL).latent),) * 2
    answers = rank_pool.run(
        2, with_fault, vae_programs.out_of_memory_once, run_vae_jobs, "cfg2", spec, jobs
    )
    for failed, good in answers:
        assert failed.error.startswith("InsufficientMemoryError: a device ran out of memory: tried")
        assert failed.reports == [("decode", 1, 3)]
        assert good.error == "no error"


# ---- the choice


def test_large_video_is_cut_along_its_longer_side_only() -> None:
    wide = LatentSize(frames=31, height=44, width=80)
    for ranks in (2, 4, 5, 8, 10, 16):
        chosen = chosen_split(wide, ranks=ranks)
        assert (chosen.axis, chosen.space, chosen.time) == (COLUMNS, ranks, 1)
    tall = LatentSize(frames=31, height=80, width=44)
    assert chosen_split(tall, ranks=8).axis is ROWS
    assert "rows in 8 parts of 10" in chosen_split(tall, ranks=8).explain(8)


def test_width_is_cut_on_a_tie_and_the_reason_says_so() -> None:
    chosen = chosen_split(LatentSize(frames=3, height=5, width=5), ranks=2)
    assert chosen.axis is COLUMNS
    assert chosen.shard(0).sizes == (3, 2)
    assert "columns in 2 parts of 2 or 3; the width on a tie" in chosen.explain(2)


def test_frames_are_cut_too_where_the_longer_side_is_too_short() -> None:
    chosen = chosen_split(LatentSize(frames=9, height=3, width=3), ranks=6)
    assert (chosen.space, chosen.time) == (3, 2)
    assert "frames in 2 runs" in chosen.explain(6)
    # But not where there are too few of them: then ranks have no part.
    chosen = chosen_split(LatentSize(frames=1, height=3, width=3), ranks=6)
    assert (chosen.space, chosen.time) == (3, 1)
    assert "3 of 6 ranks have no part" in chosen.explain(6)


def test_one_rank_does_everything() -> None:
    chosen = chosen_split(LatentSize(frames=3, height=4, width=4), ranks=1)
    assert (chosen.space, chosen.time) == (1, 1)
    assert chosen.explain(1) == "one rank does everything"


def test_parts_hold_each_frame_and_row_once_and_whoever_is_looked_back_on_has_two() -> None:
    for frames in (1, 2, 3, 4, 5, 6, 7, 9, 13, 31):
        size = LatentSize(frames=frames, height=4, width=7)
        for time in range(1, 7):
            if time > 1 and frames < 2 * time + 1:
                with pytest.raises(ValueError, match="latent frames"):
                    VAESplit(size=size, axis=COLUMNS, space=2, time=time)
                continue
            each = VAESplit(size=size, axis=COLUMNS, space=2, time=time)
            runs = [each.runs(part) for part in range(time)]
            in_order = [
                frame for chunk in zip(*runs, strict=True) for run in chunk for frame in run
            ]
            assert in_order == list(range(frames))
            if time > 1:
                looked_back_on = [size for chunk in each.chunks() for size in chunk if size][:-1]
                assert min(looked_back_on) >= 2
                assert looked_back_on[0] == 3
            groups = each.space_groups(), each.time_groups()
            for group in groups:
                assert sorted(rank for ranks in group for rank in ranks) == list(range(2 * time))
            for rank in range(2 * time):
                place = each.place(rank)
                assert place is not None
                assert groups[0][place[0]][place[1]] == groups[1][place[1]][place[0]] == rank
            assert each.place(2 * time) is None


def test_part_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="4 parts do not fit into the rows"):
        VAESplit(size=LatentSize(frames=1, height=3, width=3), axis=ROWS, space=4, time=1)
