"""The example workflows: whole in themselves, equal to their API twins, valid for a real ComfyUI.

Covered: links and widgets of the UI graphs, their conversion to the API form, where nodes and
models come from, and validation of every API graph by ComfyUI with empty files in the place of the
models. Not covered: what they look like (open them), and running them with the real model.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from devtools.comfy_server import ComfyServer, PromptRejected

ROOT = Path(__file__).resolve().parents[2]
UI_FOLDER = ROOT / "example_workflows"
API_FOLDER = UI_FOLDER / "api"
UI_NAMES = sorted(path.stem for path in UI_FOLDER.glob("*.json"))
API_NAMES = sorted(path.stem for path in API_FOLDER.glob("*.json"))

# Widgets of a node class in the order in which a UI graph stores their values.
WIDGETS = {
    "WanDistLoadModel": [
        "model_name",
        "dtype",
        "mesh",
        "devices",
        "compile",
        "machines",
        "head_address",
        "low_noise_model",
    ],
    "WanDistSampler": [
        "seed",
        "control_after_generate",
        "steps",
        "cfg",
        "sampler_name",
        "scheduler",
        "shift",
        "denoise",
        "few_step",
        "boundary",
        "low_noise_cfg",
    ],
    "WanDistVAEDecode": ["vae_name", "vae_dtype", "image_dtype", "memory"],
    "WanDistImageToVideoLatent": [
        "vae_name",
        "width",
        "height",
        "length",
        "batch_size",
        "vae_dtype",
        "memory",
    ],
    "WanDistLoadConditioning": ["file"],
    "CLIPLoader": ["clip_name", "type", "device"],
    "CLIPTextEncode": ["text"],
    "VAELoader": ["vae_name"],
    "Wan22ImageToVideoLatent": ["width", "height", "length", "batch_size"],
    "LoadImage": ["image", "upload"],
    "CreateVideo": ["fps"],
    "SaveVideo": ["filename_prefix", "format", "codec"],
}
# Widgets that only the front end has.
FRONT_END_ONLY = {"control_after_generate", "upload"}
NOTES = {"MarkdownNote"}
WIDGET_TYPES = {"COMBO", "INT", "FLOAT", "STRING", "BOOLEAN"}

# Inputs that name a file, and the folder it lies in.
FILE_FOLDERS = {
    "model_name": "models/diffusion_models",
    "clip_name": "models/text_encoders",
    "vae_name": "models/vae",
    "image": "input",
    "file": "input",
}

Graph = dict[str, Any]


def read(path: Path) -> Graph:
    graph: Graph = json.loads(path.read_text(encoding="utf-8"))
    return graph


def to_api(graph: Graph) -> Graph:
    """The inputs of every node, as the front end would queue them."""
    links = {link[0]: [str(link[1]), link[2]] for link in graph["links"]}
    api = {}
    for node in graph["nodes"]:
        if node["type"] in NOTES:
            continue
        names, values = WIDGETS[node["type"]], node["widgets_values"]
        assert len(names) == len(values), node["type"]
        inputs = {
            name: value
            for name, value in zip(names, values, strict=True)
            if name not in FRONT_END_ONLY
        }
        for socket in node["inputs"]:
            if socket["link"] is not None:
                inputs[socket["name"]] = links[socket["link"]]
        api[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return api


def own_node_ids() -> set[str]:
    """The node ids that the pack's sources define."""
    found = set()
    for path in (ROOT / "comfy_wan_dist" / "nodes").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "node_id":
                found.add(ast.literal_eval(node.value))
    return found


def test_every_ui_graph_has_an_api_twin_and_both_are_there() -> None:
    assert UI_NAMES == ["wan_dist_image_to_video", "wan_dist_text_to_video"]
    assert sorted([*UI_NAMES, "demo"]) == API_NAMES


@pytest.mark.parametrize("name", UI_NAMES)
def test_ui_graph_links_are_consistent(name: str) -> None:
    graph = read(UI_FOLDER / f"{name}.json")
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert len(nodes) == len(graph["nodes"])
    assert graph["version"] == 0.4
    assert graph["last_node_id"] == max(nodes)
    assert graph["last_link_id"] == max(link[0] for link in graph["links"])
    for number, source, source_slot, target, target_slot, kind in graph["links"]:
        output = nodes[source]["outputs"][source_slot]
        socket = nodes[target]["inputs"][target_slot]
        assert number in output["links"]
        assert socket["link"] == number
        assert output["type"] == socket["type"] == kind
        assert nodes[source]["order"] < nodes[target]["order"]
    ends = [socket["link"] for node in nodes.values() for socket in node["inputs"]]
    starts = [
        link for node in nodes.values() for out in node["outputs"] for link in out["links"] or []
    ]
    numbers = sorted(link[0] for link in graph["links"])
    assert sorted(link for link in ends if link is not None) == numbers
    assert sorted(starts) == numbers


@pytest.mark.parametrize("name", UI_NAMES)
def test_ui_graph_equals_its_api_twin(name: str) -> None:
    twin = read(API_FOLDER / f"{name}.json")
    without_titles = {
        id: {k: v for k, v in node.items() if k != "_meta"} for id, node in twin.items()
    }
    assert to_api(read(UI_FOLDER / f"{name}.json")) == without_titles


@pytest.mark.parametrize("name", UI_NAMES)
def test_ui_graph_tells_where_nodes_and_models_come_from(name: str) -> None:
    graph = read(UI_FOLDER / f"{name}.json")
    note = next(node["widgets_values"][0] for node in graph["nodes"] if node["type"] in NOTES)
    for node in graph["nodes"]:
        if node["type"] in NOTES:
            continue
        origin = "comfy-wan-dist" if node["type"].startswith("WanDist") else "comfy-core"
        assert node["properties"]["cnr_id"] == origin
        named = {value for value in node["widgets_values"] if str(value).endswith(".safetensors")}
        models = node["properties"].get("models", [])
        assert {model["name"] for model in models} == named
        for model in models:
            assert model["url"].endswith("/" + model["name"])
            assert model["directory"] in model["url"]
            assert model["url"] in note


@pytest.mark.parametrize("name", API_NAMES)
def test_api_graph_uses_known_nodes_and_existing_links(name: str) -> None:
    graph = read(API_FOLDER / f"{name}.json")
    for node in graph.values():
        assert node["class_type"] in WIDGETS
        assert node["_meta"]["title"]
        for value in node["inputs"].values():
            assert not isinstance(value, list) or value[0] in graph
    ours = {
        node["class_type"] for node in graph.values() if node["class_type"].startswith("WanDist")
    }
    assert ours
    assert ours <= own_node_ids()


def test_every_own_node_has_a_help_page() -> None:
    pages = {path.stem for path in (ROOT / "web" / "docs").glob("*.md")}
    assert pages == own_node_ids()


def test_thumbnails_belong_to_a_workflow_and_are_small() -> None:
    for path in UI_FOLDER.glob("*.jpg"):
        assert path.stem in UI_NAMES
        assert path.stat().st_size < 150_000
        with Image.open(path) as image:
            assert abs(image.width / image.height - 16 / 9) < 0.01


# ---- with a real ComfyUI


@pytest.fixture
def placeholders(comfy: ComfyServer) -> Iterator[ComfyServer]:
    """A ComfyUI in which every file that an example names exists, empty."""
    made = []
    for name in API_NAMES:
        for node in read(API_FOLDER / f"{name}.json").values():
            for key, value in node["inputs"].items():
                if key in FILE_FOLDERS:
                    path = comfy.base / FILE_FOLDERS[key] / value.removesuffix(" [input]")
                    path.parent.mkdir(parents=True, exist_ok=True)
                    if not path.exists():
                        path.touch()
                        made.append(path)
    try:
        yield comfy
    finally:
        for path in made:
            path.unlink()


@pytest.mark.parametrize("name", UI_NAMES)
def test_ui_graph_has_the_outputs_of_our_nodes(comfy: ComfyServer, name: str) -> None:
    for node in read(UI_FOLDER / f"{name}.json")["nodes"]:
        if not node["type"].startswith("WanDist"):
            continue
        info = comfy.get(f"/object_info/{node['type']}")[node["type"]]
        outputs = [(output["name"], output["type"]) for output in node["outputs"]]
        assert outputs == list(zip(info["output_name"], info["output"], strict=True))


def test_object_info_has_the_widgets_in_this_order(comfy: ComfyServer) -> None:
    for name, widgets in WIDGETS.items():
        info = comfy.get(f"/object_info/{name}")[name]
        found = []
        for part in ("required", "optional"):
            for key in info["input_order"].get(part, []):
                kind, *options = info["input"][part][key]
                if isinstance(kind, list) or kind in WIDGET_TYPES:
                    found.append(key)
                    if options and options[0].get("control_after_generate"):
                        found.append("control_after_generate")
                    if options and options[0].get("image_upload"):
                        found.append("upload")
        # Later versions of ComfyUI have given nodes of its own more, at the end.
        assert (found if name.startswith("WanDist") else found[: len(widgets)]) == widgets, name


@pytest.mark.parametrize("name", API_NAMES)
def test_object_info_has_every_input_of_the_api_graph(comfy: ComfyServer, name: str) -> None:
    for node in read(API_FOLDER / f"{name}.json").values():
        kind = node["class_type"]
        inputs = comfy.get(f"/object_info/{kind}")[kind]["input"]
        required, optional = inputs.get("required", {}), inputs.get("optional", {})
        assert set(required) <= set(node["inputs"]) <= {*required, *optional}, kind


@pytest.mark.parametrize("name", API_NAMES)
def test_comfyui_accepts_the_api_graph(placeholders: ComfyServer, name: str) -> None:
    """Validation comes first; then a loader refuses its empty file, so no work is done."""
    result = placeholders.run(read(API_FOLDER / f"{name}.json"), timeout_s=60)
    assert result.status == "error"


@pytest.mark.parametrize("name", API_NAMES)
def test_choices_of_the_api_graph_are_offered(placeholders: ComfyServer, name: str) -> None:
    """ComfyUI itself does not check the choices of every node before it runs them."""
    checked = set()
    for node in read(API_FOLDER / f"{name}.json").values():
        inputs = placeholders.get(f"/object_info/{node['class_type']}")[node["class_type"]]["input"]
        for key, (kind, *options) in {**inputs["required"], **inputs.get("optional", {})}.items():
            if isinstance(kind, list) or kind == "COMBO":
                choices = kind if isinstance(kind, list) else options[0]["options"]
                assert node["inputs"][key] in choices, key
                checked.add(key)
    assert {"model_name", "dtype", "sampler_name", "scheduler", "vae_name"} <= checked


def test_comfyui_refuses_a_graph_with_a_value_out_of_range(placeholders: ComfyServer) -> None:
    graph = read(API_FOLDER / "demo.json")
    sampler = next(node for node in graph.values() if node["class_type"] == "WanDistSampler")
    sampler["inputs"]["steps"] = 0
    with pytest.raises(PromptRejected, match="value_smaller_than_min"):
        placeholders.run(graph, timeout_s=60)
