"""The models beside TI2V-5B: every mesh against one process, and a real ComfyUI's own samplers against ours.

Tiny widths, random weights, float32 on the CPU. The forward itself is compared with diffusers in test_model.py,
recognising the files in test_wan_file.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import graphs
import pytest
import torch
from comfy_kit import error_of, latent_of, succeed
from family_programs import error_without_host_memory, sample_in_turns
from graphs import MODELS, NEGATIVE, POSITIVE, Graph, node
from safetensors.torch import load_file, save_file
from torch import Tensor

from comfy_wan_dist.ipc.errors import ConfigError, ModelFileError
from comfy_wan_dist.ipc.messages import LowNoise, ModelSpec
from comfy_wan_dist.jobs.experts import choose_experts
from comfy_wan_dist.jobs.handle import ModelHandle, ResolvedModel, resolve_model
from comfy_wan_dist.mesh.memory import rank_memory
from comfy_wan_dist.mesh.parameters import expected_parameters
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.mesh.workload import Workload, requested_workload
from comfy_wan_dist.model_file.header import read_model_file
from comfy_wan_dist.model_file.wan import read_wan_file
from comfy_wan_dist.solvers.schedules import given_sigmas, wan_official
from devtools.checkpoints import write_transformer
from devtools.comfy_server import ComfyServer
from devtools.ledgers import predict_ledger
from devtools.loras import plain_lora, spelled
from devtools.mesh_runs import (
    SIGMAS,
    TEXT_TOKENS,
    Case,
    Inputs,
    LocalJob,
    Schedule,
    build_local_runner,
    build_request,
    lora_spec,
    mesh_degrees,
    model_spec,
    relative_error,
    sample_rank,
)
from devtools.quantised import write_fp8
from devtools.rank_pool import RankPool
from workers.model.tokens import grid_of
from workers.resident.memory import Room
from workers.sampling.forward import validate_conditions

pytestmark = pytest.mark.timeout(240)

T2V = WanShape(dim=256, ffn_dim=512, num_layers=2, in_dim=16, out_dim=16)
I2V = replace(T2V, in_dim=36)
KINDS = {"t2v": T2V, "i2v": I2V}
FILES = {kind: f"tiny_{kind}.safetensors" for kind in KINDS}
# Of the same shape: a second expert, and a copy of the first one.
LOW_NOISE, COPY = "tiny_t2v_low_noise.safetensors", "tiny_t2v_copy.safetensors"
LORA = "tiny_t2v_lora.safetensors"
# 27 tokens, which 2 ranks do not divide.
CASE = Case(name="odd", frames=3, height=6, width=6, batch=2)
MASKED = replace(CASE, frame_mask=((0, 1, 1), (0, 0.5, 1)))
# What text-to-video needs beyond TI2V-5B has to do with weights and stages only.
RUNS = (
    *(("i2v", mesh) for mesh in ("tp2", "ulysses2", "cfg2", "pp2", "cfg2-ring2-tp2-sp")),
    *(("t2v", mesh) for mesh in ("tp2", "pp2")),
)
RUN = Schedule(solver="uni_pc", sigmas=SIGMAS, guidance=5.0)
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
    for seed, name in ((7, LOW_NOISE), (0, COPY)):
        if not (folder / name).exists():
            write_transformer(folder / name, T2V, seed=seed)


def kind_run(models: Path, kind: str) -> tuple[ModelSpec, Inputs, Schedule]:
    """Arguments of a run on some mesh; text-to-video with given frames, all at one timestep."""
    given = MASKED if kind == "t2v" else CASE
    inputs = replace(given.inputs(KINDS[kind]), frame_mask=None)
    return model_spec(models / FILES[kind]), inputs, RUN


@pytest.fixture(scope="module")
def single(models: Path) -> dict[str, Tensor]:
    """What one process makes of each kind, and of two experts."""
    runs: dict[str, tuple[Any, ...]] = {kind: kind_run(models, kind) for kind in KINDS}
    runs["experts"] = expert_run(models)
    return {name: sample_rank(0, "single", *run)[0] for name, run in runs.items()}


@pytest.mark.parametrize(("kind", "mesh"), RUNS)
def test_mesh_matches_single_process(
    rank_pool: RankPool, models: Path, single: dict[str, Tensor], kind: str, mesh: str
) -> None:
    """And each rank sends what was predicted."""
    shape, expected = KINDS[kind], single[kind]
    size = mesh_degrees(mesh).world_size
    ranks = rank_pool.run(size, sample_rank, mesh, *kind_run(models, kind))
    assert relative_error(ranks[0][0], expected) <= MESH_LIMIT
    planned = Workload(
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
    given = {} if image is None else {"image": torch.zeros(image)}
    with pytest.raises(ConfigError, match=words):
        validate_conditions(given, KINDS[kind], torch.zeros(2, 16, 3, 6, 6), label="positive")


# ---- two experts


def expert_run(models: Path, low_noise: str = LOW_NOISE) -> tuple[Any, ...]:
    """Arguments of a run on some mesh: the second expert has the last two of four steps and guidance 3."""
    low = LowNoise(model=model_spec(models / low_noise), from_step=2, guidance=3.0)
    return model_spec(models / FILES["t2v"]), CASE.inputs(T2V), RUN, low


@pytest.mark.parametrize("mesh", ["tp2", "cfg2", "pp2", "ulysses2-fsdp"])
def test_experts_on_a_mesh_match_single_process(
    rank_pool: RankPool, models: Path, single: dict[str, Tensor], mesh: str
) -> None:
    (result, *_), *_ = rank_pool.run(2, sample_rank, mesh, *expert_run(models))
    assert relative_error(result, single["experts"]) <= MESH_LIMIT


def test_second_expert_goes_on_where_the_first_one_stops(models: Path) -> None:
    """The solver's state passes over: with equal weights and guidance a run is as with one model."""
    spec, inputs, schedule, low = expert_run(models, COPY)
    alone = sample_rank(0, "single", spec, inputs, schedule)[0]
    equal = replace(low, guidance=schedule.guidance)
    assert torch.equal(sample_rank(0, "single", spec, inputs, schedule, equal)[0], alone)
    other = replace(equal, model=model_spec(models / LOW_NOISE))
    changed = [
        sample_rank(0, "single", spec, inputs, schedule, each)[0]
        for each in (low, other, replace(other, from_step=1))
    ]
    for index, result in enumerate(changed):
        for another in (alone, *changed[:index]):
            assert relative_error(result, another) > 100 * MESH_LIMIT


def test_guidance_of_one_is_the_prompt_alone(models: Path) -> None:
    """For one of the two experts only, as where only one of them is distilled."""
    spec, inputs, schedule, low = expert_run(models, COPY)
    unguided = replace(schedule, guidance=1.0, solver="euler", sigmas=SIGMAS[:3])
    expected = sample_rank(
        0, "single", spec, replace(inputs, uncond=None, uncond_image=None), unguided
    )
    low = replace(low, from_step=1, guidance=1.0)
    assert torch.equal(sample_rank(0, "single", spec, inputs, unguided, low)[0], expected[0])


@pytest.mark.parametrize("mesh", ["tp2", "ulysses2-fsdp", "pp2"])
def test_experts_take_turns_on_devices_too_small_for_both(
    rank_pool: RankPool, models: Path, mesh: str
) -> None:
    run = expert_run(models)
    ranks = mesh_degrees(mesh).world_size
    expected = rank_pool.run(ranks, sample_rank, mesh, *run)[0][0]
    alone = [
        rank_pool.run(ranks, sample_rank, mesh, spec, *run[1:3])[0][0]
        for spec in (run[3].model, run[0])
    ]
    answers = rank_pool.run(ranks, sample_in_turns, mesh, *run, (-1, -1, 0, -1))
    for result, wanted in zip(answers[0][0], [expected] * 4 + alone, strict=True):
        assert torch.equal(result, wanted)
    for _, read, held in answers:
        assert read[0] > 0
        assert read[1:] == [0, 0, 0, 0, 0]
        (first, second), again, both, turns, second_alone, first_alone = held
        assert first == 0 < second
        assert again == (first, second) == turns
        assert both == (second, second)
        # Alone it takes the first slot; the other one is or gets offloaded.
        assert second_alone == first_alone == (second, 0)


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("quantised", [0, 1])
def test_experts_in_different_forms_fit_where_their_own_sizes_do(
    models: Path, tmp_path: Path, quantised: int, missing: int
) -> None:
    paths = [models / FILES["t2v"], models / LOW_NOISE]
    packed = tmp_path / "fp8.safetensors"
    write_fp8(packed, load_file(paths[quantised]), torch.float8_e4m3fn, only_matrices=True)
    paths[quantised] = packed
    high, low = map(model_spec, paths)
    handle = ModelHandle(
        path=str(paths[0]),
        dtype="float32",
        mesh="single",
        devices="cpu:1",
        compile=False,
        low_noise_path=str(paths[1]),
    )
    assert resolve_model(handle, visible_cuda=0).shape == T2V  # what is planned with
    inputs = CASE.inputs(T2V)
    runner, agreement = build_local_runner(0, "single")
    slots = (runner._transformers.model, runner._transformers.low_noise)
    request, tensors = build_request(
        high,
        inputs,
        RUN,
        mesh="single",
        low_noise=LowNoise(model=low, from_step=2, guidance=3.0),
    )
    groups = runner._plane.for_mesh(mesh_degrees("single"))
    memories = [
        rank_memory(
            requested_workload(request, read_wan_file(read_model_file(str(path))).shape),
            groups.degrees,
            groups.rank,
        )
        for path in paths
    ]
    weights = sum(memory.weights for memory in memories)
    room_for_both = weights + max(memory.total - memory.weights for memory in memories)

    def usable() -> int:
        return room_for_both - missing - sum(slot.device_bytes() for slot in slots)

    with (
        mock.patch.object(Room, "has_host", True),
        mock.patch.object(Room, "usable", side_effect=usable),
    ):
        runner.run(request, LocalJob(tensors, agreement))  # type: ignore[arg-type]
    held = [slot.device_bytes() for slot in slots]
    if missing:
        assert held == [0, memories[1].weights]
    else:
        assert held == [memory.weights for memory in memories]


def test_progress_of_two_experts_with_loras_never_goes_back(models: Path, tmp_path: Path) -> None:
    names = list(expected_parameters(T2V))[:20]
    path = tmp_path / "lora.safetensors"
    parts = plain_lora({name: expected_parameters(T2V)[name] for name in names}, seed=3)
    save_file(spelled(parts, "comfyui"), path)
    high, low = (
        replace(model_spec(models / name), loras=(lora_spec(path, 0.5),))
        for name in (FILES["t2v"], LOW_NOISE)
    )
    request, tensors = build_request(
        high,
        CASE.inputs(T2V),
        RUN,
        mesh="single",
        low_noise=LowNoise(model=low, from_step=2, guidance=3.0),
    )
    runner, agreement = build_local_runner(0, "single")
    job = LocalJob(tensors, agreement)
    runner.run(request, job)  # type: ignore[arg-type]
    shares = [done / total for phase, done, total in job.reports if phase == "load"]
    assert shares == sorted(shares)
    assert shares[0] < 0.1
    assert shares[-1] == 1


def test_experts_without_room_anywhere_are_refused(rank_pool: RankPool, models: Path) -> None:
    errors = rank_pool.run(2, error_without_host_memory, "tp2", *expert_run(models))
    assert len(set(errors)) == 1
    assert errors[0].startswith("InsufficientMemoryError: the model's two experts do not fit")
    assert "GiB of host memory" in errors[0]


@pytest.mark.parametrize("from_step", [0, 4])
def test_expert_without_a_step_is_refused(models: Path, from_step: int) -> None:
    spec, inputs, schedule, low = expert_run(models)
    with pytest.raises(ConfigError, match=f"step {from_step} of 4"):
        sample_rank(0, "single", spec, inputs, schedule, replace(low, from_step=from_step))


def test_files_that_are_no_experts_of_one_model_are_refused(models: Path) -> None:
    handle = ModelHandle(
        path=str(models / FILES["t2v"]),
        dtype="float32",
        mesh="single",
        devices="cpu:1",
        compile=False,
    )
    for low, words in (
        (FILES["i2v"], "has in_dim 36, .* 16; choose the two experts"),
        (FILES["t2v"], "named for high and for low noise"),
    ):
        with pytest.raises(ModelFileError, match=words):
            resolve_model(replace(handle, low_noise_path=str(models / low)), visible_cuda=0)
    good = resolve_model(replace(handle, low_noise_path=str(models / LOW_NOISE)), visible_cuda=0)
    assert good.low_noise == model_spec_of(good, models / LOW_NOISE)


def model_spec_of(model: ResolvedModel, path: Path) -> ModelSpec:
    return replace(model.spec, path=str(path), mtime_ns=path.stat().st_mtime_ns)


@pytest.mark.parametrize(
    ("shape", "shift", "high", "low"), [(T2V, 12.0, 26, 14), (I2V, 5.0, 15, 25)]
)
def test_experts_share_the_steps_as_in_the_official_code(
    models: Path, shape: WanShape, shift: float, high: int, low: int
) -> None:
    """40 steps at the official settings of T2V-A14B and I2V-A14B."""
    model = two_experts(models, shape)
    experts = choose_experts(model, wan_official(40, shift), cfg=4.0, low_noise_cfg=3.0)
    assert experts.low_noise == LowNoise(
        model=model.low_noise or model.spec, from_step=high, guidance=3.0
    )
    assert high + low == 40
    assert (experts.first, experts.guidance) == (model.spec, 4.0)


def two_experts(models: Path, shape: WanShape) -> ResolvedModel:
    handle = ModelHandle(
        path=str(models / FILES["t2v"]),
        low_noise_path=str(models / LOW_NOISE),
        dtype="float32",
        mesh="single",
        devices="cpu:1",
        compile=False,
    )
    return replace(resolve_model(handle, visible_cuda=0), shape=shape)


def test_expert_without_a_step_is_left_out(models: Path) -> None:
    model = two_experts(models, T2V)
    late, early = given_sigmas((0.8, 0.4, 0.0)), given_sigmas((1.0, 0.95, 0.9))
    only_low = choose_experts(model, late, cfg=4.0, low_noise_cfg=1.0)
    assert (only_low.first, only_low.low_noise) == (model.low_noise, None)
    assert not only_low.is_guided
    only_high = choose_experts(model, early, cfg=4.0, low_noise_cfg=1.0)
    assert (only_high.first, only_high.low_noise) == (model.spec, None)
    assert only_high.is_guided
    # At the boundary itself the first one predicts.
    at = choose_experts(model, given_sigmas((1.0, 0.5, 0.25, 0.0)), cfg=1.0, boundary=0.5)
    assert at.low_noise is not None
    assert at.low_noise.from_step == 2
    assert not at.is_guided
    for options in ({"boundary": 0.5}, {"low_noise_cfg": 2.0}):
        with pytest.raises(ConfigError, match="has one expert"):
            choose_experts(replace(model, low_noise=None), early, cfg=4.0, **options)


# ---- with a real ComfyUI


@pytest.fixture(scope="module")
def server(comfy: ComfyServer) -> ComfyServer:
    graphs.write_files(comfy.base)
    write_models(comfy.base / MODELS)
    (comfy.base / "models" / "loras").mkdir(exist_ok=True)
    lora = spelled(plain_lora(expected_parameters(T2V), seed=5), "comfyui")
    save_file(lora, comfy.base / "models" / "loras" / LORA)
    return comfy


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


def test_two_experts_equal_two_stock_samplers(server: ComfyServer, seed: int) -> None:
    """KSamplerAdvanced twice, the first one's noise left in, and a LoRA in the second one's model.

    euler: other stock solvers begin anew in the second.
    """
    steps, shift, split = 6, 5.0, 3  # sigmas 1, 0.96, 0.91, then 0.83, below the boundary of 0.875
    graph = both_models("t2v")
    graph["own bare"] = own_model("t2v", low_noise_model=LOW_NOISE)
    graph["low bare"] = node("UNETLoader", unet_name=LOW_NOISE, weight_dtype="default")
    lora = {"lora_name": LORA}
    graph["own model"] = node(
        "WanDistLoRA", model=["own bare", 0], strength=0.7, expert="low noise", **lora
    )
    graph["low model"] = node(
        "LoraLoaderModelOnly", model=["low bare", 0], strength_model=0.7, **lora
    )
    graph["low shifted"] = node("ModelSamplingSD3", model=["low model", 0], shift=shift)
    graph["empty"] = node("EmptyHunyuanLatentVideo", width=80, height=48, length=9, batch_size=1)
    settings = {**SETTINGS, "sampler_name": "euler", "steps": steps}
    graph["own experts"] = node(
        "WanDistSampler",
        model=["own model", 0],
        latent_image=["empty", 0],
        seed=seed,
        shift=shift,
        denoise=1.0,
        low_noise_cfg=3.0,
        **settings,
    )
    for name, model, latent, first, last, cfg in (
        ("stock high", "shifted", "empty", 0, split, 5.0),
        ("stock experts", "low shifted", "stock high", split, 10000, 3.0),
    ):
        graph[name] = node(
            "KSamplerAdvanced",
            model=[model, 0],
            latent_image=[latent, 0],
            noise_seed=seed,
            add_noise="enable" if first == 0 else "disable",
            start_at_step=first,
            end_at_step=last,
            return_with_leftover_noise="enable" if first == 0 else "disable",
            **{**settings, "cfg": cfg},
        )
    for name in ("stock experts", "own experts"):
        graph[f"save {name}"] = graphs.save_latent(name)
    compare(server, graph, "experts")
    del graph["stock experts"], graph["save stock experts"], graph["save own experts"]
    graph["text"] = node("PreviewAny", source=["own experts", 1])
    (report,) = succeed(server, graph).outputs["text"]["text"]
    assert "steps by the high-noise expert: 3, by the low-noise expert: 3\n\nmesh" in report
    assert "(only in the low noise expert)" in report


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
    other = {"latent_tensor": torch.ones(1, 48, 3, 4, 4), "latent_format_version_0": torch.ones(0)}
    save_file(other, server.base / "input" / "other.latent")
    graph["other vae"] = node("LoadLatent", latent="other.latent")
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
