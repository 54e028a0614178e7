"""The whole path in a real ComfyUI: from graph to frames, reuse, progress, interrupt, and the death of a rank.

Covered: the nodes with tiny models on the CPU, on one worker group that most tests share. Not covered: whether
the numbers are right (test_model.py, test_vae.py and their neighbours compare them), LoRAs (test_lora_node.py), how a
group ends with ComfyUI (test_lifetime.py), and requests that cannot be carried out (test_bad_input.py).
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import graphs
import pytest
import torch
from comfy_kit import (
    BackgroundRun,
    assert_counted,
    bytes_read,
    error_of,
    group_of,
    groups_of,
    has_torch,
    latent_of,
    progress_of,
    succeed,
    tensors_of,
)
from graphs import (
    MODELS,
    VAE,
    VAES,
    image_to_video,
    node,
    sampled_latent,
    save_tensors,
    start_latent,
)
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from comfy_wan_dist.planning.chart import WIDTH
from devtools.checkpoints import TINY_TRANSFORMER, write_transformer
from devtools.comfy_server import ComfyServer
from devtools.vae_runs import load_vae, whole_share
from workers.vae.run import encode_chunks_into, latent_size

# A server and a group start within the first test that needs them.
pytestmark = pytest.mark.timeout(240)

FRAMES = "frames.png"
FRAME_SIZE = (64, 32)  # width, height
NODES = {
    "WanDistLoadModel": (
        [
            "model_name",
            "dtype",
            "mesh",
            "devices",
            "compile",
            "machines",
            "head_address",
            "low_noise_model",
        ],
        ["model"],
    ),
    "WanDistSampler": (
        [
            "model",
            "positive",
            "negative",
            "latent_image",
            "seed",
            "steps",
            "cfg",
            "sampler_name",
            "scheduler",
            "shift",
            "denoise",
            "few_step",
            "sigmas",
            "boundary",
            "low_noise_cfg",
        ],
        ["latent", "report"],
    ),
    "WanDistSamplerAdvanced": (
        [
            "model",
            "add_noise",
            "noise_seed",
            "steps",
            "cfg",
            "sampler_name",
            "scheduler",
            "shift",
            "positive",
            "negative",
            "latent_image",
            "start_at_step",
            "end_at_step",
            "return_with_leftover_noise",
            "sigmas",
            "boundary",
            "low_noise_cfg",
        ],
        ["latent", "report"],
    ),
    "WanDistVAEDecode": (
        ["model", "vae_name", "samples", "vae_dtype", "image_dtype", "memory"],
        ["images", "report"],
    ),
    "WanDistImageToVideoLatent": (
        [
            "model",
            "vae_name",
            "width",
            "height",
            "length",
            "batch_size",
            "vae_dtype",
            "start_image",
            "end_image",
            "memory",
        ],
        ["latent"],
    ),
    "WanDistSaveConditioning": (["conditioning", "filename_prefix"], []),
    "WanDistLoadConditioning": (["file"], ["conditioning"]),
    "WanDistPlan": (
        ["width", "height", "length", "batch_size", "steps", "cfg", "devices", "model"],
        ["chart", "report"],
    ),
    "WanDistModel": (["model", "expert"], ["MODEL"]),
    "WanDistLoRA": (["model", "lora_name", "strength", "expert"], ["model"]),
}


@pytest.fixture(scope="module")
def server(comfy: ComfyServer) -> ComfyServer:
    """The shared ComfyUI, with the files that the graphs name."""
    graphs.write_files(comfy.base)
    generator = torch.Generator().manual_seed(11)
    pictures = [
        Image.fromarray(
            torch.randint(
                0, 255, (*FRAME_SIZE[::-1], 3), generator=generator, dtype=torch.uint8
            ).numpy()
        )
        for _ in range(6)
    ]
    pictures[0].save(comfy.base / "input" / FRAMES, save_all=True, append_images=pictures[1:])
    return comfy


# ---- nodes


def test_object_info_lists_all_nodes_with_tooltips_and_names(server: ComfyServer) -> None:
    info = server.get("/object_info")
    ours = {name: node for name, node in info.items() if name.startswith("WanDist")}
    assert set(ours) == set(NODES)
    for name, (inputs, outputs) in NODES.items():
        described = ours[name]
        assert described["category"] == "Wan Dist", name
        assert described["display_name"].startswith("Wan Dist "), name
        assert described["description"].endswith("."), name
        options = {**described["input"]["required"], **described["input"].get("optional", {})}
        assert list(options) == inputs, name
        for input_name, (_, option) in options.items():
            assert option["tooltip"].endswith("."), f"{name}.{input_name}"
        assert described["output_name"] == outputs, name
    assert ours["WanDistLoadModel"]["output"] == ["WAN_DIST_MODEL"]
    assert ours["WanDistSaveConditioning"]["output_node"]
    assert not ours["WanDistSampler"]["output_node"]


def test_image_to_video_yields_frames_and_one_progress_event_per_step(
    server: ComfyServer, seed: int
) -> None:
    result = succeed(server, image_to_video(seed=seed, steps=3))
    pictures = result.outputs["preview"]["images"]
    assert len(pictures) == 9
    assert len({server.view(picture) for picture in pictures}) == 9
    path = server.base / "temp" / pictures[0]["subfolder"] / pictures[0]["filename"]
    with Image.open(path) as picture:
        assert picture.size == (96, 64)
    # A load counts percent before it, and only when there is one.
    assert_counted(result, "sampler", 3)
    assert_counted(result, "decode", 3)

    again = succeed(server, image_to_video(seed=seed + 1, steps=4))
    assert_counted(again, "sampler", 4)
    assert {most for _, most in progress_of(again, "sampler")} == {4}


def test_uint8_frames_arrive_as_an_image_of_256_steps(server: ComfyServer, seed: int) -> None:
    graph = image_to_video(seed=seed, steps=1, length=5)
    graph["exact"] = node("WanDistVAEDecode", **graph["decode"]["inputs"])
    graph["decode"]["inputs"]["image_dtype"] = "uint8"
    log_size = len(server.log)
    result = succeed(server, save_tensors(graph, images=["decode", "exact"]))
    rounded, exact = (tensors_of(server, result, name)["images"] for name in ("decode", "exact"))
    assert rounded.dtype == torch.float32
    assert torch.equal(rounded, exact.mul(255).round() / 255)
    # SaveImage, which cuts off, gets the same byte back.
    assert torch.equal((255 * rounded).byte(), exact.mul(255).round().byte())
    said = re.findall(r"DecodeRequest .* peak memory by rank ([\d., ]+) GiB", server.log[log_size:])
    assert len(said) == 2
    assert all(len(ranks.split(", ")) == 4 and "0.00" not in ranks for ranks in said)


def test_plan_shows_a_chart_and_its_table(server: ComfyServer) -> None:
    plan = node(
        "WanDistPlan",
        width=1280,
        height=704,
        length=121,
        batch_size=1,
        steps=20,
        cfg=5.0,
        devices="8xH100-SXM",
    )
    graph = {
        "plan": plan,
        "preview": node("PreviewImage", images=["plan", 0]),
        "text": node("PreviewAny", source=["plan", 1]),
    }
    result = succeed(server, graph)
    (report,) = result.outputs["plan"]["text"]
    assert "latency: cfg2-ulysses4." in report
    assert result.outputs["text"]["text"][0] == report
    for name in ("plan", "preview"):
        (picture,) = result.outputs[name]["images"]
        path = server.base / "temp" / picture["subfolder"] / picture["filename"]
        with Image.open(path) as chart:
            assert chart.size[0] == WIDTH
            assert chart.convert("RGB").getpixel((5, 5)) == (255, 255, 255)


def test_sampler_reports_mesh_and_ledger(server: ComfyServer, seed: int) -> None:
    graph = graphs.sampled_latent(seed=seed, steps=1, length=5)
    graph["text"] = node("PreviewAny", source=["sampler", 1])
    report = succeed(server, graph).outputs["text"]["text"][0]
    assert report.startswith("mesh cfg2-ulysses2, 4 ranks, ")
    assert report.splitlines()[1].startswith("peak memory by rank ")
    assert {line.split()[0] for line in report.splitlines()[3:]} == {"cfg", "ulysses"}


def test_text_to_video_yields_frames(server: ComfyServer, seed: int) -> None:
    result = succeed(server, image_to_video(seed=seed, steps=2, has_image=False))
    assert len(result.outputs["preview"]["images"]) == 9


def test_batch_of_two_yields_two_different_videos(server: ComfyServer, seed: int) -> None:
    graph = image_to_video(seed=seed, steps=2, length=5, batch_size=2)
    graph["save"] = graphs.save_latent("sampler")
    result = succeed(server, graph)
    assert len(result.outputs["preview"]["images"]) == 10
    first, second = latent_of(server, result)
    # The start image, but for a thousandth of noise that uni_pc leaves.
    torch.testing.assert_close(first[:, 0], second[:, 0], rtol=0, atol=0.02)
    assert not torch.allclose(first[:, 1], second[:, 1], atol=0.5)


def test_denoise_below_one_keeps_steps_and_depends_on_the_given_latent(
    server: ComfyServer, seed: int
) -> None:
    latents = {}
    for denoise in (0.5, 1.0):
        graph = sampled_latent(seed=seed, steps=3, denoise=denoise)
        result = succeed(server, graph)
        assert_counted(result, "sampler", 3)
        latents[denoise] = latent_of(server, result)
    assert latents[0.5].isfinite().all()
    assert not torch.allclose(latents[0.5], latents[1.0], atol=0.1)


@pytest.mark.parametrize("scheduler", ["simple", "wan_official"])
def test_denoise_zero_returns_its_input(server: ComfyServer, seed: int, scheduler: str) -> None:
    graph = sampled_latent(seed=seed, denoise=0.0, scheduler=scheduler)
    graph["given"] = graphs.save_latent("latent")
    result = succeed(server, graph)
    assert torch.equal(latent_of(server, result), latent_of(server, result, "given"))
    assert progress_of(result, "sampler") == []


def test_cfg_one_takes_a_mesh_without_cfg_on_the_same_group(server: ComfyServer, seed: int) -> None:
    reports = []
    groups = set()
    for cfg in (5.0, 1.0):
        graph = graphs.sampled_latent(seed=seed, steps=1, cfg=cfg)
        graph["text"] = node("PreviewAny", source=["sampler", 1])
        reports.append(succeed(server, graph).outputs["text"]["text"][0])
        groups.add(group_of(server).pids)
    assert reports[0].startswith("mesh cfg2-ulysses2, 4 ranks, ")
    assert reports[1].startswith("mesh ulysses4, 4 ranks, ")
    assert len(groups) == 1


def test_samplers_and_schedulers_all_run_and_differ(server: ComfyServer, seed: int) -> None:
    choices = [(name, "simple") for name in ("uni_pc", "uni_pc_bh2", "euler", "lcm", "wan_unipc")]
    choices += [("wan_unipc", "wan_official"), ("uni_pc", "wan_official"), ("euler", "beta")]
    info = server.get("/object_info/WanDistSampler")["WanDistSampler"]["input"]["required"]
    assert set(_options(info["sampler_name"])) == {sampler for sampler, _ in choices}
    latents: list[Tensor] = []
    for sampler, scheduler in choices:
        graph = sampled_latent(seed=seed, steps=4, sampler=sampler, scheduler=scheduler)
        result = succeed(server, graph)
        assert_counted(result, "sampler", 4)
        latent = latent_of(server, result)
        assert latent.isfinite().all(), (sampler, scheduler)
        assert not any(torch.equal(latent, other) for other in latents), (sampler, scheduler)
        latents.append(latent)


def test_two_samplers_in_one_graph_both_finish(server: ComfyServer, seed: int) -> None:
    graph = sampled_latent(seed=seed, steps=2)
    graph["second"] = node("WanDistSampler", **{**graph["sampler"]["inputs"], "seed": seed + 1})
    graph["save second"] = graphs.save_latent("second")
    result = succeed(server, graph)
    assert not torch.equal(latent_of(server, result), latent_of(server, result, "save second"))


def test_conditioning_survives_saving_and_loading(server: ComfyServer, seed: int) -> None:
    graph: graphs.Graph = {
        "load": node("WanDistLoadConditioning", file=f"{graphs.POSITIVE} [input]"),
        "save": node(
            "WanDistSaveConditioning",
            conditioning=["load", 0],
            filename_prefix=f"conditioning/{seed}",
        ),
    }
    (file,) = succeed(server, graph).outputs["save"]["files"]
    assert file["type"] == "output"
    name = f"{file['subfolder']}/{file['filename']}"
    saved = load_file(server.base / "output" / name)["cond"]
    assert torch.equal(saved, load_file(server.base / "input" / graphs.POSITIVE)["cond"])

    original = sampled_latent(seed=seed, steps=1)
    loaded = sampled_latent(seed=seed, steps=1)
    loaded["positive"]["inputs"]["file"] = f"{name} [output]"
    latents = [latent_of(server, succeed(server, graph)) for graph in (original, loaded)]
    assert torch.equal(*latents)


# ---- start latents


@pytest.mark.parametrize(
    ("images", "length", "given"),
    [(1, 9, 1), (2, 9, 1), (4, 9, 1), (5, 9, 2), (6, 9, 2), (5, 3, 1), (1, 1, 1), (6, 6, 2)],
)
def test_start_latent_is_encoded_images_then_the_mean(
    server: ComfyServer, comfyui_path: Path, images: int, length: int, given: int
) -> None:
    width, height = FRAME_SIZE
    graph = start_latent(width=width, height=height, length=length)
    graph["image"] = node("LoadImage", image=FRAMES)
    graph["cut"] = node("ImageFromBatch", image=["image", 0], batch_index=0, length=images)
    graph["latent"]["inputs"]["start_image"] = ["cut", 0]
    result = succeed(server, graph)
    latent = latent_of(server, result)

    frames = (length - 1) // 4 + 1
    assert latent.shape == (1, 48, frames, height // 16, width // 16)
    pixels = read_frames(server.base / "input" / FRAMES)[: 4 * given - 3]
    vae, _ = load_vae(
        str(server.base / VAES / VAE), dtype=torch.float32, device=torch.device("cpu")
    )
    with torch.inference_mode():
        encoded = torch.empty_like(latent[:, :, :given])
        whole = whole_share(latent_size(encoded))
        for _ in encode_chunks_into(vae, pixels, encoded, share=whole, device=torch.device("cpu")):
            pass
    torch.testing.assert_close(latent[:, :, :given], encoded, rtol=1e-4, atol=1e-4)
    mean = wan22_mean(comfyui_path).expand_as(latent)
    assert torch.equal(latent[:, :, given:], mean[:, :, given:])
    kept = [0.0] * given + [1.0] * (frames - given)
    assert noise_mask_of(result.outputs["text"]["text"][0]) == [
        [[[[value] * (width // 16)] * (height // 16) for value in kept]]
    ]


@pytest.mark.parametrize("images", [1, 4, 6])
def test_start_latent_equals_that_of_the_stock_node(server: ComfyServer, images: int) -> None:
    """Stock node and stock VAE with a network of ComfyUI's own; images of another size than the video's."""
    graph = start_latent(width=64, height=96, length=9, batch_size=2)
    graph["image"] = node("LoadImage", image=FRAMES)
    graph["cut"] = node("ImageFromBatch", image=["image", 0], batch_index=0, length=images)
    start = {"width": 64, "height": 96, "length": 9, "batch_size": 2, "start_image": ["cut", 0]}
    graph["latent"]["inputs"].update(start)
    graph["vae"] = node("SmallVAELoader", vae_name=VAE)
    graph["stock"] = node("Wan22ImageToVideoLatent", vae=["vae", 0], **start)
    result = succeed(server, save_tensors(graph, latent=["latent", "stock"]))
    own, stock = (tensors_of(server, result, name) for name in ("latent", "stock"))

    given = (images - 1) // 4 + 1
    assert stock["samples"].shape == (2, 48, 3, 6, 4)
    assert torch.equal(own["noise_mask"], stock["noise_mask"])
    assert torch.equal(own["samples"][:, :, given:], stock["samples"][:, :, given:])
    torch.testing.assert_close(own["samples"], stock["samples"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("start", "end", "length", "encoded"),
    [
        (1, 1, 9, [0] * 5),
        (0, 1, 5, [0] * 5),
        (0, 3, 9, [0, 0, 0, 1, 2]),
        (5, 4, 13, [0, 0, 1, 2, 3]),
        (2, 6, 9, [1, 2, 3, 4, 5]),
    ],
)
def test_end_latent_is_what_stands_for_the_last_frames_of_a_video(
    server: ComfyServer, start: int, end: int, length: int, encoded: list[int]
) -> None:
    """Against VAEEncode of the frames numbered `encoded`, and what comes before against the same without an end."""
    width, height = FRAME_SIZE
    graph = start_latent(width=width, height=height, length=length, has_image=False)
    graph["image"] = node("LoadImage", image=FRAMES)
    graph["plain"] = node("WanDistImageToVideoLatent", **graph["latent"]["inputs"])
    for name, count, nodes in (
        ("start_image", start, ("latent", "plain")),
        ("end_image", end, ("latent",)),
    ):
        cut = node("ImageFromBatch", image=["image", 0], batch_index=0, length=max(count, 1))
        graph[name] = cut
        for used in nodes if count else ():
            graph[used]["inputs"][name] = [name, 0]
    graph["vae"] = node("SmallVAELoader", vae_name=VAE)
    whole: Any = None
    for place, number in enumerate(encoded):
        one = node("ImageFromBatch", image=["image", 0], batch_index=number, length=1)
        graph[f"frame {place}"] = one
        if place:
            joined = node("ImageBatch", image1=[whole, 0], image2=[f"frame {place}", 0])
            graph[f"frames {place}"] = joined
        whole = f"frames {place}" if place else "frame 0"
    graph["expected"] = node("VAEEncode", pixels=[whole, 0], vae=["vae", 0])
    result = succeed(server, save_tensors(graph, latent=["latent", "plain", "expected"]))

    own, plain = (tensors_of(server, result, name) for name in ("latent", "plain"))
    expected = tensors_of(server, result, "expected")["samples"][:, :, 1:]
    given = expected.shape[2]
    frames = (length - 1) // 4 + 1
    assert given == 1
    torch.testing.assert_close(own["samples"][:, :, -given:], expected, rtol=0, atol=1e-5)
    if start:
        assert torch.equal(own["samples"][:, :, :-given], plain["samples"][:, :, :-given])
    first = (start - 1) // 4 + 1
    kept = [0.0] * first + [1.0] * (frames - first - given) + [0.0] * given
    assert torch.equal(own["noise_mask"].mean(dim=(0, 1, 3, 4)), torch.tensor(kept))


def test_sampler_keeps_start_and_end(server: ComfyServer, seed: int) -> None:
    graph = sampled_latent(seed=seed, steps=3, sampler="euler", length=13)
    graph["latent"]["inputs"]["end_image"] = ["image", 0]
    graph["given"] = graphs.save_latent("latent")
    result = succeed(server, graph)
    sampled, given = latent_of(server, result), latent_of(server, result, "given")
    torch.testing.assert_close(sampled[:, :, [0, 3]], given[:, :, [0, 3]], rtol=0, atol=1e-5)
    assert not torch.allclose(sampled[:, :, [1, 2]], given[:, :, [1, 2]], atol=0.1)


def test_start_latent_repeats_for_a_batch_only_with_an_image(server: ComfyServer) -> None:
    with_image = succeed(server, start_latent(width=32, height=32, length=5, batch_size=3))
    latent = latent_of(server, with_image)
    assert latent.shape == (3, 48, 2, 2, 2)
    assert torch.equal(latent[0], latent[2])
    assert len(noise_mask_of(with_image.outputs["text"]["text"][0])) == 3

    empty = start_latent(width=32, height=32, length=5, batch_size=3, has_image=False)
    without_image = succeed(server, empty)
    assert torch.equal(latent_of(server, without_image), torch.zeros(1, 48, 2, 2, 2))
    assert "noise_mask" not in without_image.outputs["text"]["text"][0]


def test_start_image_of_another_size_is_scaled_and_cropped_as_the_stock_node_does(
    server: ComfyServer,
) -> None:
    by_us = start_latent(width=64, height=96, length=5)
    beforehand = start_latent(width=64, height=96, length=5)
    beforehand["scaled"] = node(
        "ImageScale",
        image=["image", 0],
        upscale_method="bilinear",
        width=64,
        height=96,
        crop="center",
    )
    beforehand["latent"]["inputs"]["start_image"] = ["scaled", 0]
    latents = [latent_of(server, succeed(server, graph)) for graph in (by_us, beforehand)]
    torch.testing.assert_close(*latents, rtol=1e-5, atol=1e-5)


# ---- the group


def test_model_is_read_once_and_again_only_when_its_file_is_replaced(
    server: ComfyServer, seed: int
) -> None:
    path = server.base / MODELS / "replaced.safetensors"
    write_transformer(path, TINY_TRANSFORMER, seed=21)
    size = path.stat().st_size

    def run(seed: int) -> tuple[Tensor, int]:
        """The latent, and what the ranks have read for it."""
        # Whatever has to start starts before the count.
        succeed(server, start_latent(seed=seed, batch_size=1 + seed % 3))
        group = group_of(server)
        before = bytes_read(group.ranks)
        log_size = len(server.log)
        result = succeed(server, sampled_latent(seed=seed, steps=2, model=path.name))
        assert group_of(server).pids == group.pids
        read = sum(bytes_read(group.ranks)) - sum(before)
        (said,) = re.findall(
            r"SampleRequest on mesh cfg2-ulysses2: .* s, (\d+) bytes", server.log[log_size:]
        )
        assert (int(said) == 0) == (read < size / 10)
        percent = [value for value, most in progress_of(result, "sampler") if most == 100]
        assert bool(percent) == (int(said) > 0)
        assert percent == sorted(set(percent))
        return latent_of(server, result), read

    first, first_read = run(seed)
    second, second_read = run(seed + 1)
    write_transformer(path, TINY_TRANSFORMER, seed=22)
    third, third_read = run(seed + 1)
    assert first_read >= 0.99 * size
    assert second_read < 0.05 * size
    assert third_read >= 0.99 * size
    assert not torch.equal(second, third)
    assert not torch.equal(first, second)


def test_another_mesh_gets_another_group_also_after_an_interrupted_start(
    server: ComfyServer, seed: int
) -> None:
    succeed(server, sampled_latent(seed=seed, steps=1))
    old = group_of(server)
    other = sampled_latent(seed=seed, steps=1, mesh="tp2", devices="cpu:2")

    starting = BackgroundRun(server, other)
    interrupted = starting.wait_for(
        lambda: next(
            (
                g
                for g in groups_of(server.pid)
                if g.launcher != old.launcher and any(map(has_torch, g.ranks))
            ),
            None,
        )
    )
    assert old.leftovers() == []
    asked = time.monotonic()
    server.interrupt()
    assert starting.result().status == "interrupted"
    assert time.monotonic() - asked < 15  # not a wait for the start, nor for its time-out
    assert interrupted.leftovers() == []
    assert groups_of(server.pid) == []

    result = succeed(server, other)
    new = group_of(server)
    assert len(new.ranks) == 2
    assert not set(new.pids) & {*old.pids, *interrupted.pids}
    assert latent_of(server, result).isfinite().all()


def test_interrupt_ends_sampling_within_a_step_and_the_group_goes_on(
    server: ComfyServer, seed: int
) -> None:
    big: Mapping[str, Any] = {"width": 192, "height": 192, "length": 17}
    succeed(server, sampled_latent(seed=seed, steps=1, **big))
    group = group_of(server)
    steps = 500
    run = BackgroundRun(server, sampled_latent(seed=seed, steps=steps, **big))
    run.wait_for_steps(6, maximum=steps)
    asked = time.monotonic()
    server.interrupt()
    result = run.result()
    assert result.status == "interrupted"
    times = [event.at_s for event in run.steps()]
    step_s = max(later - earlier for earlier, later in zip(times, times[1:], strict=False))
    (end,) = result.of_kind("execution_interrupted")
    # The poll for the interrupt, its way to the ranks, and the answer's way back.
    assert end.at_s - asked < step_s + 1.0
    assert len([moment for moment in times if moment > asked + step_s + 0.5]) == 0
    assert len(times) < steps / 4

    latent = latent_of(server, succeed(server, sampled_latent(seed=seed, steps=2, **big)))
    assert latent.isfinite().all()
    assert group_of(server) == group


def test_interrupt_ends_a_decode_of_121_frames_within_a_chunk_and_the_group_goes_on(
    server: ComfyServer, seed: int
) -> None:
    chunks = 31
    size: dict[str, Any] = {"width": 256, "height": 256}
    run = BackgroundRun(server, image_to_video(seed=seed, steps=1, length=121, **size))
    run.wait_for_steps(chunks // 2, maximum=chunks, node="decode")
    group = group_of(server)
    asked = time.monotonic()
    server.interrupt()
    result = run.result()
    assert result.status == "interrupted"
    events = [event for event in run.steps("decode") if event.data["max"] == chunks]
    # Latent frames that are done: one after the other, and not to the end.
    counted = [event.data["value"] for event in events]
    assert counted == sorted(set(counted))
    assert chunks // 2 <= counted[-1] < chunks
    times = [event.at_s for event in events]
    chunk_s = max(later - earlier for earlier, later in pairwise(times))
    (end,) = result.of_kind("execution_interrupted")
    assert end.at_s - asked < chunk_s + 1.0
    assert max(times) - asked < chunk_s + 0.5

    graph = image_to_video(seed=seed, steps=1, length=5, **size)
    pictures = succeed(server, graph).outputs["preview"]["images"]
    assert len(pictures) == 5
    assert group_of(server) == group


def test_decode_reports_how_the_ranks_shared_the_frames(server: ComfyServer, seed: int) -> None:
    graph = image_to_video(seed=seed, steps=1, length=5)
    graph["text"] = node("PreviewAny", source=["decode", 1])
    result = succeed(server, graph)
    (text,) = result.outputs["text"]["text"]
    assert text.startswith("VAE: columns in 3 parts of 2; the shorter side is left whole")
    assert re.search(r"4 ranks, [\d.]+ s, \d+ bytes read from disk", text)
    assert re.search(r"^peak memory by rank (0\.\d\d(, )?){4} GiB$", text, re.MULTILINE)
    assert "vae_space" in text


@pytest.mark.timeout(240)
def test_rank_killed_twice_is_reported_with_the_log_and_the_next_prompt_gets_a_fresh_group(
    server: ComfyServer, seed: int
) -> None:
    steps = 900
    run = BackgroundRun(server, sampled_latent(seed=seed, steps=steps, sampler="euler"))
    run.wait_for_steps(3, maximum=steps)
    first = group_of(server)
    os.kill(first.ranks[1], signal.SIGKILL)
    # There is one plane: it is started again, and the job from its first step.
    run.wait_for(
        lambda: [e.data["value"] for e in run.steps() if e.data["max"] == steps].count(1) == 2
    )
    group = group_of(server)
    assert not set(group.pids) & set(first.pids)
    os.kill(group.ranks[1], signal.SIGKILL)
    error = error_of(run.result())
    assert error.data["exception_type"].endswith("WorkerDied")
    assert error.data["node_id"] == "sampler"
    message = error.data["exception_message"]
    # Not the ranks that noticed it.
    assert message.startswith("rank 1 of the worker group ended unexpectedly")
    assert "The end of " in message
    assert "cfg2-ulysses2.log:" in message
    assert "[launcher] ERROR rank" in message
    assert [*first.leftovers(), *group.leftovers()] == []

    succeed(server, sampled_latent(seed=seed, steps=1))
    assert not set(group_of(server).pids) & set(group.pids)


# ---- readers


def _options(described: list[Any]) -> list[str]:
    """A combo's choices in either of the two forms that ComfyUI has."""
    kind, options = described
    return options["options"] if kind == "COMBO" else kind


def read_frames(path: Path) -> Tensor:
    """Pictures of an animation, [F, H, W, 3], 0 to 1."""
    frames = []
    with Image.open(path) as animation:
        for index in range(animation.n_frames):
            animation.seek(index)
            raw = bytearray(animation.convert("RGB").tobytes())
            frames.append(
                torch.frombuffer(raw, dtype=torch.uint8).view(animation.height, animation.width, 3)
            )
    return torch.stack(frames).float() / 255


def wan22_mean(comfyui: Path) -> Tensor:
    """What ComfyUI takes for the mean of a raw Wan2.2 latent, [1, 48, 1, 1, 1]."""
    spec = importlib.util.spec_from_file_location(
        "latent_formats", comfyui / "comfy" / "latent_formats.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    mean: Tensor = module.Wan22().process_out(torch.zeros(1, 48, 1, 1, 1))
    return mean


def noise_mask_of(text: str) -> Any:
    """The numbers of a LATENT's mask out of its printed form, as nested lists."""
    _, _, mask = text.partition("'noise_mask': tensor(")
    numbers = re.match(r"[\[\]\s\d.,]+", mask)
    assert numbers is not None, text
    return _nested(re.sub(r"\s", "", numbers[0]).rstrip(","))


def _nested(text: str) -> Any:
    import json

    return json.loads(re.sub(r"(\d)\.(?=[,\]])", r"\1.0", text))
