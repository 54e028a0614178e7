"""The devices a group runs on: `all`, `0,1,2,3` (CUDA indices) or `cpu:4` (ranks on the CPU)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..ipc.errors import ConfigError

MIB, GIB = 2**20, 2**30
GB = 10**9
"""Vendors count memory in these; what is said to be used or free is in GIB."""

MAX_CPU_RANKS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceList:
    """One entry per rank that may be used: CUDA indices, or a number of CPU ranks."""

    kind: str
    indices: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.indices)

    def take(self, count: int) -> DeviceList:
        """The first `count` devices."""
        return DeviceList(kind=self.kind, indices=self.indices[:count])

    def part(self, index: int, size: int) -> DeviceList:
        """Part number `index` of parts of `size` devices."""
        return DeviceList(kind=self.kind, indices=self.indices[index * size : (index + 1) * size])

    def __str__(self) -> str:
        if self.kind == "cpu":
            return f"cpu:{self.count}"
        return ",".join(str(index) for index in self.indices)


def parse_devices(text: str, *, visible_cuda: int) -> DeviceList:
    """Parse the `devices` widget against the number of CUDA devices that ComfyUI's process sees.

    Without a CUDA device `all` is one CPU rank: more of them help only where `cpu:N` asks for them.
    """
    cleaned = re.sub(r"\s", "", text).lower()
    if cleaned in ("all", ""):
        if visible_cuda:
            return DeviceList(kind="cuda", indices=tuple(range(visible_cuda)))
        return DeviceList(kind="cpu", indices=(0,))
    if match := re.fullmatch(r"cpu(?::([0-9]{1,6}))?", cleaned):
        count = int(match[1] or 1)
        if not 1 <= count <= MAX_CPU_RANKS:
            raise ConfigError(
                f"devices {text!r} asks for {count} CPU ranks; from 1 to {MAX_CPU_RANKS} are possible"
            )
        return DeviceList(kind="cpu", indices=tuple(range(count)))
    if re.fullmatch(r"[0-9]{1,6}(,[0-9]{1,6})*", cleaned):
        indices = tuple(int(part) for part in cleaned.split(","))
        if len(set(indices)) != len(indices):
            raise ConfigError(f"devices {text!r} names a device twice; name each once")
        missing = [index for index in indices if index >= visible_cuda]
        if missing:
            have = f"0 to {visible_cuda - 1}" if visible_cuda else "none"
            raise ConfigError(
                f"devices {text!r} names CUDA device {missing[0]}, which this machine does not show "
                f"(visible: {have}); use all, the indices of visible devices, or cpu:N"
            )
        return DeviceList(kind="cuda", indices=indices)
    raise ConfigError(
        f"devices {text!r} is not understood; write all, CUDA indices such as 0,1,2,3, or cpu:4"
    )
