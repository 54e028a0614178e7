"""One random model in every form that people have it in: each rank holds the same bits, whichever was chosen.

Covered: loading on several meshes, and choosing folders in a real ComfyUI. test_names.py, test_wan_file.py and
test_vae_files.py have the cases that need neither.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import graphs
import pytest
import torch
from comfy_kit import bytes_read, group_of, latent_of, succeed, tensors_of
from graphs import MODEL, MODELS, VAE, VAES, image_to_video, sampled_latent, save_tensors
from rank_programs import loaded_digests
from safetensors.torch import load_file, save_file
from torch import Tensor

from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.model_file.names import PREFIXES
from devtools.checkpoints import TINY_TRANSFORMER, TINY_VAE, transformer_weights, write_shards
from devtools.comfy_server import ComfyServer
from devtools.mesh_runs import mesh_degrees
from devtools.quantised import write_gguf
from devtools.rank_pool import RankPool
from devtools.references import build_diffusers_transformer, build_diffusers_vae

SHAPE = WanShape(dim=512, ffn_dim=64, num_layers=2, in_dim=48, out_dim=48, text_dim=16, freq_dim=8)
MESHES = ("single", "tp2", "tp4", "pp2", "ulysses2")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Form:
    """Where a form lies, and the dtype of all its tensors, in which it is loaded."""

    path: str
    dtype: torch.dtype


def write_pipeline(
    folder: Path, transformer: Any, vae: Any = None, *, max_shard_size: str = "10GB"
) -> None:
    """What diffusers' own models write, below the index of a pipeline."""
    transformer.save_pretrained(folder / "transformer", max_shard_size=max_shard_size)
    if vae is not None:
        vae.save_pretrained(folder / "vae")
    (folder / "model_index.json").write_text('{"_class_name": "WanPipeline"}')


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Form]:
    """By name; those called `bare` are what the others of their dtype are compared with."""
    base = tmp_path_factory.mktemp("forms")
    weights = transformer_weights(SHAPE, seed=3)
    forms: dict[str, Form] = {}

    def write_file(name: str, prefix: str, short: str) -> None:
        path = base / f"{len(forms)}.safetensors"
        dtype = DTYPES[short]
        save_file({prefix + n: value.to(dtype) for n, value in weights.items()}, path)
        forms[f"{name} {short}"] = Form(str(path), dtype)

    for short in DTYPES:
        write_file("bare", "", short)
    for prefix in PREFIXES[1:]:
        write_file(prefix, prefix, "fp16")
    for short in ("fp32", "bf16"):
        dtype = DTYPES[short]
        official, diffusers = base / f"official {short}", base / f"diffusers {short}"
        official.mkdir()
        shards = write_shards(
            official, {name: value.to(dtype) for name, value in weights.items()}, parts=3
        )
        transformer = build_diffusers_transformer(SHAPE, weights).to(dtype)
        write_pipeline(diffusers, transformer, max_shard_size="4MB" if short == "bf16" else "1GB")
        for name, path in (
            ("official folder", official),
            ("shard", shards[1]),
            ("pipeline", diffusers),
            ("transformer folder", diffusers / "transformer"),
        ):
            forms[f"{name} {short}"] = Form(str(path), dtype)
    files = len(list((base / "diffusers bf16" / "transformer").glob("*.safetensors")))
    assert files > 1
    return forms


@pytest.mark.parametrize("mesh", MESHES)
def test_every_form_loads_to_the_same_bits(
    rank_pool: RankPool, forms: Mapping[str, Form], mesh: str
) -> None:
    paths = {name: form.path for name, form in forms.items()}
    dtypes = {name: form.dtype for name, form in forms.items()}
    size = mesh_degrees(mesh).world_size
    for rank, digests in enumerate(rank_pool.run(size, loaded_digests, mesh, paths, dtypes)):
        expected = {name: digests[f"bare {name.split()[-1]}"] for name in forms}
        assert digests == expected, f"rank {rank}"
        assert len(set(digests.values())) == len(DTYPES)


# ---- in ComfyUI


@pytest.fixture(scope="module")
def server(comfy: ComfyServer) -> ComfyServer:
    """The shared ComfyUI, with its tiny model and VAE in the other forms."""
    graphs.write_files(comfy.base)
    models, vaes = comfy.base / MODELS, comfy.base / VAES
    weights, vae_weights = load_file(models / MODEL), load_file(vaes / VAE)
    pipeline = comfy.base / "models" / "diffusers" / "Tiny"
    if not pipeline.exists():
        (models / "official").mkdir()
        write_shards(models / "official", weights, parts=3)
        transformer = build_diffusers_transformer(TINY_TRANSFORMER, weights)
        write_pipeline(pipeline, transformer, build_diffusers_vae(TINY_VAE, vae_weights))
        shutil.copytree(pipeline / "vae", vaes / "tiny")
    return comfy


def options(server: ComfyServer, node: str, name: str) -> list[str]:
    """What a node's list offers."""
    kind, *rest = server.get(f"/object_info/{node}")[node]["input"]["required"][name]
    listed: list[str] = rest[0]["options"] if kind == "COMBO" else kind
    return listed


def test_folders_are_listed_in_place_of_their_files(server: ComfyServer) -> None:
    models = options(server, "WanDistLoadModel", "model_name")
    assert {"official/", "Tiny [diffusers]", MODEL} <= set(models)
    assert [name for name in models if "official" in name or "Tiny" in name] == [
        "official/",
        "Tiny [diffusers]",
    ]
    for node in ("WanDistVAEDecode", "WanDistImageToVideoLatent"):
        vaes = options(server, node, "vae_name")
        assert {"tiny/", "Tiny [diffusers]", VAE} <= set(vaes)
        assert "tiny/diffusion_pytorch_model.safetensors" not in vaes


def test_folders_give_the_same_video_as_the_file(server: ComfyServer) -> None:
    seed = zlib.crc32(b"forms")

    def video(model: str, encoder: str, decoder: str) -> dict[str, dict[str, Tensor]]:
        graph = image_to_video(seed=seed, steps=1, model=model)
        graph["latent"]["inputs"]["vae_name"] = encoder
        graph["decode"]["inputs"]["vae_name"] = decoder
        save_tensors(graph, latent=["sampler"], images=["decode"])
        result = succeed(server, graph)
        return {node: tensors_of(server, result, node) for node in ("sampler", "decode")}

    expected = video(MODEL, VAE, VAE)
    group = group_of(server)
    shard = "official/diffusion_pytorch_model-00002-of-00003.safetensors"
    for names in (
        ("official/", "tiny/", "Tiny [diffusers]"),
        ("Tiny/transformer [diffusers]", "Tiny [diffusers]", "tiny/"),
        (shard, VAE, "tiny/diffusion_pytorch_model.safetensors"),
    ):
        actual = video(*names)
        for node, tensors in expected.items():
            assert actual[node].keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert torch.equal(actual[node][name], tensor), (names, node, name)
    assert group_of(server).pids == group.pids


def test_gguf_is_listed_and_gives_the_video_of_its_values(server: ComfyServer) -> None:
    weights = load_file(server.base / MODELS / MODEL)
    folder = server.base / "models" / "unet" / "packed"
    folder.mkdir(parents=True, exist_ok=True)
    values = write_gguf(folder / "tiny.gguf", weights, ("Q8_0", "Q4_K"))
    save_file(values, folder / "values.safetensors")
    assert "packed/tiny.gguf" in options(server, "WanDistLoadModel", "model_name")
    assert "packed/tiny.gguf" not in options(server, "UNETLoader", "unet_name")

    def latent(name: str) -> Tensor:
        graph = graphs.sampled_latent(seed=5, steps=2, model=f"packed/{name}")
        return latent_of(server, succeed(server, graph))

    assert torch.equal(latent("tiny.gguf"), latent("values.safetensors"))


def test_group_goes_back_to_the_model_before_without_reading_it(server: ComfyServer) -> None:
    def run(model: str, seed: int) -> None:
        succeed(server, sampled_latent(seed=seed, steps=1, model=model, has_image=False))

    run(MODEL, 1)
    run("official/", 1)
    ranks = group_of(server).ranks
    size = (server.base / MODELS / MODEL).stat().st_size
    before = sum(bytes_read(ranks))
    run(MODEL, 2)
    run("official/", 2)
    assert sum(bytes_read(ranks)) - before < size / 4  # messages
    run("Tiny [diffusers]", 1)
    assert sum(bytes_read(ranks)) - before > size
