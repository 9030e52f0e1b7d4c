"""Are the files those that were published, and the weights such as a model has?

`--weights` compares ranks with files. A file that was damaged before it was loaded agrees with itself, so what is known
of it from elsewhere is asked too: the sha256 under which the cache of the hub keeps it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from ..engine import Model
from .findings import Finding

_SHA256 = re.compile(r"[0-9a-f]{64}")
OUTLANDISH = 1e4  # no weight of a published model is as large; one flipped bit of an exponent makes 1e38 of it

_COMMON = 1e-4  # of the largest weight: where half of all are larger than that, no single one is damaged
_LOOKED_AT = 100_000  # elements of a tensor, to know what is usual


def strange_weights(model: Model) -> Iterator[Finding]:
    """What this rank holds and no model does."""
    for name, tensor in model.values().items():
        yield from strange_in(name, tensor, model.mesh.rank)


def strange_in(name: str, tensor: Tensor, rank: int) -> Iterator[Finding]:
    """Name the values of one tensor that no published model holds."""
    if not tensor.numel():
        return
    num = int((~tensor.isfinite()).sum())
    if num:
        yield Finding("W1", name, f"{num} of {tensor.numel()} elements on rank {rank} are not finite", "a damaged file")
        return
    most = tensor.abs().max().item()
    if most > OUTLANDISH:
        usual = _usual(tensor)
        what = f"a weight of {most:.3g} on rank {rank}, where {usual:.2g} is usual"
        guess = "a damaged file: a flipped bit makes such a number"
        if usual > _COMMON * most:
            guess = "all of it is as large: its scales are taken otherwise, or lack a factor such as a global scale"
        yield Finding("W1", name, what, guess)


def _usual(tensor: Tensor) -> float:
    """Return the median size of its elements, or of some of them. One damaged element would change a mean."""
    flat = tensor.reshape(-1)
    return float(flat[:: max(1, len(flat) // _LOOKED_AT)].double().abs().median())


def published_sums(directory: Path, files: Sequence[str]) -> dict[str, str]:
    """The sha256 of each file that the hub's cache knows, by its blobs or by what it noted of a download."""
    found = {}
    for file in files:
        blob = (directory / file).resolve().name
        noted = directory / ".cache" / "huggingface" / "download" / f"{file}.metadata"
        words = [blob, *(noted.read_text().split() if noted.is_file() else ())]
        known = next((word for word in words if _SHA256.fullmatch(word)), None)
        if known:
            found[file] = known
    return found


def damaged_files(directory: Path, sums: Mapping[str, str]) -> Iterator[Finding]:
    for file, due in sums.items():
        with (directory / file).open("rb") as f:
            found = hashlib.file_digest(f, "sha256").hexdigest()
        if found != due:
            what = f"its sha256 is {found}, the hub has {due}: fetch the file again"
            yield Finding("W1", file, what, "it was damaged on its way, or changed since")
