"""Numbers that a change without new mathematics must reproduce to the bit, on one machine.

    python -m tests.golden write before.json      # at the commit before
    python -m tests.golden compare before.json    # after each change

Two steps of each family on a mesh, in float64 and in bfloat16: the loss, the norm of the gradient, checksums of all
gradients and weights, and the bytes of an export; then what `plan` and `verify` say as JSON, without seconds. Another
kind of CPU rounds otherwise, so the file is not in the repository.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from meshwright.cli import main as command_line
from tests import seeing, tiny, worlds

_FULL, _SELECTIVE = (mw.MemoryOptions(recompute=kind) for kind in ("full", "selective"))
# (family, mesh, options of mw.load, options of mw.Engine)
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "qwen2 alone": ("qwen2", {}, {}, {}),
    "qwen3 fsdp=2, full": ("qwen3", dict(fsdp=2), dict(memory=_FULL), {}),
    "qwen3 replicate=2, bfloat16 moments": ("qwen3", dict(replicate=2), {},
        dict(optimizer=mw.AdamW(state_dtype=torch.bfloat16))),
    "qwen3 tp=2, frozen layer": ("qwen3", dict(tp=2), dict(train=["layers.1.*", "head.*"]), {}),
    "qwen3_tied pp=2": ("qwen3_tied", dict(pp=2), {}, {}),
    "qwen3_moe fsdp=2 ep=2": ("qwen3_moe", dict(fsdp=2, ep=2), {}, {}),
    "qwen3_moe fsdp=2 tp=2 ep=4": ("qwen3_moe", dict(fsdp=2, tp=2, ep=4), dict(memory=_FULL), {}),
    "qwen3_5 tp=2": ("qwen3_5", dict(tp=2), {}, {}),
    "qwen3_5 cp=2, selective": ("qwen3_5", dict(cp=2), dict(memory=_SELECTIVE), {}),
    "qwen3_5_moe fsdp=2 tp=2 ep=2": ("qwen3_5_moe", dict(fsdp=2, tp=2, ep=2), {}, {}),
    "qwen3_vl fsdp=2": ("qwen3_vl", dict(fsdp=2), dict(tower=True), {}),
    "qwen3_vl_moe tp=2": ("qwen3_vl_moe", dict(tp=2), {}, {}),
    "qwen3_moe tp=2, fp8": ("qwen3_moe in blocks", dict(tp=2), dict(fp8="block"), {}),
    "qwen3 tp=2, value head": ("qwen3", dict(tp=2), dict(head="value"), dict(loss=mw.losses.squared_error)),
}  # fmt: skip
COMMANDS = {
    "plan moe": ["plan", "tiny-qwen3-moe", "--mesh", "fsdp=2,tp=2,ep=4", "--json"],
    "plan pipeline": ["plan", "tiny-qwen3.5", "--mesh", "pp=2,cp=2", "--micro-batches", "4", "--json"],
    "verify moe": ["verify", "tiny-qwen3-moe", "--mesh", "fsdp=2,ep=2", "--json"],
    "verify hybrid": ["verify", "tiny-qwen3.5", "--mesh", "tp=2", "--json"],
}
_TIMES = {"date", "seconds", "host_s", "version", "torch", "took", "argv"}


def steps_of(source: Path, case: str, dtype: torch.dtype, out: Path) -> dict[str, Any]:
    """Two steps on this rank: what a change must not move."""
    _, mesh, load, options = CASES[case]
    model = mw.load(source, mw.Mesh(**mesh), dtype=dtype, **load)
    engine, record = mw.Engine(model, lr=1e-2, **options), {}
    for step in range(2):
        batches = [seeing.packed()] if load.get("tower") else tiny.batches(10 * step + model.mesh.data_rank)
        if load.get("head") == "value":
            batches = _with_targets(batches)
        record[f"loss {step}"] = repr(engine.backward(batches))
        record[f"gradients {step}"] = _checksum(mw.gather(model, "grad"))
        record[f"norm {step}"] = repr(float(engine.update()))
        record[f"weights {step}"] = _checksum(mw.gather(model))
    mw.export(model, out, overwrite=True)
    if model.mesh.rank == 0:
        record["export"] = {
            str(file.relative_to(out)): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in sorted(out.rglob("*"))
            if file.is_file()
        }
    return record


def _with_targets(batches: list[mw.Batch]) -> list[mw.Batch]:
    """Give each token a value to predict."""
    return [replace(each, fields={"target": torch.linspace(-1, 1, len(each.tokens))}) for each in batches]


def _checksum(tensors: Mapping[str, torch.Tensor]) -> int:
    crc = 0
    for name in sorted(tensors):
        crc = zlib.crc32(tensors[name].detach().contiguous().view(torch.uint8).numpy().tobytes(), crc)
        crc = zlib.crc32(name.encode(), crc)
    return crc


def _source(at: Path, family: str) -> Path:
    if at.exists():
        return at
    if family.endswith(" in blocks"):
        name = family.removesuffix(" in blocks")
        return tiny.directory(at, name, **tiny.ALIGNED[name])
    return seeing.directory(at, family) if "_vl" in family else tiny.directory(at, family)


def numbers(at: Path) -> dict[str, Any]:
    every: dict[str, Any] = {}
    for case, (family, mesh, _, _) in CASES.items():
        source = _source(at / family, family)
        world = prod(size for axis, size in mesh.items() if axis != "ep")
        for dtype in (torch.float64, torch.bfloat16):
            every[f"{case}, {dtype}"] = worlds.run(world, steps_of, source, case, dtype, at / "export")[0]
            print(case, dtype, flush=True)
    for name, command in COMMANDS.items():
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            command_line(command)
        every[name] = _without_times(json.loads(text.getvalue()))
        print(name, flush=True)
    return every


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(each) for key, each in value.items() if key not in _TIMES}
    return [_without_times(each) for each in value] if isinstance(value, list) else value


def differences(before: Any, after: Any, where: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [*before, *(key for key in after if key not in before)]
        return [line for key in keys for line in differences(before.get(key), after.get(key), f"{where}/{key}")]
    return [] if before == after else [f"{where}: {before!r}, now {after!r}"[:300]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["write", "compare"])
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as at:
        result = numbers(Path(at))
    if options.what == "write":
        options.file.write_text(json.dumps(result, indent=1))
        return 0
    apart = differences(json.loads(options.file.read_text()), json.loads(json.dumps(result)))
    print(*apart, f"{len(apart)} differences", sep="\n")
    return int(bool(apart))


if __name__ == "__main__":
    raise SystemExit(main())
