"""The Wan2.2 diffusion transformer as one device runs it, on patchified tokens.

Covers T2V, TI2V and I2V models (Wan2.1 1.3B/14B T2V, Wan2.2 5B and A14B); not the branches of VACE, S2V, Animate
or the CLIP images of Wan2.1 I2V. Parameter names and shapes are the official ones.

Two seams let a caller spread it over ranks without touching this file: the number of heads is inferred from
the projections' width, and each attention holds two functions, `attention` (the product over all tokens) and
`mean_square` (the statistic of the full-width query/key norm).

Shape letters: B batch, L tokens of this shard, S text tokens, R timestep rows, D model dim, N heads, K head dim,
P token features (1*2*2 patch times channels).

Precision: norm statistics, modulation, rotary embedding and the time embedding are float32; the residual is kept
in the weights' dtype and every update to it is computed in float32 (as diffusers; the official code keeps a
float32 residual after the first gate). Source: Wan2.2 `wan/modules/model.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comfy_wan_dist.mesh.shape import HEAD_DIM, PATCH_POSITIONS, PATCH_SIZE, WanShape

EPS = 1e-6
NO_CONDITIONS: Mapping[str, Tensor] = {}

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q_BLNK, k_BSNK, v_BSNK) -> BLNK: softmax attention of every query over all keys."""

MeanSquare = Callable[..., tuple[Tensor, ...]]
"""(x_BLD, ...) -> mean of x**2 over the full model width, [B, L, 1] float32, for each argument."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRun:
    """Tokens start..stop-1 of this shard share the timestep row `row`."""

    start: int
    stop: int
    row: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TextKeysValues:
    """Cross-attention keys and values of one block, [B, S, N, K]; constant over the steps of a prompt."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeEmbedding:
    """R timestep rows, float32: what is added to the head's modulation [B, R, D], and to a block's [B, R, 6, D]."""

    head: Tensor
    blocks: Tensor


def softmax_attention(q_BLNK: Tensor, k_BSNK: Tensor, v_BSNK: Tensor) -> Tensor:
    """Attend every query to all keys; heads may be any number."""
    q, k, v = (x.transpose(1, 2) for x in (q_BLNK, k_BSNK, v_BSNK))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def mean_square(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Mean of squares over the last dim in float32, [..., 1] each."""
    return tuple(square_sum(x) / x.shape[-1] for x in tensors)


def square_sum(x: Tensor) -> Tensor:
    """Sum of squares over the last dim, [..., 1] float32, without a float32 copy of x."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square()


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Normalise x [..., D] with a float32 affine [D]; float32 inside, dtype of x."""
    # The CPU's kernel takes 16-bit x with a float32 affine and computes in float32; CUDA's wants one dtype.
    wide = x if x.device.type == "cpu" else x.float()
    return F.layer_norm(wide, x.shape[-1:], weight, bias, EPS).to(x.dtype)


def modulate(
    x_BLD: Tensor, shift_BRD: Tensor, scale_BRD: Tensor, runs: tuple[TokenRun, ...]
) -> Tensor:
    """layer_norm(x) * (1 + scale) + shift, each token with its row's values; dtype of x.

    One layer norm per sample and run, with the row as its affine. Modulation is never spread over tokens:
    [L, 6, D] in float32 would be gigabytes.
    """
    samples = []
    for x_LD, shift_RD, scale_RD in zip(x_BLD, shift_BRD, scale_BRD, strict=True):
        parts = [
            layer_norm(x_LD[run.start : run.stop], 1 + scale_RD[run.row], shift_RD[run.row])
            for run in runs
        ]
        samples.append(join(parts, dim=0).unsqueeze(0))
    return join(samples, dim=0)


def add_gated(
    x_BLD: Tensor, update_BLD: Tensor, gate_BRD: Tensor, runs: tuple[TokenRun, ...]
) -> Tensor:
    """x + gate * update in float32, each token with its row's gate; dtype of x."""
    parts = []
    for run in runs:
        x, update = x_BLD[:, run.start : run.stop], update_BLD[:, run.start : run.stop]
        gated = torch.addcmul(x.float(), update, gate_BRD[:, run.row : run.row + 1])
        parts.append(gated.to(x.dtype))
    return join(parts, dim=1)


def join(parts: list[Tensor], dim: int) -> Tensor:
    """Concatenate; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class Norm(nn.Module):
    """Holds the affine parameters of a norm; the arithmetic is the caller's."""

    def __init__(self, dim: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None


class MultiHeadAttention(nn.Module):
    """Projections and full-width query/key norm shared by self- and cross-attention."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.o = nn.Linear(dim, dim)
        self.norm_q = Norm(dim)
        self.norm_k = Norm(dim)
        self.attention: Attention = softmax_attention
        self.mean_square: MeanSquare = mean_square


class SelfAttention(MultiHeadAttention):
    def forward(self, x_BLD: Tensor, rope: Tensor) -> Tensor:
        q, k, v = self.q(x_BLD), self.k(x_BLD), self.v(x_BLD)
        q_square, k_square = self.mean_square(q, k)
        q = apply_rope(split_heads(scale_rms(q, q_square, self.norm_q)), rope).to(x_BLD.dtype)
        k = apply_rope(split_heads(scale_rms(k, k_square, self.norm_k)), rope).to(x_BLD.dtype)
        return self.o(self.attention(q, k, split_heads(v)).flatten(-2))


class CrossAttention(MultiHeadAttention):
    def encode_text(self, text_BSD: Tensor) -> TextKeysValues:
        """Project the text once per prompt. All tokens are attended, zero padding included."""
        k, v = self.k(text_BSD), self.v(text_BSD)
        (k_square,) = self.mean_square(k)
        k = scale_rms(k, k_square, self.norm_k).to(text_BSD.dtype)
        return TextKeysValues(keys=split_heads(k), values=split_heads(v))

    def forward(self, x_BLD: Tensor, text: TextKeysValues) -> Tensor:
        q = self.q(x_BLD)
        (q_square,) = self.mean_square(q)
        q = split_heads(scale_rms(q, q_square, self.norm_q).to(x_BLD.dtype))
        batch = x_BLD.shape[0]
        keys, values = text.keys.expand(batch, -1, -1, -1), text.values.expand(batch, -1, -1, -1)
        return self.o(self.attention(q, keys, values).flatten(-2))


def scale_rms(x: Tensor, mean_square: Tensor, norm: Norm) -> Tensor:
    """x / sqrt(mean_square + eps) * weight in float32. Overwrites x where it is float32 already."""
    return x.float().mul_(torch.rsqrt(mean_square + EPS)).mul_(norm.weight.float())


def apply_rope(x: Tensor, table: Tensor) -> Tensor:
    """Turn the feature pairs of x [B, L, N, K] (float32, contiguous) by table [L, 1, K/2], in place; returns x."""
    torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(table)
    return x


def split_heads(x: Tensor) -> Tensor:
    """[..., N*K] -> [..., N, K], however many heads there are."""
    return x.unflatten(-1, (-1, HEAD_DIM))


class Block(nn.Module):
    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(dim)
        self.norm3 = Norm(dim, bias=True)
        self.cross_attn = CrossAttention(dim)
        self.ffn = nn.Sequential(
            nn.Linear(dim, ffn_dim), nn.GELU(approximate="tanh"), nn.Linear(ffn_dim, dim)
        )
        self.modulation = nn.Parameter(torch.zeros(1, 6, dim))

    def encode_text(self, text_BSD: Tensor) -> TextKeysValues:
        return self.cross_attn.encode_text(text_BSD)

    def forward(
        self,
        x: Tensor,
        time_BR6D: Tensor,
        runs: tuple[TokenRun, ...],
        rope: Tensor,
        text: TextKeysValues,
    ) -> Tensor:
        rows = self.modulation.float() + time_BR6D
        shift_sa, scale_sa, gate_sa, shift_ff, scale_ff, gate_ff = rows.unbind(2)
        x = add_gated(x, self.self_attn(modulate(x, shift_sa, scale_sa, runs), rope), gate_sa, runs)
        x = x + self.cross_attn(affine_norm(x, self.norm3), text)
        return add_gated(x, self.ffn(modulate(x, shift_ff, scale_ff, runs)), gate_ff, runs)


def affine_norm(x: Tensor, norm: Norm) -> Tensor:
    assert norm.bias is not None
    return layer_norm(x, norm.weight.float(), norm.bias.float())


class Head(nn.Module):
    def __init__(self, dim: int, token_dim: int) -> None:
        super().__init__()
        self.head = nn.Linear(dim, token_dim)
        self.modulation = nn.Parameter(torch.zeros(1, 2, dim))

    def forward(self, x: Tensor, time_BRD: Tensor, runs: tuple[TokenRun, ...]) -> Tensor:
        shift, scale = (self.modulation.float() + time_BRD.unsqueeze(2)).unbind(2)
        return self.head(modulate(x, shift, scale, runs)).float()


class WanModel(nn.Module):
    """Velocity of patchified tokens. Token features are ordered (row, column, channel), as the head emits them."""

    def __init__(self, shape: WanShape) -> None:
        super().__init__()
        dim = shape.dim
        self.shape = shape
        self.patch_embedding = nn.Conv3d(shape.in_dim, dim, PATCH_SIZE, PATCH_SIZE)
        self.text_embedding = nn.Sequential(
            nn.Linear(shape.text_dim, dim), nn.GELU(approximate="tanh"), nn.Linear(dim, dim)
        )
        self.time_embedding = nn.Sequential(
            nn.Linear(shape.freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim)
        )
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.blocks = nn.ModuleDict(
            {str(i): Block(dim, shape.ffn_dim) for i in range(shape.num_layers)}
        )
        self.head = Head(dim, shape.token_dim)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the residual and of the matrix products."""
        # Of a bias: a weight may be kept in another form.
        return cast(nn.Linear, self.text_embedding[0]).bias.dtype

    def encode_text(
        self, context: Tensor, conditions: Mapping[str, Tensor] = NO_CONDITIONS
    ) -> tuple[TextKeysValues, ...]:
        """Keys and values of every block for a prompt's embedding [B, S, text_dim]; no condition changes them yet."""
        text = self.text_embedding(context.to(self.dtype))
        return tuple(cast(Block, block).encode_text(text) for block in self.blocks.values())

    def forward(
        self,
        tokens_BLP: Tensor,
        *,
        timesteps_BR: Tensor,
        runs: tuple[TokenRun, ...],
        rope: Tensor,
        text: tuple[TextKeysValues, ...],
        conditions: Mapping[str, Tensor] = NO_CONDITIONS,
    ) -> Tensor:
        """Predict velocity [B, L, out_dim*4] float32.

        Shapes: tokens_BLP [B, L, out_dim*4]; timesteps_BR in [0, 1000], float32; runs cover 0..L-1 in order;
        rope from `rope_table` for the same tokens; text from `encode_text`; conditions as `shape.conditions` names
        them, those on tokens [1 or B, L, channels*4].
        """
        time = self.embed_time(timesteps_BR)
        x = self.run_blocks(self.embed_patches(tokens_BLP, conditions), time, runs, rope, text)
        return self.head(x, time.head, runs)

    def embed_time(self, timesteps_BR: Tensor) -> TimeEmbedding:
        time_BRD = self.time_embedding(sinusoid(timesteps_BR, self.shape.freq_dim))
        blocks_BR6D = self.time_projection(time_BRD).unflatten(-1, (6, -1))
        return TimeEmbedding(head=time_BRD, blocks=blocks_BR6D)

    def run_blocks(
        self,
        x_BLD: Tensor,
        time: TimeEmbedding,
        runs: tuple[TokenRun, ...],
        rope: Tensor,
        text: tuple[TextKeysValues, ...],
    ) -> Tensor:
        for block, block_text in zip(self.blocks.values(), text, strict=True):
            x_BLD = block(x_BLD, time.blocks, runs, rope, block_text)
        return x_BLD

    def embed_patches(self, tokens_BLP: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        image = conditions.get("image")
        if image is not None:
            tokens_BLP = beside(tokens_BLP, image)
        weight = self.patch_embedding.weight.permute(0, 2, 3, 4, 1).flatten(1)
        return F.linear(tokens_BLP.to(weight.dtype), weight, self.patch_embedding.bias)


def beside(tokens_BLP: Tensor, image: Tensor) -> Tensor:
    """Channels of an image [1 or B, L, D*4] behind those of x, at each position of a token's patch."""
    parts = (tokens_BLP, image.expand(tokens_BLP.shape[0], -1, -1))
    return torch.cat([part.unflatten(-1, (PATCH_POSITIONS, -1)) for part in parts], -1).flatten(-2)


def sinusoid(timesteps: Tensor, freq_dim: int) -> Tensor:
    """[cos | sin] embedding of timesteps, [..., freq_dim] float32, angles in float64."""
    half = freq_dim // 2
    exponents = torch.arange(half, dtype=torch.float64, device=timesteps.device) / half
    angles = timesteps.double().unsqueeze(-1) * 10000.0**-exponents
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float()
