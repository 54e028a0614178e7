"""A prompt's embedding in a file: what is written is read, whatever becomes of the file then; the rest is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from comfy_wan_dist.ipc.errors import ModelFileError
from comfy_wan_dist.model_file.conditioning import TEXT_DIM, VERSION_KEY, load, save

EMBEDDING = torch.randn(1, 5, TEXT_DIM, generator=torch.Generator().manual_seed(1))
USE_OF_A_CUT_FILE = """
import os, sys
from pathlib import Path
from comfy_wan_dist.model_file.conditioning import load
embedding = load(Path(sys.argv[1]))
before = embedding.sum().item()
os.truncate(sys.argv[1], 0)
assert embedding.sum().item() == before
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "prompt_00001_.safetensors"


def refusal(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert 20 < len(message) < 400
    return message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_written_is_read(dtype: torch.dtype, path: Path) -> None:
    save(path, EMBEDDING.to(dtype))
    assert torch.equal(load(path), EMBEDDING.to(dtype).float())
    save_file({"cond": EMBEDDING.to(dtype)}, path, metadata={VERSION_KEY: "1"})
    assert torch.equal(load(path), EMBEDDING.to(dtype).float())


def test_a_file_that_is_cut_off_later_ends_no_process(path: Path) -> None:
    save(path, EMBEDDING)
    child = subprocess.run(
        [sys.executable, "-c", USE_OF_A_CUT_FILE, str(path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        timeout=120,
        check=False,
    )
    assert child.returncode == 0


@pytest.mark.parametrize(
    ("tensors", "version", "words"),
    [
        ({"cond": EMBEDDING}, "2", "no conditioning file of version 1 (its version: '2')"),
        ({"x": EMBEDDING}, "1", "has no tensor cond, and needs one of F32, F16, BF16"),
        ({"cond": EMBEDDING.to(torch.int8)}, "1", "has cond as I8, and needs one of F32"),
        ({"cond": EMBEDDING.to(torch.complex64)}, "1", "has cond as C64"),
        (
            {"cond": EMBEDDING[0]},
            "1",
            "an embedding of shape [5, 4096]; it must be [1, tokens, 4096]",
        ),
        ({"cond": EMBEDDING[:, :0]}, "1", "an embedding of shape [1, 0, 4096]"),
        ({"cond": EMBEDDING[..., :768].contiguous()}, "1", "of shape [1, 5, 768]"),
        ({"cond": EMBEDDING.repeat(2, 1, 1)}, "1", "of shape [2, 5, 4096]"),
    ],
)
def test_another_file_is_refused(
    tensors: Mapping[str, Tensor], version: str, words: str, path: Path
) -> None:
    save_file(dict(tensors), path, metadata={VERSION_KEY: version})
    assert words in refusal(path)


def test_a_damaged_file_is_refused_wherever_it_ends(path: Path) -> None:
    save(path, EMBEDDING)
    whole = path.read_bytes()
    for size in (0, 7, 8, 50, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        refusal(path)
    path.unlink()
    assert refusal(path) == f"{path.name} cannot be read: No such file or directory"
