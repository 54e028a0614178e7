"""Requests that cannot be carried out: one sentence in the node's error, and the group lives on.

Covered: meshes, devices, files, latents and prompts as a user may get them wrong, and names that point out of
ComfyUI's folders. Every case runs in a real ComfyUI whose group has the model loaded, and must leave it working.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import graphs
import pytest
import torch
from comfy_kit import BackgroundRun, bytes_read, error_of, group_of, groups_of, succeed
from diffusers import AutoencoderKLWan
from graphs import (
    IMAGE,
    LORAS,
    MODEL,
    MODELS,
    POSITIVE,
    VAE,
    VAES,
    Graph,
    image_to_video,
    node,
    sampled_latent,
    write_hollow_file,
)
from safetensors.torch import save_file

from comfy_wan_dist.mesh.degrees import MeshDegrees
from comfy_wan_dist.mesh.memory import weight_bytes
from comfy_wan_dist.mesh.parameters import expected_parameters
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.mesh.vae_shape import VAEConfig
from devtools.checkpoints import write_shards, write_transformer, write_vae
from devtools.comfy_server import ComfyServer, PromptRejected

# A server and a group start within the first test that needs them.
pytestmark = pytest.mark.timeout(240)

MESH, DEVICES = "cfg2-ulysses2", "cpu:4"
# Nodes that read files' headers in ComfyUI's own process; the group learns nothing of what they refuse.
NOT_ASKING = {"model", "lora", "positive"}
TINY: dict[str, Any] = {"dim": 512, "ffn_dim": 1024, "num_layers": 1, "in_dim": 48, "out_dim": 48}


@pytest.fixture(scope="module")
def server(comfy: ComfyServer) -> ComfyServer:
    """The shared ComfyUI, with good files, and bad ones under the names used below."""
    graphs.write_files(comfy.base)
    write_bad_models(comfy.base)
    write_bad_loras(comfy.base)
    write_bad_inputs(comfy.base / "input")
    return comfy


@pytest.fixture
def refuse(server: ComfyServer, seed: int) -> Callable[..., str]:
    """Run a graph that must fail at a node with a class of error; returns the message.

    The group must be the same afterwards, and do a good job unless it was not asked.
    """

    def run(graph: Graph, *, at: str, error: str) -> str:
        good = sampled_latent(seed=seed, steps=1, has_image=False)
        if [group.mesh for group in groups_of(server.pid)] != [MESH]:
            succeed(server, good)
        group = group_of(server)
        failure = error_of(server.run(graph)).data
        assert failure["node_id"] == at
        assert failure["exception_type"].rpartition(".")[2] == error
        message: str = failure["exception_message"].rstrip("\n")
        assert 20 < len(message) < 600
        for sign in ("\n", "Traceback", 'File "', "Error:", "rank 0:"):
            assert sign not in message
        if at not in NOT_ASKING:
            good["sampler"]["inputs"]["seed"] += 1
            succeed(server, good)
        assert group_of(server).pids == group.pids
        return message

    return run


def write_bad_models(base: Path) -> None:
    models, vaes = base / MODELS, base / VAES
    wide = WanShape(dim=5120, ffn_dim=13824, num_layers=2, in_dim=36, out_dim=16)
    write_hollow_file(
        models / "wan_fun_control.safetensors", expected_parameters(replace(wide, in_dim=52))
    )
    write_hollow_file(
        models / "wan2.1_i2v.safetensors",
        {**expected_parameters(wide), "img_emb.proj.0.bias": (1280,)},
    )
    write_hollow_file(
        models / "int8.safetensors",
        expected_parameters(WanShape(**TINY)),
        dtype="I8",
    )
    write_transformer(models / "narrow_text.safetensors", WanShape(**TINY, text_dim=64), seed=31)
    good_model, good_vae = (models / MODEL).read_bytes(), (vaes / VAE).read_bytes()
    (models / "vae_as_model.safetensors").write_bytes(good_vae)
    (vaes / "model_as_vae.safetensors").write_bytes(good_model)
    (models / "truncated.safetensors").write_bytes(good_model[:-1000])
    (vaes / "truncated.safetensors").write_bytes(good_vae[:-1000])
    (models / "garbage.safetensors").write_bytes(b"<!DOCTYPE html> not found" * 99)
    (models / "empty.safetensors").write_bytes(b"")
    (models / "pickled.pt").write_bytes(b"\x80\x04\x95")
    write_damaged_models(models)
    write_other_vaes(vaes)


def write_damaged_models(models: Path) -> None:
    good = expected_parameters(WanShape(**TINY))
    name = "blocks.0.ffn.2.weight"
    missing = {n: shape for n, shape in good.items() if n != name}
    write_hollow_file(models / "missing.safetensors", missing)
    write_hollow_file(models / "wrong_shape.safetensors", good | {name: (512, 1000)})
    extra = {f"blocks.0.adapter.{i}.weight": (4, 4) for i in range(5)}
    write_hollow_file(models / "extra.safetensors", good | extra)
    both = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    raw = json.dumps({"a": both, "b": both | {"data_offsets": [8, 24]}}).encode()
    (models / "overlap.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(24))
    (models / "long_header.safetensors").write_bytes(struct.pack("<Q", 2**31))
    os.truncate(models / "long_header.safetensors", 2**32)  # sparse
    for folder in ("incomplete", "circle", "pickled"):
        (models / folder).mkdir(exist_ok=True)
        shards = write_shards(models / folder, {"a": torch.zeros(1), "b": torch.zeros(1)}, parts=2)
        if folder == "pickled":
            index = models / folder / "diffusion_pytorch_model.safetensors.index.json"
            index.write_text('{"weight_map": {"a": "diffusion_pytorch_model-00001-of-00002.bin"}}')
            continue
        shards[1].unlink()
        if folder == "circle":
            shards[1].symlink_to(shards[1].name)


def write_other_vaes(vaes: Path) -> None:
    write_hollow_file(
        vaes / "wan2.1_vae.safetensors",
        {
            "conv2.weight": (16, 16, 1, 1, 1),
            "decoder.conv1.weight": (384, 16, 3, 3, 3),
            "decoder.middle.0.residual.0.gamma": (384, 1, 1, 1),
            "decoder.upsamples.0.residual.2.weight": (384, 384, 3, 3, 3),
            "encoder.conv1.weight": (96, 3, 3, 3, 3),
        },
    )
    write_vae(
        vaes / "channels.safetensors",
        VAEConfig(z_dim=16, encoder_dim=8, decoder_dim=8),
        seed=2,
    )
    AutoencoderKLWan(base_dim=8).save_pretrained(vaes / "Wan2.1")


def write_bad_inputs(folder: Path) -> None:
    def write_latent(name: str, samples: torch.Tensor) -> None:
        version = torch.tensor([])
        save_file({"latent_tensor": samples, "latent_format_version_0": version}, folder / name)

    write_latent("wan21.latent", torch.ones(1, 16, 3, 8, 12))
    write_latent("image.latent", torch.ones(1, 4, 8, 12))
    write_latent("few.latent", torch.ones(1, 48, 1, 0, 6))
    write_latent("nan.latent", torch.full((1, 48, 3, 4, 6), torch.nan))
    (folder / "model.safetensors").write_bytes((folder.parent / VAES / VAE).read_bytes())
    (folder / "noise.safetensors").write_bytes(b"\xff" * 500)


# ---- meshes and devices


@pytest.mark.parametrize(
    ("mesh", "devices", "error", "words"),
    [
        ("tp3", DEVICES, "MeshError", ["tp3", "4 heads", "tp may be 1, 2, 4"]),
        ("ulysses3", DEVICES, "MeshError", ["ulysses3", "4 heads", "may be 1, 2, 4"]),
        ("ulysses4-tp2", "cpu:8", "MeshError", ["ulysses4", "2 heads", "may be 1, 2"]),
        ("ulysses2-tp4", DEVICES, "MeshError", ["8 devices", "4 are given", "smaller mesh"]),
        ("cfg2", "cpu", "MeshError", ["2 devices", "1 is given"]),
        ("foo2", DEVICES, "MeshError", ["'foo2'", "cfg", "ulysses", "tp"]),
        ("4", DEVICES, "MeshError", ["'4'", "write auto, single, or axes"]),
        ("tp0", DEVICES, "MeshError", ["tp", "0", "from 1 to"]),
        ("pp4", DEVICES, "MeshError", ["pp4 is more stages than the model's 3 blocks", "lower pp"]),
        ("cfg4", DEVICES, "MeshError", ["cfg4", "cfg is 1 or 2"]),
        ("ulysses2-cfg2", DEVICES, "MeshError", ["order", "write cfg2-ulysses2"]),
        ("tp2-tp2", DEVICES, "MeshError", ["names tp twice"]),
        ("auto", "0", "ConfigError", ["CUDA device 0", "visible: none", "cpu:N"]),
        ("auto", "gpu", "ConfigError", ["'gpu'", "write all", "cpu:4"]),
        ("auto", "cpu:0", "ConfigError", ["0 CPU ranks", "from 1 to"]),
        ("auto", "cpu:5000", "ConfigError", ["5000 CPU ranks", "from 1 to"]),
    ],
)
def test_mesh_that_does_not_fit_is_refused(
    refuse: Callable[..., str], seed: int, mesh: str, devices: str, error: str, words: list[str]
) -> None:
    graph = sampled_latent(seed=seed, mesh=mesh, devices=devices)
    assert_says(refuse(graph, at="model", error=error), words)


# ---- files


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wan_fun_control.safetensors", ["Wan2.2 Fun-Control", "52 input", "TI2V-5B"]),
        ("wan2.1_i2v.safetensors", ["a Wan2.1 image-to-video", "TI2V-5B"]),
        ("int8.safetensors", ["int8", "16- or 32-bit"]),
        ("vae_as_model.safetensors", ["looks like a VAE", "TI2V-5B"]),
        ("truncated.safetensors", ["truncated", "download it again"]),
        ("garbage.safetensors", ["garbage.safetensors", "no safetensors file"]),
        ("empty.safetensors", ["0 bytes", "download it again"]),
        ("pickled.pt", ["not a .safetensors or .gguf file", "convert"]),
        ("missing.safetensors", ["lacks 1 tensors", "blocks.0.ffn.2.weight"]),
        ("wrong_shape.safetensors", ["blocks.0.ffn.2.weight", "[512, 1000]", "[512, 1024]"]),
        (
            "extra.safetensors",
            ["has 5 tensors", "'blocks.0.adapter.0.weight'", "'blocks.0.adapter.2.", "2 more"],
        ),
        ("overlap.safetensors", ["'b' overlaps the tensor before it"]),
        ("long_header.safetensors", ["its header has 2147483648 bytes"]),
    ],
)
def test_file_that_is_no_model_is_refused(
    refuse: Callable[..., str], seed: int, name: str, words: list[str]
) -> None:
    message = refuse(sampled_latent(seed=seed, model=name), at="model", error="ModelFileError")
    assert_says(message, [name, *words])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("incomplete/", ["names the shard", "-00002-of-00002.safetensors', which is not there"]),
        ("circle/", ["-00002-of-00002.safetensors', which is a link that leads nowhere"]),
        ("pickled/", ["diffusion_pytorch_model-00001-of-00002.bin", "pickled checkpoints"]),
    ],
)
def test_folder_that_is_no_model_is_refused(
    refuse: Callable[..., str], seed: int, name: str, words: list[str]
) -> None:
    message = refuse(sampled_latent(seed=seed, model=name), at="model", error="ModelFileError")
    assert_says(message, words)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "model_as_vae.safetensors",
            ["model_as_vae.safetensors is not a Wan2.2 VAE: it is a Wan transformer"],
        ),
        ("channels.safetensors", ["channels.safetensors is a VAE of 16 latent channels"]),
        ("Wan2.1/", ["is a Wan2.1 VAE", "16 latent channels"]),
        ("wan2.1_vae.safetensors", ["Wan2.1 VAE", "16 latent channels"]),
        ("truncated.safetensors", ["truncated", "download it again"]),
    ],
)
@pytest.mark.parametrize("at", ["latent", "decode"])
def test_file_that_is_no_vae_is_refused(
    refuse: Callable[..., str], seed: int, name: str, words: list[str], at: str
) -> None:
    graph = image_to_video(seed=seed, steps=1)
    graph[at]["inputs"]["vae_name"] = name
    assert_says(refuse(graph, at=at, error="ModelFileError"), words)


def test_model_deleted_after_it_was_queued_is_refused(
    server: ComfyServer, refuse: Callable[..., str], seed: int
) -> None:
    path = server.base / MODELS / "deleted.safetensors"
    path.write_bytes((server.base / MODELS / MODEL).read_bytes())
    blocker = BackgroundRun(server, sampled_latent(seed=seed, steps=900, sampler="euler"))
    blocker.wait_for_steps(1, maximum=900)
    queued = BackgroundRun(server, sampled_latent(seed=seed, steps=1, model=path.name))
    queued.wait_for(lambda: server.get("/prompt")["exec_info"]["queue_remaining"] == 2)
    path.unlink()
    group = group_of(server)
    server.interrupt()
    assert blocker.result().status == "interrupted"
    failure = error_of(queued.result()).data
    assert failure["node_id"] == "model"
    assert_says(failure["exception_message"], ["'deleted.safetensors'", "refresh"])
    succeed(server, sampled_latent(seed=seed + 1, steps=1))
    assert group_of(server).pids == group.pids


def test_model_larger_than_memory_is_refused_unread_and_names_what_fits(
    server: ComfyServer, refuse: Callable[..., str], seed: int
) -> None:
    # Once per rank it does not fit; one copy does.
    shape = shape_of_bytes(0.4 * available_memory(), dim=5120, ffn_dim=13824)
    assert_says(
        refuse_unread(server, refuse, shape, seed=seed),
        [f"4 ranks of mesh {MESH} together need", "GiB free; mesh ", "would fit"],
    )


def test_model_larger_than_any_mesh_holds_is_refused_unread(
    server: ComfyServer, refuse: Callable[..., str], seed: int
) -> None:
    shape = shape_of_bytes(1.5 * available_memory(), dim=12288, ffn_dim=49152)
    assert_says(
        refuse_unread(server, refuse, shape, seed=seed),
        [f"4 ranks of mesh {MESH} together need", "no mesh of these devices would fit"],
    )


def refuse_unread(
    server: ComfyServer, refuse: Callable[..., str], shape: WanShape, *, seed: int
) -> str:
    """The message for a bfloat16 model of this shape, of which no rank may read more than the header."""
    path = server.base / MODELS / f"{seed}.safetensors"
    write_hollow_file(path, expected_parameters(shape))
    succeed(server, sampled_latent(seed=seed, steps=1, has_image=False))
    before = bytes_read(group_of(server).ranks)
    graph = sampled_latent(seed=seed, model=path.name, dtype="bfloat16", has_image=False)
    message = refuse(graph, at="sampler", error="InsufficientMemoryError")
    after = bytes_read(group_of(server).ranks)
    # The good job that follows reads the small model again.
    small = (server.base / MODELS / MODEL).stat().st_size
    assert path.stat().st_size > 10 * small
    assert all(now - then < 2 * small for now, then in zip(after, before, strict=True))
    path.unlink()
    return message


def shape_of_bytes(size: float, *, dim: int, ffn_dim: int) -> WanShape:
    """A shape of about `size` bytes in bfloat16."""

    def shape(blocks: int) -> WanShape:
        return WanShape(dim=dim, ffn_dim=ffn_dim, num_layers=blocks, in_dim=48, out_dim=48)

    one, two = (
        weight_bytes(shape(blocks), MeshDegrees(), stage=0, dtype="bfloat16") for blocks in (1, 2)
    )
    return shape(1 + max(0, round((size - one) / (two - one))))


# ---- LoRAs


def write_bad_loras(base: Path) -> None:
    loras = base / LORAS

    def pair(module: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
        values = {"lora_A": torch.ones(4, columns), "lora_B": torch.ones(rows, 4)}
        return {f"{module}.{end}.weight": value for end, value in values.items()}

    module = "diffusion_model.blocks.0.self_attn.q"
    good = pair(module, 512, 512)
    save_file(pair(module, 5120, 5120), loras / "wide.safetensors")
    save_file(pair(module.replace("0", "3"), 512, 512), loras / "deep.safetensors")
    save_file(pair("lora_unet_down_blocks_0", 320, 320), loras / "other.safetensors")
    save_file({f"{module}.lora_A.weight": torch.ones(4, 512)}, loras / "half.safetensors")
    save_file(good | {f"{module}.alpha": torch.ones(2)}, loras / "alpha.safetensors")
    save_file(good | {f"{module}.oft_blocks": torch.ones(4, 128, 128)}, loras / "oft.safetensors")
    save_file(
        good | {f"{module}.lora_A.weight": torch.full((4, 512), torch.nan)},
        loras / "nan.safetensors",
    )
    save_file(good, loras / "cut.safetensors")
    (loras / "cut.safetensors").write_bytes((loras / "cut.safetensors").read_bytes()[:-10])
    (loras / "pickled.pt").write_bytes(b"\x80\x04\x95")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wide.safetensors", ["width 5120", "width 512;"]),
        ("deep.safetensors", ["block 3", "0 to 2"]),
        ("other.safetensors", ["changes nothing", "'lora_unet_down_blocks_0.lora_A.weight'"]),
        ("half.safetensors", ["without its up", "download it again"]),
        ("alpha.safetensors", ["[2]", "one number"]),
        ("oft.safetensors", ["OFT", "does not merge"]),
        ("cut.safetensors", ["truncated", "download it again"]),
    ],
)
def test_file_that_is_no_lora_is_refused(
    refuse: Callable[..., str], seed: int, name: str, words: list[str]
) -> None:
    graph = with_lora(sampled_latent(seed=seed), name)
    assert_says(refuse(graph, at="lora", error="ModelFileError"), [name, *words])


def test_lora_with_nan_is_refused(refuse: Callable[..., str], seed: int) -> None:
    graph = with_lora(sampled_latent(seed=seed), "nan.safetensors")
    message = refuse(graph, at="sampler", error="ModelFileError")
    assert_says(message, ["nan.safetensors", "self_attn.q.lora_A.weight' holds", "NaN"])


def with_lora(graph: Graph, name: str) -> Graph:
    graph["lora"] = node("WanDistLoRA", model=["model", 0], lora_name=name, strength=1.0)
    graph["sampler"]["inputs"]["model"] = ["lora", 0]
    return graph


# ---- what links bring


WRONG: dict[str, tuple[object, ...]] = {
    "STRING": (None, 3),
    "COMBO": (None, []),
    "INT": (None, "3", 2.5),
    "FLOAT": (None, "0.5"),
    "BOOLEAN": (None, 1),
    "IMAGE": ("", []),
    "SIGMAS": ("", []),
}
"""By the type of an input; of any other nothing but what it is made of will do."""


def test_links_of_another_type_are_refused_by_the_inputs_name(
    server: ComfyServer, seed: int
) -> None:
    graph = image_to_video(seed=seed, steps=1)
    graph["lora"] = node(
        "WanDistLoRA", model=["model", 0], lora_name="wide.safetensors", strength=1.0
    )
    graph["save"] = node(
        "WanDistSaveConditioning", conditioning=["positive", 0], filename_prefix="linked"
    )
    size = {"width": 96, "height": 64, "length": 9, "batch_size": 1}
    graph["plan"] = node("WanDistPlan", **size, steps=1, cfg=5.0, devices="8xH100-SXM")
    info = server.get("/object_info")
    asked = 0
    for name, each in graph.items():
        if not each["class_type"].startswith("WanDist"):
            continue
        needed = {key: value for key, value in graph.items() if key not in ("save", "plan")}
        del needed["preview"]
        described = info[each["class_type"]]["input"]
        for key, (kind, *_) in {**described["required"], **described.get("optional", {})}.items():
            for value in WRONG.get(kind, (None, "text", [["x"]])):
                if value is None and (
                    kind in ("IMAGE", "SIGMAS") or (name, key) == ("plan", "model")
                ):
                    continue
                changed = {**each, "inputs": {**each["inputs"], key: ["wrong", 0]}}
                wrong = node("LinkedValue", value=json.dumps(value))
                end = node("TakeAny", value=[name, 0])
                ends = {} if name in ("save", "plan") else {"end": end}
                failure = error_of(
                    server.run({**needed, "wrong": wrong, name: changed, **ends})
                ).data
                what = f"{name}.{key} = {value!r}: {failure['exception_message']}"
                assert failure["node_id"] == name, what
                assert failure["exception_type"].endswith("ConfigError"), what
                assert key.partition("_")[0] in failure["exception_message"].lower(), what
                asked += 1
    assert asked > 100


@pytest.mark.parametrize(
    ("at", "inputs", "words"),
    [
        ("sampler", {"steps": 2**70}, ["steps 1180591620717411303424", "from 1 to 10000"]),
        ("sampler", {"steps": 0}, ["steps 0"]),
        ("sampler", {"denoise": 1e-300}, ["denoise 1e-300"]),
        ("sampler", {"cfg": 1e300}, ["cfg is 1e+300", "to 1e30"]),  # beyond float32
        ("sampler", {"cfg": 10**400}, ["cfg is 1000", "to 1e30"]),
        ("sampler", {"shift": 10**400}, ["shift is 1000"]),
        ("positive", {"file": "x" * 9999}, ["is not a file in"]),
        ("sampler", {"seed": 2**64}, ["seed 18446744073709551616", "2**64 - 1"]),
        ("latent", {"width": -16}, ["(-16, 64, 9, 1)", "from 1 to 16384"]),
        ("latent", {"batch_size": 2**70}, ["batch_size", "1180591620717411303424"]),
    ],
)
def test_linked_numbers_beyond_what_can_be_done_are_refused(
    server: ComfyServer, seed: int, at: str, inputs: dict[str, Any], words: list[str]
) -> None:
    """A widget keeps to its range, a link does not."""
    graph = sampled_latent(seed=seed, steps=1, scheduler="wan_official")
    succeed(server, graph)
    group = group_of(server)
    for key, value in inputs.items():
        graph[key] = node("LinkedValue", value=json.dumps(value))
        graph[at]["inputs"][key] = [key, 0]
    failure = error_of(server.run(graph, timeout_s=20)).data
    assert (failure["node_id"], failure["exception_type"].rpartition(".")[2]) == (at, "ConfigError")
    assert_says(failure["exception_message"], words)
    assert group_of(server).pids == group.pids


@pytest.mark.parametrize("prefix", ["x" * 300, "zero\0", "half\ud800"])
def test_name_that_no_file_can_have_is_refused(server: ComfyServer, prefix: str) -> None:
    graph = {
        "load": node("WanDistLoadConditioning", file=f"{POSITIVE} [input]"),
        "save": node("WanDistSaveConditioning", conditioning=["load", 0], filename_prefix=prefix),
    }
    failure = error_of(server.run(graph)).data
    assert failure["exception_type"].endswith("ModelFileError"), failure
    assert "cannot be written" in failure["exception_message"]


# ---- latents


@pytest.mark.parametrize("value", ["NaN", "Infinity"])
def test_mask_that_cannot_be_meant_is_refused(
    refuse: Callable[..., str], seed: int, value: str
) -> None:
    graph = sampled_latent(seed=seed, has_image=False)
    graph["value"] = node("LinkedValue", value=value)
    graph["mask"] = node("SolidMask", value=["value", 0], width=96, height=64)
    graph["masked"] = node("SetLatentNoiseMask", samples=["latent", 0], mask=["mask", 0])
    graph["sampler"]["inputs"]["latent_image"] = ["masked", 0]
    message = refuse(graph, at="sampler", error="ConfigError")
    assert_says(message, ["noise_mask", "NaN", "values from 0 to 1"])


def test_latent_with_the_channels_of_another_model_is_refused(
    refuse: Callable[..., str], seed: int
) -> None:
    graph = sampled_latent(seed=seed)
    graph["latent"] = node("LoadLatent", latent="wan21.latent")
    message = refuse(graph, at="sampler", error="ConfigError")
    assert_says(message, ["[1, 16, 3, 8, 12]", "48", "Wan22ImageToVideoLatent"])


def test_latent_of_a_still_image_is_refused(refuse: Callable[..., str], seed: int) -> None:
    graph = sampled_latent(seed=seed)
    graph["latent"] = node("LoadLatent", latent="image.latent")
    message = refuse(graph, at="sampler", error="ConfigError")
    assert_says(message, ["[1, 4, 1, 8, 12]", "frames", "Wan22ImageToVideoLatent"])
    graph = image_to_video(seed=seed)
    graph["sampler"] = node("EmptyLatentImage", width=96, height=64, batch_size=1)
    assert_says(refuse(graph, at="decode", error="ConfigError"), ["[1, 4, 8, 12]", "48"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("few.latent", ["[1, 48, 1, 0, 6]"]),
        ("nan.latent", ["the latent holds NaN"]),
    ],
)
def test_latent_that_cannot_be_sampled_is_refused(
    refuse: Callable[..., str], seed: int, name: str, words: list[str]
) -> None:
    graph = sampled_latent(seed=seed)
    graph["latent"] = node("LoadLatent", latent=name)
    assert_says(refuse(graph, at="sampler", error="ConfigError"), words)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nan.latent", ["the latent holds NaN"]),
        ("few.latent", ["[1, 48, 1, 0, 6]"]),
        ("wan21.latent", ["[1, 16, 3, 8, 12]", "ComfyUI's own VAELoader and VAEDecode"]),
    ],
)
def test_latent_that_cannot_be_decoded_is_refused(
    refuse: Callable[..., str], seed: int, name: str, words: list[str]
) -> None:
    graph = image_to_video(seed=seed)
    graph["sampler"] = node("LoadLatent", latent=name)
    assert_says(refuse(graph, at="decode", error="ConfigError"), words)


@pytest.mark.parametrize(
    ("length", "has_start", "words"),
    [
        (1, False, ["needs 4 frames", "has 1;", "length of 5"]),
        (9, True, ["needs 4 frames and the start 9", "length of 13"]),
    ],
)
def test_end_image_without_room_is_refused(
    refuse: Callable[..., str], seed: int, length: int, has_start: bool, words: list[str]
) -> None:
    graph = sampled_latent(seed=seed, length=length)
    graph["latent"]["inputs"]["end_image"] = ["image", 0]
    if has_start:
        graph["many"] = node("RepeatImageBatch", image=["image", 0], amount=20)
        graph["latent"]["inputs"]["start_image"] = ["many", 0]
    else:
        del graph["latent"]["inputs"]["start_image"]
    assert_says(refuse(graph, at="latent", error="ConfigError"), words)


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        ("0.00001", ["a video of 96x64", "0.00 GiB is the budget"]),
        ("much", ["memory is 'much'", "auto"]),
        ("-1", ["memory is '-1'", "auto"]),
    ],
)
@pytest.mark.parametrize("at", ["decode", "latent"])
def test_vae_job_beyond_its_memory_is_refused(
    refuse: Callable[..., str], seed: int, at: str, memory: str, words: list[str]
) -> None:
    graph = image_to_video(seed=seed, steps=1)
    graph[at]["inputs"]["memory"] = memory
    assert_says(refuse(graph, at=at, error="ConfigError"), words)


# ---- prompts


def test_prompt_of_another_width_is_refused(refuse: Callable[..., str], seed: int) -> None:
    graph = sampled_latent(seed=seed, model="narrow_text.safetensors")
    message = refuse(graph, at="sampler", error="ConfigError")
    assert_says(message, ["positive", "[1, 24, 4096]", "[1, tokens, 64]", "umT5"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cfg": float("nan")}, ["cfg is nan"]),
        ({"shift": float("nan")}, ["shift is nan"]),
        ({"scheduler": "kl_optimal", "steps": 1, "sampler": "euler"}, ["'kl_optimal'", "nan"]),
        (
            {"scheduler": "exponential", "steps": 200, "shift": 1.0},
            ["UniPC cannot tell sigma", "fewer steps"],
        ),
    ],
)
def test_numbers_that_cannot_be_sampled_with_are_refused(
    refuse: Callable[..., str], seed: int, changes: dict[str, Any], words: list[str]
) -> None:
    graph = sampled_latent(seed=seed, has_image=False, **changes)
    message = refuse(graph, at="sampler", error="ConfigError")
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("values", "dims", "words"),
    [
        ("1", 0, ["hold 1 value;", "2 to 10001"]),
        ("1,nan,0", 0, ["value 1", "nan after 1.0"]),
        ("0.5,0.75,0", 0, ["value 1", "0.75 after 0.5", "must fall"]),
        ("14.6,3,0", 0, ["value 0", "14.6", "flow models"]),
        ("1,0.5,-0.1", 0, ["value 2"]),
        ("1,0.5,0", 1, ["shape [1, 3]", "OptimalStepsScheduler"]),
    ],
)
def test_sigmas_that_cannot_be_sampled_with_are_refused(
    refuse: Callable[..., str], seed: int, values: str, dims: int, words: list[str]
) -> None:
    graph = sampled_latent(seed=seed, has_image=False)
    graph["sigmas"] = node("GivenSigmas", values=values, dims=dims)
    graph["sampler"]["inputs"]["sigmas"] = ["sigmas", 0]
    assert_says(refuse(graph, at="sampler", error="ConfigError"), words)


def test_few_step_beside_sigmas_is_refused(refuse: Callable[..., str], seed: int) -> None:
    graph = sampled_latent(seed=seed, has_image=False)
    graph["sigmas"] = node("GivenSigmas", values="1,0.5,0", dims=0)
    graph["sampler"]["inputs"].update(sigmas=["sigmas", 0], few_step="Turbo, 4 steps")
    message = refuse(graph, at="sampler", error="ConfigError")
    assert_says(message, ["'Turbo, 4 steps'", "set few_step to off"])


@pytest.mark.parametrize("shift", [1.32, 4.03, 8.72])
def test_shift_whose_first_sigma_rounds_above_one_is_sampled(
    server: ComfyServer, seed: int, shift: float
) -> None:
    succeed(server, sampled_latent(seed=seed, steps=2, has_image=False, shift=shift))
    succeed(
        server,
        sampled_latent(seed=seed, steps=2, has_image=False, shift=shift, sampler="wan_unipc"),
    )


@pytest.mark.parametrize("label", ["positive", "negative"])
def test_prompt_with_several_entries_is_refused(
    refuse: Callable[..., str], seed: int, label: str
) -> None:
    graph = sampled_latent(seed=seed)
    graph["both"] = node(
        "ConditioningCombine", conditioning_1=["positive", 0], conditioning_2=["negative", 0]
    )
    graph["sampler"]["inputs"][label] = ["both", 0]
    message = refuse(graph, at="sampler", error="ConfigError")
    assert_says(message, [label, "2 entries", "ConditioningCombine"])


@pytest.mark.parametrize(
    ("class_type", "options", "words"),
    [
        (
            "ConditioningSetArea",
            {"width": 64, "height": 64, "x": 0, "y": 0, "strength": 1.0},
            ["area"],
        ),
        ("ConditioningSetTimestepRange", {"start": 0.0, "end": 0.5}, ["end_percent"]),
        ("ConditioningSetAreaStrength", {"strength": 0.0}, ["strength"]),
    ],
)
def test_prompt_with_conditions_is_refused(
    refuse: Callable[..., str], seed: int, class_type: str, options: Any, words: list[str]
) -> None:
    graph = sampled_latent(seed=seed)
    graph["changed"] = node(class_type, conditioning=["positive", 0], **options)
    graph["sampler"]["inputs"]["positive"] = ["changed", 0]
    message = refuse(graph, at="sampler", error="ConfigError")
    assert_says(message, ["positive", *words, "CLIPTextEncode directly"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.safetensors", ["no conditioning file", "Wan Dist Save Conditioning"]),
        ("noise.safetensors", ["it is truncated or no safetensors file"]),
    ],
)
def test_file_that_is_no_prompt_is_refused(
    refuse: Callable[..., str], seed: int, name: str, words: list[str]
) -> None:
    graph = sampled_latent(seed=seed)
    graph["positive"]["inputs"]["file"] = f"{name} [input]"
    assert_says(refuse(graph, at="positive", error="ModelFileError"), [name, *words])


# ---- names that point elsewhere


@pytest.mark.parametrize(
    "name",
    [
        "../models/vae/tiny_vae.safetensors [input]",
        "../output/../../escape.safetensors [output]",
        "../../../../etc/passwd",
        "/etc/passwd",
        "none.safetensors [input]",
        "",
    ],
)
def test_prompt_file_outside_the_folders_is_refused(
    server: ComfyServer, seed: int, name: str
) -> None:
    save_file({"x": torch.ones(1)}, server.base.parent / "escape.safetensors")
    graph = sampled_latent(seed=seed)
    graph["positive"]["inputs"]["file"] = name
    message = refusal_of(server, graph)
    assert "ConfigError" in message or "value_not_in_list" in message
    assert "conditioning file" not in message  # it was not opened


def test_linked_prompt_file_in_the_input_folder_is_loaded(server: ComfyServer, seed: int) -> None:
    target = server.base.parent / "elsewhere.safetensors"
    target.write_bytes((server.base / "input" / POSITIVE).read_bytes())
    (server.base / "input" / "linked.safetensors").symlink_to(target)
    graph = sampled_latent(seed=seed, steps=1)
    graph["positive"]["inputs"]["file"] = "linked.safetensors [input]"
    succeed(server, graph)


@pytest.mark.parametrize(
    ("at", "option"), [("model", "model_name"), ("latent", "vae_name"), ("decode", "vae_name")]
)
@pytest.mark.parametrize("folder", ["../../input", "/etc"])
def test_model_outside_the_folders_is_refused(
    server: ComfyServer, seed: int, at: str, option: str, folder: str
) -> None:
    graph = image_to_video(seed=seed, steps=1)
    graph[at]["inputs"][option] = f"{folder}/{IMAGE}"
    message = refusal_of(server, graph)
    assert "folders of ComfyUI; refresh" in message or "value_not_in_list" in message


@pytest.mark.parametrize(
    ("at", "option", "words"),
    [
        ("sampler", "sampler_name", "choose uni_pc"),
        ("sampler", "scheduler", "choose simple"),
        ("sampler", "few_step", "choose 'FastWan, 3 steps', 'Turbo, 4 steps' or 'off'"),
        ("model", "dtype", "choose auto"),
        ("decode", "vae_dtype", "choose auto"),
        ("decode", "image_dtype", "choose float32"),
    ],
)
def test_choice_that_is_not_offered_is_refused(
    server: ComfyServer, seed: int, at: str, option: str, words: str
) -> None:
    graph = image_to_video(seed=seed, steps=1)
    graph[at]["inputs"][option] = "nonsense"
    message = refusal_of(server, graph)
    assert "'nonsense'" in message
    assert words in message or "value_not_in_list" in message


def test_prompt_is_not_saved_outside_the_output_folder(server: ComfyServer, seed: int) -> None:
    graph = {
        "load": node("WanDistLoadConditioning", file=f"{POSITIVE} [input]"),
        "save": node(
            "WanDistSaveConditioning", conditioning=["load", 0], filename_prefix="../../escaped"
        ),
    }
    failure = error_of(server.run(graph)).data
    assert "outside the output folder" in failure["exception_message"]
    assert list(server.base.parent.rglob("escaped*")) == []


# ---- helpers


def refusal_of(server: ComfyServer, graph: Graph) -> str:
    """Why ComfyUI would not take the graph or a node failed; versions differ in who looks first."""
    try:
        failure = error_of(server.run(graph)).data
    except PromptRejected as rejection:
        return str(rejection)
    return f"{failure['exception_type']}: {failure['exception_message']}"


def assert_says(message: str, words: list[str]) -> None:
    assert [word for word in words if word not in message] == [], message


def available_memory() -> int:
    """Bytes that /proc/meminfo calls available."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024
