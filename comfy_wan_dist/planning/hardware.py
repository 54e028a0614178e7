"""Devices as the planner sees them: memory, arithmetic, and the link to their peers.

The table holds vendors' figures (dense, one direction). What a program reaches of them is a guess and says so; a
`Calibration` replaces figures and guesses by what was measured. The CPU has no figures: it must be measured.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..ipc.errors import ConfigError
from ..mesh.devices import GB

MAX_DEVICES = 1024


EFFICIENCY = 0.5
"""Guess: the share of the peak that matrix products and attention of this model reach."""
MEMORY_EFFICIENCY = 0.7
"""Guess: the share of its memory's rate that elementwise work reaches."""
LINK_EFFICIENCY = 0.7
"""Guess: the share of the link that a large collective reaches."""
LATENCY = 30e-6
"""Guess: seconds for a collective besides its bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """How a device really does on this kind of work, as measured, or figures times guesses.

    rate: floating-point operations per second. memory: bytes read and written per second. link: bytes per second that
    a rank sends. latency: seconds that a collective takes besides.
    """

    rate: float
    memory: float
    link: float
    latency: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One kind of device. half, single: what it does in 16 and in 32 bits."""

    name: str
    memory: int
    link_name: str
    half: Calibration
    single: Calibration
    is_measured: bool = False

    def performance(self, dtype: str) -> Calibration:
        """What to count with."""
        return self.single if dtype == "float32" else self.half


def _device(
    name: str,
    memory: int,
    tflops: tuple[float, float],
    memory_rate: float,
    link: float,
    link_name: str,
) -> Device:
    half, single = (
        Calibration(
            rate=peak * 1e12 * EFFICIENCY,
            memory=memory_rate * 1e12 * MEMORY_EFFICIENCY,
            link=link * GB * LINK_EFFICIENCY,
            latency=LATENCY,
        )
        for peak in tflops
    )
    return Device(name=name, memory=memory * GB, link_name=link_name, half=half, single=single)


DEVICES = (
    _device("H200-SXM", 141, (989, 67), 4.8, 450, "NVLink"),
    _device("H100-SXM", 80, (989, 67), 3.35, 450, "NVLink"),
    _device("A100-SXM", 80, (312, 19.5), 2.0, 300, "NVLink"),
    _device("RTX5090", 32, (209, 105), 1.8, 50, "PCIe 5"),
    _device("RTX4090", 24, (165, 82.6), 1.0, 25, "PCIe 4, through host memory"),
    _device("RTX3090", 24, (71, 35.6), 0.94, 25, "PCIe 4"),
)
"""Vendors' figures: GB, dense TFLOP/s in bfloat16 and float32, TB/s of memory, GB/s to peers in one direction."""
KNOWN_NAMES = ", ".join(device.name for device in DEVICES)


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePool:
    """The devices of one machine. A mesh goes at the pace, and within the memory, of the weakest."""

    devices: tuple[Device, ...]

    @property
    def count(self) -> int:
        return len(self.devices)

    @property
    def weakest(self) -> Device:
        """One device with the least of everything; its name lists all kinds. Measured ones are all alike."""
        return Device(
            name=" + ".join(dict.fromkeys(device.name for device in self.devices)),
            memory=min(device.memory for device in self.devices),
            link_name=min(self.devices, key=lambda device: device.half.link).link_name,
            half=_least([device.half for device in self.devices]),
            single=_least([device.single for device in self.devices]),
            is_measured=self.devices[0].is_measured,
        )

    def __str__(self) -> str:
        names = [device.name for device in self.devices]
        return ",".join(f"{names.count(name)}x{name}" for name in dict.fromkeys(names))


def _least(each: Sequence[Calibration]) -> Calibration:
    return Calibration(
        rate=min(one.rate for one in each),
        memory=min(one.memory for one in each),
        link=min(one.link for one in each),
        latency=max(one.latency for one in each),
    )


MeasureCPU = Callable[[int], Calibration]
"""Measures what each of so many ranks reaches while all of them work."""


def cpu_device(*, ranks: int, memory: int, measure: MeasureCPU) -> Device:
    """One of `ranks` CPU ranks that share `memory` bytes."""
    measured = measure(ranks)
    return Device(
        name="CPU",
        memory=memory // ranks,
        link_name="loopback",
        half=measured,
        single=measured,
        is_measured=True,
    )


OTHER_MODELS = {"pcie", "nvl", "laptop", "ti", "d", "super"}
"""Words that make another device of a known name."""


def find_device(name: str) -> Device | None:
    """The table's device for a short or a long name: `H100-SXM`, `h100`, `NVIDIA H100 80GB HBM3`, `RTX 4090`."""
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    found = [device for device in DEVICES if words & _short_names(device)]
    return found[0] if len(found) == 1 and not words & OTHER_MODELS else None


def _short_names(device: Device) -> set[str]:
    name = device.name.lower().removesuffix("-sxm")
    return {name, name.removeprefix("rtx")}


def known_pool(found: Sequence[tuple[str, int]]) -> DevicePool:
    """Devices that are here: (name, bytes of memory) of each. Raises ConfigError for one that the table lacks."""
    devices = []
    for name, memory in found:
        device = find_device(name)
        if device is None:
            raise ConfigError(
                f"there are no figures for {name!r}; plan for the nearest of {KNOWN_NAMES} instead"
            )
        devices.append(replace(device, memory=memory))
    return DevicePool(devices=tuple(devices))


def parse_pool(text: str) -> DevicePool:
    """Devices by name: `8xH100-SXM`, `4090`, `2x4090,2x3090`. Raises ConfigError."""
    devices: list[Device] = []
    for part in text.split(","):
        match = re.fullmatch(r"(?:([0-9]{1,4})\s*x\s*)?(.+)", part.strip(), flags=re.IGNORECASE)
        device = find_device(match[2]) if match else None
        count = int(match[1] or 1) if match else 0
        if device is None or not 1 <= count <= MAX_DEVICES:
            raise ConfigError(
                f"devices {text!r}: {part.strip()!r} is not a number of known devices; write it like 8xH100-SXM, "
                f"with one of {KNOWN_NAMES}; for another card take the nearest below"
            )
        devices += [device] * count
    if len(devices) > MAX_DEVICES:
        raise ConfigError(f"devices {text!r} are {len(devices)}; plan for at most {MAX_DEVICES}")
    return DevicePool(devices=tuple(devices))
