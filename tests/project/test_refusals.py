"""Whatever is refused about a file or a graph is refused on purpose: a case of it is run through stock ComfyUI too.

Every `raise` of a ConfigError in the product is the end of such a case, or stock has nothing that could meet it, for a
reason of WITHOUT_STOCK. What stock runs of the cases has its row in docs/differences.md. A new refusal needs a case in
tests/kits/refused_cases.py, or a reason.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from comfyui_child import run_beside_comfyui
from lora_headers import REFUSED
from odd_scaled import ODD, scaled
from refusals import REPO, Refusal, all_refusals, refusal_of
from refused_cases import CASES, Graph, base_graph

from comfy_wan_dist.ipc.errors import ConfigError
from comfy_wan_dist.mesh.shape import WanShape
from comfy_wan_dist.model_file.header import read_model_file
from comfy_wan_dist.model_file.lora import parse_lora
from comfy_wan_dist.model_file.wan import read_wan_file

# ---- beside ComfyUI


def run_own(graph: Graph) -> None:
    """Our nodes, and the ranks' work in this process. Raises what is refused."""
    from comfy_wan_dist.comfyui.folders import lora_path
    from comfy_wan_dist.jobs.handle import ModelHandle
    from comfy_wan_dist.nodes.image_to_video_latent import ImageToVideoLatent
    from comfy_wan_dist.nodes.sampler import Sampler
    from comfy_wan_dist.nodes.vae_decode import VAEDecode

    handle = ModelHandle(
        path=str(graph.model),
        low_noise_path=str(graph.low_noise or ""),
        dtype="float32",
        mesh="single",
        devices="cpu:1",
        compile=False,
    )
    if graph.lora is not None:
        handle = handle.with_lora(lora_path(graph.lora.name), graph.strength)
    if graph.vae is None:
        work = Sampler.execute(
            handle,
            graph.positive,
            graph.negative,
            graph.latent,
            seed=1,
            steps=graph.steps,
            cfg=graph.cfg,
            sampler_name=graph.sampler,
            scheduler=graph.scheduler,
            shift=graph.shift,
            denoise=graph.denoise,
            sigmas=graph.sigmas,
        )
    elif graph.image is None:
        work = VAEDecode.execute(handle, graph.vae.name, graph.latent, vae_dtype="float32")
    else:
        work = ImageToVideoLatent.execute(
            handle,
            graph.vae.name,
            width=32,
            height=32,
            length=5,
            batch_size=1,
            vae_dtype="float32",
            start_image=graph.image,
        )
    asyncio.run(work)


def run_ranks_here() -> None:
    """From now on a node's request is done by the runner of one rank in this process."""
    from comfy_wan_dist.jobs.session import Session
    from devtools.mesh_runs import LocalJob, build_local_runner

    async def run(session: Any, pieces: Any) -> None:
        runner, agreement = build_local_runner(0, "single")
        job = LocalJob((), agreement)
        job.tensor = session.tensor  # type: ignore[method-assign]
        for piece in pieces:
            runner.run(piece.request, job)  # type: ignore[arg-type]
        raise Done

    Session.run = run  # type: ignore[assignment, method-assign]


class Done(Exception):
    """A request was not refused."""


def run_stock(graph: Graph) -> None:
    """The stock nodes of the same graph. Raises what they raise."""
    import comfy.ldm.wan.vae
    import comfy.ldm.wan.vae2_2
    import comfy.sample
    import comfy.samplers
    import comfy.sd
    import comfy.utils
    import nodes
    import torch
    from comfy.model_sampling import CONST, ModelSamplingDiscreteFlow

    from devtools.comfy_pack import small_vae

    if graph.vae is not None:
        weights = comfy.utils.load_torch_file(str(graph.vae))
        width = weights["encoder.conv1.weight"].shape[0]
        if "decoder.upsamples.0.residual.2.weight" in weights:
            (vae,) = small_vae(comfy.ldm.wan.vae, weights, dim=width)
        else:
            decoder_width = weights["decoder.head.2.weight"].shape[1]
            (vae,) = small_vae(comfy.ldm.wan.vae2_2, weights, dim=width, dec_dim=decoder_width)
        if graph.image is None:
            vae.decode(graph.latent["samples"])
        else:
            pixels = comfy.utils.common_upscale(
                graph.image.movedim(-1, 1), 32, 32, "bilinear", "center"
            )
            vae.encode(pixels.movedim(1, -1))
        return

    def shifted(path: Path) -> Any:
        model = comfy.sd.load_diffusion_model(
            str(path), model_options={"dtype": torch.float32}
        ).clone()
        sampling = type("Sampling", (ModelSamplingDiscreteFlow, CONST), {})()
        sampling.set_parameters(shift=graph.shift, multiplier=1000)
        model.add_object_patch("model_sampling", sampling)
        if graph.lora is None:
            return model
        file = comfy.utils.load_torch_file(str(graph.lora))
        return comfy.sd.load_lora_for_models(model, None, file, graph.strength, 0)[0]

    model = shifted(graph.model)
    ends = {"positive": graph.positive, "negative": graph.negative}
    if graph.sigmas is not None:
        samples = comfy.sample.fix_empty_latent_channels(model, graph.latent["samples"])
        comfy.sample.sample_custom(
            model,
            comfy.sample.prepare_noise(samples, 1),
            graph.cfg,
            comfy.samplers.sampler_object(graph.sampler),
            graph.sigmas,
            latent_image=samples,
            noise_mask=graph.latent.get("noise_mask"),
            seed=1,
            disable_pbar=True,
            **ends,
        )
        return
    inputs = {
        "seed": 1,
        "steps": graph.steps,
        "cfg": graph.cfg,
        "sampler_name": graph.sampler,
        "scheduler": graph.scheduler,
        "denoise": graph.denoise,
        **ends,
    }
    if graph.low_noise is None:
        nodes.common_ksampler(model, latent=graph.latent, **inputs)
        return
    (half,) = nodes.common_ksampler(
        model, latent=graph.latent, **inputs, last_step=1, force_full_denoise=False
    )
    nodes.common_ksampler(
        shifted(graph.low_noise), latent=half, **inputs, start_step=1, disable_noise=True
    )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """stock: what it raised, or ''. place, lines: of the refusal here; message: what it says."""

    stock: str
    place: str
    lines: tuple[int, int]
    message: str

    @property
    def refusal(self) -> Refusal:
        return Refusal(self.place, (self.lines[0], self.lines[1]))


def error_of(run: Callable[[Graph], None], graph: Graph) -> BaseException | None:
    try:
        run(graph)
    except Exception as error:
        return error
    return None


def main(folder: Path) -> None:
    """Run every case through both, and write what came of it."""
    sys.argv = [sys.argv[0], "--cpu"]  # ComfyUI reads it on import
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.samplers
    import folder_paths
    import torch

    def late(_: Any, steps: int) -> Any:
        return torch.tensor([1 - step / (steps - 1) for step in range(steps)])

    comfy.samplers.SCHEDULER_HANDLERS["late"] = comfy.samplers.SchedulerHandler(late)
    comfy.samplers.KSampler.SCHEDULERS = [*comfy.samplers.KSampler.SCHEDULERS, "late"]
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    run_ranks_here()
    refusals = all_refusals()
    outcomes = {}
    for index, (name, case) in enumerate(CASES.items()):
        place = folder / str(index)
        place.mkdir()
        for kind in ("vae", "loras"):
            folder_paths.add_model_folder_path(kind, str(place), is_default=True)
        graph = base_graph(place)
        case.change(graph)
        own, stock = error_of(run_own, graph), error_of(run_stock, graph)
        found = refusal_of(own, refusals) if isinstance(own, ConfigError) else None
        outcomes[name] = Outcome(
            stock="" if stock is None else repr(stock)[:200],
            place="" if found is None else found.place,
            lines=(0, 0) if found is None else found.lines,
            message=repr(own) if found is None else str(own),
        )
    (folder / "outcomes.json").write_text(
        json.dumps({name: asdict(outcome) for name, outcome in outcomes.items()})
    )


WITHOUT_STOCK: dict[str, tuple[str, ...]] = {
    # Why stock has nothing that could meet it; files, folders, or functions in them.
    "a mesh, devices and what they can do, their memory, other machines": (
        "comfy_wan_dist/mesh/degrees.py",
        "comfy_wan_dist/mesh/devices.py",
        "comfy_wan_dist/mesh/layout.py",
        "comfy_wan_dist/mesh/machines.py",
        "comfy_wan_dist/mesh/validate.py",
        "comfy_wan_dist/group/",
        "comfy_wan_dist/ipc/tcp.py",
        "workers/job.py::memory_errors",
        "workers/parallel/",
        "workers/process/",
        "workers/resident/fit.py",
        "workers/checkpoint/files.py::CopiedFiles",
    ),
    "the command line and its node, which plan and compute nothing": (
        "comfy_wan_dist/cli.py",
        "comfy_wan_dist/planning/",
        "comfy_wan_dist/mesh/shape.py::video_grid",
    ),
    "GGUF, for which stock has no loader": (
        "comfy_wan_dist/model_file/gguf.py",
        "comfy_wan_dist/model_file/files.py::_parts_of",
        "comfy_wan_dist/model_file/encoding.py::_require_supported",
    ),
    "a folder, where stock takes one file": ("comfy_wan_dist/model_file/files.py::_model_in",),
    "a file of this pack": (
        "comfy_wan_dist/model_file/conditioning.py",
        "comfy_wan_dist/comfyui/folders.py::conditioning_path",
    ),
    "an input that stock nodes have not: presets, the second expert, dtypes, memory, an end image, wan_official": (
        "comfy_wan_dist/nodes/sampler.py::_few_step",
        "comfy_wan_dist/nodes/vae_decode.py",
        "comfy_wan_dist/nodes/vae_inputs.py",
        "comfy_wan_dist/jobs/experts.py",
        "comfy_wan_dist/jobs/handle.py::ModelHandle.with_lora",
        "comfy_wan_dist/jobs/handle.py::resolve_dtype",
        "comfy_wan_dist/jobs/vae.py::validate_room",
        "comfy_wan_dist/solvers/schedules.py::wan_official",
        "workers/vae_job.py::VAEWork._choose_split",
    ),
    "the pack's own MODEL, which tests/comfyui/test_model_node.py runs beside the native one": (
        "comfy_wan_dist/comfyui/patches.py",
        "comfy_wan_dist/comfyui/remote_model.py",
        "comfy_wan_dist/jobs/forwards.py",
        "workers/forward_job.py",
    ),
    "what widgets keep out, and only a link or another program can bring: tests/comfyui/test_bad_input.py": (
        "comfy_wan_dist/nodes/inputs.py::validate_types",
        "comfy_wan_dist/nodes/image_to_video_latent.py",
        "comfy_wan_dist/nodes/sampler_advanced.py",
        "comfy_wan_dist/solvers/schedules.py::cut_schedule",
    ),
    "a file that changes, or a disk that fails, while it is read": (
        "comfy_wan_dist/model_file/header.py::content_of",
        "comfy_wan_dist/model_file/encoding.py::read_bytes",
        "workers/checkpoint/files.py::GivenFiles",
        "workers/checkpoint/reader.py",
    ),
    "a request that no node makes; ranks look again at what they are sent": (
        "comfy_wan_dist/ipc/messages.py",
        "comfy_wan_dist/mesh/workload.py",
        "comfy_wan_dist/solvers/table.py::build_solver",
        "workers/resident/loading.py",
        "workers/job.py::groups_for",
        "workers/job.py::read_conditions",
        "workers/sample_job.py::validate_steps",
        "workers/sampling/forward.py",
        "workers/vae/run.py::validate_decode",
        "workers/vae/run.py::validate_encode",
    ),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, comfyui_path: Path) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("cases")
    run_beside_comfyui(__file__, folder, comfyui_path)
    found = json.loads((folder / "outcomes.json").read_text())
    return {name: Outcome(**outcome) for name, outcome in found.items()}


@pytest.mark.parametrize("case", CASES)
def test_case_is_refused_in_a_sentence(case: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[case]
    assert outcome.place, outcome.message
    assert 20 < len(outcome.message) < 600
    assert "\n" not in outcome.message


def test_what_stock_runs_has_a_row(outcomes: dict[str, Outcome]) -> None:
    lines = (REPO / "docs" / "differences.md").read_text().splitlines()
    for name, case in CASES.items():
        rows = [line for line in lines if line.startswith(f"| {case.row}")]
        if case.row:
            assert len(rows) == 1, (name, case.row)
        else:
            assert outcomes[name].stock, (
                f"stock ComfyUI runs {name!r}: docs/differences.md needs a row of it"
            )
    assert 20 < sum(outcome.stock == "" for outcome in outcomes.values()) < len(CASES)


def test_every_refusal_has_a_case_or_a_reason(outcomes: dict[str, Outcome], tmp_path: Path) -> None:
    refusals = all_refusals()
    reached = {outcome.refusal for outcome in outcomes.values()} | of_other_tables(tmp_path)
    excused = [place for places in WITHOUT_STOCK.values() for place in places]
    left = [each for each in refusals if each not in reached]
    missing = [str(each) for each in left if not each.place.startswith(tuple(excused))]
    assert not missing, "a case in tests/kits/refused_cases.py is missing"
    unused = [place for place in excused if not any(each.place.startswith(place) for each in left)]
    assert not unused, "these have cases, or are gone"
    assert len(reached) > 90


def of_other_tables(folder: Path) -> set[Refusal | None]:
    """Where the cases end that are run through stock elsewhere."""
    refusals = all_refusals()
    found = set()
    for name, (form, change, _) in ODD.items():
        path = scaled(folder / f"{name}.safetensors", change, form)
        with pytest.raises(ConfigError) as caught:
            read_wan_file(read_model_file(str(path)))
        found.add(refusal_of(caught.value, refusals))
    shape = WanShape(
        dim=128, ffn_dim=64, num_layers=3, in_dim=48, out_dim=48, text_dim=16, freq_dim=8
    )
    for entries, _ in REFUSED.values():
        with pytest.raises(ConfigError) as caught:
            parse_lora(entries, shape, label="x", alpha=None, read_scalar=lambda _: 2.0)
        found.add(refusal_of(caught.value, refusals))
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
