"""Transformers as their publishers lay them out, written small: the same names, types and dims.

Each builder returns what is chosen, a file or a folder, and the values of all parameters by official name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from public_loras import LINEARS, MATRICES
from safetensors.torch import save_file
from torch import Tensor

from devtools.quantised import WRITABLE, random_blocks
from devtools.references import TRANSFORMER_NAMES, renamed

Tensors = dict[str, Tensor]
FP8 = torch.float8_e4m3fn
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
Kind = gguf.GGMLQuantizationType


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """path: what is chosen. values: None if it is refused here.

    difference: how the row of docs/differences.md begins that says what stock does otherwise.
    is_rounded: stock has some of the values rounded to fp8. needs: what comfy.ops has in a ComfyUI that reads it.
    """

    path: Path
    values: Tensors | None
    difference: str = ""
    is_rounded: bool = False
    needs: str = ""


# ---- safetensors


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """Which matrices are fp8, the type of the rest, and how scales are called and stored."""

    names: tuple[str, ...]
    rest: torch.dtype
    scale: str
    input_scale: str = ""
    scale_shape: tuple[int, ...] = ()

    def write(self, weights: Mapping[str, Tensor]) -> tuple[Tensors, Tensors]:
        """Tensors under official names, and the values."""
        stored, values = {}, {}
        for name, value in weights.items():
            if name not in self.names:
                stored[name] = value.to(self.rest)
                values[name] = stored[name].float()
                continue
            layer = name.removesuffix(".weight")
            scale = value.abs().max() / torch.finfo(FP8).max
            stored[name] = (value / scale).to(FP8)
            values[name] = stored[name].float() * scale
            stored[f"{layer}.{self.scale}"] = scale.reshape(self.scale_shape)
            if self.input_scale:
                stored[f"{layer}.{self.input_scale}"] = torch.tensor(1.0)
        return stored, values


def marker(count: int) -> Tensors:
    return {"scaled_fp8": torch.zeros(count, dtype=FP8)}


def in_diffusers_names(tensors: Mapping[str, Tensor]) -> Tensors:
    """Whatever belongs to a module goes with it."""
    return {renamed(name, TRANSFORMER_NAMES): value for name, value in tensors.items()}


def cast(weights: Mapping[str, Tensor], type_of: Callable[[str], torch.dtype]) -> Tensors:
    return {name: value.to(type_of(name)) for name, value in weights.items()}


def floats(stored: Mapping[str, Tensor]) -> Tensors:
    return {name: value.float() for name, value in stored.items()}


def comfy_org_fp16(folder: Path, weights: Tensors) -> Checkpoint:
    stored = cast(weights, lambda _: F16)
    save_file(stored, folder / "model.safetensors")
    return Checkpoint(path=folder / "model.safetensors", values=floats(stored))


def comfy_org_scaled(folder: Path, weights: Tensors) -> Checkpoint:
    """wan2.2_t2v_low_noise_14B_fp8_scaled: every matrix, an empty marker, the rest in float16."""
    form = Scaled(names=MATRICES, rest=F16, scale="scale_weight", input_scale="scale_input")
    stored, values = form.write(weights)
    save_file(stored | marker(0), folder / "model.safetensors")
    return Checkpoint(
        path=folder / "model.safetensors",
        values=values,
        difference="biases of an older scaled fp8 file",
        is_rounded=True,
    )


def comfy_org_formats(folder: Path, weights: Tensors) -> Checkpoint:
    """The newer form: beside each fp8 weight its scale and its format, as text."""
    stored, values = Scaled(names=LINEARS, rest=BF16, scale="weight_scale").write(weights)
    text = torch.frombuffer(bytearray(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8)
    stored |= {f"{name.removesuffix('.weight')}.comfy_quant": text.clone() for name in LINEARS}
    save_file(stored, folder / "model.safetensors")
    return Checkpoint(
        path=folder / "model.safetensors",
        values=values,
        difference="fp8 with scales and formats (`comfy_quant`) beside",
    )


def comfy_org_metadata(folder: Path, weights: Tensors) -> Checkpoint:
    """The newer form as 0.3.7x reads it: the formats of all layers in the metadata."""
    stored, values = Scaled(
        names=LINEARS, rest=BF16, scale="weight_scale", input_scale="input_scale"
    ).write(weights)
    layers = {name.removesuffix(".weight"): {"format": "float8_e4m3fn"} for name in LINEARS}
    metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}
    path = folder / "model.safetensors"
    save_file(stored, path, metadata=metadata)
    return Checkpoint(path=path, values=values, needs="mixed_precision_ops")


def comfy_org_checkpoint(folder: Path, weights: Tensors) -> Checkpoint:
    """As CheckpointSave writes it: the transformer among the VAE's and the text encoder's tensors."""
    stored = cast(weights, lambda _: F16)
    others = {
        "cond_stage_model.umt5xxl.transformer.shared.weight": torch.ones(8, 8, dtype=F16),
        "first_stage_model.decoder.conv1.bias": torch.ones(8, dtype=F16),
    }
    tensors = {f"model.diffusion_model.{name}": value for name, value in stored.items()} | others
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint(path=folder / "model.safetensors", values=floats(stored))


def kijai_scaled(folder: Path, weights: Tensors) -> Checkpoint:
    """fp8_e4m3fn_scaled_KJ: linears of the blocks with scales [1], the rest in float32."""
    form = Scaled(names=LINEARS, rest=F32, scale="scale_weight", scale_shape=(1,))
    stored, values = form.write(weights)
    save_file(stored | marker(2), folder / "model.safetensors", metadata={"format": "pt"})
    return Checkpoint(
        path=folder / "model.safetensors",
        values=values,
        difference="biases of an older scaled fp8 file",
        is_rounded=True,
    )


def kijai_fp8(folder: Path, weights: Tensors) -> Checkpoint:
    """fp8_e4m3fn: matrices as they are in fp8, but for those that are kept."""
    kept = ("norm", "head", "bias", "patch_embedding", "time_", "modulation", "text_embedding")
    stored = cast(weights, lambda name: BF16 if any(word in name for word in kept) else FP8)
    save_file(stored, folder / "model.safetensors")
    return Checkpoint(path=folder / "model.safetensors", values=floats(stored))


def lightx2v_comfyui(folder: Path, weights: Tensors) -> Checkpoint:
    """converter.py --comfyui_mode: linears of the blocks, a marker of two values, the rest in bfloat16."""
    stored, values = Scaled(names=LINEARS, rest=BF16, scale="scale_weight").write(weights)
    save_file(stored | marker(2), folder / "model.safetensors")
    return Checkpoint(
        path=folder / "model.safetensors",
        values=values,
        difference="biases of an older scaled fp8 file",
        is_rounded=True,
    )


def lightx2v_rows(folder: Path, weights: Tensors, dtype: torch.dtype) -> Checkpoint:
    """converter.py: a scale for each row, [rows, 1]."""
    largest = torch.iinfo(dtype).max if dtype is torch.int8 else torch.finfo(dtype).max
    stored = cast(weights, lambda _: BF16)
    for name in LINEARS:
        scale = weights[name].abs().amax(dim=1, keepdim=True) / largest
        scaled = weights[name] / scale
        stored[name] = (scaled.round() if dtype is torch.int8 else scaled).to(dtype)
        stored[f"{name}_scale"] = scale
    save_file(stored, folder / "model.safetensors")
    return Checkpoint(
        path=folder / "model.safetensors",
        values=None,
        difference="fp8 with a scale for each row or block",
    )


def lightx2v_blocks(folder: Path, weights: Tensors) -> Checkpoint:
    """converter.py --save_by_block: a file for each block, one for the rest, and an index."""
    stored = cast(weights, lambda _: BF16)
    files: dict[str, Tensors] = {}
    for name, value in stored.items():
        block = name.split(".")[1] if name.startswith("blocks.") else None
        file = "non_block.safetensors" if block is None else f"block_{block}.safetensors"
        files.setdefault(file, {})[name] = value
    write_indexed(folder, files)
    return Checkpoint(path=folder, values=floats(stored), difference="a folder of files with")


def write_indexed(folder: Path, files: Mapping[str, Tensors]) -> None:
    for file, tensors in files.items():
        save_file(tensors, folder / file)
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    path = folder / "diffusion_pytorch_model.safetensors.index.json"
    path.write_text(json.dumps(index))


def diffusion_pipe_model(folder: Path, weights: Tensors) -> Checkpoint:
    """save_model after training all weights."""
    stored = cast(weights, lambda _: BF16)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return Checkpoint(path=folder / "model.safetensors", values=floats(stored))


def diffusers_folder(folder: Path, weights: Tensors) -> Checkpoint:
    """A pipeline whose transformer lies in shards, in bfloat16 but for what diffusers keeps in float32."""
    kept = ("time_embedding", "modulation", "norm3")
    stored = cast(weights, lambda name: F32 if any(word in name for word in kept) else BF16)
    named = in_diffusers_names(stored)
    (folder / "transformer").mkdir()
    shards: dict[str, Tensors] = {}
    for index, (name, value) in enumerate(named.items()):
        file = f"diffusion_pytorch_model-{1 + index % 3:05}-of-00003.safetensors"
        shards.setdefault(file, {})[name] = value
    write_indexed(folder / "transformer", shards)
    (folder / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    write_config(folder / "transformer", {})
    return Checkpoint(path=folder, values=floats(stored), difference="a folder of files with")


def diffusers_variant(folder: Path, weights: Tensors) -> Checkpoint:
    """save_pretrained(variant="fp16")."""
    stored = cast(weights, lambda _: F16)
    path = folder / "diffusion_pytorch_model.fp16.safetensors"
    save_file(in_diffusers_names(stored), path, metadata={"format": "pt"})
    write_config(folder, {})
    return Checkpoint(path=path, values=floats(stored), difference="a transformer in diffusers'")


def write_config(folder: Path, quantisation: Mapping[str, object]) -> None:
    config = {"_class_name": "WanTransformer3DModel", **quantisation}
    (folder / "config.json").write_text(json.dumps(config))


MODELOPT = {"quantization_config": {"quant_algo": "FP8", "quant_method": "modelopt"}}


def modelopt_tensors(weights: Tensors) -> tuple[Tensors, Tensors]:
    form = Scaled(names=LINEARS, rest=BF16, scale="weight_scale", input_scale="input_scale")
    stored, values = form.write(weights)
    return in_diffusers_names(stored), values


def modelopt_fp8(folder: Path, weights: Tensors) -> Checkpoint:
    """export_hf_checkpoint: what is quantised is told by config.json only."""
    tensors, values = modelopt_tensors(weights)
    path = folder / "diffusion_pytorch_model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    write_config(folder, MODELOPT)
    return Checkpoint(path=path, values=values, difference="a transformer in diffusers'")


def modelopt_metadata(folder: Path, weights: Tensors) -> Checkpoint:
    """enable_layerwise_quant_metadata: the algorithm of each layer in the metadata, too."""
    tensors, values = modelopt_tensors(weights)
    layers = {
        name.removesuffix(".weight_scale"): {"format": "fp8"}
        for name in tensors
        if name.endswith(".weight_scale")
    }
    text = json.dumps({"format_version": "1.0", "layers": layers})
    path = folder / "diffusion_pytorch_model.safetensors"
    save_file(tensors, path, metadata={"_quantization_metadata": text})
    return Checkpoint(path=path, values=values, difference="a transformer in diffusers'")


def modelopt_nvfp4(folder: Path, weights: Tensors) -> Checkpoint:
    """Two values a byte, a scale in fp8 for each 16 of a row, and one for all."""
    stored = cast(weights, lambda _: BF16)
    for name in LINEARS:
        layer = name.removesuffix(".weight")
        rows, columns = weights[name].shape
        stored[name] = torch.zeros(rows, columns // 2, dtype=torch.uint8)
        stored[f"{layer}.weight_scale"] = torch.ones(rows, columns // 16).to(FP8)
        stored[f"{layer}.weight_scale_2"] = torch.tensor(0.1)
        stored[f"{layer}.input_scale"] = torch.tensor(0.1)
    path = folder / "diffusion_pytorch_model.safetensors"
    save_file(in_diffusers_names(stored), path)
    return Checkpoint(path=path, values=None, difference="fp8 with a scale for each row or block")


# ---- GGUF


def write_gguf(path: Path, weights: Tensors, kind_of: Callable[[str, Tensor], Kind]) -> Checkpoint:
    """As city96's convert.py, llama-quantize with its patch, and fix_5d_tensors.py leave it."""
    writer = gguf.GGUFWriter(path, "wan")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for turn, (name, value) in enumerate(weights.items()):
        kind, array = kind_of(name, value), value.numpy()
        if kind in (Kind.F32, Kind.F16) or kind.name in WRITABLE:
            blocks = gguf.quants.quantize(array, kind)
        else:
            count = array.shape[1] // gguf.GGML_QUANT_SIZES[kind][0]
            blocks = random_blocks(kind, array.shape[0], count, seed=turn, spread=1e-3)
        writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Checkpoint(path=path, values=package_values(path), difference="GGUF |")


def package_values(path: Path) -> Tensors:
    """What the `gguf` package reads."""
    values = {}
    for tensor in gguf.GGUFReader(path).tensors:
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        shape = tuple(reversed(tensor.shape.tolist()))
        values[tensor.name] = torch.from_numpy(array.copy()).reshape(shape)
    return values


def source_kind(name: str, value: Tensor) -> Kind:
    """Of a file converted from bfloat16: what is small or sensitive is float32."""
    is_small = value.dim() == 1 or value.numel() <= 1024
    return Kind.F32 if is_small or value.dim() == 5 or ".modulation" in name else Kind.BF16


def city96_bf16(folder: Path, weights: Tensors) -> Checkpoint:
    return write_gguf(folder / "model-BF16.gguf", weights, source_kind)


def city96_f16(folder: Path, weights: Tensors) -> Checkpoint:
    """Converted from float16 or fp8: all in float16, but for what has 5 dims."""
    return write_gguf(
        folder / "model-F16.gguf", weights, lambda _, v: Kind.F32 if v.dim() == 5 else Kind.F16
    )


def quantised(folder: Path, weights: Tensors, name: str, kinds: Mapping[str, Kind]) -> Checkpoint:
    """kinds: of the blocks' linears, by how their names end; `` is for all others."""

    def kind_of(parameter: str, value: Tensor) -> Kind:
        if parameter not in LINEARS:
            return source_kind(parameter, value)
        return next(kind for end, kind in kinds.items() if parameter.endswith(end))

    return write_gguf(folder / f"model-{name}.gguf", weights, kind_of)


def city96_q8(folder: Path, weights: Tensors) -> Checkpoint:
    return quantised(folder, weights, "Q8_0", {"": Kind.Q8_0})


def quantstack_q4_k_m(folder: Path, weights: Tensors) -> Checkpoint:
    kinds = {".v.weight": Kind.Q6_K, ".ffn.2.weight": Kind.Q6_K, "": Kind.Q4_K}
    return quantised(folder, weights, "Q4_K_M", kinds)


def quantstack_q2_k(folder: Path, weights: Tensors) -> Checkpoint:
    return quantised(folder, weights, "Q2_K", {".v.weight": Kind.Q3_K, "": Kind.Q2_K})


def quantstack_q5_0(folder: Path, weights: Tensors) -> Checkpoint:
    return quantised(folder, weights, "Q5_0", {".ffn.2.weight": Kind.Q5_1, "": Kind.Q5_0})


CHECKPOINTS: dict[tuple[str, str], Callable[[Path, Tensors], Checkpoint]] = {
    ("LightX2V", "fp8 for ComfyUI"): lightx2v_comfyui,
    ("LightX2V", "fp8, scales of rows"): lambda folder, w: lightx2v_rows(folder, w, FP8),
    ("LightX2V", "int8, scales of rows"): lambda folder, w: lightx2v_rows(folder, w, torch.int8),
    ("LightX2V", "folder by blocks"): lightx2v_blocks,
    ("diffusion-pipe", "whole model"): diffusion_pipe_model,
    ("Kijai", "fp8 scaled"): kijai_scaled,
    ("Kijai", "fp8"): kijai_fp8,
    ("Comfy-Org", "fp16"): comfy_org_fp16,
    ("Comfy-Org", "fp8 scaled"): comfy_org_scaled,
    ("Comfy-Org", "fp8, comfy_quant"): comfy_org_formats,
    ("Comfy-Org", "fp8, formats in metadata"): comfy_org_metadata,
    ("Comfy-Org", "checkpoint with VAE and text encoder"): comfy_org_checkpoint,
    ("city96", "GGUF BF16"): city96_bf16,
    ("city96", "GGUF F16"): city96_f16,
    ("city96", "GGUF Q8_0"): city96_q8,
    ("QuantStack", "GGUF Q4_K_M"): quantstack_q4_k_m,
    ("QuantStack", "GGUF Q2_K"): quantstack_q2_k,
    ("QuantStack", "GGUF Q5_0"): quantstack_q5_0,
    ("diffusers", "pipeline folder in shards"): diffusers_folder,
    ("diffusers", "transformer, variant fp16"): diffusers_variant,
    ("ModelOpt", "fp8"): modelopt_fp8,
    ("ModelOpt", "fp8, formats in metadata"): modelopt_metadata,
    ("ModelOpt", "nvfp4"): modelopt_nvfp4,
}
