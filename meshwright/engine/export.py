"""What leaves the engine: tensors under their Hugging Face names, and whole directories."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import weights
from ..errors import ConfigError, ExportError, StateError
from ..models import LM_HEAD, SCORE, classifier_of
from ..sharding import Piece, check_rows_to_write
from ..watch import names_lost_ranks
from .agreement import Proposal, agree, check_is_model
from .model import Model

FORMATS = ("values", "source", "fp8")


def stream(
    model: Model,
    which: str = "weight",
    *,
    format: str = "values",  # noqa: A002 - the word of users
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor) one after the other on global rank 0, in the source's layout.

    All ranks must run through it; the others get nothing. It holds a few tensors (64 MiB) at a time. Weights come in
    the dtype of the source, gradients in float32. Tensors that are not trained (`mtp.*`) are left out.

    Where the source is in 8 bits, weights are values in the dtype of `config.json`. With `format="source"` or `"fp8"`
    they are the numbers and scales that `export` would write.
    """
    with names_lost_ranks():
        yield from _streamed(model, which, format)


def _streamed(model: Model, which: str, form: str) -> Iterator[tuple[str, Tensor]]:
    def propose() -> Proposal:
        if which != "weight" and form != "values":
            raise ConfigError(
                f"stream(which={which!r}, format={form!r}): only weights have another format than 'values'"
            )
        stored, written = _stored(model, which), _in_format(model.keymap, model, form)
        _check_shapes(stored, model.pieces)
        if written.scales:
            weights.check_scaled(model.stored_model(stored), written)
        if stored and which == "weight":
            _refuse_overflow(model, model.keymap)
        return Proposal(settings={"format=": form})

    agree(model, f"stream(which={which!r})", propose)
    stored_model, dtypes = model.stored_model(_stored(model, which)), None
    keys = [k for k in model.keymap.keys.values() if k.name not in model.keymap.carried]
    if which == "grad":  # as they are kept; of what is trained, on whatever rank
        made_of, trained, dtypes = weights.blocks_by_key(model.table, model.keymap.choice), {*model.trained}, model.kept
        keys = [k for k in keys if all(p.name in trained for p, _ in made_of[k.name])]
    written = _in_format(model.keymap, model, form)
    wide = [key._replace(dtype="F32") if key.name in written.scales else key for key in keys]
    for key, tensor in weights.whole_tensors(stored_model, model.keymap, wide, dtypes=dtypes):
        if key.name in written.scales:
            yield from weights.quantised_tensors(written, key.name, tensor).items()
        else:
            yield key.name, tensor


def _in_format(keymap: weights.KeyMap, model: Model, form: str) -> weights.KeyMap:
    """As it is written. 8-bit numbers are made of what products see of a weight: whoever reads them has what was
    trained."""
    if form not in FORMATS:
        raise ConfigError(f"format={form!r} is unknown; choose from {', '.join(map(repr, FORMATS))}")
    keymap = replace(keymap, used=model.dtype)
    if form == "source":
        return keymap.as_source()
    return keymap.in_fp8(model.table, model.blueprint.spec.fp8_left_out) if form == "fp8" else keymap


def gather(model: Model, which: str = "weight") -> dict[str, Tensor]:
    """`stream` as a dict: whole on rank 0, empty elsewhere."""
    return dict(stream(model, which))


@names_lost_ranks()
def export(
    model: Model, directory: str | os.PathLike[str], *, dtype: torch.dtype | None = None, overwrite: bool = False,
    keep_lm_head: bool = False, format: str | None = None,  # noqa: A002 - the word of users
) -> None:  # fmt: skip
    """Write a Hugging Face directory: files, keys, layouts and dtypes as in the source (or in `dtype`, which rounds
    none of the float32 parameters; or with `format="fp8"` matrices in 8 bits, in blocks of 128 x 128).

    It appears whole or not at all. With `overwrite`, it may take the place of an earlier export, which is kept until
    then. A critic that was made here of a language model says so, and its vocabulary head, which nobody trained, is
    left out unless `keep_lm_head`. All ranks call it.
    """
    planned = _planned(model, "export", directory, Choices(dtype, overwrite, keep_lm_head, _form(dtype, format)))
    weights.write_directory(model.stored_model(model.values()), planned)


@names_lost_ranks()
def check_export(
    model: Model, directory: str | os.PathLike[str], *, dtype: torch.dtype | None = None, overwrite: bool = False,
    keep_lm_head: bool = False, format: str | None = None,  # noqa: A002 - the word of users
) -> None:  # fmt: skip
    """Refuse at once, on all ranks, what `export` with the same arguments would refuse: call it before the training.

    It writes nothing. Only what the weights will be by then is not known.
    """
    planned = _planned(model, "check_export", directory, Choices(dtype, overwrite, keep_lm_head, _form(dtype, format)))
    weights.check_export(model.mesh, planned)


@dataclass(frozen=True)
class Choices:
    dtype: torch.dtype | None = None
    overwrite: bool = False
    keep_lm_head: bool = False
    form: str = "values"  # or another of FORMATS


def _form(dtype: torch.dtype | None, given: str | None) -> str:
    if dtype is not None and given is not None:
        raise ConfigError(f"dtype={dtype}, format={given!r}: give one of them; a dtype is for values")
    return given or ("source" if dtype is None else "values")


def _planned(model: Model, call: str, directory: str | os.PathLike[str], choices: Choices) -> weights.Export:
    """What all ranks have agreed to write."""
    check_is_model(model)
    if not isinstance(directory, str | os.PathLike):
        raise ExportError(f"{directory!r} is no path; give the directory to write")

    def propose() -> Proposal:
        check_pieces(model, model.stored(), model.pieces)
        refuse_overflow(model, choices)
        return Proposal(settings={f"{name}=": value for name, value in asdict(choices).items()})

    agree(model, call, propose)
    return exported(model, weights.path_of(directory).absolute(), choices)


def exported(model: Model, at: Path, choices: Choices) -> weights.Export:
    return weights.Export(_keymap(model, choices), _config(model, choices), model.small, at, choices.overwrite)


def check_pieces(model: Model, values: Mapping[str, Tensor], pieces: Mapping[str, Piece]) -> None:
    """Before a byte is written: this rank holds what `pieces` say, and what the ranks write tiles each parameter.

    The second is arithmetic and the same on all ranks, so each of them proves a share of it.
    """
    spec, mesh = model.blueprint.spec, model.mesh
    _check_shapes(values, pieces)
    for name in sorted(model.table.params)[mesh.rank :: mesh.axes.world]:
        check_rows_to_write(model.table[name], spec, mesh.axes)


def _check_shapes(values: Mapping[str, Tensor], pieces: Mapping[str, Piece]) -> None:
    live = values.stored if isinstance(values, weights.Values) else values  # no values are made to see their shapes
    for name, held in live.items():
        if held.shape != pieces[name].shape:
            raise ExportError(
                f"{name} is stored as {tuple(held.shape)}, and {pieces[name].shape} is this rank's piece of it; "
                "nothing was written. Something has replaced the parameter: load the model again"
            )


def refuse_overflow(model: Model, choices: Choices) -> None:
    """Nobody would see a weight that became infinite on its way into a file."""
    _refuse_overflow(model, _keymap(model, choices))


def _keymap(model: Model, choices: Choices) -> weights.KeyMap:
    keymap = model.keymap
    if _is_new_critic(model) and not choices.keep_lm_head:
        keymap = keymap.without(LM_HEAD)
    if choices.dtype is None:
        return _in_format(keymap, model, choices.form)
    made_of = weights.blocks_by_key(model.table, keymap.choice)
    exact = {key for key, parts in made_of.items() if any(param.float32 for param, _ in parts)}
    return keymap.recast(choices.dtype, exact)


def _is_new_critic(model: Model) -> bool:
    """Whether its value head was made here, on a language model."""
    source, module = model.keymap.source, model.blueprint.module
    made_here = source is None or SCORE not in source.entries
    return made_here and "values" in module.scores and module.shape.labels.new


def _config(model: Model, choices: Choices) -> dict[str, Any]:
    """A new critic is no language model any more. It has one label unless its config says otherwise, which must then be
    stated, because others assume two. Where transformers has no class for it, no class is named."""
    config = weights.exported_config(model.config, choices.dtype, _keymap(model, choices))
    if not _is_new_critic(model):
        return config
    config["architectures"] = [classifier_of(model.config)]
    if config["architectures"] == [""]:
        del config["architectures"]
    num = model.blueprint.module.shape.labels.num
    return {**config, "num_labels": 1} if num == 1 else config


def _refuse_overflow(model: Model, keymap: weights.KeyMap) -> None:
    made_of, stored = weights.blocks_by_key(model.table, keymap.choice), model.values()
    most_of = functools.cache(lambda name: torch.linalg.vector_norm(stored[name], torch.inf))  # of many keys
    for key in keymap.keys.values():
        for part, _ in [] if key.name in keymap.scales else made_of.get(key.name, []):
            dtype = weights.DTYPES[key.dtype]
            if torch.finfo(dtype).max > torch.finfo(model.kept[part.name]).max / 2:
                continue
            if part.name not in stored or not stored.stored[part.name].numel():
                continue
            most = most_of(part.name)
            if most.isfinite() and not most.to(dtype).float().isfinite():
                raise ExportError(
                    f"{key.name} has a weight of {most:.6g}, which {dtype} cannot hold; export with a wider dtype="
                )


def _stored(model: Model, which: str) -> Mapping[str, Tensor]:
    if which == "weight":
        return model.values()
    if which != "grad":
        raise ConfigError(f"stream(model, {which!r}): choose 'weight' or 'grad'")
    grads = model.grads()
    if not grads and model.trainable:  # a pipeline stage may have nothing to train
        raise StateError("there are no gradients; call engine.backward(batches) and not yet update()")
    return grads
