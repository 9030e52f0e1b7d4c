"""E2: exports after training, in every dtype and format, each read by safetensors and held against what was trained."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..engine import export
from ..weights import blocks_by_key
from .findings import Finding
from .run import Findings, Run
from .trial import unrounded
from .weights import scaled

# Arguments of `mw.export`, by their name in findings.
_WAYS: dict[str, dict[str, Any]] = {
    "export()": {},
    "export(dtype=float32)": {"dtype": torch.float32},
    "export(dtype=bfloat16)": {"dtype": torch.bfloat16},
    'export(format="fp8")': {"format": "fp8"},
}
_SCALES = "_scale_inv"
_LARGEST = 448.0  # of E4M3
_STEP = 2.0**-4  # half of the distance between two numbers of E4M3, in parts of the smaller one
_LEAST = 2.0**-10  # half of the smallest of them


def e2_exports(run: Run) -> Findings:
    """What is exported after training, in every dtype and in 8 bits, is what was trained, rounded once."""
    trained, num = unrounded(run.model), 0
    with _folder(run) as at:
        for way, arguments in _ways(run):
            export(run.model, at / str(num), **arguments)
            if run.model.mesh.rank == 0:
                yield from _compared(run, way, _read(at / str(num)), trained, arguments.get("dtype"))
            num += 1
    run.measured_once("E2", "keys of exports", num * len(trained))


def _ways(run: Run) -> Iterator[tuple[str, dict[str, Any]]]:
    """The ways to export. Where no matrix has whole blocks of 128, 8 bits are what the source has."""
    model = run.model
    in_fp8 = model.keymap.in_fp8(model.table, model.blueprint.spec.fp8_left_out).scales
    return ((way, given) for way, given in _WAYS.items() if in_fp8 or given.get("format") != "fp8")


class _folder:
    """A directory that all ranks have, which rank 0 makes and removes."""

    def __init__(self, run: Run) -> None:
        self.mesh = run.model.mesh

    def __enter__(self) -> Path:
        made = Path(tempfile.mkdtemp(prefix="meshwright-verify-")) if self.mesh.rank == 0 else None
        self.path: Path = self.mesh.of_rank_0(made)
        return self.path

    def __exit__(self, *_: object) -> None:
        if self.mesh.rank == 0:
            shutil.rmtree(self.path, ignore_errors=True)


def _read(at: Path) -> dict[str, Tensor]:
    return {key: tensor for file in at.glob("*.safetensors") for key, tensor in load_file(file).items()}


def _compared(
    run: Run, way: str, files: Mapping[str, Tensor], trained: Mapping[str, Tensor], dtype: torch.dtype | None
) -> Iterator[Finding]:
    made_of = blocks_by_key(run.model.table, run.model.keymap.choice)
    source = run.model.keymap.keys
    for key, weight in trained.items():
        if key not in files:
            yield Finding("E2", key, f"{way} has not written it")
        elif key + _SCALES in files:
            yield from _in_8_bits(way, key, files[key], files[key + _SCALES], weight.to(run.model.dtype))
        else:
            exact = any(param.float32 for param, _ in made_of[key])
            wanted = torch.float32 if exact else dtype or _DTYPES[source[key].dtype]
            due = weight.to(wanted)
            if files[key].dtype != wanted:
                what = f"{way} wrote it in {files[key].dtype}, not in {wanted}"
                yield Finding("E2", key, what, "a parameter that is never rounded is rounded" if exact else "")
            elif not torch.equal(files[key], due):
                num = int((files[key] != due).sum())
                yield Finding("E2", key, f"{num} of {due.numel()} elements of {way} are not those that were trained")


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def _in_8_bits(way: str, key: str, codes: Tensor, scales: Tensor, weight: Tensor) -> Iterator[Finding]:
    """Each value is the nearest that its scale has, and the scale no larger than its block needs."""
    values = scaled(codes, scales, (128, 128)).double()
    step = scaled(torch.ones_like(weight), scales, (128, 128)).double()
    off = (values - weight.double()).abs()
    allowed = 1.001 * torch.maximum(weight.double().abs() * _STEP, step * _LEAST)
    if (off > allowed).any():
        what = f"{int((off > allowed).sum())} of {off.numel()} values of {way} are further off than rounding to 8 bits"
        yield Finding("E2", key, what, "codes or scales of other blocks")
    largest = (weight.double().abs() / step).amax()
    if not 0.99 * _LARGEST <= largest <= 1.01 * _LARGEST:
        yield Finding("E2", key, f"the largest value of {way} is {largest:.4g} times its scale, not {_LARGEST:g}")
