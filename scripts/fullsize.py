"""Load a model of full size on two CPU ranks and run one step: `make fullsize`. Not part of the tests.

A seeded bfloat16 checkpoint of TI2V-5B's shapes, 10 GB, is written to out/fullsize once; it needs that much disk, and
about 14 GB of memory. A worker group of mesh tp2 loads it and samples one step of a 256x256 video of 17 frames.
Limits: the group reads 1.1 times the file at most, by the loader's count and by the kernel's (rchar), and while it
loads, a rank's anonymous memory grows by its shard and 300 MiB at most. Shared memory counts in the peak.

The last line of the output is one JSON object: load_s, file_bytes, read_bytes (of the loader, all ranks),
peak_rss_bytes (RssAnon + RssShmem, the most of each rank that was seen every 20 ms), step_s.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from comfy_wan_dist.group.client import WorkerGroup
from comfy_wan_dist.group.registry import GroupRegistry
from comfy_wan_dist.group.spec import LaunchSpec
from comfy_wan_dist.ipc.messages import Done, ModelSpec, Progress, SampleRequest
from comfy_wan_dist.mesh.degrees import MeshDegrees
from comfy_wan_dist.mesh.devices import DeviceList
from comfy_wan_dist.mesh.memory import weight_bytes
from comfy_wan_dist.mesh.shape import TI2V_5B, WanShape
from comfy_wan_dist.model_file.header import read_model_file
from devtools.checkpoints import TINY_TRANSFORMER, write_transformer
from devtools.leasing import leased, lone_parcel, run_blocking

OUT = Path(__file__).resolve().parent.parent / "out" / "fullsize"
LATENT = (1, 48, 5, 16, 16)
TEXT_TOKENS = 512

POLL_S = 0.02
READ_LIMIT = 1.1
GROWTH_LIMIT = 300 * 2**20


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mesh", default="tp2", choices=sorted(MESHES), help="default: tp2")
    parser.add_argument("--tiny", action="store_true", help="a toy model, to try the script")
    options = parser.parse_args(arguments)
    shape = TINY_TRANSFORMER if options.tiny else TI2V_5B
    degrees = MESHES[options.mesh]
    path = written_checkpoint(shape, "tiny" if options.tiny else "ti2v_5b")
    found = measure(path, shape, degrees)
    for line in found.verdicts():
        print(line)
    print(json.dumps(found.as_json()))
    return 0 if all(found.is_within()) else 1


MESHES = {"tp2": MeshDegrees(tp=2), "ulysses2": MeshDegrees(ulysses=2)}


def written_checkpoint(shape: WanShape, name: str) -> Path:
    """The file, written unless it is there. A half written one has another name."""
    path = OUT / f"{name}.safetensors"
    if not path.exists():
        OUT.mkdir(parents=True, exist_ok=True)
        print(f"writing {path}", flush=True)
        part = path.with_suffix(".part")
        write_transformer(part, shape, seed=1, dtype=torch.bfloat16)
        part.rename(path)
    return path


@dataclass(frozen=True, kw_only=True)
class Found:
    """Seconds and bytes; growth: of each rank's anonymous memory while loading. shard: a rank's weights."""

    load_s: float
    step_s: float
    file_bytes: int
    answers: tuple[Done, ...]
    kernel_bytes: int
    peak: tuple[int, ...]
    growth: tuple[int, ...]
    shard: int

    @property
    def read_bytes(self) -> int:
        return sum(answer.bytes_read for answer in self.answers)

    def is_within(self) -> tuple[bool, bool, bool]:
        most = READ_LIMIT * self.file_bytes
        return (
            self.read_bytes <= most,
            self.kernel_bytes <= most,
            max(self.growth) <= self.shard + GROWTH_LIMIT,
        )

    def verdicts(self) -> list[str]:
        what = (
            f"read by the loader's count: {self.read_bytes / self.file_bytes:.3f} of the file, limit {READ_LIMIT}",
            f"read by the kernel's count: {self.kernel_bytes / self.file_bytes:.3f} of the file, limit {READ_LIMIT}",
            f"anonymous memory grew by {', '.join(f'{each / 2**20:.0f}' for each in self.growth)} MiB, limit "
            f"{(self.shard + GROWTH_LIMIT) / 2**20:.0f}",
        )
        return [
            f"{'ok' if is_within else 'OVER'}  {line}"
            for line, is_within in zip(what, self.is_within(), strict=True)
        ]

    def as_json(self) -> dict[str, object]:
        return {
            "load_s": round(self.load_s, 2),
            "file_bytes": self.file_bytes,
            "read_bytes": self.read_bytes,
            "peak_rss_bytes": list(self.peak),
            "step_s": round(self.step_s, 2),
        }


def measure(path: Path, shape: WanShape, degrees: MeshDegrees) -> Found:
    spec = LaunchSpec(
        degrees=degrees,
        devices=DeviceList(kind="cpu", indices=tuple(range(degrees.world_size))),
        log_path=OUT / "group.log",
    )
    registry = GroupRegistry()
    try:
        with leased(registry, spec) as group:
            return measure_job(group, path, shape)
    finally:
        registry.stop_all()


def measure_job(group: WorkerGroup, path: Path, shape: WanShape) -> Found:
    file = read_model_file(str(path))
    degrees = group.spec.degrees
    ranks = group.pids[1:]
    moments: dict[str, float] = {}

    def note(progress: Progress) -> None:
        moments[progress.phase] = time.monotonic()

    generator = torch.Generator().manual_seed(0)
    with lone_parcel() as parcel:
        noisy, cond = parcel.pack(
            [
                torch.randn(LATENT, generator=generator),
                torch.randn(1, TEXT_TOKENS, shape.text_dim, generator=generator),
            ]
        )
        request = SampleRequest(
            id="fullsize",
            model=ModelSpec(
                path=file.path,
                file_bytes=file.file_bytes,
                mtime_ns=file.mtime_ns,
                dtype="bfloat16",
                compile=False,
            ),
            mesh=str(degrees),
            solver="euler",
            sigmas=(1.0, 0.0),
            timesteps=(1000.0,),
            start=1.0,
            guidance=1.0,
            noisy=noisy,
            clean=None,
            mask=None,
            frame_mask=None,
            cond=cond,
            uncond=None,
            step_noise=None,
            result=parcel.reserve(LATENT, torch.float32),
        )
        read_before = sum(map(bytes_read_by, ranks))
        watch = MemoryWatch(ranks)
        started = time.monotonic()
        with watch:
            answers = run_blocking(group, request, parcel, on_progress=note)
        read = sum(map(bytes_read_by, ranks)) - read_before
    loaded = moments["load"]
    return Found(
        load_s=loaded - started,
        step_s=moments["sample"] - loaded,
        file_bytes=file.file_bytes,
        answers=answers,
        kernel_bytes=read,
        peak=watch.peak(),
        growth=watch.growth(until=loaded),
        shard=weight_bytes(shape, degrees, stage=0, dtype="bfloat16"),
    )


def bytes_read_by(pid: int) -> int:
    """What the process has read from anything, by the kernel's count."""
    found = re.search(r"^rchar: (\d+)$", Path(f"/proc/{pid}/io").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


@dataclass(kw_only=True)
class Sample:
    at: float
    anonymous: int
    shared: int


@dataclass
class MemoryWatch:
    """Looks at the memory of processes again and again while it is entered."""

    pids: Sequence[int]
    samples: dict[int, list[Sample]] = field(default_factory=dict)

    def __enter__(self) -> None:
        self.samples = {pid: [look(pid)] for pid in self.pids}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def peak(self) -> tuple[int, ...]:
        return tuple(
            max(each.anonymous + each.shared for each in seen) for seen in self.samples.values()
        )

    def growth(self, *, until: float) -> tuple[int, ...]:
        return tuple(
            max(each.anonymous for each in seen if each.at <= until) - seen[0].anonymous
            for seen in self.samples.values()
        )

    def _watch(self) -> None:
        while not self._over.wait(POLL_S):
            for pid, seen in self.samples.items():
                seen.append(look(pid))


def look(pid: int) -> Sample:
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )

    def size(name: str) -> int:
        return 1024 * int(fields[name].split()[0])

    return Sample(at=time.monotonic(), anonymous=size("RssAnon"), shared=size("RssShmem"))


if __name__ == "__main__":
    sys.exit(main())
