"""The transformer against diffusers with equal weights, its tokens and parameters.

float32 on the CPU, tiny width; 16-bit weights only as far as their dtypes go.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from comfy_wan_dist.mesh.parameters import expected_parameters
from comfy_wan_dist.mesh.shape import LatentGrid, WanShape
from devtools.checkpoints import TINY_TRANSFORMER, transformer_weights
from devtools.mesh_runs import relative_error, single_groups
from devtools.references import build_diffusers_transformer
from workers.model.tokens import (
    grid_of,
    patchify,
    rope_table,
    token_boxes,
    token_runs,
    unpatchify,
    write_tokens,
)
from workers.model.wan import (
    Norm,
    TokenRun,
    WanModel,
    apply_rope,
    layer_norm,
    mean_square,
    scale_rms,
    sinusoid,
)
from workers.parallel.parallelize import cut_model

CPU = torch.device("cpu")
LIMIT = 1e-4
SHAPES = {
    "two blocks": TINY_TRANSFORMER,
    "other widths": WanShape(
        dim=384, ffn_dim=640, num_layers=3, in_dim=48, out_dim=48, text_dim=64, freq_dim=128
    ),
    "16 channels": WanShape(
        dim=256, ffn_dim=384, num_layers=2, in_dim=16, out_dim=16, text_dim=64, freq_dim=128
    ),
    "16 channels and an image": WanShape(
        dim=256, ffn_dim=384, num_layers=2, in_dim=36, out_dim=16, text_dim=64, freq_dim=128
    ),
}


def build(
    shape: WanShape, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float32
) -> WanModel:
    model = cut_model(shape, single_groups(), dtype=dtype, device=CPU)
    model.load_state_dict(weights)
    return model


@pytest.fixture(scope="module", params=list(SHAPES))
def pair(request: pytest.FixtureRequest) -> tuple[WanModel, Any]:
    """This project's model and diffusers' with equal weights."""
    shape = SHAPES[request.param]
    weights = transformer_weights(shape, seed=3)
    return build(shape, weights), build_diffusers_transformer(shape, weights)


@torch.inference_mode()
def velocity(
    model: WanModel, latent: Tensor, text: Tensor, frame_factors: Tensor, timestep: float
) -> Tensor:
    """Forward of a whole latent; frame_factors [B, T] scale the timestep of each frame."""
    grid = grid_of(latent)
    factors, rows = torch.unique(frame_factors, dim=1, return_inverse=True)
    tokens = model(
        patchify(latent),
        timesteps_BR=factors * timestep,
        runs=token_runs(tuple(rows.tolist()), grid, 0, grid.tokens),
        rope=rope_table(grid, 0, grid.tokens, device=CPU),
        text=model.encode_text(text),
    )
    return unpatchify(tokens, grid)


@pytest.mark.parametrize(("height", "width"), [(6, 8), (5, 7)])
def test_tokens_are_written_to_their_places_whatever_part_they_are(height: int, width: int) -> None:
    latent = torch.randn(2, 3, 3, height, width)
    grid, tokens = grid_of(latent), patchify(latent)
    for start in range(grid.tokens):
        for stop in range(start, grid.tokens + 1):
            assert len(list(token_boxes(grid, start, stop))) <= 5
            written, others = torch.full_like(latent, -9), torch.full_like(tokens, -9)
            write_tokens(tokens[:, start:stop], grid, start, written)
            others[:, start:stop] = tokens[:, start:stop]
            assert torch.equal(written, unpatchify(others, grid)[..., :height, :width])


def inputs(
    shape: WanShape, batch: int, frames: int, height: int, width: int
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)
    latent = torch.randn(batch, shape.in_dim, frames, height, width, generator=generator)
    return latent, torch.randn(batch, 20, shape.text_dim, generator=generator)


@pytest.mark.parametrize("size", [(1, 1, 2, 2), (2, 3, 6, 10), (1, 2, 4, 2)])
@pytest.mark.parametrize("timestep", [1000.0, 731.5, 3.25])
def test_text_to_video_matches_diffusers(
    pair: tuple[WanModel, Any], size: tuple[int, int, int, int], timestep: float
) -> None:
    model, reference = pair
    latent, text = inputs(model.shape, *size)
    batch, frames = size[:2]
    expected = reference(latent, torch.full((batch,), timestep), text).sample
    actual = velocity(model, latent, text, torch.ones(batch, frames), timestep)
    assert actual.dtype == torch.float32
    assert relative_error(actual, expected) <= LIMIT


@pytest.mark.parametrize(
    "frame_factors",
    [((0.0, 1.0, 1.0),), ((0.0, 1.0, 1.0), (0.0, 0.5, 1.0)), ((1.0, 0.0, 0.25), (1.0, 1.0, 0.25))],
)
def test_image_to_video_matches_diffusers(
    pair: tuple[WanModel, Any], frame_factors: tuple[tuple[float, ...], ...]
) -> None:
    model, reference = pair
    factors = torch.tensor(frame_factors)
    latent, text = inputs(model.shape, len(frame_factors), 3, 6, 10)
    per_token = (factors * 640.0).repeat_interleave(grid_of(latent).tokens_per_frame, dim=1)
    expected = reference(latent, per_token, text).sample
    actual = velocity(model, latent, text, factors, 640.0)
    assert relative_error(actual, expected) <= LIMIT
    as_text_to_video = velocity(model, latent, text, torch.ones_like(factors), 640.0)
    assert relative_error(as_text_to_video, expected) > 100 * LIMIT


def test_text_padding_is_attended(pair: tuple[WanModel, Any]) -> None:
    model, _ = pair
    latent, text = inputs(model.shape, 1, 1, 4, 4)
    padded = torch.cat([text, torch.zeros_like(text)], dim=1)
    ones = torch.ones(1, 1)
    plain, with_padding = (velocity(model, latent, t, ones, 500.0) for t in (text, padded))
    assert relative_error(with_padding, plain) > 100 * LIMIT


def test_one_prompt_serves_a_batch(pair: tuple[WanModel, Any]) -> None:
    model, _ = pair
    latent, text = inputs(model.shape, 2, 1, 4, 4)
    ones = torch.ones(2, 1)
    shared = velocity(model, latent, text[:1], ones, 500.0)
    repeated = velocity(model, latent, text[:1].expand(2, -1, -1), ones, 500.0)
    assert relative_error(shared, repeated) <= 1e-6


# ---- parameters and precision


def test_parameters_have_the_official_names_and_shapes() -> None:
    model = cut_model(
        TINY_TRANSFORMER, single_groups(), dtype=torch.float32, device=torch.device("meta")
    )
    found = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert found == expected_parameters(TINY_TRANSFORMER)
    assert not dict(model.named_buffers())
    # 27 per block and 15 beside them, as in the official checkpoint.
    assert len(found) == 27 * TINY_TRANSFORMER.num_layers + 15


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_model_keeps_norms_time_and_modulation_in_float32(dtype: torch.dtype) -> None:
    weights = transformer_weights(TINY_TRANSFORMER, seed=3)
    model = build(TINY_TRANSFORMER, weights, dtype)
    for name, parameter in model.named_parameters():
        is_precise = "norm" in name or "modulation" in name or name.startswith("time_")
        assert parameter.dtype == (torch.float32 if is_precise else dtype), name
    latent, text = inputs(TINY_TRANSFORMER, 1, 2, 4, 6)
    factors = torch.tensor([[0.0, 1.0]])
    actual = velocity(model, latent, text, factors, 700.0)
    assert actual.dtype == torch.float32
    expected = velocity(build(TINY_TRANSFORMER, weights), latent, text, factors, 700.0)
    assert relative_error(actual, expected) < 0.05


def test_mean_square_does_not_overflow_in_float16() -> None:
    x = torch.full((1, 1, 64), 6.0e4, dtype=torch.float16)
    (result,) = mean_square(x)
    assert result.dtype == torch.float32
    assert torch.allclose(result, x.float().square().mean(-1, keepdim=True))


def test_norms_add_1e_6() -> None:
    x = 1e-3 * torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(0))
    norm = Norm(256)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    (square,) = mean_square(x)
    rms = scale_rms(x.clone(), square, norm)
    assert torch.allclose(rms, F.rms_norm(x, (256,), norm.weight, 1e-6), rtol=1e-5, atol=0)
    normed = layer_norm(x, torch.ones(256), torch.zeros(256))
    assert torch.allclose(normed, F.layer_norm(x, (256,), eps=1e-6), rtol=1e-4, atol=1e-6)


def test_sinusoid_has_cosines_first() -> None:
    embedding = sinusoid(torch.tensor([[0.0, 1.0]]), 256)
    assert embedding.shape == (1, 2, 256)
    assert torch.equal(embedding[0, 0], torch.cat([torch.ones(128), torch.zeros(128)]))
    frequencies = 10000.0 ** (-torch.arange(128, dtype=torch.float64) / 128)
    assert torch.allclose(embedding[0, 1, :128], frequencies.cos().float())
    assert torch.allclose(embedding[0, 1, 128:], frequencies.sin().float())


# ---- tokens


def test_patchify_round_trip_and_order() -> None:
    latent = torch.arange(2 * 3 * 2 * 4 * 6).float().view(2, 3, 2, 4, 6)
    grid = grid_of(latent)
    assert grid == LatentGrid(frames=2, rows=2, columns=3)
    tokens = patchify(latent)
    assert tokens.shape == (2, grid.tokens, 12)
    assert torch.equal(unpatchify(tokens, grid), latent)
    # Token (frame 1, row 1, column 2); features are (row, column, channel).
    patch = latent[0, :, 1, 2:4, 4:6]
    assert torch.equal(tokens[0, 6 + 3 + 2], patch.permute(1, 2, 0).flatten())


GRID = LatentGrid(frames=3, rows=3, columns=3)


def spread(runs: tuple[TokenRun, ...], size: int) -> list[int]:
    """The row of every token of a shard."""
    assert [run.start for run in runs] == [0, *(run.stop for run in runs[:-1])]
    assert runs[-1].stop == size
    return [run.row for run in runs for _ in range(run.start, run.stop)]


@pytest.mark.parametrize("rows", [(0, 0, 0), (0, 1, 1), (1, 0, 1), (0, 1, 2)])
def test_token_runs_of_any_shard_are_that_part_of_the_whole(rows: tuple[int, ...]) -> None:
    whole = [row for row in rows for _ in range(GRID.tokens_per_frame)]
    for start in range(GRID.tokens):
        for stop in range(start + 1, GRID.tokens + 1):
            assert spread(token_runs(rows, GRID, start, stop), stop - start) == whole[start:stop]


def test_frames_of_one_row_join_into_one_run() -> None:
    assert token_runs((0, 1, 1), GRID, 4, 27) == (
        TokenRun(start=0, stop=5, row=0),
        TokenRun(start=5, stop=23, row=1),
    )


def test_rope_of_a_shard_is_that_part_of_the_whole() -> None:
    whole = rope_table(GRID, 0, GRID.tokens, device=CPU)
    assert whole.shape == (27, 1, 64)
    assert torch.equal(rope_table(GRID, 7, 20, device=CPU), whole[7:20])


def test_rope_turns_pairs_by_frame_row_and_column() -> None:
    # Token of frame 1, row 2, column 0: 22 pairs turn with the frame, 21 with the row, 21 stay.
    table = rope_table(GRID, 15, 16, device=CPU)[0, 0]
    frame = 10000.0 ** (-torch.arange(0, 44, 2, dtype=torch.float64) / 44)
    row = 2 * 10000.0 ** (-torch.arange(0, 42, 2, dtype=torch.float64) / 42)
    angle = torch.cat([frame, row, torch.zeros(21, dtype=torch.float64)])
    assert torch.allclose(table.angle().double(), angle, atol=1e-6)
    x = torch.zeros(1, 1, 1, 128)
    x[..., 0::2] = 1
    turned = apply_rope(x, table.view(1, 1, 64))[0, 0, 0]
    assert torch.allclose(turned[0::2].double(), angle.cos(), atol=1e-6)
    assert torch.allclose(turned[1::2].double(), angle.sin(), atol=1e-6)
