"""Loading a rank's shard: the right bytes, how many were read, and refusal where memory does not suffice."""

from __future__ import annotations

import json
import os
import resource
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from comfy_wan_dist.ipc.errors import InsufficientMemoryError, ModelFileError
from comfy_wan_dist.mesh.degrees import MeshDegrees
from comfy_wan_dist.mesh.devices import GIB
from comfy_wan_dist.mesh.host_memory import HostMemory
from comfy_wan_dist.mesh.memory import load_bytes
from comfy_wan_dist.mesh.parameters import expected_parameters, parameter_slice
from comfy_wan_dist.mesh.shape import TI2V_5B, WanShape
from comfy_wan_dist.model_file.encoding import TensorEntry
from comfy_wan_dist.model_file.header import read_model_file
from comfy_wan_dist.model_file.wan import WanFile, read_wan_file
from devtools.checkpoints import (
    TINY_VAE,
    transformer_weights,
    vae_weights,
    write_shards,
    write_transformer,
)
from devtools.mesh_runs import (
    Case,
    LocalJob,
    Schedule,
    build_local_runner,
    build_request,
    mesh_degrees,
    model_spec,
    single_groups,
)
from devtools.reading import pass_by, read_alone
from devtools.vae_runs import load_vae
from workers.checkpoint import reader
from workers.checkpoint.load import load_weights
from workers.checkpoint.reader import TensorReader
from workers.model.wan import WanModel
from workers.parallel.collectives import AxisGroup, Ledger
from workers.parallel.parallelize import cut_model
from workers.resident.fit import validate_memory
from workers.resident.memory import Room, free_memory

SHAPE = WanShape(dim=256, ffn_dim=192, num_layers=2, in_dim=48, out_dim=48, text_dim=16, freq_dim=8)
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tp_group(size: int, rank: int) -> AxisGroup:
    return AxisGroup(axis="tp", ranks=tuple(range(size)), rank=rank, group=None, ledger=Ledger())


def load(
    file: WanFile, *, size: int = 1, rank: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[WanModel, int, list[tuple[int, int]]]:
    """A rank's model, the bytes read, and the progress reported."""
    groups = replace(single_groups(), tp=tp_group(size, rank))
    model = cut_model(file.shape, groups, dtype=dtype, device=CPU)
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    reports: list[tuple[int, int]] = []

    def milestone(done: int, total: int, error: Exception | None) -> None:
        pass_by(done, total, error)
        reports.append((done, total))

    bytes_read = load_weights(
        model,
        file,
        groups,
        sharing=read_alone(),
        milestone=milestone,
    )
    return model, bytes_read, reports


def recognise(path: Path) -> WanFile:
    return read_wan_file(read_model_file(str(path)))


def sliced(name: str, weights: Mapping[str, Tensor], *, size: int, rank: int) -> Tensor:
    part = parameter_slice(name, tuple(weights[name].shape), tp_rank=rank, tp_size=size)
    return (
        weights[name]
        if part is None
        else weights[name].narrow(part.dim, part.start, part.stop - part.start)
    )


@pytest.mark.parametrize("file_dtype", DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2])
def test_shards_are_bit_equal_to_slices_of_the_file(
    tmp_path: Path, file_dtype: torch.dtype, dtype: torch.dtype, size: int
) -> None:
    weights = transformer_weights(SHAPE, seed=5, dtype=file_dtype)
    save_file(weights, tmp_path / "m.safetensors")
    file = recognise(tmp_path / "m.safetensors")
    for rank in range(size):
        model, _, _ = load(file, size=size, rank=rank, dtype=dtype)
        parameters = dict(model.named_parameters())
        assert parameters.keys() == weights.keys()
        for name, parameter in parameters.items():
            expected = sliced(name, weights, size=size, rank=rank)
            assert torch.equal(parameter, expected.to(parameter.dtype)), name
            assert (
                parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
            ), name


def test_prefixed_file_loads_the_same(tmp_path: Path) -> None:
    weights = transformer_weights(SHAPE, seed=5)
    beside = {"first_stage_model.x": torch.zeros(3)}
    save_file(
        {f"model.diffusion_model.{n}": v for n, v in weights.items()} | beside,
        tmp_path / "m.safetensors",
    )
    model, _, _ = load(recognise(tmp_path / "m.safetensors"))
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())


def test_several_files_load_the_same_from_any_of_them(tmp_path: Path) -> None:
    weights = transformer_weights(SHAPE, seed=5)
    paths = write_shards(tmp_path, weights, parts=3)
    for path in paths:
        model, _, _ = load(recognise(path), size=2, rank=1)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, sliced(name, weights, size=2, rank=1)), name


# ---- reading


def tensor_file(tmp_path: Path, tensor: Tensor) -> TensorEntry:
    save_file({"before": torch.zeros(5), "x": tensor}, tmp_path / "t.safetensors")
    return read_model_file(str(tmp_path / "t.safetensors")).entries["x"]


@pytest.mark.parametrize("buffer_bytes", [1, 24, 100, 2**20])
@pytest.mark.parametrize("columns", [None, range(0, 4), range(5, 6)])
@pytest.mark.parametrize("rows", [None, range(3, 8), range(9, 9)])
def test_reading_does_not_depend_on_the_buffer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: range | None,
    columns: range | None,
    buffer_bytes: int,
) -> None:
    whole = torch.randn(9, 6, generator=torch.Generator().manual_seed(0))
    entry = tensor_file(tmp_path, whole)
    expected = whole
    for dim, part in enumerate((rows, columns)):
        if part is not None:
            expected = expected.narrow(dim, part.start, len(part))
    monkeypatch.setattr(reader, "BUFFER_BYTES", max(buffer_bytes, whole.element_size()))
    for dtype in DTYPES:
        target = torch.full(expected.shape, float("nan"), dtype=dtype)
        with TensorReader() as source:
            source.read_into(target, entry, rows=rows, columns=columns)
        assert torch.equal(target, expected.to(dtype))


def test_bytes_read_are_what_the_kernel_gave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(transformer_weights(SHAPE, seed=5), tmp_path / "m.safetensors")
    file = recognise(tmp_path / "m.safetensors")
    given = 0
    real = os.preadv

    def counted(*arguments: object) -> int:
        nonlocal given
        got: int = real(*arguments)  # type: ignore[arg-type]
        given += got
        return got

    monkeypatch.setattr(os, "preadv", counted)
    _, bytes_read, _ = load(file, size=2, rank=1)
    assert bytes_read == given > 0


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("file_dtype", DTYPES)
def test_bytes_read_leave_out_other_ranks_rows(
    tmp_path: Path, size: int, file_dtype: torch.dtype
) -> None:
    weights = transformer_weights(SHAPE, seed=5, dtype=file_dtype)
    save_file(weights, tmp_path / "m.safetensors")
    file = recognise(tmp_path / "m.safetensors")
    expected = 0
    for name, value in weights.items():
        part = parameter_slice(name, tuple(value.shape), tp_rank=0, tp_size=size)
        # A slice of dim 1 passes over whole rows.
        expected += (
            value.numel()
            * value.element_size()
            // (size if part is not None and part.dim == 0 else 1)
        )
    _, bytes_read, reports = load(file, size=size)
    assert bytes_read == expected
    total = sum(value.numel() * value.element_size() for value in weights.values())
    assert reports[-1] == (total, total)
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert {of for _, of in reports} == {total}


def test_file_is_read_once_and_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.safetensors"
    header, data = {}, b""
    for name, value in reversed(transformer_weights(SHAPE, seed=5).items()):
        content = value.numpy().tobytes()
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": offsets}
        data += content
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    file = recognise(path)
    positions: list[int] = []
    real = os.preadv

    def recorded(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        positions.append(offset)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", recorded)
    load(file)
    assert positions == sorted(positions)
    assert len(positions) == len(file.entries)


def test_loading_closes_its_files(tmp_path: Path) -> None:
    save_file(transformer_weights(SHAPE, seed=5), tmp_path / "m.safetensors")
    file = recognise(tmp_path / "m.safetensors")
    before = os.listdir("/proc/self/fd")
    load(file)
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize("rows", [None, range(4, 8)])
@pytest.mark.parametrize("columns", [None, range(0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_file_that_shrinks_while_it_is_read_is_refused(
    tmp_path: Path, rows: range | None, columns: range | None, dtype: torch.dtype
) -> None:
    entry = tensor_file(tmp_path, torch.randn(8, 8))
    os.truncate(entry.path, entry.stop - 1)
    shape = (4 if rows else 8, 4 if columns else 8)
    with (
        TensorReader() as source,
        pytest.raises(ModelFileError, match="became shorter while it was read; load it"),
    ):
        source.read_into(torch.empty(shape, dtype=dtype), entry, rows=rows, columns=columns)


def test_file_that_is_removed_before_it_is_read_is_refused(tmp_path: Path) -> None:
    entry = tensor_file(tmp_path, torch.randn(8, 8))
    os.remove(entry.path)
    with (
        TensorReader() as source,
        pytest.raises(ModelFileError, match="cannot be opened: No such file"),
    ):
        source.read_into(torch.empty(8, 8), entry)


# ---- VAE


@pytest.mark.parametrize("file_dtype", DTYPES)
def test_vae_file_is_loaded_whole(tmp_path: Path, file_dtype: torch.dtype) -> None:
    weights = vae_weights(TINY_VAE, seed=2, dtype=file_dtype)
    save_file(weights, tmp_path / "vae.safetensors")
    vae, bytes_read = load_vae(str(tmp_path / "vae.safetensors"), dtype=torch.float32, device=CPU)
    assert bytes_read == sum(value.numel() * value.element_size() for value in weights.values())
    parameters = dict(vae.named_parameters())
    assert parameters.keys() == weights.keys()
    assert all(torch.equal(parameters[name], value.float()) for name, value in weights.items())


# ---- memory


def write_sparse(path: Path, shape: WanShape) -> None:
    """A file that claims a model of `shape` in float32 and takes next to no room on the disk."""
    header, position = {}, 0
    for name, dims in expected_parameters(shape).items():
        size = torch.Size(dims).numel() * 4
        header[name] = {
            "dtype": "F32",
            "shape": list(dims),
            "data_offsets": [position, position + size],
        }
        position += size
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)
    os.truncate(path, 8 + len(raw) + position)


def test_model_that_does_not_fit_is_refused_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.safetensors"
    huge = WanShape(dim=128 * 512, ffn_dim=4 * 128 * 512, num_layers=40, in_dim=48, out_dim=48)
    write_sparse(path, huge)
    assert path.stat().st_size > 8e12
    runner, agreement = build_local_runner(0, "single")
    case = Case(name="any", frames=1, height=2, width=2)
    schedule = Schedule(solver="euler", sigmas=(1.0, 0.0), guidance=1.0)
    request, tensors = build_request(model_spec(path), case.inputs(huge), schedule, mesh="single")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InsufficientMemoryError) as caught:
        runner.run(request, LocalJob(tensors, agreement))  # type: ignore[arg-type]
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 100 * 1024
    message = str(caught.value)
    assert message.startswith("mesh single needs 10369.9 GiB for the model on cpu, which has ")
    assert message.endswith("no mesh of these devices would fit: use more or larger devices")
    assert runner._transformers.bytes_read == 0


def memory_error(
    mesh: str,
    free_gib: float,
    *,
    device: torch.device = CPU,
    dtype: str = "bfloat16",
    machines: int = 1,
) -> str:
    degrees = mesh_degrees(mesh)
    room = Room(device=device, local_ranks=degrees.plane_size // machines)
    with mock.patch.object(Room, "free", return_value=int(free_gib * GIB)):
        try:
            validate_memory(TI2V_5B, degrees, stage=0, dtype=dtype, room=room)
        except InsufficientMemoryError as error:
            return str(error)
    return "fits"


def test_refusal_names_a_mesh_that_fits() -> None:
    cuda = torch.device("cuda", 0)
    # 5B in 16 bits is 9.4 GiB, and half a GiB beside.
    assert memory_error("ulysses4", 10, device=cuda) == "fits"
    assert memory_error("ulysses4", 9, device=cuda) == (
        "each rank of mesh ulysses4 needs 9.9 GiB for the model on cuda:0, which has 9.0 GiB free; "
        "mesh cfg2-tp2 would fit"
    )
    assert memory_error("cfg2-tp2", 9, device=cuda) == "fits"
    assert "mesh tp4 would fit" in memory_error("ulysses4", 3.3, device=cuda)
    assert memory_error("ulysses4", 1, device=cuda).endswith(
        "no mesh of these devices would fit: use more or larger devices"
    )
    assert memory_error("ulysses4", 4, device=cuda, dtype="float32").endswith(
        "use more or larger devices, or the dtype bfloat16 with mesh tp4"
    )


def test_ranks_on_the_cpu_share_its_memory() -> None:
    assert memory_error("ulysses2", 20) == "fits"
    assert memory_error("ulysses2", 15) == (
        "the 2 ranks of mesh ulysses2 together need 19.9 GiB for the model on cpu, which has 15.0 GiB free; "
        "mesh tp2 would fit"
    )


def test_ranks_of_another_machine_do_not_share_this_ones_memory() -> None:
    assert memory_error("ulysses2", 15, machines=2) == "fits"


def test_weights_of_exactly_the_free_memory_fit() -> None:
    need = load_bytes(TI2V_5B, MeshDegrees(), stage=0, dtype="bfloat16")
    cuda = torch.device("cuda", 0)
    assert memory_error("single", need / GIB, device=cuda) == "fits"
    assert memory_error("single", (need - 1) / GIB, device=cuda) != "fits"


def test_free_memory_of_the_cpu_is_within_the_limits_of_control_groups() -> None:
    limited = HostMemory(free=123, group=Path("/sys/fs/cgroup"))
    with mock.patch("workers.resident.memory.host_memory", return_value=limited):
        assert free_memory(CPU) == 123


def test_file_replaced_while_it_is_loaded_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_transformer(path, SHAPE, seed=1)
    runner, agreement = build_local_runner(0, "single")
    case = Case(name="any", frames=1, height=2, width=2)
    schedule = Schedule(solver="euler", sigmas=(1.0, 0.0), guidance=1.0)
    request, tensors = build_request(model_spec(path), case.inputs(SHAPE), schedule, mesh="single")

    class ReplacingJob(LocalJob):
        def report(self, phase: str, done: int, total: int) -> None:
            if phase == "load" and done < total:
                os.utime(path, ns=(1, 1))

    with pytest.raises(ModelFileError, match="changed after the job was made"):
        runner.run(request, ReplacingJob(tensors, agreement))  # type: ignore[arg-type]
    with pytest.raises(ModelFileError, match="changed after the job was made"):
        runner.run(request, LocalJob(tensors, agreement))  # type: ignore[arg-type]
