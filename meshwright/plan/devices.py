"""Vendors' figures of devices by name: memory, links and matmul throughput, and the share that runs reach."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import ConfigError

GB = 10**9

# Memory in the vendor's round numbers. A device has slightly more, and a driver takes some before a run begins.
DEVICES = {"H100": 80 * GB, "H200": 141 * GB, "B200": 180 * GB, "L40S": 48 * GB, "MI300X": 192 * GB}
_SIZE = re.compile(r"(?:[A-Za-z]\w*-)?(\d+(?:\.\d+)?) ?([kMGT])(i?)B", re.ASCII | re.IGNORECASE)  # 80GB, A100-40GB
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}

# Dense bfloat16 in 10**12 operations per second. The first key that occurs in the name of a device counts, so H200
# comes before H20, and L40S before L40 before L4.
PEAKS = {
    "H200": 989, "H100 PCIE": 756, "H100 NVL": 835, "H100": 989, "GH200": 989, "H800": 989, "H20": 148,
    "B200": 2250, "B300": 2250, "A100": 312, "A800": 312, "L40S": 362, "L40": 181, "L4": 121, "A10G": 70, "A10": 125,
    "MI325X": 1307, "MI300X": 1307, "MI250X": 383,
}  # fmt: skip

# GB/s of a device in each direction: to the other devices of its node, and to other nodes. The second depends on the
# network of a cluster; the value here is that of most nodes with these devices.
LINKS = {
    "H100": (450.0, 50.0), "H200": (450.0, 50.0), "B200": (900.0, 100.0), "MI300X": (448.0, 50.0),
    "A100": (300.0, 25.0), "L40S": (32.0, 25.0),
}  # fmt: skip
_ASSUMED = "H100"  # if no device is named, or an unknown one
LINK_EFFICIENCY, MATMUL_EFFICIENCY = 0.75, 0.45  # the shares of the vendor's figures that are assumed to be reached


@dataclass(frozen=True)
class Cluster:
    """The nodes that a step would run on, in vendors' figures. Consecutive ranks share a node.

    `inside`, `between`: GB/s of a rank in each direction, to the ranks of its node and to other nodes. `flops`: 10**12
    operations per second, dense bfloat16. `source`: the origin of these figures, in words.
    """

    gpus_per_node: int = 8
    inside: float = LINKS[_ASSUMED][0]
    between: float = LINKS[_ASSUMED][1]
    flops: float = float(PEAKS[_ASSUMED])
    source: str = "assumed"

    @property
    def bytes_inside(self) -> float:
        """Return the bytes per second that a rank is assumed to send inside its node."""
        return self.inside * GB * LINK_EFFICIENCY

    @property
    def bytes_between(self) -> float:
        """Return the bytes per second that a rank is assumed to send to other nodes."""
        return self.between * GB * LINK_EFFICIENCY

    @property
    def matmul_flops(self) -> float:
        """Return the operations per second that matmuls are assumed to reach."""
        return self.flops * 10**12 * MATMUL_EFFICIENCY

    @property
    def description(self) -> str:
        """Name the figures in words, for the line of assumptions."""
        return (
            f"nodes of {self.gpus_per_node} ranks, {self.inside:g} GB/s per rank and direction inside a node and "
            f"{self.between:g} between nodes, {self.flops:g} TFLOP/s ({self.source}), assuming that links reach "
            f"{LINK_EFFICIENCY:.0%} of this and matmuls {MATMUL_EFFICIENCY:.0%}"
        )


def device_bytes(text: str) -> int:
    """Parse `--device`: the name of a device, or a size such as 80GB, 74.5GiB or A100-40GB."""
    if text.upper() in DEVICES:
        return DEVICES[text.upper()]
    match = _SIZE.fullmatch(text)
    if not match or float(match[1]) <= 0:
        known = ", ".join(DEVICES)
        unit = f" without a unit; did you mean {text}GB? Give" if text.isdecimal() else " is not a memory size; give"
        raise ConfigError(
            f"--device {text!r:.200}{unit} one such as 80GB or 74.5GiB, or one of {known}, A100-40GB, A100-80GB"
        )
    return int(float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2].lower()])


def cluster_of(device: str | None, gpus_per_node: int, overrides: dict[str, float | None]) -> Cluster:
    """Return the cluster of a device, by the start of its name. `overrides`: `inside`, `between` and `flops` from
    options, None where the vendor's figure holds."""
    name = next((name for name in LINKS if device is not None and device.upper().startswith(name)), None)
    source = "assumed" if name is None else f"as specified for {name}"
    inside, between = LINKS[name or _ASSUMED]
    specified = {"inside": inside, "between": between, "flops": float(PEAKS[name or _ASSUMED])}
    overridden = {key: value for key, value in overrides.items() if value is not None}
    if overridden:
        source = "from options" if len(overridden) == len(specified) else f"{source}, except for options"
    return Cluster(gpus_per_node, **{**specified, **overridden}, source=source)


def peak_of(device: str) -> float | None:
    """Return the operations per second of a device by its name; None for an unknown device, which then has no MFU."""
    matching = (peak for name, peak in PEAKS.items() if re.search(rf"{name}(?!\d)", device.upper()))  # no A100 in A1000
    return next((peak * 1e12 for peak in matching), None)
