"""Wan2.2 VAE: against diffusers and ComfyUI with equal weights, chunked against whole, files.

ComfyUI is imported only by a child process: this file run as a script, which writes ComfyUI's
results to a file. Its tree is $COMFYUI_PATH or <repo>/.comfy/ComfyUI; without one, those tests
are skipped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comfyui_child import run_beside_comfyui
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from comfy_wan_dist.ipc.errors import ModelFileError
from comfy_wan_dist.mesh.vae_parameters import vae_parameters
from comfy_wan_dist.mesh.vae_shape import (
    FRAME_STRIDE,
    VAE_STRIDE,
    VAEConfig,
    latent_frames,
    pixel_frames,
)
from comfy_wan_dist.model_file.vae import vae_config_of
from devtools.references import build_diffusers_vae
from devtools.vae_runs import decode, decode_chunks, encode, encode_chunks
from workers.vae.layers import (
    CausalConv3d,
    ChannelNorm,
    FrameAttention,
    FrameConv2d,
    FrameHistory,
    Prepare,
)
from workers.vae.wan22 import WanVAE, patchify, unpatchify

TINY = VAEConfig(encoder_dim=16, decoder_dim=16)
# Other widths, latent channels and blocks, and time halved on other levels.
OTHER = VAEConfig(
    z_dim=6,
    encoder_dim=8,
    decoder_dim=12,
    dim_mult=(1, 2, 4, 4),
    encoder_res_blocks=1,
    decoder_res_blocks=2,
    temporal_levels=(True, False, True),
)
NARROW = VAEConfig(z_dim=4, encoder_dim=4, decoder_dim=4)
SMALLEST = VAEConfig(
    z_dim=2,
    encoder_dim=2,
    decoder_dim=2,
    dim_mult=(1, 1),
    encoder_res_blocks=1,
    decoder_res_blocks=1,
    temporal_levels=(True,),
)
LATENT_SHAPES = ((1, 1, 4, 4), (1, 2, 3, 5), (2, 3, 4, 3), (1, 5, 2, 3))
PIXEL_SHAPES = ((1, 1, 64, 64), (1, 5, 48, 80), (2, 9, 32, 48), (1, 16, 32, 16))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build_vae(config: VAEConfig) -> WanVAE:
    """A VAE with repeatable random weights that keep activations near 1; none is 0 or 1."""
    vae = WanVAE(config)
    generator = torch.Generator().manual_seed(11)
    for name, parameter in sorted(vae.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("gamma"):
            parameter.copy_(1 + 0.2 * noise)
        elif name.endswith("bias"):
            parameter.copy_(0.1 * noise)
        else:
            parameter.copy_(noise / parameter[0].numel() ** 0.5)
    return vae


def random_latent(shape: Sequence[int], z_dim: int) -> Tensor:
    batch, frames, height, width = shape
    generator = torch.Generator().manual_seed(5)
    return torch.randn(batch, z_dim, frames, height, width, generator=generator)


def random_pixels(shape: Sequence[int]) -> Tensor:
    batch, frames, height, width = shape
    generator = torch.Generator().manual_seed(6)
    return torch.rand(batch, 3, frames, height, width, generator=generator) * 2 - 1


def relative_error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return ((actual.double() - expected.double()).abs().max() / expected.abs().max()).item()


@pytest.fixture(scope="module")
def tiny_vae() -> WanVAE:
    return build_vae(TINY)


@pytest.fixture(scope="module")
def diffusers_vae(tiny_vae: WanVAE) -> nn.Module:
    return build_diffusers_vae(tiny_vae.config, tiny_vae.state_dict())


@pytest.mark.parametrize("shape", LATENT_SHAPES)
def test_decode_matches_diffusers(
    shape: tuple[int, ...], tiny_vae: WanVAE, diffusers_vae: Any
) -> None:
    z = random_latent(shape, TINY.z_dim)
    expected = diffusers_vae.decode(z).sample
    assert 0 < (expected.abs() == 1).float().mean() < 0.3
    actual = decode(tiny_vae, z)
    batch, frames, height, width = shape
    assert actual.shape == (batch, 3, 4 * frames - 3, 16 * height, 16 * width)
    assert actual.is_contiguous()
    assert relative_error(actual, expected) < 2e-5


@pytest.mark.parametrize("shape", PIXEL_SHAPES)
def test_encode_matches_diffusers(
    shape: tuple[int, ...], tiny_vae: WanVAE, diffusers_vae: Any
) -> None:
    pixels = random_pixels(shape)
    expected = diffusers_vae.encode(pixels).latent_dist.mode()
    actual = encode(tiny_vae, pixels)
    batch, frames, height, width = shape
    assert actual.shape == (batch, TINY.z_dim, (frames - 1) // 4 + 1, height // 16, width // 16)
    assert relative_error(actual, expected) < 2e-5


def test_other_sizes_match_diffusers() -> None:
    vae = build_vae(OTHER)
    reference = build_diffusers_vae(vae.config, vae.state_dict())
    z, pixels = random_latent((2, 3, 2, 3), OTHER.z_dim), random_pixels((2, 9, 32, 48))
    assert relative_error(decode(vae, z), reference.decode(z).sample) < 2e-5
    expected = reference.encode(pixels).latent_dist.mode()
    assert relative_error(encode(vae, pixels), expected) < 2e-5


def test_16_bit_errors_are_not_larger_than_those_of_diffusers(
    tiny_vae: WanVAE, diffusers_vae: Any
) -> None:
    z, pixels = random_latent((1, 2, 3, 5), TINY.z_dim), random_pixels((1, 5, 48, 80))
    exact_decode, exact_encode = decode(tiny_vae, z), encode(tiny_vae, pixels)
    for dtype in (torch.bfloat16, torch.float16):
        ours, theirs = (
            build_vae(TINY).to(dtype),
            build_diffusers_vae(tiny_vae.config, tiny_vae.state_dict()).to(dtype),
        )
        decoded, encoded = decode(ours, z), encode(ours, pixels)
        assert decoded.dtype == encoded.dtype == dtype
        for actual, exact, reference in (
            (decoded, exact_decode, theirs.decode(z.to(dtype)).sample),
            (encoded, exact_encode, theirs.encode(pixels.to(dtype)).latent_dist.mode()),
        ):
            mean_error = (actual.float() - exact).abs().mean()
            assert mean_error < 1.1 * (reference.float() - exact).abs().mean()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norm_takes_statistics_in_float32(dtype: torch.dtype) -> None:
    x = (torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(0)) * 3000).to(dtype)
    x[0, 0] = 0
    norm = ChannelNorm(256, trailing_ones=3).to(dtype).requires_grad_(False)
    expected = F.normalize(x.double(), dim=-1, eps=1e-12) * 16
    assert relative_error(norm(x), expected) < 2 * torch.finfo(dtype).eps
    assert not norm(x)[0, 0].any()


@pytest.mark.parametrize("config", [NARROW, OTHER], ids=["narrow", "other"])
def test_decode_is_the_same_however_frames_are_chunked(config: VAEConfig) -> None:
    vae = build_vae(config).double()
    z = random_latent((2, 5, 3, 2), config.z_dim).double()
    expected = torch.cat(list(decode_chunks(vae, z)), dim=2)
    assert expected.shape[2] == 4 * config.temporal_factor + 1
    for sizes in ((5,), (1, 4), (2, 3), (3, 2), (1, 1, 3)):
        history, chunks = FrameHistory(), []
        for chunk in z.split(sizes, dim=2):
            chunks.append(vae.decode_chunk(chunk, history))
            history.is_start = False
        assert relative_error(torch.cat(chunks, dim=2), expected) < 1e-12, sizes


@pytest.mark.parametrize("config", [NARROW, OTHER], ids=["narrow", "other"])
def test_encode_is_the_same_however_frames_are_chunked(config: VAEConfig) -> None:
    vae = build_vae(config).double()
    pixels = random_pixels((2, 13, 32, 48)).double()
    expected = torch.cat(list(encode_chunks(vae, pixels)), dim=2)
    assert expected.shape[2] == 12 // config.temporal_factor + 1
    for sizes in ((13,), (1, 12), (5, 8), (9, 4), (1, 4, 8)):
        history, chunks = FrameHistory(), []
        for chunk in pixels.split(sizes, dim=2):
            chunks.append(vae.encode_chunk(chunk, history))
            history.is_start = False
        assert relative_error(torch.cat(chunks, dim=2), expected) < 1e-12, sizes


def test_runs_do_not_share_history(tiny_vae: WanVAE) -> None:
    z = random_latent((1, 3, 2, 2), TINY.z_dim)
    first, second = decode_chunks(tiny_vae, z), decode_chunks(tiny_vae, z)
    interleaved = [chunk for pair in zip(first, second, strict=True) for chunk in pair]
    expected = list(decode_chunks(tiny_vae, z))
    for i, chunk in enumerate(interleaved):
        assert torch.equal(chunk, expected[i // 2])


def test_history_does_not_grow_with_frames(tiny_vae: WanVAE) -> None:
    history, sizes = FrameHistory(), []
    for frame in random_latent((1, 6, 2, 2), TINY.z_dim).split(1, dim=2):
        tiny_vae.decode_chunk(frame, history)
        history.is_start = False
        kept = history._frames.values()
        sizes.append(sum(frames.untyped_storage().nbytes() for frames in kept))
        assert all(frames.shape[1] <= 2 for frames in kept)
    assert len(set(sizes[2:])) == 1


def test_border_and_attention_can_be_replaced(tiny_vae: WanVAE) -> None:
    """The seams that a spatial split needs: rows from outside, attention over more keys."""

    def rows_from_outside(x_bthwc: Tensor, prepare: Prepare) -> Tensor:
        return F.pad(prepare(x_bthwc), (0, 0, 0, 0, 1, 1))

    def row_below_from_outside(x_bthwc: Tensor, prepare: Prepare) -> Tensor:
        return F.pad(prepare(x_bthwc), (0, 0, 0, 1, 0, 1))

    def attention_with_twice_the_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions.append(q.shape[1])
        k, v = torch.cat([k, k], dim=1), torch.cat([v, v], dim=1)
        return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v

    replaced = build_vae(TINY)
    positions: list[int] = []
    spatial = 0
    for module in replaced.modules():
        if isinstance(module, FrameAttention):
            module.attention = attention_with_twice_the_keys
        elif isinstance(module, FrameConv2d) and module.stride == (2, 2):
            module.border = row_below_from_outside
        elif isinstance(module, (CausalConv3d, FrameConv2d)) and module.padding[-1] == 1:
            spatial += 1
            module.border = rows_from_outside
            module.padding = (*module.padding[:-2], 0, 1)
    assert spatial == 33 + 22
    z, pixels = random_latent((1, 2, 3, 4), TINY.z_dim), random_pixels((1, 5, 32, 48))
    assert relative_error(decode(replaced, z), decode(tiny_vae, z)) < 2e-5
    assert relative_error(encode(replaced, pixels), encode(tiny_vae, pixels)) < 2e-5
    # Two latent frames of 3x4, then chunks of 1 and 4 pixel frames that are one latent frame of 2x3.
    assert positions == [12, 12, 6, 6]


def test_unpatchify_undoes_patchify_with_columns_before_rows() -> None:
    pixels = random_pixels((2, 3, 4, 6))
    patches = patchify(pixels)
    assert torch.equal(unpatchify(patches), pixels)
    # Colour 1, column 1, row 0 of the patch in patch row 1, patch column 2.
    assert torch.equal(patches[:, :, 1, 2, 1 * 4 + 1 * 2 + 0], pixels[:, 1, :, 2, 5])


def test_published_size_has_the_published_tensors() -> None:
    shapes = vae_parameters(VAEConfig())
    assert len(shapes) == 196
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 704_688_668
    assert VAEConfig().spatial_factor == VAE_STRIDE == 16
    assert VAEConfig().temporal_factor == FRAME_STRIDE == 4
    for name, shape in {
        "encoder.conv1.weight": (160, 12, 3, 3, 3),
        "encoder.downsamples.1.downsamples.0.shortcut.weight": (320, 160, 1, 1, 1),
        "encoder.downsamples.2.downsamples.2.time_conv.weight": (640, 640, 3, 1, 1),
        "encoder.middle.1.to_qkv.weight": (1920, 640, 1, 1),
        "encoder.head.2.weight": (96, 640, 3, 3, 3),
        "decoder.conv1.weight": (1024, 48, 3, 3, 3),
        "decoder.middle.1.norm.gamma": (1024, 1, 1),
        "decoder.upsamples.1.upsamples.3.time_conv.weight": (2048, 1024, 3, 1, 1),
        "decoder.upsamples.2.upsamples.0.shortcut.weight": (512, 1024, 1, 1, 1),
        "decoder.upsamples.2.upsamples.3.resample.1.weight": (512, 512, 3, 3),
        "decoder.head.0.gamma": (256, 1, 1, 1),
        "conv1.weight": (96, 96, 1, 1, 1),
        "conv2.bias": (48,),
    }.items():
        assert shapes[name] == shape


def test_latent_frames_stand_for_one_pixel_frame_and_four_each() -> None:
    assert [pixel_frames(count) for count in range(5)] == [0, 1, 5, 9, 13]
    assert [latent_frames(count) for count in range(1, 11)] == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3]


@pytest.mark.parametrize("config", [VAEConfig(), TINY, OTHER, SMALLEST])
def test_table_of_parameters_is_what_the_network_has(config: VAEConfig) -> None:
    with torch.device("meta"):
        network = WanVAE(config).state_dict()
    # In the same order too: seeded weights are drawn in it.
    assert list(vae_parameters(config).items()) == [
        (name, tuple(tensor.shape)) for name, tensor in network.items()
    ]


@pytest.mark.parametrize("config", [VAEConfig(), TINY, OTHER], ids=["published", "tiny", "other"])
def test_config_is_read_back_from_shapes(config: VAEConfig) -> None:
    assert vae_config_of(vae_parameters(config), label="file") == config


def test_config_refuses_any_tensor_missing_added_or_of_another_shape() -> None:
    shapes = vae_parameters(SMALLEST)
    with pytest.raises(ModelFileError, match="wan2.2_vae.safetensors"):
        vae_config_of({}, label="file")
    for i, (name, shape) in enumerate(shapes.items()):
        changed = {key: value for key, value in shapes.items() if key != name}
        if i % 2:
            changed[name] = ((), (*shape, 1), (shape[0] + 1, *shape[1:]))[i // 2 % 3]
        with pytest.raises(ModelFileError, match="wan2.2_vae.safetensors"):
            vae_config_of(changed, label="file")
    with pytest.raises(ModelFileError, match=r"1 tensors .*, 'decoder\.extra';"):
        vae_config_of({**shapes, "decoder.extra": (1,)}, label="file")


def test_config_refuses_sizes_without_a_shortcut() -> None:
    with pytest.raises(ValueError, match="no shortcut .* encoder"):
        VAEConfig(dim_mult=(1, 2, 4, 8))
    with pytest.raises(ValueError, match="no shortcut .* decoder"):
        VAEConfig(dim_mult=(1, 2, 1, 1))
    with pytest.raises(ValueError, match="temporal_levels has 2 entries"):
        VAEConfig(temporal_levels=(True, True))


def write_comfyui_results(path: Path) -> None:
    """Decode and encode with ComfyUI's own VAE and the weights of `build_vae`."""
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    from comfy.ldm.wan import vae2_2

    torch.set_num_threads(1)
    reference = vae2_2.WanVAE(
        dim=TINY.encoder_dim,
        dec_dim=TINY.decoder_dim,
        z_dim=TINY.z_dim,
        dim_mult=list(TINY.dim_mult),
        num_res_blocks=TINY.encoder_res_blocks,
        temperal_downsample=list(TINY.temporal_levels),
    )
    reference.load_state_dict(build_vae(TINY).state_dict(), strict=True)
    with torch.no_grad():
        z, pixels = random_latent(LATENT_SHAPES[1], TINY.z_dim), random_pixels(PIXEL_SHAPES[1])
        decoded, encoded = reference.decode(z), reference.encode(pixels)
    save_file({"decoded": decoded.contiguous(), "encoded": encoded.contiguous()}, path)


def test_decode_and_encode_match_comfyui(
    tiny_vae: WanVAE, comfyui_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "results.safetensors"
    run_beside_comfyui(__file__, path, comfyui_path)
    results = load_file(path)
    decoded = decode(tiny_vae, random_latent(LATENT_SHAPES[1], TINY.z_dim))
    encoded = encode(tiny_vae, random_pixels(PIXEL_SHAPES[1]))
    assert relative_error(decoded, results["decoded"].clamp(-1, 1)) < 2e-5
    assert relative_error(encoded, results["encoded"]) < 2e-5


if __name__ == "__main__":
    write_comfyui_results(Path(sys.argv[1]))
