"""Graphs as people have them: what stock ComfyUI runs gives the same latent here, beside the stock nodes.

Covered: inputs that are linked, conditioning with more in it, sizes, masks, schedulers and SIGMAS.
What is refused on purpose is listed in docs/differences.md.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import graphs
import pytest
import torch
from comfy_kit import error_of, latent_of, succeed, tensors_of
from graphs import (
    LORAS,
    MODEL,
    MODELS,
    POSITIVE,
    VAE,
    VAES,
    Graph,
    image_to_video,
    node,
    save_tensors,
)
from safetensors.torch import save_file
from torch import Tensor

from comfy_wan_dist.mesh.parameters import expected_parameters
from comfy_wan_dist.mesh.shape import WanShape
from devtools.checkpoints import TINY_TRANSFORMER, write_transformer
from devtools.comfy_server import ComfyServer
from devtools.loras import plain_lora, spelled
from devtools.mesh_runs import relative_error

DIFFERENCES = Path(__file__).parents[2] / "docs" / "differences.md"
# A server and a group start within the first test that needs them.
pytestmark = pytest.mark.timeout(240)

LORA = "linked.safetensors"
T2V = WanShape(dim=256, ffn_dim=512, num_layers=2, in_dim=16, out_dim=16)
SHAPES = {"graph_t2v.safetensors": T2V, "graph_i2v.safetensors": replace(T2V, in_dim=36)}
T2V_FILE, I2V_FILE = SHAPES
LOW_NOISE_FILE = "graph_low_noise.safetensors"
STOCK_LIMIT = 1e-3
ANY, COMBO = range(2)
"""Outputs of LinkedValue."""


@pytest.fixture(scope="module")
def server(comfy: ComfyServer) -> ComfyServer:
    graphs.write_files(comfy.base)
    lora = spelled(plain_lora(expected_parameters(TINY_TRANSFORMER), seed=6), "comfyui")
    save_file(lora, comfy.base / LORAS / LORA)
    for seed, (name, shape) in enumerate([*SHAPES.items(), (LOW_NOISE_FILE, T2V)]):
        if not (comfy.base / MODELS / name).exists():
            write_transformer(comfy.base / MODELS / name, shape, seed=seed)
    return comfy


def both_models(file: str) -> Graph:
    """A model for stock nodes and for ours, two prompts, and an image."""
    own = image_to_video(model=file)
    return {
        **{name: own[name] for name in ("model", "positive", "negative", "image")},
        "stock": node("UNETLoader", unet_name=file, weight_dtype="default"),
        "shifted": node("ModelSamplingSD3", model=["stock", 0], shift=5.0),
    }


def add_both(graph: Graph, name: str, **inputs: Any) -> None:
    """A stock KSampler and ours that differ in their models only, and what saves their results."""
    inputs = {
        "steps": 3,
        "cfg": 3.0,
        "sampler_name": "euler",
        "scheduler": "simple",
        "denoise": 1.0,
        "positive": ["positive", 0],
        "negative": ["negative", 0],
        **inputs,
    }
    graph[f"stock {name}"] = node("KSampler", model=["shifted", 0], **inputs)
    graph[f"own {name}"] = node("WanDistSampler", model=["model", 0], shift=5.0, **inputs)
    for kind in ("stock", "own"):
        graph[f"save {kind} {name}"] = graphs.save_latent(f"{kind} {name}")


def compare(server: ComfyServer, graph: Graph, *names: str) -> dict[str, Tensor]:
    """Run the graph; both samplers of each name must have the same result, which is returned."""
    result = succeed(server, graph)
    results = {}
    for name in names:
        own, stock = (latent_of(server, result, f"save {kind} {name}") for kind in ("own", "stock"))
        error = relative_error(own, stock)
        print(f"{name}: {error:.1e}")
        assert error <= STOCK_LIMIT, name
        results[name] = own
    return results


def all_differ(results: dict[str, Tensor]) -> bool:
    latents = list(results.values())
    return all(
        relative_error(one, other) > 10 * STOCK_LIMIT
        for index, one in enumerate(latents)
        for other in latents[:index]
        if one.shape == other.shape
    )


def image_conditions(**size: int) -> dict[str, Any]:
    """Inputs of WanImageToVideo and the like for the node "image"."""
    ends = {"positive": ["positive", 0], "negative": ["negative", 0], "vae": ["vae", 0]}
    return {**ends, "start_image": ["image", 0], "batch_size": 1, **size}


# ---- linked inputs


def all_nodes(seed: int) -> Graph:
    """A graph with every node of this pack."""
    graph = image_to_video(seed=seed, steps=2, length=5)
    graph["lora"] = node("WanDistLoRA", model=["model", 0], lora_name=LORA, strength=0.5)
    graph["sampler"]["inputs"]["model"] = ["lora", 0]
    parts = {
        key: ["sampler", 0] if key == "latent_image" else value
        for key, value in (graph["sampler"]["inputs"].items())
        if key not in ("seed", "denoise")
    }
    graph["advanced"] = node(
        "WanDistSamplerAdvanced",
        **parts,
        add_noise="enable",
        noise_seed=seed,
        start_at_step=1,
        end_at_step=2,
        return_with_leftover_noise="disable",
    )
    graph["save"] = graphs.save_latent("advanced")
    graph["saved"] = node(
        "WanDistSaveConditioning", conditioning=["positive", 0], filename_prefix=f"linked/{seed}"
    )
    size = {"width": 1280, "height": 704, "length": 121, "batch_size": 1}
    graph["plan"] = node("WanDistPlan", **size, steps=20, cfg=5.0, devices="8xH100-SXM")
    return graph


def link_widgets(server: ComfyServer, graph: Graph, *, combos_only: bool) -> Graph:
    """The graph with all widgets of this pack's nodes, given or at their defaults, as links."""
    linked: Graph = dict(graph)
    info = server.get("/object_info")
    for name, each in graph.items():
        if not each["class_type"].startswith("WanDist"):
            continue
        inputs = dict(each["inputs"])
        described = info[each["class_type"]]["input"]
        for key, (kind, options) in {
            **described["required"],
            **described.get("optional", {}),
        }.items():
            value = inputs.get(key, options.get("default"))
            if isinstance(value, list) or value is None or (combos_only and kind != "COMBO"):
                continue
            linked[f"{name} {key}"] = node("LinkedValue", value=json.dumps(value))
            inputs[key] = [f"{name} {key}", COMBO if combos_only else ANY]
        linked[name] = {**each, "inputs": inputs}
    return linked


@pytest.mark.parametrize("combos_only", [False, True], ids=["any type", "COMBO"])
def test_linked_inputs_give_what_constants_give_and_are_cached(
    server: ComfyServer, seed: int, combos_only: bool
) -> None:
    graph = all_nodes(seed)
    expected = latent_of(server, succeed(server, graph))
    linked = link_widgets(server, graph, combos_only=combos_only)
    assert len(linked) > len(graph) + (10 if combos_only else 40)
    assert torch.equal(latent_of(server, succeed(server, linked)), expected)
    # A second time ComfyUI finds every node in its cache.
    (cached,) = succeed(server, linked).of_kind("execution_cached")
    assert set(cached.data["nodes"]) == linked.keys()


def test_replaced_files_are_noticed_unless_their_names_are_linked(
    server: ComfyServer, seed: int
) -> None:
    """As by the stock loaders, which notice neither."""

    def executed(graph: Graph) -> set[str]:
        events = succeed(server, graph).of_kind("executing")
        return {event.data["node"] for event in events} - {None}

    graph = all_nodes(seed)
    files = {
        server.base / MODELS / MODEL: "model",
        server.base / LORAS / LORA: "lora",
        server.base / VAES / VAE: "latent",
        server.base / "input" / POSITIVE: "positive",
    }
    executed(graph)
    for file, name in files.items():
        os.utime(file)
        assert {name, "sampler", "decode"} <= executed(graph) < graph.keys()
        assert executed(graph) == set()
    linked = link_widgets(server, graph, combos_only=True)
    executed(linked)
    for file in files:
        os.utime(file)
    assert executed(linked) == set()


def test_numbers_of_numpy_are_numbers(server: ComfyServer, seed: int) -> None:
    """As nodes for arithmetic give them."""
    graph = all_nodes(seed)
    expected = latent_of(server, succeed(server, graph))
    for name, key in (
        *(("sampler", key) for key in ("cfg", "shift", "denoise", "low_noise_cfg", "boundary")),
        ("lora", "strength"),
    ):
        value = graph[name]["inputs"].get(key, 0.0)
        graph[f"{name} {key}"] = node("LinkedValue", value=f"numpy {value}")
        graph[name]["inputs"][key] = [f"{name} {key}", ANY]
    assert torch.equal(latent_of(server, succeed(server, graph)), expected)


# ---- conditioning with more in it


def more(source: str, key: str, value: object) -> dict[str, Any]:
    text = value if value in ("clip", "drop", "twice") else json.dumps(value)
    return node("MoreConditioning", conditioning=[source, 0], key=key, value=text)


def test_what_a_model_does_not_use_is_left_out_as_stock_does(
    server: ComfyServer, seed: int
) -> None:
    graph = both_models(T2V_FILE)
    graph["latent"] = node("EmptyHunyuanLatentVideo", width=48, height=32, length=5, batch_size=1)
    graph["guidance"] = node("FluxGuidance", conditioning=["positive", 0], guidance=3.5)
    graph["strength"] = node(
        "ConditioningSetAreaStrength", conditioning=["guidance", 0], strength=0.5
    )
    graph["width"] = more("strength", "width", 1024)
    graph["foreign"] = more("width", "foreign_pack", {"any": [1, 2]})
    graph["vace"] = more("foreign", "vace_strength", [0.5])
    graph["clip"] = more("vace", "clip_vision_output", "clip")
    graph["reference"] = node("ReferenceLatent", conditioning=["clip", 0], latent=["own plain", 0])
    given = {"latent_image": ["latent", 0], "seed": seed}
    add_both(graph, "plain", **given)
    graph["negative clip"] = more("negative", "clip_vision_output", "clip")
    add_both(graph, "more", **given, positive=["reference", 0], negative=["negative clip", 0])
    results = compare(server, graph, "plain", "more")
    assert relative_error(results["more"], results["plain"]) <= STOCK_LIMIT


def test_clip_vision_behind_an_image_is_left_out_as_stock_does(
    server: ComfyServer, seed: int
) -> None:
    graph = both_models(I2V_FILE)
    graph["vae"] = node("RandomVAE")
    graph["i2v"] = node("WanImageToVideo", **image_conditions(width=48, height=32, length=5))
    graph["clip"] = more("i2v", "clip_vision_output", "clip")
    graph["guidance"] = node("FluxGuidance", conditioning=["clip", 0], guidance=3.5)
    add_both(graph, "clip", seed=seed, latent_image=["i2v", 2], positive=["guidance", 0])
    compare(server, graph, "clip")


def test_what_would_change_the_result_is_refused_by_name(server: ComfyServer, seed: int) -> None:
    graph = both_models(T2V_FILE)
    graph["latent"] = node("EmptyHunyuanLatentVideo", width=48, height=32, length=5, batch_size=1)
    graph["solid"] = node("SolidMask", value=0.5, width=48, height=32)
    cases: dict[str, dict[str, Any]] = {
        "area": node(
            "ConditioningSetArea",
            conditioning=["positive", 0],
            width=64,
            height=64,
            x=0,
            y=0,
            strength=1.0,
        ),
        "mask": node(
            "ConditioningSetMask",
            conditioning=["positive", 0],
            mask=["solid", 0],
            strength=1.0,
            set_cond_area="default",
        ),
        "end_percent": node(
            "ConditioningSetTimestepRange", conditioning=["positive", 0], start=0.0, end=0.5
        ),
        "strength": node("ConditioningSetAreaStrength", conditioning=["positive", 0], strength=0.0),
        **{
            key: more("positive", key, 0.1)
            for key in ("start_percent", "concat_mask_index", "clip_start_percent")
        },
        "clip_end_percent": more("positive", "clip_end_percent", 0.9),
        **{
            key: more("positive", key, [1])
            for key in (
                *("control", "hooks", "gligen", "time_dim_concat", "noise_concat"),
                *("timestep_start", "timestep_end"),
            )
        },
        **{
            key: more("positive", key, [1])
            for key in ("default", "model_conds", "denoise_mask", "context_latents")
        },
    }
    for key, changed in cases.items():
        used = {**graph, "changed": changed}
        add_both(used, "it", seed=seed, latent_image=["latent", 0], positive=["changed", 0])
        del used["stock it"], used["save stock it"]
        message = error_of(server.run(used)).data["exception_message"]
        assert f"the positive conditioning carries {key}, which" in message


def test_negative_prompt_is_not_read_without_guidance(server: ComfyServer, seed: int) -> None:
    graph = both_models(T2V_FILE)
    graph["latent"] = node("EmptyHunyuanLatentVideo", width=48, height=32, length=5, batch_size=1)
    graph["area"] = more("negative", "area", [2, 2, 2, 0, 0, 0])
    given = {"latent_image": ["latent", 0], "seed": seed, "cfg": 1.0}
    add_both(graph, "plain", **given)
    add_both(graph, "area", **given, negative=["area", 0])
    result = succeed(server, graph)
    plain, area = (latent_of(server, result, f"save own {name}") for name in ("plain", "area"))
    assert torch.equal(area, plain)
    stock = latent_of(server, result, "save stock area")
    assert relative_error(stock, plain) > 10 * STOCK_LIMIT


# ---- sizes


def test_odd_latent_sides_are_padded_as_stock_does(server: ComfyServer, seed: int) -> None:
    """16 channels: 72x40 pixels are 9x5 values, 45 tokens; given frames in a second run."""
    graph = both_models(T2V_FILE)
    graph["latent"] = node("EmptyHunyuanLatentVideo", width=72, height=40, length=9, batch_size=2)
    graph["one odd"] = node("EmptyHunyuanLatentVideo", width=64, height=40, length=5, batch_size=1)
    add_both(graph, "odd", latent_image=["latent", 0], seed=seed)
    add_both(graph, "one odd", latent_image=["one odd", 0], seed=seed, sampler_name="uni_pc")
    add_both(graph, "again", latent_image=["stock odd", 0], seed=seed, denoise=0.5)
    results = compare(server, graph, "odd", "one odd", "again")
    assert results["odd"].shape == (2, 16, 3, 5, 9)


def test_odd_latent_sides_with_an_image_are_padded_as_stock_does(
    server: ComfyServer, seed: int
) -> None:
    graph = both_models(I2V_FILE)
    graph["vae"] = node("RandomVAE")
    graph["i2v"] = node("WanImageToVideo", **image_conditions(width=72, height=40, length=5))
    ends = {"positive": ["i2v", 0], "negative": ["i2v", 1], "latent_image": ["i2v", 2]}
    add_both(graph, "odd", seed=seed, **ends)
    compare(server, graph, "odd")


def test_all_nodes_take_the_sizes_that_stock_takes(server: ComfyServer, seed: int) -> None:
    """TI2V: linked sizes and API users send any; the latent, the sampler and the decoder agree with the stock nodes."""
    graph = both_models(MODEL)
    graph["vae"] = node("SmallVAELoader", vae_name=VAE)
    names = []
    for width, height, has_image in ((80, 48, True), (90, 57, True), (90, 57, False)):
        name = f"{width}x{height} {has_image}"
        names.append(name)
        size = {"width": width, "height": height, "length": 5, "batch_size": 1}
        if has_image:
            size["start_image"] = ["image", 0]  # type: ignore[assignment]
        own = {"model": ["model", 0], "vae_name": VAE, "vae_dtype": "float32"}
        graph[f"latent {name}"] = node("WanDistImageToVideoLatent", **own, **size)
        graph[f"stock latent {name}"] = node("Wan22ImageToVideoLatent", vae=["vae", 0], **size)
        add_both(graph, name, latent_image=[f"stock latent {name}", 0], seed=seed)
        samples = [f"own {name}", 0]
        graph[f"images {name}"] = node("WanDistVAEDecode", samples=samples, **own)
        graph[f"stock images {name}"] = node("VAEDecode", samples=samples, vae=["vae", 0])
    latents = [f"{kind}latent {name}" for name in names for kind in ("", "stock ")]
    images = [f"{kind}images {name}" for name in names for kind in ("", "stock ")]
    graph = save_tensors(graph, latent=latents, images=images)
    result = succeed(server, graph)
    for name in names:
        latent, other = (tensors_of(server, result, f"{k}latent {name}") for k in ("", "stock "))
        torch.testing.assert_close(latent, other, rtol=0, atol=1e-5)
        pixels, others = (
            tensors_of(server, result, f"{k}images {name}")["images"] for k in ("", "stock ")
        )
        torch.testing.assert_close(pixels, others, rtol=0, atol=1e-4)
    compare(server, graph, *names)


def test_noise_is_that_of_stock_for_any_batch_index(server: ComfyServer, seed: int) -> None:
    graph = both_models(T2V_FILE)
    names = []
    for size, index in ((2, [1]), (1, [1, 0]), (2, [3, 3])):
        name = f"{size} {index}"
        names.append(name)
        graph[f"latent {name}"] = node(
            "EmptyHunyuanLatentVideo", width=48, height=32, length=5, batch_size=size
        )
        graph[f"given {name}"] = node(
            "MoreLatent", latent=[f"latent {name}", 0], key="batch_index", value=json.dumps(index)
        )
        add_both(graph, name, seed=seed, latent_image=[f"given {name}", 0])
    results = compare(server, graph, *names)
    assert all_differ(results)
    assert all(len(latent) == 2 for latent in results.values())


def test_batch_index_that_cannot_be_meant_is_refused(server: ComfyServer, seed: int) -> None:
    graph = both_models(T2V_FILE)
    graph["latent"] = node("EmptyHunyuanLatentVideo", width=48, height=32, length=5, batch_size=3)
    for index in ([0, 1], [], [-1, 0, 1], 3):
        used = dict(graph)
        used["given"] = node(
            "MoreLatent", latent=["latent", 0], key="batch_index", value=json.dumps(index)
        )
        add_both(used, "it", seed=seed, latent_image=["given", 0])
        del used["stock it"], used["save stock it"]
        error = error_of(server.run(used)).data
        assert error["exception_type"].endswith("ConfigError"), error
        assert f"3 samples with the batch_index {index}: " in error["exception_message"]


def test_latents_in_16_bits_are_sampled_in_32(server: ComfyServer, seed: int) -> None:
    """Stock rounds the sigmas too: to 0.001, of which the model is told 1000 times as much."""
    graph = both_models(T2V_FILE)
    graph["latent"] = node("EmptyHunyuanLatentVideo", width=48, height=32, length=5, batch_size=1)
    graph["half"] = node("MoreLatent", latent=["latent", 0], key="dtype", value="float16")
    add_both(graph, "half", seed=seed, latent_image=["half", 0])
    result = succeed(server, graph)
    own, stock = (latent_of(server, result, f"save {kind} half") for kind in ("own", "stock"))
    assert own.dtype == torch.float32
    assert STOCK_LIMIT < relative_error(own, stock) < 0.05


# ---- masks and presets


def test_masks_on_models_of_16_channels_are_those_of_stock(server: ComfyServer, seed: int) -> None:
    graph = both_models(T2V_FILE)
    graph["empty"] = node("EmptyHunyuanLatentVideo", width=48, height=32, length=9, batch_size=1)
    graph["solid"] = node("SolidMask", value=0.7, width=24, height=16)
    graph["part"] = node("SolidMask", value=0.0, width=48, height=32)
    graph["mask"] = node(
        "MaskComposite",
        destination=["part", 0],
        source=["solid", 0],
        x=10,
        y=5,
        operation="add",
    )
    for name, samples in (("zero", "empty"), ("video", "own video")):
        graph[f"masked {name}"] = node("SetLatentNoiseMask", samples=[samples, 0], mask=["mask", 0])
    given = {"latent_image": ["masked video", 0], "seed": seed + 1}
    add_both(graph, "video", latent_image=["empty", 0], seed=seed)
    add_both(graph, "euler", **given)
    add_both(graph, "uni_pc", **given, sampler_name="uni_pc")
    add_both(graph, "lcm", **given, sampler_name="lcm", cfg=1.0)
    add_both(graph, "denoise", **given, denoise=0.6)
    add_both(graph, "zero", latent_image=["masked zero", 0], seed=seed)
    assert all_differ(compare(server, graph, "video", "euler", "uni_pc", "lcm", "denoise", "zero"))


def test_mask_beside_an_image_is_that_of_stock(server: ComfyServer, seed: int) -> None:
    """Without a mask of its own the image counts where the video is given."""
    graph = both_models(I2V_FILE)
    graph["vae"] = node("RandomVAE")
    graph["i2v"] = node("WanImageToVideo", **image_conditions(width=48, height=32, length=9))
    graph["bare"] = more("i2v", "concat_mask", "drop")
    graph["mask"] = node("SolidMask", value=0.7, width=48, height=32)
    graph["masked"] = node("SetLatentNoiseMask", samples=["i2v", 2], mask=["mask", 0])
    masked = {"latent_image": ["masked", 0], "seed": seed}
    add_both(graph, "own mask", **masked, positive=["i2v", 0], negative=["i2v", 1])
    add_both(graph, "no mask", **masked, positive=["bare", 0], negative=["bare", 0])
    assert all_differ(compare(server, graph, "own mask", "no mask"))


def test_preset_of_a_single_model_is_refused_for_two_experts(
    server: ComfyServer, seed: int
) -> None:
    graph = both_models(T2V_FILE)
    graph["model"]["inputs"]["low_noise_model"] = LOW_NOISE_FILE
    graph["latent"] = node("EmptyHunyuanLatentVideo", width=48, height=32, length=5, batch_size=1)
    add_both(graph, "it", seed=seed, latent_image=["latent", 0])
    graph["own it"]["inputs"]["few_step"] = "Turbo, 4 steps"
    message = error_of(server.run(graph)).data["exception_message"]
    assert "few_step 'Turbo, 4 steps' is for a model with one expert" in message
    assert "set few_step to off" in message


# ---- schedulers and SIGMAS


def test_schedulers_of_other_packs_are_those_of_stock(server: ComfyServer, seed: int) -> None:
    """One that comes after our nodes were loaded; and ddim_uniform, which gives 8 steps for 7."""
    succeed(server, {"late": node("LateScheduler", name="late")})
    graph = both_models(T2V_FILE)
    graph["latent"] = node("EmptyHunyuanLatentVideo", width=48, height=32, length=5, batch_size=1)
    given = {"latent_image": ["latent", 0], "seed": seed}
    one = dict(graph)
    add_both(graph, "late", **given, scheduler="late", steps=4)
    add_both(graph, "late uni_pc", **given, scheduler="late", sampler_name="uni_pc", steps=1)
    add_both(graph, "more", **given, scheduler="ddim_uniform", steps=7)
    assert all_differ(compare(server, graph, "late", "late uni_pc", "more"))
    add_both(one, "one", **given, scheduler="late", steps=1)
    del one["stock one"], one["save stock one"]
    message = error_of(server.run(one)).data["exception_message"]
    assert "scheduler 'late' fails for 1 steps at shift 5: " in message
    assert "division by zero" in message


def test_denoise_beyond_its_range_is_taken_as_stock_takes_it(
    server: ComfyServer, seed: int
) -> None:
    """A link may bring any number."""
    graph = both_models(T2V_FILE)
    graph["latent"] = node("EmptyHunyuanLatentVideo", width=48, height=32, length=5, batch_size=1)
    add_both(graph, "video", latent_image=["latent", 0], seed=seed)
    names = {"1.5": 1.5, "-0.5": -0.5, "0.0001": 0.0001}
    for name, denoise in names.items():
        graph[name] = node("LinkedValue", value=json.dumps(denoise))
        add_both(graph, name, latent_image=["stock video", 0], seed=seed + 1, denoise=[name, 0])
    results = compare(server, graph, "video", *names)
    assert relative_error(results["-0.5"], results["video"]) <= STOCK_LIMIT


SIGMAS: tuple[tuple[str, str], ...] = (
    ("euler", "1.0005,0.7,0.3,0"),
    ("euler", "1,0.9,0.9,0.5,0.5,0"),
    ("lcm", "1,0.9,0.9,0.5,0.25"),
    ("uni_pc", "1.0005,0.8,0.5,0"),
)


def use_sigmas(graph: Graph, name: str, values: str) -> None:
    """Let what `add_both` added sample with these sigmas."""
    graph[f"sigmas {name}"] = node("GivenSigmas", values=values, dims=0)
    sigmas = {"sigmas": [f"sigmas {name}", 0]}
    graph[f"own {name}"]["inputs"].update(sigmas)
    inputs = graph[f"stock {name}"]["inputs"]
    graph[f"solver {name}"] = node("KSamplerSelect", sampler_name=inputs["sampler_name"])
    kept = ("positive", "negative", "latent_image", "cfg")
    graph[f"stock {name}"] = node(
        "SamplerCustom",
        model=["stock", 0],
        add_noise=True,
        noise_seed=inputs["seed"],
        sampler=[f"solver {name}", 0],
        **sigmas,
        **{key: inputs[key] for key in kept},
    )


def test_sigmas_are_taken_as_stock_takes_them(server: ComfyServer, seed: int) -> None:
    graph = both_models(T2V_FILE)
    graph["latent"] = node("EmptyHunyuanLatentVideo", width=48, height=32, length=5, batch_size=1)
    names = []
    for index, (sampler, values) in enumerate(SIGMAS):
        name = f"{index}"
        names.append(name)
        add_both(graph, name, latent_image=["latent", 0], seed=seed, sampler_name=sampler)
        use_sigmas(graph, name, values)
    assert all_differ(compare(server, graph, *names))


# ---- what is refused on purpose

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    # The changed inputs of both samplers; how the row of docs/differences.md begins.
    "combined": ({"positive": ["both", 0]}, "a CONDITIONING of several entries"),
    "none": ({"positive": ["none", 0]}, "a CONDITIONING of several entries"),
    "samples": ({"positive": ["samples", 0]}, "an embedding of several samples"),
    "area": ({"positive": ["area", 0]}, "areas, masks, time ranges"),
    "mask": ({"positive": ["covered", 0]}, "areas, masks, time ranges"),
    "range": ({"positive": ["range", 0]}, "areas, masks, time ranges"),
    "image": (
        {"positive": ["i2v", 0]},
        "an image from WanImageToVideo for a model that takes none",
    ),
    "rising": ({"sigmas": "0.5,0.75,0"}, "sigmas that rise"),
    "high": ({"sigmas": "3,1,0"}, "sigmas that rise"),
    "equal": ({"sigmas": "1,0.5,0.5,0", "sampler_name": "uni_pc"}, "equal neighbours"),
}


def test_sigmas_of_0_alone_leave_a_latent_as_it_is(server: ComfyServer, seed: int) -> None:
    """As SplitSigmas gives behind the last step."""
    graph = both_models(T2V_FILE)
    graph["latent"] = node("EmptyHunyuanLatentVideo", width=48, height=32, length=5, batch_size=1)
    add_both(graph, "video", latent_image=["latent", 0], seed=seed)
    add_both(graph, "again", latent_image=["stock video", 0], seed=seed)
    use_sigmas(graph, "again", "0")
    results = compare(server, graph, "video", "again")
    assert relative_error(results["again"], results["video"]) <= STOCK_LIMIT
    graph["own again"]["inputs"]["latent_image"] = ["latent", 0]
    assert latent_of(server, succeed(server, graph), "save own again").count_nonzero() == 0


def test_what_stock_runs_and_we_refuse_is_listed(server: ComfyServer, seed: int) -> None:
    graph = both_models(T2V_FILE)
    positive = ["positive", 0]
    graph["vae"] = node("RandomVAE")
    graph["latent"] = node("EmptyHunyuanLatentVideo", width=48, height=32, length=5, batch_size=1)
    graph["still"] = node("EmptyLatentImage", width=48, height=32, batch_size=1)
    graph["i2v"] = node("WanImageToVideo", **image_conditions(width=48, height=32, length=5))
    graph["solid"] = node("SolidMask", value=0.5, width=48, height=32)
    graph["both"] = node(
        "ConditioningCombine", conditioning_1=positive, conditioning_2=["negative", 0]
    )
    graph["none"] = node("LinkedValue", value="[]")
    graph["samples"] = more("positive", "", "twice")
    graph["area"] = node(
        "ConditioningSetAreaPercentageVideo",
        conditioning=positive,
        width=0.5,
        height=0.5,
        temporal=1.0,
        x=0,
        y=0,
        z=0,
        strength=1.0,
    )
    graph["covered"] = node(
        "ConditioningSetMask",
        conditioning=positive,
        mask=["solid", 0],
        strength=1.0,
        set_cond_area="default",
    )
    graph["range"] = node("ConditioningSetTimestepRange", conditioning=positive, start=0.0, end=0.5)
    rows = [
        line.split("|")[1].strip() for line in DIFFERENCES.read_text().splitlines() if "|" in line
    ]
    stock, own = dict(graph), {}
    for name, (changed, row) in REFUSED.items():
        assert any(each.startswith(row) for each in rows), row
        own[name] = dict(graph)
        for target in (stock, own[name]):
            inputs = {"latent_image": ["latent", 0], "seed": seed, **changed}
            values = inputs.pop("sigmas", None)
            add_both(target, name, **inputs)
            if values is not None:
                use_sigmas(target, name, values)
        del stock[f"own {name}"], stock[f"save own {name}"]
        del own[name][f"stock {name}"], own[name][f"save stock {name}"]
    succeed(server, stock)
    for name, each in own.items():
        error = error_of(server.run(each)).data
        assert error["node_id"] == f"own {name}"
        assert error["exception_type"].endswith("ConfigError"), error
