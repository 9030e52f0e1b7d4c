"""Check LoRA adapters: the oracles A1 and E3, and the exports that E2 expects.

Runs draw B at random, since A has no gradient where B is 0. Expected merges and files are computed here from the
formula and PEFT's keys, without the code that writes them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..blueprint import Blueprint
from ..engine import Model, export_adapter, gather, load, resume
from ..mesh import Mesh
from ..models import family_of
from ..recipe import ALL_LINEAR, ContextParallel, Lora, MemoryOptions, Pipeline
from ..weights import peft_files
from .diagnose.forward import scores_of
from .independent_checks import UPDATE
from .reference import lr_of_trial, unrounded
from .results import Finding, Margin, Notes

if TYPE_CHECKING:
    from .reference import Reference, Run, Trial

Findings = Iterator[Finding]
PREFIX = "base_model.model."  # PEFT's prefix of the keys of all factors
_DRAWN = 0.2  # standard deviation of scale * B: makes the addition about as large as the matrix
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_FUSED = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")


def drawn(lora: Lora | None) -> Lora | None:
    """Return adapters whose B is drawn, so that every factor has a gradient in the first step."""
    return None if lora is None else replace(lora, b_std=_DRAWN / lora.scale)


def on_kinds(blueprint: Blueprint) -> Lora | None:
    """Return the adapters of a small model: new ones, on the kinds of modules that have adapters in the large model.

    The small model has too few layers for targets that name layers.
    """
    lora = blueprint.recipe.lora
    if lora is None or tuple(lora.targets) == (ALL_LINEAR,):
        return lora
    keys = {key for param in blueprint.table if param.adapter for key in param.layouts[0].keys}
    kinds = {_kind(key.removeprefix(PREFIX).partition(".lora_")[0]) for key in keys}
    return replace(lora, path=None, targets=tuple(sorted(kinds)))


def _kind(module: str) -> str:
    """Return a pattern of the modules of all layers that share a name: `*layers.*.mlp.down_proj`."""
    at = re.search(r"\w+\.\d+\.", module)
    tail = module[at.start() :] if at else module.removeprefix("model.").removeprefix("language_model.")
    return "*" + re.sub(r"(?<=\.)\d+(?=\.)", "*", tail)


def a1_frozen(run: Run) -> Findings:
    """Look for gradients of frozen parameters. They exist only between backward and update."""
    frozen = [name for name in run.model.pieces if name not in run.model.trained]
    for name in frozen:
        if run.model.parameter(name).grad is not None:
            yield Finding("A1", name, "it is frozen and has a gradient", "the norm would count it")
    run.record("A1", "frozen parameters without a gradient", len(frozen))


def a1_base(run: Run, before: Mapping[str, Tensor]) -> Findings:
    """Adapters leave their base as it is: no frozen byte changes, and without them, or where B is 0, outputs are the
    base's bit for bit.

    `before`: the tensors of this rank before the first step.
    """
    model, stored = run.model, run.model.stored()
    frozen = [name for name in stored if name not in model.trained]
    for name in frozen:
        if not _same_bits(stored[name], before[name]):
            yield Finding("A1", name, f"it is frozen and has changed on rank {model.mesh.rank}", "an update moved it")
    for name in run.engine.optimizer.state.keys() - {*model.trained}:
        yield Finding("A1", name, "it is frozen and has optimizer state")
    run.record("A1", "frozen tensors after training", len(frozen))
    if run.trial.keeps_all and not trains_more(model):
        yield from _base_outputs(run)


def trains_more(model: Model) -> bool:
    """Return whether parameters that are no adapters are trained too, such as a new head. Then `model.base()` is not
    the source, and `export_adapter` refuses the model."""
    return any(not model.table[name].adapter for name in model.trained)


def _base_outputs(run: Run) -> Findings:
    """Compare outputs with those of the source loaded without adapters. Only for a small model is there room for two
    more copies."""
    batch, lora = run.trial.packed()[0], run.trial.recipe.lora
    assert lora is not None
    base_T = scores_of(_loaded(run, None), batch)
    with run.model.base():
        tried = {"model.base()": scores_of(run.model, batch)}
    tried["B = 0"] = scores_of(_loaded(run, replace(lora, b_std=0.0, path=None)), batch)
    for what, scores_T in tried.items():
        if not _same_bits(scores_T, base_T):
            off = (scores_T - base_T).abs().max().item()
            yield Finding("A1", f"outputs with {what}", f"they are {off:.1e} off those of the base")
    if _same_bits(scores_of(run.model, batch), base_T):
        yield Finding("A1", "outputs with adapters", "they are those of the base", "adapters are left out")
    run.record_once("A1", "outputs with B = 0, or without adapters", 2 * base_T.numel())


def _loaded(run: Run, lora: Lora | None) -> Model:
    """Load the source again on the mesh of a run, with other adapters."""
    return load(run.trial.source, run.model.mesh, **vars(replace(run.trial.recipe, lora=lora)))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare as bytes, so that NaN equals itself and 0 differs from -0."""
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@dataclass(frozen=True)
class Expected:
    """A tensor of an export, in float64. `size`: None for a tensor that is only rounded, because nothing is merged into
    it; else the sum of the magnitudes that were added up, which bounds the rounding error."""

    value: Tensor
    size: Tensor | None = None

    @property
    def slack(self) -> Tensor | float:
        """The error of a merge, which is computed in float32 as a sum over the rank."""
        return 0.0 if self.size is None else 16 * torch.finfo(torch.float32).eps * self.size


def expected_exports(trained: Mapping[str, Tensor], lora: Lora | None) -> dict[str, Expected]:
    """Return the tensors that an export should hold; with adapters, W + scale * B @ A.

    `trained`: whole weights and factors, by key.
    """
    if lora is None:
        return {key: Expected(weight) for key, weight in trained.items()}
    scale = lora.alpha / (lora.rank**0.5 if lora.rslora else lora.rank)
    return {key: _merged(key, weight, trained, scale) for key, weight in trained.items() if PREFIX not in key}


def _merged(key: str, weight: Tensor, trained: Mapping[str, Tensor], scale: float) -> Expected:
    factors = _factors(key, trained)
    if factors is None:
        return Expected(weight)
    a, b = factors
    delta, most = scale * b @ a, abs(scale) * b.abs() @ a.abs()
    if delta.shape != weight.shape:  # some files have the matrices of experts transposed
        delta, most = delta.mT, most.mT
    return Expected(weight.double() + delta, weight.double().abs() + most)


def _factors(key: str, trained: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """Return A and B of a matrix of the files, or None. The factors of experts are `[experts, rank, in]` and `[experts,
    out, rank]`, or those of the one expert that the key names."""
    one = _EXPERT.fullmatch(key)
    fused = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
    module = f"{one[1]}.{fused[one[3]]}" if one else key.removesuffix(".weight")
    a, b = (trained.get(f"{PREFIX}{module}.lora_{factor}.weight") for factor in "AB")
    if a is None or b is None:
        return None
    a, b = a.float().double(), b.float().double()  # merges and files take factors in float32
    if not one and not _FUSED.fullmatch(module):
        return a, b
    num = len(a) // b.shape[1]
    a, b = a.view(num, b.shape[1], -1), b.view(num, -1, b.shape[1])
    if not one:
        return a, b
    a, b = a[int(one[2])], b[int(one[2])]
    half = len(b) // 2
    return a, {"gate_proj": b[:half], "up_proj": b[half:], "down_proj": b}[one[3]]


def adapter_files(run: Run, folder: Path, trained: Mapping[str, Tensor]) -> Findings:
    """Compare the adapter directories of a run with its factors: read them with safetensors, and with
    `mw.Lora(path=)`."""
    model, own = run.model, {key: tensor.float() for key, tensor in trained.items() if key.startswith(PREFIX)}
    streamed = gather(model, "adapter")
    experts = any(param.adapter and "expert" in param.rows for param in model.table)
    of_source = "per-expert" if model.keymap.choice.get("experts") == "per-expert" else "fused"
    usual = family_of(model.config).served or of_source  # chosen here, to check the choice of the export
    for layout in ("fused", "per-expert") if experts else ("fused",):
        # Call the export without a layout where it should choose this one itself.
        export_adapter(model, folder / layout, layout=None if layout == usual else layout)
        way = f"export_adapter(layout={layout!r})"
        if model.mesh.rank == 0:  # before our own reader, which may refuse wrong files
            files = load_file(folder / layout / peft_files.WEIGHTS_FILE)
            yield from _same_tensors(way, files, _in_layout(own, layout))
            yield from _stated(way, json.loads((folder / layout / peft_files.CONFIG_FILE).read_text()), files)
        again = gather(_loaded(run, Lora(path=str(folder / layout))), "adapter")
        if model.mesh.rank == 0:
            yield from _same_tensors(f"mw.Lora(path=) of {way}", again, own)
    if model.mesh.rank == 0:
        yield from _same_tensors('stream("adapter")', streamed, own)
    run.record_once("E2", "factors in adapter files", len(own) * (3 + 2 * experts))


def with_rslora(adapter: Path) -> Path:
    """Copy an adapter directory. The copy's config sets `use_rslora` (scale = alpha / sqrt(rank)) and keeps all
    scales."""
    out = Path(shutil.copytree(adapter, adapter.with_name(f"{adapter.name} with rsLoRA"), dirs_exist_ok=True))
    config = json.loads((out / peft_files.CONFIG_FILE).read_text())
    rank, alpha, ranks, alphas = (config[name] for name in ("r", "lora_alpha", "rank_pattern", "alpha_pattern"))
    for name in {**ranks, **alphas}:
        alphas[name] = alphas.get(name, alpha) / ranks.get(name, rank) ** 0.5
    (out / peft_files.CONFIG_FILE).write_text(
        json.dumps({**config, "use_rslora": True, "lora_alpha": alpha / rank**0.5})
    )
    return out


def _module(key: str) -> str:
    return key.removeprefix(PREFIX).partition(".lora_")[0]


def _same_tensors(way: str, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Findings:
    for key in sorted(actual.keys() ^ expected.keys()):
        yield Finding("E2", key, f"{way} {'has it, and should not' if key in actual else 'has not written it'}")
    for key in expected.keys() & actual.keys():
        if not _same_bits(actual[key].cpu(), expected[key]):
            shapes = f"{list(actual[key].shape)} of {list(expected[key].shape)}"
            yield Finding(
                "E2", key, f"{way} has not the factor that was trained: {shapes}", "a part of it, or reordered"
            )


def _stated(way: str, config: Mapping[str, Any], files: Mapping[str, Tensor]) -> Findings:
    """Check that the ranks in the config are those of the tensors: inference engines allocate by the config."""
    for key, tensor in files.items():
        module = _module(key)
        rank: int = next((r for name, r in config["rank_pattern"].items() if re.fullmatch(name, module)), config["r"])
        num = tensor.shape["lora_A" not in key]
        if num != rank and not (module.endswith((".experts", ".base_layer")) and num % rank == 0):
            yield Finding("E2", key, f"{way} has rank {num}, and its config says {rank}")


def _in_layout(own: Mapping[str, Tensor], layout: str) -> dict[str, Tensor]:
    """Return factors as PEFT's files have them.

    One pair for all experts: A `[experts * rank, in]`, B `[out, rank * experts]`, under the name of the module
    `experts`, with `.base_layer` for the matrix that peft wraps first. Or one pair for each expert and projection.
    """
    out: dict[str, Tensor] = {}
    for key, tensor in own.items():
        module, first = _module(key), own[key.replace("lora_B", "lora_A")]
        if not _FUSED.fullmatch(module):
            out[key] = tensor
        elif "lora_B" in key:
            rank = tensor.shape[1]
            a, b = first.view(-1, rank, first.shape[1]), tensor.view(len(first) // rank, -1, rank)
            at, _, last = (PREFIX + module).rpartition(".")
            nested = last == "gate_up_proj" and f"{at}.down_proj.lora_A.weight" in own
            out |= _fused(f"{at}.base_layer" if nested else at, a, b) if layout == "fused" else _each(at, last, a, b)
    return out


def _fused(at: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """Return the factors of all experts as one pair, whose B has its columns by rank, then by expert."""
    num, rank, width = a.shape
    b_OrE = b.permute(1, 2, 0).reshape(-1, rank * num)
    return {f"{at}.lora_A.weight": a.reshape(num * rank, width), f"{at}.lora_B.weight": b_OrE}


def _each(at: str, last: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """Return a pair for each expert and projection. Gate and up have the same A."""
    names = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    out = dict[str, Tensor]()
    for expert, (a_rI, b_Or) in enumerate(zip(a, b, strict=True)):
        for name, half in zip(names, b_Or.chunk(len(names)), strict=True):
            out |= {f"{at}.{expert}.{name}.lora_A.weight": a_rI, f"{at}.{expert}.{name}.lora_B.weight": half}
    return out


def e3_resume(trial: Trial, reference: Reference, notes: Notes) -> Findings:
    """A checkpoint of the mesh, resumed on one process, makes the step that one process makes without a stop.

    It holds factors and their optimizer state alone. The mesh wrote it before its last step.
    """
    alone = trial.with_options(memory=MemoryOptions(), pipeline=Pipeline(), context=ContextParallel())
    engine, last, limit = alone.engine(Mesh(device="cpu")), trial.steps - 1, trial.tolerance
    assert trial.checkpoint is not None
    resume(engine, trial.checkpoint)
    expected, loss = reference.steps[last], engine.backward(trial.all_batches(last))
    grads = gather(engine.model, "grad")
    engine.update()
    off = abs(loss - expected.loss) / abs(expected.loss)
    notes.add_margin(Margin("E3", "loss of the next step", 1, off, limit.loss))
    if not off <= limit.loss:
        yield Finding("E3", "loss", f"{loss!r} after resuming, {expected.loss!r} without a stop")
    for key, grad in grads.items():
        off = (grad - expected.grads[key]).norm().item() / (expected.grads[key].norm().item() or 1.0)
        notes.add_margin(Margin("E3", "gradients of the next step", 1, off, limit.grad, key))
        if not off <= limit.grad:
            yield Finding("E3", key, f"its gradient is {off:.1e} off after resuming", "it was restored otherwise")
    made, most = unrounded(engine.model, grads), UPDATE * lr_of_trial(last)
    for key, weight in made.items():
        off = (weight - expected.weights[key]).abs().nan_to_num(torch.inf).max().item()
        notes.add_margin(Margin("E3", "weights after the next step", 1, off, most, key))
        if not off <= most:
            what = f"the next update leaves it {off:.1e} off, {most:.0e} allowed"
            yield Finding("E3", key, what, "its optimizer state was restored otherwise")
