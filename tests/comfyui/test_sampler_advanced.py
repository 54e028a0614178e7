"""Parts of a run: WanDistSamplerAdvanced beside stock KSamplerAdvanced, in one stage and in several.

Covered: every solver that stock has, leftover noise, given frames, models of 16 and of 48 channels, experts, SIGMAS.
Which sigmas a part has is compared in tests/nodes/test_stock_schedules.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import graphs
import pytest
import torch
from comfy_kit import error_of, latent_of, succeed
from graphs import MODEL, MODELS, Graph, image_to_video, node, save_latent
from torch import Tensor

from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.solvers.table import SOLVERS
from devtools.checkpoints import write_transformer
from devtools.comfy_server import ComfyServer
from devtools.mesh_runs import relative_error

# A server and a group start within the first test that needs them.
pytestmark = pytest.mark.timeout(240)

T2V_FILE, LOW_NOISE_FILE = "advanced_t2v.safetensors", "advanced_low_noise.safetensors"
STOCK_LIMIT = 1e-3
STOCK_SOLVERS = [kind.name for kind in SOLVERS if kind.name == kind.stock]
STEPS = 5
LAST = 10000

Stage = dict[str, Any]


def stage(start: int, end: int = LAST, **inputs: Any) -> Stage:
    """A stage as people chain them: the first adds noise, all but the last leave some in."""
    return {
        "start_at_step": start,
        "end_at_step": end,
        "add_noise": "disable" if start else "enable",
        "return_with_leftover_noise": "disable" if end == LAST else "enable",
        **inputs,
    }


CHAINS: dict[str, tuple[Stage, ...]] = {
    "one": (stage(0),),
    "two": (stage(0, 2), stage(2)),
    # lcm adds noise by each stage's own seed.
    "three": (stage(0, 1), stage(1, 4, noise_seed=1), stage(4, noise_seed=2)),
}
"""For each latent and solver."""

ODD_CHAINS: dict[str, tuple[Stage, ...]] = {
    "noise left in": (stage(0, 3),),
    "ends at 0": (stage(0, 2, return_with_leftover_noise="disable"),),
    "noise anew": (stage(0, 3), stage(2, add_noise="enable", noise_seed=3)),
    "a gap": (stage(0, 1), stage(3)),
    "from the start": (stage(0, 4), stage(0, add_noise="disable")),
    "a part of a video": (stage(0), stage(2, 4, add_noise="enable", noise_seed=4)),
    "to the last step": (stage(0, STEPS, return_with_leftover_noise="enable"),),
}
NO_STEPS = {
    "no steps": (stage(3, 3),),
    "behind the end": (stage(4, 2),),
    "beyond the last step": (stage(STEPS, add_noise="enable"),),
    "up to the first step": (stage(0, 0, return_with_leftover_noise="disable"),),
}


@pytest.fixture(scope="module")
def server(comfy: ComfyServer) -> ComfyServer:
    graphs.write_files(comfy.base)
    shape = WanShape(dim=256, ffn_dim=512, num_layers=2, in_dim=16, out_dim=16)
    for seed, name in enumerate((T2V_FILE, LOW_NOISE_FILE)):
        if not (comfy.base / MODELS / name).exists():
            write_transformer(comfy.base / MODELS / name, shape, seed=seed)
    return comfy


def start_graph(file: str) -> Graph:
    """A model for stock nodes and for ours, two prompts, and the latents "plain" and "masked"."""
    own = image_to_video(model=file, width=64, height=32)
    graph: Graph = {
        **{name: own[name] for name in ("model", "positive", "negative")},
        "stock": node("UNETLoader", unet_name=file, weight_dtype="default"),
        "shifted": node("ModelSamplingSD3", model=["stock", 0], shift=5.0),
    }
    if file == MODEL:
        graph["image"], graph["masked"] = own["image"], own["latent"]
        inputs = {
            name: value for name, value in own["latent"]["inputs"].items() if name != "start_image"
        }
        graph["plain"] = node("WanDistImageToVideoLatent", **inputs)
        return graph
    graph["plain"] = node("EmptyHunyuanLatentVideo", width=48, height=32, length=5, batch_size=2)
    add_chain(graph, "given", CHAINS["one"], latent="plain", seed=1, kinds=("own",))
    graph["solid"] = node("SolidMask", value=0.7, width=24, height=16)
    graph["kept"] = node("SolidMask", value=0.0, width=48, height=32)
    ends = {"destination": ["kept", 0], "source": ["solid", 0]}
    graph["mask"] = node("MaskComposite", **ends, x=10, y=5, operation="add")
    graph["masked"] = node("SetLatentNoiseMask", samples=["own given 0", 0], mask=["mask", 0])
    return graph


def add_chain(
    graph: Graph,
    name: str,
    stages: Sequence[Stage],
    *,
    latent: str,
    seed: int,
    kinds: Sequence[str] = ("stock", "own"),
    **inputs: Any,
) -> None:
    """Samplers that hand their latent on, of each kind, and what saves their last one.

    kinds: "stock", "own", or whose stages take turns: "stock+own". Nodes are called "own two 0", "own two 1".
    """
    for kind in kinds:
        before = latent
        for index, each in enumerate(stages):
            of = kind.split("+")
            is_stock = of[index % len(of)] == "stock"
            at = f"{kind} {name} {index}"
            settings = {
                "noise_seed": seed,
                "steps": STEPS,
                "cfg": 3.0,
                "sampler_name": "euler",
                "scheduler": "simple",
                "positive": ["positive", 0],
                "negative": ["negative", 0],
                "latent_image": [before, 0],
                **inputs,
                **each,
            }
            if is_stock:
                graph[at] = node("KSamplerAdvanced", **{"model": ["shifted", 0], **settings})
            else:
                own = {"model": ["model", 0], "shift": 5.0, **settings}
                graph[at] = node("WanDistSamplerAdvanced", **own)
            before = at
        graph[f"save {kind} {name}"] = save_latent(before)


def add_whole(graph: Graph, *, seed: int, **inputs: Any) -> None:
    """A WanDistSampler, and what saves its result."""
    settings = {"steps": STEPS, "cfg": 3.0, "scheduler": "simple", "shift": 5.0, "denoise": 1.0}
    links = {key: [key, 0] for key in ("model", "positive", "negative")}
    given = {**links, **settings, "latent_image": ["plain", 0], "seed": seed, **inputs}
    graph["whole"] = node("WanDistSampler", **given)
    graph["save whole"] = save_latent("whole")


def run(server: ComfyServer, graph: Graph) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The saved latents by what they are of, such as "own two", and the texts by the names of their nodes."""
    result = succeed(server, graph)
    saved = [name for name in graph if name.startswith("save ")]
    texts = {
        name: result.outputs[name]["text"][0]
        for name in graph
        if graph[name]["class_type"] == "PreviewAny"
    }
    return {name.removeprefix("save "): latent_of(server, result, name) for name in saved}, texts


def assert_equal(results: dict[str, Tensor], own: str, stock: str) -> None:
    error = relative_error(results[own], results[stock])
    print(f"{own}, {stock}: {error:.1e}")
    assert error <= STOCK_LIMIT, (own, stock)


def assert_other(results: dict[str, Tensor], one: str, other: str) -> None:
    assert relative_error(results[one], results[other]) > 10 * STOCK_LIMIT, (one, other)


@pytest.mark.parametrize("latent", ["plain", "masked"])
@pytest.mark.parametrize("file", [MODEL, T2V_FILE], ids=["48 channels", "16 channels"])
def test_stages_are_those_of_stock(server: ComfyServer, seed: int, file: str, latent: str) -> None:
    graph = start_graph(file)
    for solver, name in [(solver, name) for solver in STOCK_SOLVERS for name in CHAINS]:
        chain: dict[str, Any] = {"latent": latent, "seed": seed, "sampler_name": solver}
        add_chain(graph, f"{solver} {name}", CHAINS[name], **chain)
    results, _ = run(server, graph)
    for solver in STOCK_SOLVERS:
        for name in CHAINS:
            assert_equal(results, f"own {solver} {name}", f"stock {solver} {name}")
    for name in ("two", "three"):
        if latent == "plain":
            assert_equal(results, f"own euler {name}", "own euler one")
            assert_equal(results, f"stock euler {name}", "stock euler one")
        else:
            # The frames that are kept have the noise in them that the first stage left.
            assert_other(results, f"stock euler {name}", "stock euler one")
        assert_other(results, f"own lcm {name}", "own lcm one")
        assert_other(results, f"own uni_pc {name}", "own uni_pc one")


@pytest.mark.parametrize("file", [MODEL, T2V_FILE], ids=["48 channels", "16 channels"])
def test_stages_that_do_not_fit_each_other_are_those_of_stock(
    server: ComfyServer, seed: int, file: str
) -> None:
    graph = start_graph(file)
    solvers = ("euler", "uni_pc", "lcm")
    for solver in solvers:
        for name, stages in ODD_CHAINS.items():
            chain: dict[str, Any] = {"latent": "masked", "seed": seed, "sampler_name": solver}
            add_chain(graph, f"{solver} {name}", stages, scheduler="beta", **chain)
    results, _ = run(server, graph)
    for name in [f"{solver} {name}" for solver in solvers for name in ODD_CHAINS]:
        assert_equal(results, f"own {name}", f"stock {name}")


def test_without_a_step_the_latent_stays_as_it_is(server: ComfyServer, seed: int) -> None:
    graph = start_graph(T2V_FILE)
    for name, stages in NO_STEPS.items():
        add_chain(graph, name, stages, latent="masked", seed=seed)
        graph[f"text {name}"] = node("PreviewAny", source=[f"own {name} 0", 1])
    graph["save given"] = save_latent("masked")
    results, texts = run(server, graph)
    for name in NO_STEPS:
        assert torch.equal(results[f"own {name}"], results["given"]), name
        assert torch.equal(results[f"stock {name}"], results["given"]), name
        assert texts[f"text {name}"] == "no steps: nothing was computed"


def test_stages_of_stock_and_ours_go_on_from_each_other(server: ComfyServer, seed: int) -> None:
    graph = start_graph(MODEL)
    given: dict[str, Any] = {"latent": "masked", "seed": seed, "sampler_name": "uni_pc"}
    kinds = ("stock", "own", "stock+own", "own+stock")
    add_chain(graph, "two", CHAINS["two"], kinds=kinds, **given)
    results, _ = run(server, graph)
    for kind in kinds[1:]:
        assert_equal(results, f"{kind} two", "stock two")


def test_official_schedule_is_the_same_in_stages(server: ComfyServer, seed: int) -> None:
    graph = start_graph(MODEL)
    given: dict[str, Any] = {
        "latent": "plain",
        "seed": seed,
        "scheduler": "wan_official",
        "kinds": ("own",),
    }
    for name, stages in CHAINS.items():
        add_chain(graph, name, stages, **given)
        add_chain(graph, f"unipc {name}", stages, **given, sampler_name="wan_unipc")
    add_whole(graph, seed=seed, sampler_name="wan_unipc", scheduler="wan_official")
    results, _ = run(server, graph)
    assert torch.equal(results["own unipc one"], results["whole"])
    for name in ("two", "three"):
        assert_equal(results, f"own {name}", "own one")
        # A multistep solver begins anew.
        assert_other(results, f"own unipc {name}", "whole")


def test_stages_of_given_sigmas_are_those_of_split_sigmas(server: ComfyServer, seed: int) -> None:
    """Whose last value is above 0: noise is left whatever the node is told."""
    graph = start_graph(T2V_FILE)
    graph["sigmas"] = node("GivenSigmas", values="1,0.9,0.7,0.4,0.1", dims=0)
    graph["split"] = node("SplitSigmas", sigmas=["sigmas", 0], step=2)
    graph["solver"] = node("KSamplerSelect", sampler_name="uni_pc")
    before = "plain"
    for index in (0, 1):
        graph[f"stock {index}"] = node(
            "SamplerCustom",
            model=["stock", 0],
            add_noise=index == 0,
            noise_seed=seed,
            cfg=3.0,
            sampler=["solver", 0],
            sigmas=["split", index],
            latent_image=[before, 0],
            **{key: [key, 0] for key in ("positive", "negative")},
        )
        before = f"stock {index}"
    graph["save stock two"] = save_latent(before)
    given: dict[str, Any] = {
        "latent": "plain",
        "seed": seed,
        "sampler_name": "uni_pc",
        "kinds": ("own",),
    }
    add_chain(graph, "two", CHAINS["two"], **given, sigmas=["sigmas", 0])
    graph["text"] = node("PreviewAny", source=["own two 1", 1])
    results, texts = run(server, graph)
    assert_equal(results, "own two", "stock two")
    assert texts["text"].startswith(
        "2 of 4 steps from step 2 on, no noise added, sigmas 0.7, 0.4, 0.1; not used: steps, scheduler, shift\n\nmesh"
    )


def test_each_expert_does_its_steps_of_a_stage(server: ComfyServer, seed: int) -> None:
    """Sigmas 1, 0.96, 0.91, then 0.83, below the boundary of 0.875: where the graph cuts does not matter.

    Stock samplers are cut there, each with its expert.
    """
    graph = start_graph(T2V_FILE)
    graph["model"]["inputs"]["low_noise_model"] = LOW_NOISE_FILE
    graph["low"] = node("UNETLoader", unet_name=LOW_NOISE_FILE, weight_dtype="default")
    graph["low shifted"] = node("ModelSamplingSD3", model=["low", 0], shift=5.0)
    given: dict[str, Any] = {"latent": "plain", "seed": seed, "steps": 6}
    by_expert = (stage(0, 3), stage(3, model=["low shifted", 0], cfg=2.0))
    add_chain(graph, "experts", by_expert, kinds=("stock",), **given)
    given |= {"low_noise_cfg": 2.0, "kinds": ("own",)}
    chains = {
        "one": ((stage(0),), ["3, by the low-noise expert: 3"]),
        "early": (
            (stage(0, 2), stage(2)),
            ["2, by the low-noise expert: 0", "1, by the low-noise expert: 3"],
        ),
        "late": (
            (stage(0, 4), stage(4)),
            ["3, by the low-noise expert: 1", "0, by the low-noise expert: 2"],
        ),
    }
    for name, (stages, steps) in chains.items():
        add_chain(graph, name, stages, **given)
        for index in range(len(steps)):
            graph[f"text {name} {index}"] = node("PreviewAny", source=[f"own {name} {index}", 1])
    add_whole(graph, seed=seed, sampler_name="euler", steps=6, low_noise_cfg=2.0)
    results, texts = run(server, graph)
    assert_equal(results, "whole", "stock experts")
    for name, (_, steps) in chains.items():
        assert_equal(results, f"own {name}", "stock experts")
        for index, said in enumerate(steps):
            assert f"steps by the high-noise expert: {said}\n" in texts[f"text {name} {index}"]


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"add_noise": "maybe"}, "add_noise is 'maybe'; it must be 'enable' or 'disable'"),
        ({"return_with_leftover_noise": ""}, "return_with_leftover_noise is ''"),
        ({"start_at_step": -1}, "start_at_step is -1 and end_at_step 2; they count steps from 0"),
    ],
)
def test_linked_values_that_stock_does_not_offer_are_refused(
    server: ComfyServer, seed: int, inputs: Stage, words: str
) -> None:
    """ComfyUI checks widgets, and no links."""
    graph = start_graph(T2V_FILE)
    linked = {}
    for key, value in inputs.items():
        graph[f"linked {key}"] = node("LinkedValue", value=json.dumps(value))
        linked[key] = [f"linked {key}", 0]
    add_chain(graph, "it", [{**stage(0, 2), **linked}], latent="plain", seed=seed, kinds=("own",))
    error = error_of(server.run(graph)).data
    assert error["exception_type"].endswith("ConfigError"), error
    assert words in error["exception_message"]
