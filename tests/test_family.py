"""The models beside TI2V-5B: every mesh against one process, and a real ComfyUI's own samplers against ours.

Tiny widths, random weights, float32 on the CPU. The forward itself is compared with diffusers in test_model.py,
recognising the files in test_model_file.py.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import graphs
import pytest
import torch
from comfy_kit import error_of, latent_of, succeed
from graphs import MODELS, NEGATIVE, POSITIVE, Graph, node
from torch import Tensor

from comfy_wan_dist.ipc.errors import ConfigError
from comfy_wan_dist.ipc.messages import LedgerLine
from comfy_wan_dist.mesh.job import PlannedJob
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.mesh.traffic import predict_ledger
from devtools.checkpoints import write_transformer
from devtools.comfy_server import ComfyServer
from devtools.mesh_runs import (
    SIGMAS,
    TEXT_TOKENS,
    Case,
    Schedule,
    mesh_degrees,
    model_spec,
    relative_error,
    sample_rank,
)
from devtools.rank_pool import RankPool
from workers.model.tokens import grid_of
from workers.sampling.denoise import validate_image

pytestmark = pytest.mark.timeout(240)

T2V = WanShape(dim=256, ffn_dim=512, num_layers=2, in_dim=16, out_dim=16)
I2V = replace(T2V, in_dim=36)
KINDS = {"t2v": T2V, "i2v": I2V}
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
    """And each rank sends what was predicted."""
    shape, schedule = KINDS[kind], Schedule(solver="uni_pc", sigmas=SIGMAS, guidance=5.0)
    inputs, spec = CASE.inputs(shape), model_spec(models / FILES[kind])

    def sampled(mesh: str) -> list[tuple[Tensor, tuple[LedgerLine, ...], int]]:
        ranks = mesh_degrees(mesh).world_size
        return rank_pool.run(ranks, sample_rank, mesh, spec, inputs, schedule)

    ranks, ((expected, *_),) = sampled(mesh), sampled("single")
    assert relative_error(ranks[0][0], expected) <= MESH_LIMIT
    planned = PlannedJob(
        shape=shape,
        grid=grid_of(expected),
        steps=len(SIGMAS) - 1,
        guided=True,
        batch=CASE.batch,
        dtype="float32",
        text_tokens=(TEXT_TOKENS, TEXT_TOKENS),
    )
    for rank, (_, ledger, _) in enumerate(ranks):
        assert predict_ledger(planned, mesh_degrees(mesh), rank) == ledger


def test_each_prompt_has_its_image(models: Path) -> None:
    spec, inputs = model_spec(models / FILES["i2v"]), CASE.inputs(I2V)
    schedule = Schedule(solver="euler", sigmas=SIGMAS, guidance=5.0)

    def sampled(**changes: Tensor) -> Tensor:
        return sample_rank(0, "single", spec, replace(inputs, **changes), schedule)[0]

    assert inputs.cond_image is not None
    assert inputs.uncond_image is not None
    expected = sampled()
    for name in ("cond_image", "uncond_image"):
        image = getattr(inputs, name)
        assert relative_error(sampled(**{name: image.flip(2)}), expected) > 100 * MESH_LIMIT
    # One for all samples is one for each of them.
    shared = inputs.cond_image.repeat(CASE.batch, 1, 1, 1, 1)
    assert relative_error(sampled(cond_image=shared), expected) <= 1e-6


@pytest.mark.parametrize(
    ("kind", "image", "words"),
    [
        ("i2v", None, "positive image conditioning is none, .* need .1 or 2, 20, 3, 6, 6."),
        ("i2v", (1, 16, 3, 6, 6), "is shape .1, 16, 3, 6, 6."),
        ("i2v", (1, 20, 2, 6, 6), "is shape .1, 20, 2, 6, 6."),
        ("t2v", (1, 20, 3, 6, 6), "need none; .*leave it out"),
    ],
)
def test_image_that_does_not_suit_the_model_is_refused(
    kind: str, image: tuple[int, ...] | None, words: str
) -> None:
    given = None if image is None else torch.zeros(image)
    with pytest.raises(ConfigError, match=words):
        validate_image(given, KINDS[kind], torch.zeros(2, 16, 3, 6, 6), label="positive")


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


SETTINGS = {
    "steps": 4,
    "cfg": 5.0,
    "sampler_name": "uni_pc",
    "scheduler": "simple",
    "positive": ["positive", 0],
    "negative": ["negative", 0],
}


def add_both(graph: Graph, name: str, **inputs: Any) -> None:
    """A stock KSampler and ours with equal inputs, of which only their models differ, and what saves the results."""
    inputs = {**SETTINGS, "denoise": 1.0, **inputs}
    graph[f"stock {name}"] = node("KSampler", model=["shifted", 0], **inputs)
    graph[f"own {name}"] = node("WanDistSampler", model=["own model", 0], shift=5.0, **inputs)
    for kind in ("stock", "own"):
        graph[f"save {kind} {name}"] = graphs.save_latent(f"{kind} {name}")


def both_models(kind: str) -> Graph:
    return {
        **prompts(),
        "own model": own_model(kind),
        "stock model": node("UNETLoader", unet_name=FILES[kind], weight_dtype="default"),
        "shifted": node("ModelSamplingSD3", model=["stock model", 0], shift=5.0),
    }


def compare(server: ComfyServer, graph: Graph, *names: str) -> list[Tensor]:
    """Run the graph; both samplers of each name must have the same result, which is returned."""
    result = succeed(server, graph)
    results = []
    for name in names:
        own, stock = (latent_of(server, result, f"save {kind} {name}") for kind in ("own", "stock"))
        error = relative_error(own, stock)
        print(f"{name}: {error:.1e}")
        assert error <= STOCK_LIMIT, name
        results.append(own)
    return results


def test_text_to_video_equals_stock_ksampler(server: ComfyServer, seed: int) -> None:
    graph = both_models("t2v")
    graph["empty"] = node("EmptyHunyuanLatentVideo", width=80, height=48, length=9, batch_size=2)
    add_both(graph, "first", seed=seed, latent_image=["empty", 0])
    # Begins with the first one's video, in raw latent space.
    add_both(graph, "again", seed=seed + 1, latent_image=["stock first", 0], denoise=0.5)
    for latent in compare(server, graph, "first", "again"):
        assert latent.shape == (2, 16, 3, 6, 10)


def test_image_to_video_equals_stock_ksampler(server: ComfyServer, seed: int) -> None:
    """Start image, start and end, another image for the negative prompt, and no image at all."""
    graph = both_models("i2v")
    graph["image"] = node("LoadImage", image=graphs.IMAGE)
    graph["other"] = node("ImageInvert", image=["image", 0])
    graph["vae"] = node("RandomVAE")
    size = {"vae": ["vae", 0], "width": 80, "height": 48, "length": 9, "batch_size": 2}
    ends = {**size, "positive": ["positive", 0], "negative": ["negative", 0]}
    graph["start"] = node("WanImageToVideo", start_image=["image", 0], **ends)
    graph["changed"] = node("WanImageToVideo", start_image=["other", 0], **ends)
    graph["ends"] = node(
        "WanFirstLastFrameToVideo", start_image=["image", 0], end_image=["other", 0], **ends
    )
    cases = {
        "start": ("start", "start"),
        "ends": ("ends", "ends"),
        "two images": ("start", "changed"),
        "no negative image": ("start", None),
        "no image": (None, None),
    }
    for name, (positive, negative) in cases.items():
        given = {"latent_image": ["start", 2], "seed": seed}
        if positive is not None:
            given["positive"] = [positive, 0]
        if negative is not None:
            given["negative"] = [negative, 1]
        add_both(graph, name, **given)
    results = compare(server, graph, *cases)
    for index, result in enumerate(results):
        for other in results[:index]:
            assert relative_error(result, other) > 10 * STOCK_LIMIT


def test_inputs_for_another_model_are_refused(server: ComfyServer, seed: int) -> None:
    graph = {kind: own_model(kind) for kind in KINDS} | prompts()
    graph["image"] = node("LoadImage", image=graphs.IMAGE)
    graph["vae"] = node("RandomVAE")
    graph["start"] = node(
        "WanImageToVideo",
        positive=["positive", 0],
        negative=["negative", 0],
        vae=["vae", 0],
        start_image=["image", 0],
        width=80,
        height=48,
        length=9,
        batch_size=1,
    )
    graph["longer"] = node("EmptyHunyuanLatentVideo", width=80, height=48, length=13, batch_size=1)
    graph["other vae"] = node(
        "Wan22ImageToVideoLatent", width=64, height=64, length=9, batch_size=1
    )
    graph["other vae"]["inputs"]["vae"] = ["vae", 0]
    graph["mask"] = node("SolidMask", value=0.5, width=10, height=6)
    graph["masked"] = node("SetLatentNoiseMask", samples=["start", 2], mask=["mask", 0])
    cases: list[tuple[dict[str, Any], list[str]]] = [
        (
            {"model": ["t2v", 0], "positive": ["start", 0], "latent_image": ["start", 2]},
            ["positive", "concat_latent_image, concat_mask", "use an I2V model"],
        ),
        (
            {"model": ["i2v", 0], "positive": ["start", 0], "latent_image": ["longer", 0]},
            ["positive image", "[1, 16, 3, 6, 10]", "[1 or 1, 16, 4,", "same length"],
        ),
        (
            {"model": ["t2v", 0], "latent_image": ["masked", 0]},
            ["noise_mask", "TI2V models only", "WanImageToVideo"],
        ),
        (
            {"model": ["t2v", 0], "latent_image": ["other vae", 0]},
            ["[1, 48, 3, 4, 4]", "[batch, 16, frames, height/8", "EmptyHunyuanLatentVideo"],
        ),
    ]
    for given, words in cases:
        options = {**SETTINGS, "seed": seed, "shift": 5.0, "denoise": 1.0, **given}
        used = {
            **graph,
            "own": node("WanDistSampler", **options),
            "save": graphs.save_latent("own"),
        }
        message = error_of(server.run(used)).data["exception_message"]
        assert [word for word in words if word not in message] == [], message
