"""Export a model as a Hugging Face directory.

An export has the key names, file layout and dtypes of the source, so whatever reads the source reads the export. All
ranks first agree on the options and prove that their pieces tile every parameter; then each rank writes its own rows
into the same files.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import weights
from ..blueprint import Blueprint
from ..errors import ConfigError, ExportError
from ..log import logger
from ..models import LM_HEAD, PREFIX, SCORE, classifier_of, family_of, text_config, with_mtp_layers
from ..sharding import MTP, Piece, check_rows_to_write
from ..watch import names_lost_ranks
from .adapters import check_has_adapters, merged_values
from .agreement import Proposal, agree, check_is_model
from .model import Model

FORMATS = ("values", "source", "fp8")


def in_format(keymap: weights.KeyMap, model: Model, form: str) -> weights.KeyMap:
    """Return the key map in a format of `FORMATS`.

    FP8 codes are quantised from weights in the compute dtype, which is what matmuls saw in training: so a reader
    computes with the weights that were trained.
    """
    if form not in FORMATS:
        raise ConfigError(f"format={form!r} is unknown; choose from {', '.join(map(repr, FORMATS))}")
    keymap = replace(keymap, used=model.dtype)
    if form == "source":
        return keymap.as_source()
    if form != "fp8":
        return keymap
    quantised = keymap.in_fp8(model.table, model.blueprint.spec.fp8_left_out)
    if not quantised.scales:
        raise ConfigError(
            "format='fp8' needs matrices of whole 128 x 128 blocks, which no module of this model has; leave it out, "
            "or choose 'source' for the format of the files"
        )
    return quantised


@names_lost_ranks()
def export(
    model: Model, directory: str | os.PathLike[str], *, dtype: torch.dtype | None = None, overwrite: bool = False,
    keep_lm_head: bool = False, format: str | None = None, merge: bool = False,  # noqa: A002 - the word of users
) -> None:  # fmt: skip
    """Write a Hugging Face directory, with the files, keys, layouts and dtypes of the source. All ranks call it.

    `dtype`: another dtype for weights; float32 parameters are never rounded. `format="fp8"`: matrices in FP8, with one
    scale per block of 128 x 128. The directory appears complete or not at all. With `overwrite` it may replace an
    earlier export, which stays until the new one is complete. If a value head was added to a language model, the config
    becomes that of a classifier, and the untrained vocabulary head is left out unless `keep_lm_head`. `merge`: with
    adapters (LoRA) merged into their weights; `export_adapter` writes the adapters alone.
    """
    choices = ExportOptions(dtype, overwrite, keep_lm_head, _format_of(model, dtype, format, merge), merge)
    planned = _agreed_export(model, "export", directory, choices)
    if not merge:
        weights.write_directory(model.stored_model(model.values()), planned)
        return
    values = merged_values(model)
    at, nothing = f"the merging of adapters for {planned.directory}", f"nothing was exported to {planned.directory}"
    model.mesh.together(lambda: refuse_overflow_of(values, model, planned.keymap), at, ExportError, nothing)
    weights.write_directory(model.stored_model(values), planned)


@names_lost_ranks()
def check_export(
    model: Model, directory: str | os.PathLike[str], *, dtype: torch.dtype | None = None, overwrite: bool = False,
    keep_lm_head: bool = False, format: str | None = None, merge: bool = False,  # noqa: A002 - the word of users
) -> None:  # fmt: skip
    """Refuse, on all ranks, whatever `export` with the same arguments would refuse. Call it before training.

    It writes nothing. It cannot know the weights that training will produce, so an overflow shows up only in `export`.
    """
    choices = ExportOptions(dtype, overwrite, keep_lm_head, _format_of(model, dtype, format, merge), merge)
    planned = _agreed_export(model, "check_export", directory, choices)
    weights.check_export(model.mesh, planned)


@dataclass(frozen=True)
class ExportOptions:
    """The arguments of an export, which all ranks must agree on."""

    dtype: torch.dtype | None = None
    overwrite: bool = False
    keep_lm_head: bool = False
    form: str = "values"  # one of FORMATS
    merge: bool = False  # adapters into their weights


def _format_of(model: Model, dtype: torch.dtype | None, form: str | None, merge: bool) -> str:
    """Return the format to write. Without arguments it is that of the source, 8-bit formats included; but merged
    weights of a source in a read-only format, such as 4 bits, are written as values.
    """
    if dtype is not None and form is not None:
        raise ConfigError(f"dtype={dtype}, format={form!r}: give one of them; a dtype needs format='values'")
    check_is_model(model)
    return form or ("source" if dtype is None and not (merge and _read_only(model)) else "values")


def _read_only(model: Model) -> list[tuple[str, str]]:
    """Return the keys in formats that Meshwright reads but does not write, with their formats."""
    return [each for param in model.table if (each := model.keymap.only_read(param)) is not None]


def _agreed_export(
    model: Model, call: str, directory: str | os.PathLike[str], choices: ExportOptions
) -> weights.Export:
    """Compare the arguments between ranks, and return the export that all ranks will write."""
    check_is_model(model)
    if not isinstance(directory, str | os.PathLike):
        raise ExportError(f"{directory!r} is not a path; give the directory to write")

    def propose() -> Proposal:
        _check_merge(model, choices)
        check_pieces(model, model.stored(), model.pieces)
        refuse_overflow(model, choices)
        return Proposal(settings={f"{name}=": value for name, value in asdict(choices).items()})

    agree(model, call, propose)
    return export_plan(model, weights.path_of(directory).absolute(), choices)


def _check_merge(model: Model, choices: ExportOptions) -> None:
    """Refuse an export of a model with adapters that leaves them out: whoever loads it would get the base."""
    if model.recipe.lora is not None and not choices.merge:
        raise ConfigError(
            "the model has adapters, which an export without them would lose; give merge=True, or write them as PEFT's "
            "files: mw.export_adapter(model, directory)"
        )
    if choices.merge:
        check_has_adapters(model, "export(merge=True)")
        read_only = _read_only(model)
        if read_only and choices.form == "source":
            key, form = read_only[0]
            raise ConfigError(
                f"{key} is {form}, a format that is only read, so merged weights cannot be written as the source has "
                'them; give format="values", or dtype='
            )


def export_plan(model: Model, at: Path, choices: ExportOptions) -> weights.Export:
    """Return the files, keys and config of an export, without writing."""
    return weights.Export(_keymap(model, choices), _config(model, choices), model.small, at, choices.overwrite)


def check_pieces(model: Model, values: Mapping[str, Tensor], pieces: Mapping[str, Piece]) -> None:
    """Check, before a byte is written, the shapes of this rank's tensors and the tiling of each parameter.

    Ranks must write each row exactly once: a gap would leave zeros in a file without an error. The tiling is the same
    arithmetic on all ranks, so each rank checks a share of the parameters.
    """
    spec, mesh = model.blueprint.spec, model.mesh
    check_shapes(model, values, pieces)
    for name in sorted(model.table.params)[mesh.rank :: mesh.axes.world]:
        check_rows_to_write(model.table[name], spec, mesh.axes)


def check_shapes(model: Model, values: Mapping[str, Tensor], pieces: Mapping[str, Piece]) -> None:
    """Refuse tensors whose shapes differ from those of this rank's pieces."""
    live = values.stored if isinstance(values, weights.Values) else values  # as stored: no dequantising
    for name, tensor in live.items():
        shape = pieces[name].shape
        if name in model.codings:
            shape = model.codings[name].stored(shape)
        if tensor.shape != shape:
            raise ExportError(
                f"{name} is stored as {tuple(tensor.shape)}, but this rank's piece is {shape}; nothing was written. "
                "Something has replaced the parameter: load the model again"
            )


def refuse_overflow(model: Model, choices: ExportOptions) -> None:
    """Refuse to round a finite weight to infinity: the file would look fine, and the model would not."""
    refuse_overflow_of(model.values(), model, _keymap(model, choices))


def _keymap(model: Model, choices: ExportOptions) -> weights.KeyMap:
    """Return the keys of an export, with their dtypes."""
    keymap = model.keymap.of_base()
    if _has_new_value_head(model) and not choices.keep_lm_head:
        keymap = keymap.without(LM_HEAD)
    return in_format(keymap, model, choices.form) if choices.dtype is None else in_dtype(keymap, model, choices.dtype)


def in_dtype(keymap: weights.KeyMap, model: Model, dtype: torch.dtype) -> weights.KeyMap:
    """Return the key map in another dtype; float32 parameters are never rounded to it."""
    made_of = weights.blocks_by_key(model.table, keymap.choice)
    return keymap.recast(dtype, {key for key, parts in made_of.items() if any(param.float32 for param, _ in parts)})


def _has_new_value_head(model: Model) -> bool:
    """Return whether the value head was added to a language model, rather than read from files."""
    source, module = model.keymap.source, model.blueprint.module
    is_new = source is None or SCORE not in source.entries
    return is_new and "values" in module.scores and module.shape.labels.new


def _config(model: Model, choices: ExportOptions) -> dict[str, Any]:
    """Return the config.json of an export.

    A new value head changes the architecture to a classifier. Its number of labels is written out if it is 1, since
    transformers assumes 2. If transformers has no classifier class for the family, no architecture is named.
    """
    keymap = _keymap(model, choices)
    config = config_of(model.blueprint, choices.dtype, keymap, say=model.mesh.rank == 0)
    if not _has_new_value_head(model):
        return config
    config["architectures"] = [classifier_of(model.config)]
    if config["architectures"] == [""]:
        del config["architectures"]
    num = model.blueprint.module.shape.labels.num
    return {**config, "num_labels": 1} if num == 1 else config


def config_of(
    blueprint: Blueprint, dtype: torch.dtype | None, keymap: weights.KeyMap, *, say: bool = True
) -> dict[str, Any]:
    """Return the config of files with these keys: one that promises MTP layers exactly where the files have some.

    A source may disagree with itself: libraries that drop `mtp.*` keep the config (unsloth#11042). Where the field is
    absent, readers take one layer, so files with layers need no field. `say`: log a repair.
    """
    config = weights.exported_config(blueprint.config, dtype, keymap)
    field, has = family_of(config).mtp, any(key.startswith(PREFIX) for key in keymap.keys)
    says, is_new = text_config(config).get(field), any(name.startswith(MTP) for name in blueprint.keymap.fresh)
    if not field or has == bool(says) or (has and says is None and not is_new):
        return config
    if say:
        files = "have an MTP head" if has else "have no MTP head (mtp.*)"
        logger.info("config.json has %s=%s and the files %s: the export says %d", field, says, files, has)
    return with_mtp_layers(config, field, int(has))


def refuse_overflow_of(stored: weights.Values, model: Model, keymap: weights.KeyMap) -> None:
    """Compare the largest local magnitude of each parameter with the dtypes of its keys.

    A key in FP8 is skipped: its scales bring every weight into range. So is a dtype with the range of the stored one.
    """
    made_of = weights.blocks_by_key(model.table, keymap.choice)
    # Cached, since fused experts have one parameter and hundreds of keys.
    most_of = functools.cache(lambda name: torch.linalg.vector_norm(stored[name], torch.inf))
    for key in keymap.keys.values():
        for part, _ in [] if key.name in keymap.scales else made_of.get(key.name, []):
            dtype = weights.DTYPES[key.dtype]
            merged = isinstance(stored, weights.MergedValues) and part.name in stored.deltas
            held = torch.float32 if merged else model.kept[part.name]
            if torch.finfo(dtype).max > torch.finfo(held).max / 2:
                continue
            if part.name not in stored or not stored.stored[part.name].numel():
                continue
            most = most_of(part.name)
            if most.isfinite() and not most.to(dtype).float().isfinite():
                raise ExportError(
                    f"{key.name} has a weight of {most:.6g}, which {dtype} cannot hold; export with a wider dtype="
                )
