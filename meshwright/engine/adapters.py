"""Export LoRA adapters as PEFT files or merged into their base weights, and save them in checkpoints."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .. import weights
from ..blueprint import Blueprint
from ..errors import CheckpointError, ConfigError, ExportError
from ..models import family_of, without_adapters
from ..optim import SCALES
from ..sharding import Param, Table
from ..watch import names_lost_ranks
from ..weights import peft_files
from .agreement import Proposal, agree, check_is_model
from .model import Model

LAYOUTS = ("fused", "per-expert")
FLOAT = torch.float32  # of factors in files and merges


def check_has_adapters(model: Model, call: str) -> None:
    """Refuse a model without adapters."""
    if model.recipe.lora is None:
        raise ConfigError(f"{call}: the model has no adapters; load it with lora=mw.Lora(...)")


@contextlib.contextmanager
def adapters_off(model: Model) -> Iterator[None]:
    """Switch the adapters off, and note it for all ranks to compare: a pipeline stage may have no adapters."""
    before, model.calls.in_base = model.calls.in_base, True
    try:
        with without_adapters(model.parts):
            yield
    finally:
        model.calls.in_base = before


def factors_on_rank_0(model: Model) -> dict[str, Tensor]:
    """Return the whole factors of all adapters by key, in float32, on rank 0; nothing elsewhere. All ranks call it."""
    keymap = model.keymap.of_adapters()
    tensors = weights.whole_tensors(model.stored_model(model.stored()), model.keymap, keymap.keys.values())
    return {key.name: tensor for key, tensor in tensors}


def merged_values(model: Model) -> weights.MergedValues:
    """Return this rank's weights with their adapters merged. All ranks call it: each receives all factors, which are
    small, and no base weight is sent.
    """
    on_rank_0, keymap = factors_on_rank_0(model), model.keymap.of_adapters()
    whole: dict[str, Tensor] = {}
    for name, key in keymap.keys.items():
        # Both are given, because a user may change torch's default dtype and device.
        empty = torch.empty(key.shape, dtype=FLOAT, device=model.mesh.host)
        tensor = on_rank_0.pop(name) if model.mesh.rank == 0 else empty
        whole[name] = model.mesh.broadcast_on_hosts_(tensor, "the sending of adapters to all ranks")
    lora, deltas = model.recipe.lora, dict[str, weights.Delta]()
    assert lora is not None
    local = {base: pair for base, pair in _pairs_by_base(model).items() if base in model.pieces}
    for base, pair in local.items():
        a, b = (_assembled(param, whole) for param in (pair.a, pair.b))
        groups = max(pair.a.matrix[0] // pair.a.dims["rank"], 1)  # halves of gate and up, or experts
        deltas[base] = weights.Delta(a.view(groups, pair.a.dims["rank"], -1), b, lora.scale)
    values = model.values()
    return weights.MergedValues(values.stored, values.grids, deltas, model.pieces)


def _pairs_by_base(model: Model) -> dict[str, peft_files.Pair]:
    """Return the factors of each adapter by the name of their base parameter."""
    pairs = peft_files.pairs_of(param for param in model.table if param.adapter)
    return {base_of(pair.a.name): pair for pair in pairs}


def base_of(factor: str) -> str:
    """Return the name of the parameter that a factor belongs to: `q.weight` of `q.lora.a`, `experts.down` of
    `experts.down_lora.a`.
    """
    owner = factor.rpartition(".")[0]
    return owner.removesuffix("_lora") if owner.endswith("_lora") else owner.removesuffix("lora") + "weight"


def _assembled(param: Param, whole: Mapping[str, Tensor]) -> Tensor:
    """Return a factor as the matrix of its parameter, from the tensors of its keys."""
    blocks = param.layouts[0].blocks
    out = whole[blocks[0].key].new_empty(param.shape)
    for block in blocks:
        out[block.ours.slices] = block.view(whole[block.key])
    return out.view(param.matrix)


def _agreed(model: Model, call: str, directory: str | os.PathLike[str], layout: str | None) -> tuple[Path, str]:
    """Return the path and the layout to write, after all ranks have agreed on them."""
    check_is_model(model)
    check_has_adapters(model, call)
    others = [name for name in model.trained if not model.table[name].adapter]
    if others:
        raise ConfigError(
            f"{call} would leave out {others[0]} ({len(others)} trained parameters that are no adapters); export them "
            "with the adapters merged: mw.export(model, directory, merge=True)"
        )
    if not isinstance(directory, str | os.PathLike):
        raise ExportError(f"{directory!r} is not a path; give the directory to write")
    if why := why_without_class(model.blueprint):
        raise ConfigError(f"{call}: {why}. Export them merged: mw.export(model, directory, merge=True)")
    chosen = layout or default_layout(model)
    if chosen not in LAYOUTS:
        raise ConfigError(f"layout={layout!r} is unknown; choose from {', '.join(map(repr, LAYOUTS))}")
    path = weights.path_of(directory).absolute()
    agree(model, call, lambda: Proposal(settings={"directory": str(path), "layout=": chosen}))
    return path, chosen


@names_lost_ranks()
def check_export_adapter(
    model: Model, directory: str | os.PathLike[str], *, layout: str | None = None, overwrite: bool = False
) -> None:
    """Refuse, on all ranks, whatever `export_adapter` with the same arguments would refuse. Call it before training."""
    path, _ = _agreed(model, "check_export_adapter", directory, layout)
    keys = model.keymap.of_adapters().keys.values()

    def check() -> None:
        if model.mesh.rank == 0:
            weights.check_target(_target(model, path, sum(key.num_bytes for key in keys), overwrite))

    model.mesh.together(check, f"the check of {path}", ExportError, f"nothing could be exported to {path}")


@names_lost_ranks()
def export_adapter(
    model: Model, directory: str | os.PathLike[str], *, layout: str | None = None, overwrite: bool = False
) -> None:
    """Write the adapters as a PEFT directory: `adapter_config.json` and `adapter_model.safetensors`. All ranks call it.

    `layout` of routed experts: "fused", as PEFT has them for models of transformers 5, or "per-expert", one A and B for
    each expert and matrix. By default what vLLM reads for the family, and for other families as the source has them;
    docs/lora.md says which server reads what. The directory appears whole or not at all.
    """
    path, chosen = _agreed(model, "export_adapter", directory, layout)
    factors = factors_on_rank_0(model)

    def write() -> None:
        if model.mesh.rank == 0:
            num_bytes = sum(tensor.nbytes for tensor in factors.values())
            with weights.atomic_directory(_target(model, path, num_bytes, overwrite)) as folder:
                _write(model, folder, factors, chosen)

    at, nothing = f"the export of adapters to {path}", f"nothing was exported to {path}"
    model.mesh.together(write, at, ExportError, nothing)


def default_layout(model: Model) -> str:
    """Return the layout of routed experts that vLLM reads for the family; else the one that the source has."""
    of_source = "per-expert" if model.keymap.choice.get("experts") == "per-expert" else "fused"
    return family_of(model.config).served or of_source


def why_without_class(blueprint: Blueprint) -> str:
    """Return why the keys of adapters do not fit the transformers class that loads them, "" if they do.

    PEFT would leave B at 0. The layers of a class with a head are under `model.`, those of a base model (AutoModel) are
    not. Keys follow the source.
    """
    of_base, head = "embed_tokens.weight" in blueprint.keymap.keys, blueprint.head
    if of_base == (head == "none"):
        return ""
    kind = "those of a base model without a head" if of_base else "those of a model with a head"
    return (
        f'the keys of the source are {kind}, and the model is loaded with head="{head}"; the class that has this head '
        "spells them differently, and PEFT would leave the adapters out"
    )


def _target(model: Model, path: Path, num_bytes: int, overwrite: bool) -> weights.Target:
    names = frozenset({peft_files.CONFIG_FILE, peft_files.WEIGHTS_FILE})
    return weights.Target(
        path, num_bytes + (1 << 16), names, model.directory or path.parent, overwrite, peft_files.CONFIG_FILE
    )


def _write(model: Model, folder: Path, factors: Mapping[str, Tensor], layout: str) -> None:
    """Write config and tensors, and fsync both."""
    lora, pairs = model.recipe.lora, peft_files.pairs_of(param for param in model.table if param.adapter)
    assert lora is not None
    config = peft_files.config_of(lora, pairs, layout, str(model.directory or ""), plain=_plain_modules(model))
    config["task_type"] = "CAUSAL_LM" if model.blueprint.head == "lm" else "FEATURE_EXTRACTION"
    (folder / peft_files.CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    # safetensors refuses tensors that share memory, and gate and up of an expert share one A.
    tensors = {key: tensor.clone() for key, tensor in as_in_peft(model.table, factors, layout).items()}
    save_file(tensors, folder / peft_files.WEIGHTS_FILE, {"format": "pt"})
    # safetensors lets only the owner read the file, but another user may serve the adapter.
    (folder / peft_files.WEIGHTS_FILE).chmod((folder / peft_files.CONFIG_FILE).stat().st_mode & 0o777)
    for file in folder.iterdir():
        weights.to_disk(file)


def as_in_peft(table: Table, factors: Mapping[str, Tensor], layout: str) -> dict[str, Tensor]:
    """Return factors, or their gradients, by the keys of a PEFT file. `factors`: by the keys of `stream`."""
    pairs, tensors = peft_files.pairs_of(param for param in table if param.adapter), dict[str, Tensor]()
    stacks = [pair.module.rpartition(".")[0] for pair in pairs if pair.experts]
    for pair in pairs:
        of_pair = {key: factors[key] for param in (pair.a, pair.b) for key in param.layouts[0].keys}
        nested = stacks.count(pair.module.rpartition(".")[0]) > 1
        tensors |= {key: t.contiguous() for key, t in peft_files.written(pair, of_pair, layout, nested)}
    return tensors


def _plain_modules(model: Model) -> list[str]:
    """Return the modules without adapters, by each name that files may have for them."""
    adapted = _pairs_by_base(model)
    plain = [param for param in model.table if not param.adapter and param.name not in adapted]
    return [key.removesuffix(".weight") for param in plain for layout in param.layouts for key in layout.keys]


def saved_part(model: Model, table: Table) -> tuple[Table, weights.KeyMap]:
    """Return the parameters and keys that a checkpoint holds: all of them, or with adapters those that are trained.

    The base is not saved again with every checkpoint. Everything is in one file, whose name no loader of models looks
    for: a checkpoint of adapters must not load as a model without them. `table`: parameters, and scales of 8-bit state.
    """
    if model.recipe.lora is None:
        return table, model.keymap
    trained = {*model.trained}
    params = {
        n: p for n, p in table.params.items() if n in trained or (n not in model.table.params and _owner(n) in trained)
    }
    made_of = weights.blocks_by_key(replace(table, params=params), model.keymap.choice)
    whole = weights.blocks_by_key(model.table, model.keymap.choice)
    partly = [name for name in made_of if name in whole and len(made_of[name]) < len(whole[name])]
    if partly:
        raise ConfigError(
            f"{partly[0]} is one tensor of the files, and only a part of it is trained with the adapters; a "
            "checkpoint of adapters holds whole tensors: give train= patterns that take in all of it, or none"
        )
    keys = {n: k._replace(file=weights.ADAPTERS) for n, k in model.keymap.keys.items() if n in made_of}
    metadata = {weights.ADAPTERS: {"format": "pt"}}
    keymap = replace(model.keymap, keys=keys, carried=frozenset(), fresh=frozenset(), metadata=metadata)
    return replace(table, params=params, carried=()), keymap


def _owner(scales: str) -> str:
    """Return the parameter whose 8-bit state has these scales."""
    return scales.removesuffix(SCALES)


def check_same_adapters(model: Model, saved: Mapping[str, Any] | None, at: Path) -> None:
    """Refuse to resume adapters on a model without them, of other rank or scale, or on another base."""
    now = adapter_record(model)
    if now and saved and math.isclose(_scale_of(now), _scale_of(saved)):  # files say rsLoRA by a larger alpha
        saved = {**saved, "alpha": now["alpha"], "rslora": now["rslora"]}
    if now == saved:
        return
    if now is None or saved is None:
        has, needs = ("adapters", "no lora=") if now is None else ("no adapters", "lora=")
        raise CheckpointError(
            f"{at} has {has}, but the engine's model was loaded with {needs}; load it as it was saved"
        )
    name = next(name for name in {**now, **saved} if now.get(name) != saved.get(name))
    field = name if name == "frozen" else f"lora.{name}"
    fix = (
        "load the base that they were trained with"
        if name == "base"
        else f"load the model with {field}={saved.get(name)!r}"
    )
    raise CheckpointError(
        f"the adapters of {at} have {name}={saved.get(name)!r}, the engine's model has {now.get(name)!r}; {fix}"
    )


def _scale_of(record: Mapping[str, Any]) -> float:
    return float(record["alpha"] / record["rank"] ** (0.5 if record["rslora"] else 1))


def adapter_record(model: Model) -> dict[str, Any] | None:
    """Return what a checkpoint notes of the adapters and of the base they belong to."""
    lora, source, frozen = model.recipe.lora, model.keymap.source, model.recipe.frozen
    if lora is None:
        return None
    base = source.checksum() if source is not None else model.blueprint.origin
    return {
        "rank": lora.rank,
        "alpha": lora.alpha,
        "expert_rank": lora.expert_rank,
        "rslora": lora.rslora,
        "base": base,
        **({"frozen": frozen} if frozen else {}),
    }
