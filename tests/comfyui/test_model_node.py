"""ComfyUI's own samplers on a MODEL whose forwards run in a group, beside the same on the native MODEL, in one server.

Every graph has both, which differ in their loaders only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import graphs
import pytest
import torch
from comfy_kit import error_of, group_of, latent_of, succeed
from graphs import LORAS, MODEL, MODELS, Graph, node, save_latent
from model_graphs import (
    I2V_FILES,
    OWN,
    STOCK,
    T2V_FILES,
    add_both,
    behind,
    both_models,
    repeated,
    write_models,
)
from safetensors.torch import save_file
from torch import Tensor

from comfy_wan_dist.mesh.parameters import expected_parameters
from devtools.checkpoints import TINY_TRANSFORMER
from devtools.comfy_server import ComfyServer, PromptResult
from devtools.loras import mixed_lora, plain_lora, spelled
from devtools.mesh_runs import mesh_degrees, relative_error

# A server and a group start within the first test that needs them.
pytestmark = pytest.mark.timeout(240)

LIMIT, LORA_LIMIT = 1e-4, 1e-3
LORA_SHAPES = expected_parameters(TINY_TRANSFORMER)
# ComfyUI leaves out a modulation's difference; the pack's MODEL merges it, as Wan Dist LoRA does.
LORA_FILES = {
    "stock_mixed.safetensors": spelled(
        {
            name: tensors
            for name, tensors in mixed_lora(LORA_SHAPES, seed=5).items()
            if not name.endswith("modulation")
        },
        "comfyui",
    ),
    "stock_plain.safetensors": spelled(plain_lora(LORA_SHAPES, seed=6), "kohya"),
}


@pytest.fixture(scope="module")
def server(comfy: ComfyServer) -> ComfyServer:
    graphs.write_files(comfy.base)
    write_models(comfy.base)
    for name, tensors in LORA_FILES.items():
        save_file(tensors, comfy.base / LORAS / name)
    return comfy


def errors(server: ComfyServer, graph: Graph) -> dict[str, float]:
    """By name what `add_both` added, how far the results are from each other."""
    result = succeed(server, graph)
    names = [name.removesuffix(" own saved") for name in graph if name.endswith(" own saved")]
    assert names
    return {
        name: relative_error(*(saved(server, result, name, model) for model in (OWN, STOCK)))
        for name in names
    }


def saved(server: ComfyServer, result: PromptResult, name: str, model: str) -> Tensor:
    return latent_of(server, result, f"{name} {model} saved")


def assert_equal(server: ComfyServer, graph: Graph, limit: float = LIMIT) -> None:
    found = errors(server, graph)
    assert all(error <= limit for error in found.values()), found


def runs_of(log: str) -> list[str]:
    """What the log says of the forwards of each sampler."""
    return re.findall(r"a sampler's forwards: (.*); [0-9.]+ s in the ranks", log)


@pytest.mark.parametrize("mesh", ["cfg2-ulysses2", "tp2"])
def test_without_guidance_and_without_a_first_frame(
    server: ComfyServer, mesh: str, seed: int
) -> None:
    graph = repeated(both_models(mesh=mesh, has_image=False), 3)
    for sampler in ("euler", "lcm", "uni_pc", "dpmpp_2m_sde"):
        for cfg in (1.0, 5.0):
            add_both(graph, f"{sampler} {cfg}", sampler_name=sampler, cfg=cfg, seed=seed)
    assert_equal(server, graph)


@pytest.mark.parametrize(
    ("mesh", "cfg", "batch", "expected"),
    [
        ("cfg2-ulysses2", 5.0, 1, "3 on mesh dp2-ulysses2"),
        ("cfg2-ulysses2", 1.0, 1, "3 on mesh ulysses4"),
        ("cfg2-ulysses2", 1.0, 3, "3 on mesh ulysses4"),
        ("tp2", 5.0, 1, "3 on mesh tp2"),
        ("dp2", 5.0, 1, "6 on mesh single"),
        ("auto", 5.0, 2, "3 on mesh dp4"),
    ],
)
def test_each_call_is_laid_on_the_mesh_that_suits_its_batch(
    server: ComfyServer, mesh: str, cfg: float, batch: int, expected: str, seed: int
) -> None:
    graph = repeated(both_models(mesh="cfg2-ulysses2"), batch)
    graph["model"]["inputs"]["mesh"] = mesh
    if mesh != "auto":
        graph["model"]["inputs"]["devices"] = f"cpu:{mesh_degrees(mesh).world_size}"
    add_both(graph, "run", cfg=cfg, seed=seed)
    log = len(server.log)
    assert_equal(server, graph)
    assert runs_of(server.log[log:]) == [expected]


def test_prompts_of_different_length_are_called_one_by_one(server: ComfyServer, seed: int) -> None:
    graph = both_models()
    graph["negative"] = node(
        "ConditioningSetTimestepRange", conditioning=["longer", 0], start=0.0, end=0.9
    )
    graph["longer"] = node("WanDistLoadConditioning", file=f"{graphs.NEGATIVE} [input]")
    add_both(graph, "run", seed=seed)
    assert_equal(server, graph)


def test_models_of_16_channels(server: ComfyServer, seed: int) -> None:
    text = both_models(model=T2V_FILES[0])
    image = both_models(model=I2V_FILES[0])
    image |= {
        "image": node("LoadImage", image=graphs.IMAGE),
        "vae": node("RandomVAE"),
        "start": node(
            "WanImageToVideo",
            positive=["positive", 0],
            negative=["negative", 0],
            vae=["vae", 0],
            start_image=["image", 0],
            width=96,
            height=64,
            length=9,
            batch_size=1,
        ),
    }
    given: dict[str, Any] = {
        "positive": ["start", 0],
        "negative": ["start", 1],
        "latent_image": ["start", 2],
    }
    for graph, inputs in ((text, {}), (image, given)):
        behind(graph, "ModelSamplingSD3", shift=5.0)
        for sampler in ("euler", "dpmpp_2m_sde"):
            add_both(graph, sampler, sampler_name=sampler, seed=seed, **inputs)
        assert_equal(server, graph)
    del given["positive"], given["negative"]
    add_both(image, "bare", seed=seed, **given)
    result = succeed(server, image)
    bare, with_image = (saved(server, result, name, OWN) for name in ("bare", "euler"))
    assert relative_error(bare, with_image) > 10 * LIMIT


# Later versions of ComfyUI ask for the last three.
WINDOWS = {
    "context_length": 9,
    "context_overlap": 4,
    "context_schedule": "standard_static",
    "context_stride": 1,
    "closed_loop": False,
    "fuse_method": "pyramid",
    "freenoise": False,
    "retain_first_frame": False,
    "split_conds_to_windows": False,
}
CHANGES: dict[str, Callable[[Graph], None]] = {
    "ModelSamplingSD3": lambda graph: behind(graph, "ModelSamplingSD3", shift=3.0),
    "CFGZeroStar": lambda graph: behind(graph, "CFGZeroStar"),
    "RescaleCFG": lambda graph: behind(graph, "RescaleCFG", multiplier=0.7),
    "context windows": lambda graph: behind(graph, "WanContextWindowsManual", **WINDOWS),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_lives_outside_the_transformer_works_as_it_does(
    server: ComfyServer, change: str, seed: int
) -> None:
    # Context windows do not cut a mask, so that frames would have each other's timesteps.
    has_image = change != "context windows"
    plain, graph = (both_models(length=17, has_image=has_image) for _ in range(2))
    add_both(plain, "run", seed=seed)
    CHANGES[change](graph)
    add_both(graph, "run", seed=seed)
    assert_equal(server, graph)
    changed, before = (saved(server, succeed(server, each), "run", OWN) for each in (graph, plain))
    assert relative_error(changed, before) > 10 * LIMIT


@pytest.mark.parametrize("mesh", ["cfg2-ulysses2", "dp2"])
def test_one_timestep_is_that_of_all_samples(server: ComfyServer, mesh: str, seed: int) -> None:
    """As wrappers of other packs may hand it to the transformer."""
    graph = repeated(both_models(mesh=mesh, has_image=False), 3)
    behind(graph, "OneTimestep")
    add_both(graph, "run", seed=seed)
    assert_equal(server, graph)


@pytest.mark.parametrize("kind", ["EasyCache", "LazyCache"])
def test_caches_skip_the_steps_that_they_skip_on_the_native_model(
    server: ComfyServer, kind: str, seed: int
) -> None:
    graph = both_models()
    behind(graph, kind, reuse_threshold=0.6, start_percent=0.1, end_percent=0.95, verbose=True)
    add_both(graph, "run", steps=8, seed=seed)
    log = len(server.log)
    assert_equal(server, graph)
    skipped = re.findall(rf"{kind} - skipped (\d+/\d+) steps", server.log[log:])
    assert len(skipped) == 2
    assert skipped[0] == skipped[1]
    (run,) = runs_of(server.log[log:])
    count, steps = map(int, skipped[0].split("/"))
    assert 0 < count < steps == 8
    assert run == f"{steps - count} on mesh dp2-ulysses2"


def test_custom_samplers_with_split_sigmas(server: ComfyServer, seed: int) -> None:
    # ComfyUI ends a stage by dividing all by 1 - sigma, given frames too, so that these differ in the next.
    graph = both_models(has_image=False)
    graph |= {
        "noise": node("RandomNoise", noise_seed=seed),
        "no noise": node("DisableNoise"),
        "solver": node("KSamplerSelect", sampler_name="euler"),
    }
    for name in (OWN, STOCK):
        graph[f"guider {name}"] = node(
            "CFGGuider",
            model=[name, 0],
            positive=["positive", 0],
            negative=["negative", 0],
            cfg=4.0,
        )
        graph[f"sigmas {name}"] = node(
            "BasicScheduler", model=[name, 0], scheduler="simple", steps=4, denoise=1.0
        )
        graph[f"split {name}"] = node("SplitSigmas", sigmas=[f"sigmas {name}", 0], step=2)
        for run, noise, sigmas, latent in (
            ("whole", "noise", [f"sigmas {name}", 0], ["latent", 0]),
            ("first", "noise", [f"split {name}", 0], ["latent", 0]),
            ("second", "no noise", [f"split {name}", 1], [f"first {name}", 0]),
        ):
            graph[f"{run} {name}"] = node(
                "SamplerCustomAdvanced",
                noise=[noise, 0],
                guider=[f"guider {name}", 0],
                sampler=["solver", 0],
                sigmas=sigmas,
                latent_image=latent,
            )
            graph[f"{run} {name} saved"] = save_latent(f"{run} {name}")
    assert_equal(server, graph)
    result = succeed(server, graph)
    whole, second = (saved(server, result, run, OWN) for run in ("whole", "second"))
    assert relative_error(second, whole) <= LIMIT


# ---- LoRAs of ComfyUI's own loader


def with_loras(graph: Graph, chain: Sequence[tuple[str, float]]) -> Graph:
    for name, strength in chain:
        behind(graph, "LoraLoaderModelOnly", lora_name=name, strength_model=strength)
    return graph


def test_stock_loras_are_merged_changed_and_taken_off_without_a_reload(
    server: ComfyServer, seed: int
) -> None:
    mixed, plain = LORA_FILES
    size = (server.base / MODELS / MODEL).stat().st_size
    results: list[Tensor] = []
    group = None
    chains: tuple[list[tuple[str, float]], ...] = (
        [],
        [(mixed, 0.8), (plain, -0.4)],
        [(mixed, 0.8), (plain, 0.7)],
        [(plain, 0.7)],
        [],
    )
    for chain in chains:
        graph = with_loras(both_models(mesh="tp2"), chain)
        add_both(graph, "run", seed=seed + len(results))
        add_both(graph, "same seed", seed=seed)
        log = len(server.log)
        result = succeed(server, graph)
        for name in ("run", "same seed"):
            own, stock = (saved(server, result, name, model) for model in (OWN, STOCK))
            assert relative_error(own, stock) <= LORA_LIMIT, (chain, name)
        results.append(saved(server, result, "same seed", OWN))
        if group is not None:
            assert group_of(server) == group
            read = re.findall(r"(\d+) bytes read from disk", server.log[log:])
            assert len(read) == 1  # of all forwards, the first one's
            assert 0 < int(read[0]) < 2 * 0.7 * size
        group = group_of(server)
    assert torch.equal(results[0], results[-1])
    for one, other in zip(results[:-1], results[1:], strict=True):
        assert relative_error(one, other) > 10 * LORA_LIMIT


# ---- what would need the transformer in ComfyUI's process


@pytest.mark.parametrize(
    ("kind", "inputs", "words"),
    [
        (
            "SkipLayerGuidanceDiT",
            dict(
                double_layers="0",
                single_layers="",
                scale=3.0,
                start_percent=0.0,
                end_percent=1.0,
                rescaling_scale=0.0,
            ),
            "patches_replace",
        ),
        (
            "ScaleROPE",
            dict(scale_x=1.5, shift_x=0.0, scale_y=1.0, shift_y=0.0, scale_t=1.0, shift_t=0.0),
            "rope_options",
        ),
    ],
)
def test_what_changes_the_transformer_inside_is_refused_by_name(
    server: ComfyServer, kind: str, inputs: dict[str, Any], words: str, seed: int
) -> None:
    if not server.get(f"/object_info/{kind}"):
        pytest.skip("this ComfyUI does not know the node yet")
    graph = both_models()
    behind(graph, kind, **inputs)
    add_both(graph, "run", seed=seed)
    for name in [name for name in graph if STOCK in name]:
        del graph[name]
    error = error_of(server.run(graph)).data
    assert error["node_type"] == "KSampler"
    assert f"the MODEL of Wan Dist was given {words}" in error["exception_message"]
    # The model goes on.
    graph = both_models()
    add_both(graph, "run", seed=seed)
    assert_equal(server, graph)


def test_context_windows_with_given_frames_are_refused_in_a_sentence(
    server: ComfyServer, seed: int
) -> None:
    """Unless this ComfyUI cuts the mask to the window."""
    graph = both_models(length=17)
    CHANGES["context windows"](graph)
    add_both(graph, "run", seed=seed)
    own = {name: each for name, each in graph.items() if STOCK not in name}
    result = server.run(own)
    if result.status == "success":
        assert_equal(server, graph)
        return
    message = error_of(result).data["exception_message"]
    assert "the timesteps have shape [2, 5]; this latent needs [2, 1] or [2, 3]" in message
    assert "Context windows may not go together with given frames" in message


def test_a_node_that_reaches_for_the_blocks_is_told_that_there_are_none(
    server: ComfyServer, seed: int
) -> None:
    graph = both_models()
    graph["merged"] = node("ModelMergeSimple", model1=[OWN, 0], model2=[OWN, 0], ratio=0.5)
    add_both(graph, "run", seed=seed)
    graph[f"run {OWN}"]["inputs"]["model"] = ["merged", 0]
    for name in [name for name in graph if STOCK in name]:
        del graph[name]
    error = error_of(server.run(graph)).data
    assert error["node_type"] == "ModelMergeSimple"
    assert "the MODEL of Wan Dist has no '" in error["exception_message"]
    assert "load the model with a stock loader" in error["exception_message"]


def test_models_freed_by_comfyui_are_there_again(server: ComfyServer, seed: int) -> None:
    """ComfyUI's *Unload models* has next to nothing to take; the group keeps its own."""
    graph = both_models()
    add_both(graph, "run", seed=seed)
    assert_equal(server, graph)
    group = group_of(server)
    server.free(unload_models=True, free_memory=True)
    graph = both_models()
    add_both(graph, "run", seed=seed + 1)
    log = len(server.log)
    assert_equal(server, graph)
    assert group_of(server) == group
    assert "ForwardRequest" not in server.log[log:]  # said where bytes are read
