"""The models beside TI2V-5B: every mesh against one process, and a real ComfyUI's own samplers against ours.

Tiny widths, random weights, float32 on the CPU. The forward itself is compared with diffusers in test_model.py,
recognising the files in test_model_file.py.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import graphs
import pytest
import torch
from comfy_kit import latent_of, succeed
from graphs import MODELS, NEGATIVE, POSITIVE, Graph, node

from comfy_wan_dist.mesh.shape import WanShape
from devtools.checkpoints import write_transformer
from devtools.comfy_server import ComfyServer
from devtools.mesh_runs import (
    SIGMAS,
    Case,
    Schedule,
    mesh_degrees,
    model_spec,
    relative_error,
    sample_rank,
)
from devtools.rank_pool import RankPool

pytestmark = pytest.mark.timeout(240)

T2V = WanShape(dim=256, ffn_dim=512, num_layers=2, in_dim=16, out_dim=16)
KINDS = {"t2v": T2V}
FILES = {kind: f"tiny_{kind}.safetensors" for kind in KINDS}
# 27 tokens, which 2 ranks do not divide.
CASE = Case(name="odd", frames=3, height=6, width=6, batch=2)
MESHES = ("tp2", "ulysses2", "cfg2", "pp2", "cfg2-ring2-tp2-sp")
MESH_LIMIT = 1e-4
STOCK_LIMIT = 1e-3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with FILES."""
    folder = tmp_path_factory.mktemp("family")
    write_models(folder)
    return folder


def write_models(folder: Path) -> None:
    for seed, (kind, name) in enumerate(FILES.items()):
        if not (folder / name).exists():
            write_transformer(folder / name, KINDS[kind], seed=seed)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", KINDS)
def test_mesh_matches_single_process(
    rank_pool: RankPool, models: Path, kind: str, mesh: str
) -> None:
    inputs = CASE.inputs(KINDS[kind])
    schedule = Schedule(solver="uni_pc", sigmas=SIGMAS, guidance=5.0)

    def sampled(mesh: str) -> torch.Tensor:
        ranks = mesh_degrees(mesh).world_size
        spec = model_spec(models / FILES[kind])
        return rank_pool.run(ranks, sample_rank, mesh, spec, inputs, schedule)[0][0]

    assert relative_error(sampled(mesh), sampled("single")) <= MESH_LIMIT


# ---- with a real ComfyUI


@pytest.fixture(scope="module")
def server(comfy: ComfyServer) -> ComfyServer:
    graphs.write_files(comfy.base)
    write_models(comfy.base / MODELS)
    return comfy


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed that no other test uses: ComfyUI would answer a graph that it has seen from its cache."""
    return zlib.crc32(request.node.nodeid.encode())


def prompts() -> Graph:
    return {
        "positive": node("WanDistLoadConditioning", file=f"{POSITIVE} [input]"),
        "negative": node("WanDistLoadConditioning", file=f"{NEGATIVE} [input]"),
    }


def own_model(kind: str, **options: Any) -> dict[str, Any]:
    return node(
        "WanDistLoadModel",
        model_name=FILES[kind],
        dtype="float32",
        mesh="cfg2-ulysses2",
        devices="cpu:4",
        compile=False,
        **options,
    )


def test_text_to_video_equals_stock_ksampler(server: ComfyServer, seed: int) -> None:
    graph = prompts()
    graph["own model"] = own_model("t2v")
    graph["stock model"] = node("UNETLoader", unet_name=FILES["t2v"], weight_dtype="default")
    graph["shifted"] = node("ModelSamplingSD3", model=["stock model", 0], shift=5.0)
    graph["empty"] = node("EmptyHunyuanLatentVideo", width=80, height=48, length=9, batch_size=2)
    settings = {
        "seed": seed,
        "steps": 4,
        "cfg": 5.0,
        "sampler_name": "uni_pc",
        "scheduler": "simple",
        "positive": ["positive", 0],
        "negative": ["negative", 0],
    }
    # The second run begins with the first one's video, in raw latent space.
    for name, latent, denoise in (("first", "empty", 1.0), ("again", "stock first", 0.5)):
        given = {"latent_image": [latent, 0], "denoise": denoise, **settings}
        graph[f"stock {name}"] = node("KSampler", model=["shifted", 0], **given)
        graph[f"own {name}"] = node("WanDistSampler", model=["own model", 0], shift=5.0, **given)
        for kind in ("stock", "own"):
            graph[f"save {kind} {name}"] = graphs.save_latent(f"{kind} {name}")
    result = succeed(server, graph)
    for name in ("first", "again"):
        own, stock = (latent_of(server, result, f"save {kind} {name}") for kind in ("own", "stock"))
        assert own.shape == (2, 16, 3, 6, 10)
        assert relative_error(own, stock) <= STOCK_LIMIT, name
