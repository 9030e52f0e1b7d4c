"""Devices by name: what their makers say of memory, links and products. Some of it is reached, never all."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import ConfigError

GB = 10**9

# Memory as the maker names it: some bytes more are there, some of them taken before a run begins.
DEVICES = {"H100": 80 * GB, "H200": 141 * GB, "B200": 180 * GB, "L40S": 48 * GB, "MI300X": 192 * GB}
_SIZE = re.compile(r"(?:[A-Za-z]\w*-)?(\d+(?:\.\d+)?) ?([kMGT])(i?)B", re.ASCII | re.IGNORECASE)  # 80GB, A100-40GB
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}

PEAKS = {  # dense bfloat16, 10**12 a second, by what the name of the device holds
    "H200": 989, "H100 PCIE": 756, "H100 NVL": 835, "H100": 989, "GH200": 989, "H800": 989, "H20": 148,
    "B200": 2250, "B300": 2250, "A100": 312, "A800": 312, "L40S": 362, "L40": 181, "L4": 121, "A10G": 70, "A10": 125,
    "MI325X": 1307, "MI300X": 1307, "MI250X": 383,
}  # fmt: skip

# GB/s of a device each way: to the others of its node, and to other nodes as such nodes are mostly built.
LINKS = {
    "H100": (450.0, 50.0), "H200": (450.0, 50.0), "B200": (900.0, 100.0), "MI300X": (448.0, 50.0),
    "A100": (300.0, 25.0), "L40S": (32.0, 25.0),
}  # fmt: skip
_ASSUMED = "H100"  # where no device is named, or one that is not known
LINK_SHARE, PRODUCT_SHARE = 0.75, 0.45  # of what is named, that runs reach


@dataclass(frozen=True)
class Cluster:
    """`inside`, `between`: GB/s of a rank each way, to the ranks of its node and to other nodes. `flops`: 10**12 a
    second, dense bfloat16. All as makers name them. Ranks that are neighbours share a node. `source`: where these come
    from, in words."""

    gpus_per_node: int = 8
    inside: float = LINKS[_ASSUMED][0]
    between: float = LINKS[_ASSUMED][1]
    flops: float = float(PEAKS[_ASSUMED])
    source: str = "assumed"

    @property
    def bytes_inside(self) -> float:
        """A second."""
        return self.inside * GB * LINK_SHARE

    @property
    def bytes_between(self) -> float:
        return self.between * GB * LINK_SHARE

    @property
    def products(self) -> float:
        """Operations a second."""
        return self.flops * 10**12 * PRODUCT_SHARE

    @property
    def told(self) -> str:
        return (
            f"nodes of {self.gpus_per_node} ranks, {self.inside:g} GB/s of a rank each way inside a node and "
            f"{self.between:g} between nodes, {self.flops:g} TFLOP/s ({self.source}), of which links reach "
            f"{LINK_SHARE:.0%} and products {PRODUCT_SHARE:.0%}"
        )


def device_bytes(text: str) -> int:
    if text.upper() in DEVICES:
        return DEVICES[text.upper()]
    found = _SIZE.fullmatch(text)
    if not found or float(found[1]) <= 0:
        known = ", ".join(DEVICES)
        unit = f" without a unit; did you mean {text}GB? Give" if text.isdecimal() else " is no size of memory; give"
        raise ConfigError(
            f"--device {text!r:.200}{unit} one such as 80GB or 74.5GiB, or one of {known}, A100-40GB, A100-80GB"
        )
    return int(float(found[1]) * (1024 if found[3] else 1000) ** _POWERS[found[2].lower()])


def cluster_of(device: str | None, gpus_per_node: int, given: dict[str, float | None]) -> Cluster:
    """Of a device as the user names it. `given`: what of `inside`, `between` and `flops` the user knows better."""
    name = next((name for name in LINKS if device is not None and device.upper().startswith(name)), None)
    source = "assumed" if name is None else f"those of {name}"
    inside, between = LINKS[name or _ASSUMED]
    found = {"inside": inside, "between": between, "flops": float(PEAKS[name or _ASSUMED])}
    told = {key: value for key, value in given.items() if value is not None}
    if told:
        source = "as given" if len(told) == len(found) else f"{source}, and as given"
    return Cluster(gpus_per_node, **{**found, **told}, source=source)


def peak_of(device: str) -> float | None:
    """Operations a second of a device of this name; None where nobody has told."""
    return next((peak * 1e12 for name, peak in PEAKS.items() if name in device.upper()), None)
