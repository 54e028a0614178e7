"""Files and graphs that this pack refuses, each a small change of a graph that it runs.

Whether stock ComfyUI runs it is asked in tests/project/test_refusals.py. Other tables of such cases, which are run
through both elsewhere: ODD of odd_scaled.py, REFUSED of lora_headers.py.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from comfy_wan_dist.mesh.parameters import expected_parameters
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.mesh.vae_shape import VAEConfig
from devtools.checkpoints import TINY_VAE, transformer_weights, vae_weights, write_shards
from devtools.loras import PartsMaker, spelled
from devtools.quantised import ScaledForm, write_scaled_fp8
from devtools.references import TRANSFORMER_NAMES, renamed

Tensors = dict[str, Tensor]
NAN = float("nan")

TI2V = WanShape(dim=256, ffn_dim=256, num_layers=1, in_dim=48, out_dim=48)
T2V = replace(TI2V, in_dim=16, out_dim=16)
I2V = replace(T2V, in_dim=36)
LAYER = "blocks.0.self_attn.o"
MODULATION = "head.modulation"


@dataclass(kw_only=True)
class Graph:
    """A loader, perhaps a LoRA, and a sampler; with `vae` a VAE behind a start image or a latent instead.

    model, low_noise, lora, vae: files, in `folder`. conditioning and latent as ComfyUI has them.
    """

    folder: Path
    model: Path
    positive: list[Any]
    negative: list[Any]
    latent: dict[str, Any]
    low_noise: Path | None = None
    lora: Path | None = None
    vae: Path | None = None
    image: Tensor | None = None
    strength: float = 1.0
    steps: int = 2
    sampler: str = "euler"
    scheduler: str = "simple"
    shift: float = 5.0
    denoise: float = 1.0
    cfg: float = 3.0
    sigmas: Any = None

    @property
    def path(self) -> Path:
        return self.folder / "changed.safetensors"

    def use_model(self, shape: WanShape, change: Callable[[Tensors], object] | None = None) -> None:
        """A model of its own, and a latent for it."""
        weights = transformer_weights(shape, seed=1)
        if change is not None:
            change(weights)
        save_file(weights, self.path)
        self.model = self.path
        self.latent = {"samples": torch.zeros(1, shape.out_dim, 2, 4, 4)}

    def use_header(self, header: object, data: bytes = b"") -> None:
        """A file with this header, JSON unless it is bytes, as the model."""
        raw = header if isinstance(header, bytes) else json.dumps(header).encode()
        self.path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
        self.model = self.path

    def use_lora(self, tensors: Tensors, **metadata: str) -> None:
        self.lora = self.folder / "lora.safetensors"
        save_file(tensors, self.lora, metadata=metadata)

    def use_vae(
        self, config: VAEConfig = TINY_VAE, change: Callable[[Tensors], object] | None = None
    ) -> None:
        weights = vae_weights(config, seed=2)
        if change is not None:
            change(weights)
        self.vae = self.folder / "vae.safetensors"
        save_file(weights, self.vae)
        self.latent = {"samples": torch.zeros(1, config.z_dim, 1, 2, 2)}


def base_graph(folder: Path) -> Graph:
    """One that runs, in a folder of its own."""
    generator = torch.Generator().manual_seed(4)
    prompts = [[[torch.randn(1, 4, 4096, generator=generator), {}]] for _ in range(2)]
    graph = Graph(
        folder=folder,
        model=folder / "model.safetensors",
        positive=prompts[0],
        negative=prompts[1],
        latent={},
    )
    graph.use_model(T2V)
    graph.model = graph.model.rename(folder / "model.safetensors")
    return graph


@dataclass(frozen=True, kw_only=True)
class Case:
    """row: how the row of docs/differences.md begins that says what stock makes of it; '' if it refuses it too."""

    change: Callable[[Graph], object]
    row: str = ""


def put(**values: Any) -> Callable[[Graph], None]:
    """Set fields of the graph."""

    def change(graph: Graph) -> None:
        for name, value in values.items():
            assert hasattr(graph, name)
            setattr(graph, name, value)

    return change


def latent(**values: Any) -> Callable[[Graph], None]:
    return lambda graph: graph.latent.update(values)


def cond(**options: Any) -> Callable[[Graph], None]:
    """More in the positive CONDITIONING."""
    return lambda graph: graph.positive[0][1].update(options)


def header(value: object, data: bytes = b"") -> Callable[[Graph], None]:
    return lambda graph: graph.use_header(value, data)


def whole_header(change: Callable[[dict[str, Any]], None]) -> Callable[[Graph], None]:
    """A good model whose header is changed."""

    def use(graph: Graph) -> None:
        raw = graph.model.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        described = json.loads(raw[8 : 8 + length])
        change(described)
        graph.use_header(described, raw[8 + length :])

    return use


def both(*changes: Callable[[Graph], object]) -> Callable[[Graph], None]:
    def change(graph: Graph) -> None:
        for each in changes:
            each(graph)

    return change


def model(
    shape: WanShape, change: Callable[[Tensors], object] | None = None
) -> Callable[[Graph], None]:
    return lambda graph: graph.use_model(shape, change)


def without(*names: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return change


def shards(change: Callable[[Path, dict[str, Any]], None]) -> Callable[[Graph], None]:
    """The first of two shards of a good model, whose folder or index is changed."""

    def use(graph: Graph) -> None:
        first, _ = write_shards(graph.folder, load_file(graph.model), parts=2)
        (index,) = graph.folder.glob("*.index.json")
        described = json.loads(index.read_text())
        change(graph.folder, described["weight_map"])
        if index.exists():
            index.write_text(json.dumps(described))
        graph.model = first

    return use


def repeat_in_second(folder: Path, weight_map: dict[str, Any]) -> None:
    first, second = (folder / name for name in sorted(set(weight_map.values())))
    save_file(load_file(second) | load_file(first), second)


def circle(graph: Graph) -> None:
    graph.model = graph.path
    graph.path.symlink_to(graph.path)


def pickled(graph: Graph) -> None:
    weights = load_file(graph.model)
    graph.model = graph.folder / "model.pt"
    torch.save(weights, graph.model)


def two_names(graph: Graph) -> None:
    weights = load_file(graph.model)
    named = {renamed(name, TRANSFORMER_NAMES): value for name, value in weights.items()}
    save_file(named | {"blocks.0.norm3.weight": torch.ones(256)}, graph.path)
    graph.model = graph.path


def scale(value: float) -> Callable[[Graph], None]:
    def use(graph: Graph) -> None:
        write_scaled_fp8(graph.path, load_file(graph.model), ScaledForm.OLD)
        stored = load_file(graph.path)
        stored[f"{LAYER}.scale_weight"] = torch.tensor(value)
        save_file(stored, graph.path)
        graph.model = graph.path

    return use


def low_noise(shape: WanShape | None) -> Callable[[Graph], None]:
    """A second expert of this shape; None: the first one's own file."""

    def use(graph: Graph) -> None:
        graph.low_noise = graph.model
        if shape is not None:
            graph.low_noise = graph.path
            save_file(transformer_weights(shape, seed=3), graph.path)

    return use


def lora(
    change: Callable[[Tensors], object] = lambda _: None, **metadata: str
) -> Callable[[Graph], None]:
    def use(graph: Graph) -> None:
        name = f"{LAYER}.weight"
        parts = PartsMaker(expected_parameters(T2V), seed=5).low_rank(name)
        tensors = spelled({name: parts}, "comfyui")
        change(tensors)
        graph.use_lora(tensors, **metadata)

    return use


def pickled_lora(graph: Graph) -> None:
    lora()(graph)
    assert graph.lora is not None
    tensors = load_file(graph.lora)
    graph.lora = graph.folder / "lora.pt"
    torch.save(tensors, graph.lora)


def filled(end: str, value: float) -> Callable[[Tensors], None]:
    """Fill the tensors whose names end so."""

    def change(tensors: Tensors) -> None:
        found = [tensor for name, tensor in tensors.items() if name.endswith(end)]
        assert found
        for tensor in found:
            tensor.fill_(value)

    return change


def bad_kronecker(tensors: Tensors) -> None:
    tensors.clear()
    tensors[f"diffusion_model.{LAYER}.lokr_w1"] = torch.ones(4)
    tensors[f"diffusion_model.{LAYER}.lokr_w2"] = torch.ones(64, 256)


def vae(
    config: VAEConfig = TINY_VAE, change: Callable[[Tensors], object] | None = None
) -> Callable[[Graph], None]:
    return lambda graph: graph.use_vae(config, change)


def first_level(width: int) -> Callable[[Tensors], None]:
    """Another width for the encoder's second level, in the tensor that tells it."""
    name = "encoder.downsamples.1.downsamples.0.residual.2.weight"
    return lambda tensors: tensors.update({name: torch.ones(width, 16, 3, 3, 3)})


def vae_of_two_names(tensors: Tensors) -> None:
    tensors.clear()
    for name in (
        "decoder.up_blocks.0.upsampler.x",
        "encoder.conv_in.weight",
        "encoder.conv1.weight",
    ):
        tensors[name] = torch.ones(1)


def wan21_vae(graph: Graph) -> None:
    """ComfyUI's own, small: 8 channels at the finest level."""
    import comfy.ldm.wan.vae

    network = comfy.ldm.wan.vae.WanVAE(
        dim=8,
        z_dim=16,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=2,
        attn_scales=[],
        temperal_downsample=[False, True, True],
    )
    graph.use_vae(replace(TINY_VAE, z_dim=16), lambda tensors: tensors.clear())
    assert graph.vae is not None
    save_file(
        {name: torch.zeros(each.shape) for name, each in network.state_dict().items()}, graph.vae
    )


def tiny_vae(graph: Graph) -> None:
    """A distilled one, as ComfyUI has it. Versions that have none know no tensor of it either."""
    graph.use_vae(change=lambda tensors: tensors.clear())
    assert graph.vae is not None
    tensors = {"decoder.22.bias": torch.zeros(12)}
    with contextlib.suppress(ImportError):
        import comfy.taesd.taehv

        network = comfy.taesd.taehv.TAEHV(latent_channels=48, latent_format=None)
        tensors = {name: torch.zeros(each.shape) for name, each in network.state_dict().items()}
    save_file(tensors, graph.vae)


def cast(name: str, dtype: torch.dtype) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


def empty(name: str) -> dict[str, Any]:
    return {name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}


def image(images: Tensor) -> Callable[[Graph], None]:
    def use(graph: Graph) -> None:
        graph.use_vae()
        graph.image = images

    return use


FOREIGN = "tensors that no supported model has, or too few"
SIBLING = "another model of the Wan family"
NAN_IN_LORA = "alpha or matrices that are NaN"
PEFT = "PEFT's `use_rslora`"
TWO_EXPERTS = "one file for both experts"
OTHER_VAE = "a VAE with other tensors than the published one, or in fp8"
NOT_A_NUMBER = "NaN in a latent"
OUT_OF_RANGE = "numbers outside the range of their widgets"
APPLIED = "areas, masks, time ranges"
SIGMAS = "sigmas that rise"
UNIPC = "equal neighbours"
NOT_OFFERED = "a sampler or scheduler that is not offered"

FILES: Mapping[str, Case] = {
    # ---- any safetensors file
    "gone": Case(change=lambda graph: graph.model.unlink()),
    "short": Case(change=lambda graph: graph.model.write_bytes(b"12345")),
    "a page": Case(change=lambda graph: graph.model.write_bytes(b"<!DOCTYPE html> not found")),
    "no JSON": Case(change=header(b"{" * 40)),
    "a list": Case(change=header([])),
    "many tensors": Case(
        change=whole_header(
            lambda h: h.update({k: v for i in range(2**16) for k, v in empty(f"{i}").items()})
        ),
        row=FOREIGN,
    ),
    "long name": Case(change=whole_header(lambda h: h.update(empty("n" * 2000))), row=FOREIGN),
    "no offsets": Case(change=header({"x": {"dtype": "F32", "shape": [1]}}, bytes(4))),
    "unknown type": Case(change=whole_header(lambda h: h[MODULATION].update(dtype="F7"))),
    "shape": Case(change=whole_header(lambda h: h[MODULATION].update(shape=[1, 2, 255]))),
    "overlap": Case(
        change=header(
            {k: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} for k in "ab"}, bytes(4)
        )
    ),
    "longer than described": Case(change=lambda graph: graph.model.open("ab").write(b"more")),
    # ---- which files
    "pickle": Case(change=pickled, row="pickles"),
    "circle": Case(change=circle),
    "no index": Case(change=shards(lambda folder, _: next(folder.glob("*.index.json")).unlink())),
    "index of pickles": Case(change=shards(lambda _, names: names.update(a="a.bin"))),
    "index of other folders": Case(
        change=shards(lambda _, names: names.update(a="../a.safetensors"))
    ),
    "index of what is gone": Case(change=shards(lambda _, names: names.update(a="a.safetensors"))),
    "index of others": Case(
        change=shards(lambda _, names: names.update(dict.fromkeys(names, max(names.values()))))
    ),
    "repeated": Case(change=shards(repeat_in_second)),
    # ---- a transformer
    "no modulation": Case(change=model(T2V, without(MODULATION))),
    "modulation of two dims": Case(
        change=model(T2V, lambda t: t.update({MODULATION: t[MODULATION][0]}))
    ),
    "bias of another size": Case(
        change=model(T2V, lambda t: t.update({f"{LAYER}.bias": torch.ones(255)}))
    ),
    "two names": Case(change=two_names),
    "metadata that cannot be read": Case(
        change=whole_header(lambda h: h.update(__metadata__={"_quantization_metadata": "{"})),
        row="the newer form of scaled fp8",
    ),
    "Fun-Control": Case(
        change=model(
            T2V,
            lambda t: t.update(
                {"ref_conv.weight": torch.ones(256, 16, 2, 2), "ref_conv.bias": torch.ones(256)}
            ),
        ),
        row=SIBLING,
    ),
    "something else": Case(change=lambda graph: save_file({"x": torch.ones(1)}, graph.model)),
    "width": Case(change=model(replace(T2V, dim=192)), row="a width that is no multiple of 128"),
    "channels": Case(change=model(replace(T2V, in_dim=20)), row=SIBLING),
    "no blocks": Case(
        change=model(
            T2V, lambda t: without(*(name for name in list(t) if name.startswith("blocks.")))(t)
        )
    ),
    "frequencies": Case(change=model(replace(T2V, freq_dim=255))),
    "scale below 0": Case(change=scale(-1.0), row="a scale below 0"),
    "one file for both experts": Case(change=low_noise(None), row=TWO_EXPERTS),
    "experts of two models": Case(change=low_noise(TI2V), row=TWO_EXPERTS),
    "NaN in a weight": Case(
        change=model(T2V, filled("head.bias", NAN)), row="a model whose result is NaN"
    ),
    # ---- a LoRA
    "PEFT's metadata": Case(change=lora(lora_adapter_metadata="{"), row=PEFT),
    "PEFT's rslora": Case(
        change=lora(
            lora_adapter_metadata=json.dumps(
                {"transformer.lora_alpha": 4, "transformer.use_rslora": True}
            )
        ),
        row=PEFT,
    ),
    "LoKr of vectors": Case(change=lora(bad_kronecker), row="a part of a change is missing"),
    "alpha": Case(change=lora(filled(".alpha", NAN)), row=NAN_IN_LORA),
    "pickled LoRA": Case(change=pickled_lora, row="pickles"),
    "LoRA that is gone": Case(
        change=lambda graph: put(lora=graph.folder / "gone.safetensors")(graph)
    ),
    "NaN in a factor": Case(change=lora(filled("lora_up.weight", NAN)), row=NAN_IN_LORA),
    "overflow": Case(
        change=both(lora(filled("lora_up.weight", 3e38)), put(strength=100.0)), row=NAN_IN_LORA
    ),
    # ---- a VAE
    "empty tensor in a VAE": Case(
        change=vae(change=lambda t: t.update(extra=torch.ones(0))), row=OTHER_VAE
    ),
    "tensor too much in a VAE": Case(
        change=vae(change=lambda t: t.update(extra=torch.ones(1))), row=OTHER_VAE
    ),
    "tensor missing in a VAE": Case(
        change=vae(change=without("decoder.middle.0.residual.2.bias")), row=OTHER_VAE
    ),
    "Wan2.1 VAE": Case(change=wan21_vae, row="a Wan2.1 VAE"),
    "tiny VAE": Case(change=tiny_vae, row="a distilled VAE"),
    "VAE of two names": Case(change=vae(change=vae_of_two_names)),
    "VAE of 16 channels": Case(change=vae(replace(TINY_VAE, z_dim=16))),
    "VAE of other factors": Case(
        change=vae(replace(TINY_VAE, dim_mult=(1, 1, 1), temporal_levels=(False, True)))
    ),
    "VAE in fp8": Case(change=vae(change=cast("conv2.weight", torch.float8_e4m3fn)), row=OTHER_VAE),
    "NaN in a VAE": Case(
        change=vae(change=filled("decoder.head.2.bias", NAN)), row="a VAE that makes NaN"
    ),
    "VAE without decoder": Case(
        change=vae(change=lambda t: without(*(n for n in list(t) if n.startswith("decoder.")))(t))
    ),
    "VAE of odd levels": Case(change=vae(change=first_level(33))),
    "VAE of steep levels": Case(change=vae(change=first_level(80))),
    "VAE of no shape": Case(
        change=vae(change=lambda t: t.update({"decoder.head.2.weight": torch.ones(12, 3, 3, 3, 3)}))
    ),
    "transformer for VAE": Case(change=lambda graph: put(vae=graph.model)(graph)),
}

GRAPHS: Mapping[str, Case] = {
    # ---- CONDITIONING
    "two entries": Case(
        change=lambda g: g.positive.extend(g.negative), row="a CONDITIONING of several entries"
    ),
    **{
        key: Case(change=cond(**{key: value}), row=APPLIED)
        for key, value in {
            "area": (2, 2, 0, 0),
            "mask": torch.ones(1, 4, 4),
            "start_percent": 0.5,
            "end_percent": 0.5,
            "strength": 0.0,
            "context_latents": [torch.zeros(1, 16, 1, 4, 4)],
        }.items()
    },
    "image without I2V": Case(
        change=cond(
            concat_latent_image=torch.zeros(1, 16, 2, 4, 4), concat_mask=torch.zeros(1, 1, 2, 4, 4)
        ),
        row="an image from WanImageToVideo",
    ),
    "another encoder": Case(change=put(positive=[[torch.ones(1, 4, 768), {}]])),
    "NaN in a prompt": Case(
        change=put(positive=[[torch.full((1, 4, 4096), NAN), {}]]), row=NOT_A_NUMBER
    ),
    "image of another length": Case(
        change=both(
            model(I2V),
            cond(
                concat_latent_image=torch.zeros(1, 16, 3, 4, 4),
                concat_mask=torch.zeros(1, 1, 3, 4, 4),
            ),
        )
    ),
    "images of another batch": Case(
        change=both(
            model(I2V),
            latent(samples=torch.zeros(2, 16, 2, 4, 4)),
            cond(
                concat_latent_image=torch.zeros(3, 16, 2, 4, 4),
                concat_mask=torch.zeros(1, 1, 2, 4, 4),
            ),
        ),
        row="an image conditioning of another length",
    ),
    "NaN in an image": Case(
        change=both(model(I2V), cond(concat_latent_image=torch.full((1, 16, 2, 4, 4), NAN))),
        row=NOT_A_NUMBER,
    ),
    # ---- LATENT
    "no tensor": Case(change=latent(samples=[1])),
    "other channels": Case(change=latent(samples=torch.ones(1, 4, 2, 4, 4))),
    "NaN in a latent": Case(
        change=latent(samples=torch.full((1, 16, 2, 4, 4), NAN)), row=NOT_A_NUMBER
    ),
    "batch_index": Case(change=latent(batch_index=["first"])),
    "large batch": Case(
        change=both(put(steps=1, cfg=1.0), latent(samples=torch.zeros(4097, 16, 1, 2, 2))),
        row="more than 4096 videos",
    ),
    "vector as mask": Case(change=latent(noise_mask=torch.ones(4))),
    "NaN in a mask": Case(change=latent(noise_mask=torch.full((1, 4, 4), NAN)), row=NOT_A_NUMBER),
    # ---- schedules
    "shift below 0": Case(change=put(shift=-1.0), row=OUT_OF_RANGE),
    "unknown scheduler": Case(change=put(scheduler="nowhere"), row=NOT_OFFERED),
    "failing scheduler": Case(change=put(scheduler="late", steps=1)),
    "unknown sampler": Case(change=put(sampler="nowhere"), row=NOT_OFFERED),
    "another sampler": Case(change=put(sampler="dpmpp_2m"), row=NOT_OFFERED),
    "SIGMAS of two dims": Case(change=put(sigmas=torch.tensor([[1.0, 0.5, 0.0]]))),
    "complex SIGMAS": Case(change=put(sigmas=torch.tensor([1.0 + 1j, 0.0]))),
    "one sigma": Case(change=put(sigmas=torch.tensor([1.0])), row=SIGMAS),
    "rising": Case(change=put(sigmas=torch.tensor([0.5, 0.75, 0.0])), row=SIGMAS),
    "uni_pc to a low sigma": Case(
        change=put(sampler="uni_pc", sigmas=torch.tensor([1.0, 0.5, 0.0005, 0.0])), row=UNIPC
    ),
    "uni_pc of equal sigmas": Case(
        change=put(sampler="uni_pc", sigmas=torch.tensor([1.0, 0.5, 0.5, 0.0])), row=UNIPC
    ),
    # ---- numbers
    "cfg": Case(change=put(cfg=NAN), row=OUT_OF_RANGE),
    "strength of a LoRA": Case(change=both(lora(), put(strength=1000.0)), row=OUT_OF_RANGE),
    # ---- VAE
    "VAE and other channels": Case(change=both(vae(), latent(samples=torch.ones(1, 4, 1, 2, 2)))),
    "image without pixels": Case(change=image(torch.ones(1, 0, 0, 3))),
}

CASES: Mapping[str, Case] = {**FILES, **GRAPHS}
