"""Tensors and files of a group over several machines, where these are not ComfyUI's."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import buffer_programs
import graphs
import pytest
import torch
from machine_kit import TWO

from comfy_wan_dist.ipc.errors import (
    ModelFileError,
)
from comfy_wan_dist.jobs.handle import ModelHandle, resolve_model
from comfy_wan_dist.model_file.header import content_of, read_model_file
from devtools.checkpoints import TINY_TRANSFORMER, write_transformer
from devtools.mesh_runs import (
    model_spec,
)
from devtools.rank_pool import RankPool
from workers.checkpoint.files import CopiedFiles


def test_other_machines_get_copies_of_inputs_and_untouched_room_for_results(
    rank_pool: RankPool,
) -> None:
    answers = rank_pool.run(4, buffer_programs.adopted_tensors, 4, True)
    latent = torch.arange(12.0).view(3, 4)
    for rank, answer in enumerate(answers):
        assert not isinstance(answer, str), answer
        assert torch.equal(answer[0], latent), rank
        assert torch.equal(answer[1], torch.full((2, 2), 7.0 if rank < 2 else 0.0)), rank
    broken = rank_pool.run(4, buffer_programs.without_broadcast, 4)
    assert not torch.equal(broken[2][0], latent)  # type: ignore[arg-type]


def test_nobody_waits_for_tensors_that_rank_0_does_not_have(rank_pool: RankPool) -> None:
    answers = rank_pool.run(4, buffer_programs.adopted_tensors, 4, False, timeout_s=20)
    assert all("names buffer 0 of 0" in str(answer) for answer in answers)


def test_all_ranks_hear_why_another_machine_has_no_room(rank_pool: RankPool) -> None:
    answers = rank_pool.run(4, buffer_programs.without_room, 4, timeout_s=20)
    assert all(
        str(answer).startswith("InsufficientMemoryError: another machine") for answer in answers
    )


def test_files_of_other_machines_are_known_by_path_or_name_and_size(
    model_path: Path, tmp_path: Path
) -> None:
    spec = model_spec(model_path)
    os.utime(model_path)  # elsewhere the time of change means nothing
    assert CopiedFiles(folder=None, machine="other").read(spec).path == str(model_path)
    gone = replace(spec, path=f"/nowhere/{graphs.MODEL}")
    with pytest.raises(
        ModelFileError, match=r"machine other has no file of \d+ bytes at /nowhere/.*--models"
    ):
        CopiedFiles(folder=None, machine="other").read(gone)
    small, right = tmp_path / "a" / graphs.MODEL, tmp_path / "b" / "deep" / graphs.MODEL
    for path in (small, right):
        path.parent.mkdir(parents=True)
    write_transformer(small, TINY_TRANSFORMER, seed=1, dtype=torch.bfloat16)
    files = CopiedFiles(folder=tmp_path, machine="other")
    with pytest.raises(ModelFileError, match=rf"or below {tmp_path}, and {small} has \d+ bytes;"):
        files.read(gone)
    right.write_bytes(model_path.read_bytes())
    assert files.read(gone).path == str(right)
    small.write_bytes(model_path.read_bytes()[:-1])
    assert files.read(gone).path == str(right)  # a damaged one does not end the search
    write_transformer(right, TINY_TRANSFORMER, seed=2)
    assert right.stat().st_size == spec.file_bytes
    with pytest.raises(
        ModelFileError,
        match=rf"^machine other .*, and {small} is of no use \(.*\), and {right} has other weights; copy it",
    ):
        files.read(gone)


def test_files_of_other_machines_are_found_behind_links(model_path: Path, tmp_path: Path) -> None:
    models, disk = tmp_path / "models", tmp_path / "disk"
    for folder in (models, disk):
        folder.mkdir()
        (folder / "circle").symlink_to(models)
    gone = replace(model_spec(model_path), path=f"/nowhere/{graphs.MODEL}")
    files = CopiedFiles(folder=models, machine="other")
    with pytest.raises(ModelFileError, match="has no file"):
        files.read(gone)
    (models / "linked").symlink_to(disk)
    (disk / graphs.MODEL).write_bytes(model_path.read_bytes())
    assert files.read(gone).path == str(models / "linked" / graphs.MODEL)


@pytest.mark.parametrize("machines", [1, 2])
def test_content_is_told_to_other_machines_only(model_path: Path, machines: int) -> None:
    handle = ModelHandle(
        path=str(model_path),
        dtype="auto",
        mesh="cfg2",
        devices="cpu:2",
        compile=False,
        machines=machines,
        head_address=str(TWO.head),
    )
    content = content_of(read_model_file(str(model_path)))
    assert resolve_model(handle, visible_cuda=0).spec.content == ("" if machines == 1 else content)


def test_content_changes_with_any_matrix(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_transformer(path, TINY_TRANSFORMER, seed=1)
    file = read_model_file(str(path))
    contents = {content_of(file)}
    matrices = [entry for entry in file.entries.values() if len(entry.shape) > 1]
    with path.open("r+b") as stream:
        for entry in matrices:
            stream.seek((entry.start + entry.stop) // 2)
            stream.write(b"\x3f\x3f\x3f\x3f")
            stream.flush()
            contents.add(content_of(file))
    assert len(contents) == 1 + len(matrices)
