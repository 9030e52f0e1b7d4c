"""E2: export after training in every dtype and format, read the files with safetensors, compare with the weights.

By then the weights differ from the source, so an export of the source's bytes, or of an earlier state, shows.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..blueprint import Blueprint
from ..engine import Model, export, stream
from ..mesh import Mesh
from ..weights import DTYPES, TRAINABLE, blocks_by_key
from .adapters import PREFIX, Expected, adapter_files, expected_exports, trains_more
from .fp8_exports import SCALES, check_in_8_bits, check_unchanged_blocks
from .reference import Findings, Run, unrounded
from .results import Finding

Way = tuple[str, dict[str, Any]]  # a name in findings; the arguments of `mw.export` or `mw.stream`
_WAYS: dict[str, dict[str, Any]] = {
    "export()": {},
    **{f"export(dtype={DTYPES[name]})": {"dtype": DTYPES[name]} for name in TRAINABLE},
    'export(format="values")': {"format": "values"},
    'export(format="fp8")': {"format": "fp8"},
    'stream(format="fp8")': {"format": "fp8"},
}


def e2_exports(run: Run) -> Findings:
    """An export after training, in every dtype and in FP8, holds the trained weights, with adapters merged, rounded
    once; adapter files hold their factors.

    All ranks export, and rank 0 reads the files back. It runs only where no other oracle has failed: copies that differ
    would fail it too.
    """
    trained, ways, lora = unrounded(run.model), ways_of(run.model.blueprint), run.trial.recipe.lora
    expected = expected_exports(trained, lora)
    with _folder(run.model.mesh) as folder:
        for number, way in enumerate(ways):
            at = folder / str(number)
            made = _made(run.model, way, at)
            if run.model.mesh.rank == 0:
                yield from _compared(run, way, made, expected)
            if way[1].get("format") == "fp8" and at.exists():
                yield from check_unchanged_blocks(run, at, made)
        if lora is not None and not trains_more(run.model):
            yield from adapter_files(run, folder, trained)
    run.record_once("E2", "keys of exports", len(ways) * len(expected))


def ways_of(blueprint: Blueprint) -> list[Way]:
    """Return the ways to export a model, with adapters merged; FP8 is left out if no matrix has whole blocks."""
    ways = [way for way in _WAYS.items() if way[1].get("format") != "fp8" or in_blocks(blueprint)]
    if blueprint.recipe.lora is None:
        return ways
    merging = [(name, {**options, **_merging(name)}) for name, options in ways]
    return [(f"{name} with adapters merged", options) for name, options in (*merging, ("stream", {"which": "merged"}))]


def _merging(name: str) -> dict[str, Any]:
    return {"which": "merged"} if name.startswith("stream") else {"merge": True}


def in_blocks(blueprint: Blueprint) -> bool:
    """Return whether a matrix has whole blocks of 128, as FP8 needs."""
    return bool(blueprint.keymap.in_fp8(blueprint.table, blueprint.spec.fp8_left_out).scales)


@contextmanager
def _folder(mesh: Mesh) -> Iterator[Path]:
    """Return a directory that all ranks share. Rank 0 creates and removes it."""
    path: Path = mesh.broadcast_object(Path(tempfile.mkdtemp(prefix="meshwright-verify-")) if mesh.rank == 0 else None)
    try:
        yield path
    finally:
        if mesh.rank == 0:
            shutil.rmtree(path, ignore_errors=True)


def _made(model: Model, way: Way, at: Path) -> dict[str, Tensor]:
    """Export, and return the tensors that rank 0 reads back. All ranks call it.

    Files are read with safetensors' own `load_file`, as any other program would.
    """
    name, options = way
    if name.startswith("stream"):
        return dict(stream(model, **options))
    export(model, at, **options)
    files = at.glob("*.safetensors") if model.mesh.rank == 0 else ()
    return {key: tensor for file in files for key, tensor in load_file(file).items()}


def _compared(run: Run, way: Way, files: Mapping[str, Tensor], expected: Mapping[str, Expected]) -> Iterator[Finding]:
    """Compare the keys of one export with the trained weights, each rounded as this way should round it."""
    made_of, of_keys = blocks_by_key(run.model.table, run.model.keymap.choice), run.model.keymap.keys
    name, options = way
    for key in (key for key in files if key.startswith(PREFIX)):
        yield Finding("E2", key, f"{name} has written it, though readers take the file for a model without adapters")
    for key, each in expected.items():
        if key not in files:
            yield Finding("E2", key, f"{name} has not written it")
        elif key + SCALES in files:
            yield from check_in_8_bits(
                name, key, files[key], files[key + SCALES], each.value.to(run.model.dtype), each.slack
            )
        else:
            # Parameters that are never rounded keep the dtype of the source where it is wider.
            exact, of_source = any(param.float32 for param, _ in made_of[key]), DTYPES[of_keys[key].dtype]
            dtype = options.get("dtype", of_source)
            dtype = torch.promote_types(of_source, dtype) if exact else dtype
            yield from _values(name, key, files[key], each, dtype, exact)


def _values(
    way: str, key: str, actual: Tensor, expected: Expected, dtype: torch.dtype, exact: bool
) -> Iterator[Finding]:
    """Compare a tensor bit for bit, or a merged one within one rounding to its dtype: the order of the sum over the
    rank is free. `exact`: it must never be rounded."""
    if actual.dtype != dtype:
        what = f"{way} wrote it in {actual.dtype}, not in {dtype}"
        yield Finding("E2", key, what, "a parameter that is never rounded is rounded" if exact else "")
        return
    if expected.size is None:
        wrong, guess = actual != expected.value.to(dtype), "an earlier copy is exported, or it is rounded twice"
    else:
        # The distance between neighbouring values of a dtype is eps times the value; for subnormals, eps times the
        # smallest normal number.
        step, guess = torch.finfo(dtype), "adapters are merged otherwise"
        limit = step.eps * expected.value.abs().clamp(min=step.smallest_normal) + expected.slack
        wrong = ~((actual.double() - expected.value).abs() <= limit)
    if wrong.any():
        what = f"{int(wrong.sum())} of {wrong.numel()} elements of {way} are not those that were trained"
        yield Finding("E2", key, what, guess)
