"""Refuse a resume, before a tensor is overwritten, if the same weights would compute other values."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import weights
from ..blueprint import Blueprint
from ..checkpoint import Checkpoint
from ..errors import CheckpointError
from ..log import logger
from ..models import PREFIX
from ..sharding import MTP
from ..weights import chosen
from .adapters import saved_part
from .engine import Engine
from .model import Model

# Fields of config.json that change nothing that the model computes. A resume ignores how they differ.
_IRRELEVANT = (
    "architectures", "dtype", "torch_dtype", "num_labels", "transformers_version", "id2label", "label2id",
    "quantization_config", "mtp_num_hidden_layers", "num_nextn_predict_layers",
)  # fmt: skip
# Fields that change text, loss or initial values, but not the forward pass. A resume warns if they differ, and refuses
# any other difference.
_WARN_ONLY = (
    "_name_or_path", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "initializer_range",
    "router_aux_loss_coef", "output_router_logits",
)  # fmt: skip


def check_tower(model: Model, at: Path, tower: bool) -> None:
    """Refuse a vision tower that is trained on one side only: a carried one has no optimizer state."""
    if tower != model.blueprint.tower:
        raise CheckpointError(
            f"{at} was saved with tower={tower}, and the engine's model has tower={model.blueprint.tower}; load the "
            f"model with tower={tower}, or start from the weights: mw.load({str(at)!r}, tower={model.blueprint.tower})"
        )


def check_mtp(model: Model, trained: Sequence[str], at: Path) -> None:
    """Refuse a trained MTP head where the engine carries one: it would export the head of its source."""
    if model.recipe.mtp == "carried" and any(name.startswith(MTP) for name in trained):
        raise CheckpointError(
            f'{at} trained its MTP head, and the engine\'s model was loaded with mtp="carried", which would export the '
            'old one; load the model with mtp="head" or "all"'
        )


def check_carried_mtp(model: Model, source: weights.Source) -> None:
    """Refuse files with another MTP head than that which the model carries: an export would have the wrong one.

    All ranks call it; rank 0 compares the first bytes of each tensor, which training changes in every one.
    """
    own = model.keymap.source
    both = [key for key in model.keymap.carried if key.startswith(PREFIX) and key in source.entries]
    # Keys with different dtypes are left out: a checkpoint may hold weights of 8-bit files in a wider dtype.
    carried = [key for key in both if own is not None and own.entries[key].dtype == source.entries[key].dtype]
    if model.recipe.mtp != "carried" or own is None or not carried:
        return

    def compare() -> None:
        for key in carried if model.mesh.rank == 0 else ():
            if weights.first_bytes(own, key) != weights.first_bytes(source, key):
                raise CheckpointError(
                    f"{key} is not that of {own.directory}, whose MTP head an export would write; load the model from "
                    f'{source.directory}, or with mtp="head"'
                )

    at, what = f"the comparison with {source.directory}", f"{source.directory} cannot be resumed"
    model.mesh.together(compare, at, CheckpointError, what)


def check_adapter_keys(source: weights.Source, keymap: weights.KeyMap) -> None:
    """Refuse a checkpoint with other adapters than the model's: other targets, or other shapes."""
    saved, now = ({key: part.shape for key, part in each.items()} for each in (source.entries, keymap.keys))
    odd = sorted(key for key in {*saved, *now} if saved.get(key) != now.get(key))
    if odd and all(key.startswith(PREFIX) for key in odd):
        raise CheckpointError(
            f"{source.directory} has no MTP head that was trained with its adapters ({odd[0]}); load the model as it "
            'was saved, with mtp="carried"'
        )
    if odd:
        then, this = (list(each[odd[0]]) if odd[0] in each else "missing" for each in (saved, now))
        raise CheckpointError(
            f"{odd[0]} is {then} in {source.directory} and {this} in the engine's model ({len(odd)} such keys); load "
            "the model with the lora= that was saved"
        )


def check_same(engine: Engine, checkpoint: Checkpoint, blueprint: Blueprint, trainer: Mapping[str, Any]) -> None:
    """Refuse a checkpoint with other parameters, shapes or trained parameters. Log other differences."""
    model, at = engine.model, checkpoint.directory
    check_same_table(model, blueprint, at)
    carried = carried_before(engine, trainer)
    trained = {*trainer["trained"], *carried}
    if carried and model.mesh.rank == 0:
        logger.warning(
            "%s carried its MTP head, which is trained from now on: its optimizer state begins at zero", at.name
        )
    if trained != set(engine.trained):
        odd = min(trained ^ set(engine.trained))
        trainer_of_odd = "the checkpoint" if odd in trained else "this engine"
        raise CheckpointError(
            f"{at} trained {len(trained)} parameters, this engine trains {len(engine.trained)}; only {trainer_of_odd} "
            f"trains {odd}. Give mw.load the same train="
        )
    frozen = trainer.get("frozen", model.recipe.frozen)  # `meshwright convert` does not know it
    if frozen != model.recipe.frozen:
        raise CheckpointError(
            f"{at} was trained with frozen={frozen!r}, the engine's model has frozen={model.recipe.frozen!r}, so the "
            f"frozen weights have other values; load the model with frozen={frozen!r}"
        )
    if model.mesh.rank == 0:
        saved = trainer["settings"]  # empty in a checkpoint that `meshwright convert` made
        for name, now, then in _differences({n: v for n, v in settings_of(engine).items() if n in saved}, saved):
            logger.warning("%s was %s in %s, and is %s now", name, then, at.name, now)
        mesh = checkpoint.manifest.about.get("mesh")
        if mesh != str(model.mesh.axes):
            logger.info("%s was saved on %s, and is resumed on %s", at.name, mesh, model.mesh.axes)


def check_state(
    engine: Engine, source: Checkpoint, blueprint: Blueprint, trained: Container[str], quantised: Sequence[str]
) -> None:
    """Refuse a checkpoint that lacks state of this engine's optimizer, or has it in 8 bits, which the optimizer does
    not support.

    Muon may take over from AdamW: its momentum is then AdamW's first moment, an average of gradients too.
    """
    optimizer, at = engine.optimizer, source.directory
    kind = type(optimizer.options).__name__
    if quantised and not optimizer.options.codes:
        raise CheckpointError(
            f"{at} has optimizer state in 8 bits, and {kind} has none; resume it with the optimizer that was saved, or "
            f"start with new state: mw.load({str(at)!r})"
        )
    for name in (name for name in engine.trained if name in trained):
        keys = keys_of_state(blueprint, name)
        for state in optimizer.state_names[name]:
            if missing := [key for key in keys if key not in source.planes[state].entries]:
                raise CheckpointError(
                    f"{at} has no {state} of {missing[0]}, which {kind} needs for {name}: another optimizer, or one "
                    "with other options, has trained it. Give mw.Engine the optimizer= that was saved, or start with "
                    f"new state: mw.load({str(at)!r})"
                )
    dropped = [
        (name, state)
        for name in engine.trained
        for state in set(source.planes) & {*optimizer.options.state_names} - {*optimizer.state_names[name]}
        if name in trained and keys_of_state(blueprint, name)[0] in source.planes[state].entries
    ]
    if dropped and engine.model.mesh.rank == 0:
        logger.warning(
            "%s has %s of %d parameters, such as %s, which %s does not keep: another optimizer has trained them. "
            "Their %s goes on",
            at.name, dropped[0][1], len(dropped), dropped[0][0], kind, optimizer.options.state_names[0],
        )  # fmt: skip


def keys_of_state(blueprint: Blueprint, name: str) -> list[str]:
    """Return the keys that have optimizer state of a parameter: not copies, such as that of a tied head."""
    return [block.key for block in chosen(blueprint.table[name], blueprint.keymap.choice).blocks]


def carried_before(engine: Engine, trainer: Mapping[str, Any]) -> list[str]:
    """Return the parameters of an MTP head that the engine trains and the checkpoint carried: they have weights in it,
    and no optimizer state."""
    names = [] if engine.mtp is None else engine.mtp.names
    return [] if {*names} & {*trainer["trained"]} else [*names]


def check_same_table(model: Model, blueprint: Blueprint, at: Path) -> None:
    """Refuse another architecture, and parameters of other shapes."""
    params, saved = saved_part(model, model.table)[0].params, blueprint.table.params
    kinds = model.config.get("model_type"), blueprint.config.get("model_type")
    if kinds[0] != kinds[1]:
        raise CheckpointError(f"{at} is a {kinds[1]}, the engine's model a {kinds[0]}; load the model that was saved")
    for name in sorted({*params, *saved}):
        if name not in params or name not in saved or params[name].dims != saved[name].dims:
            then, now = (p[name].dims if name in p else "missing" for p in (saved, params))
            raise CheckpointError(
                f"{name} is {then} in {at} and {now} in the engine's model; resume with the model that was saved"
            )
    if fresh := blueprint.keymap.fresh:
        hint = ", or start from the weights: mw.load draws a new MTP head" if min(fresh).startswith(MTP) else ""
        raise CheckpointError(f"{at} has no {min(fresh)}; give a checkpoint that has it{hint}")


def check_same_config(model: Model, blueprint: Blueprint, at: Path, new_config: Sequence[str]) -> None:
    """Refuse a `config.json` with which the saved weights would compute other values."""
    # No tensor's shape depends on rope_theta or rms_norm_eps: only the config shows a change.
    for name, now, then in _differences(_flatten(model.config), _flatten(blueprint.config)):
        field = name.rpartition(".")[2]
        if {*name.split(".")} & {*_IRRELEVANT}:
            continue
        if field not in _WARN_ONLY and name not in new_config and field not in new_config:
            raise CheckpointError(
                f"{name} of config.json was {then} in {at}, and is {now} now, so the same weights would compute other "
                f"values; load the model with the config.json of {at}, or confirm the change: mw.resume(engine, "
                f"directory, new_config=[{name!r}])"
            )
        if model.mesh.rank == 0:
            logger.warning("%s of config.json was %s in %s, and is %s now", name, then, at.name, now)


def _flatten(config: Mapping[str, Any], inside: str = "") -> dict[str, Any]:
    """Return nested fields under dotted names, such as `text_config.rope_theta`."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= _flatten(value, f"{inside}{name}.") if isinstance(value, Mapping) else {inside + name: value}
    return flat


def _differences(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[tuple[str, object, object]]:
    """Return (name, value now, value then) of all fields that differ. A missing field counts as None."""
    names = [name for name in {**now, **then} if now.get(name) != then.get(name)]
    return [(name, now.get(name), then.get(name)) for name in names]


def settings_of(engine: Engine) -> dict[str, Any]:
    """Return the settings that may change from run to run; a resume warns if they do."""
    options = engine.optimizer.options.settings()
    settings = {**options, "max_norm": engine.max_norm, "router_aux": engine.router.mode}
    settings["temperature"] = float(engine.temperature)
    recipe = engine.model.recipe
    return settings if engine.mtp is None else {**settings, "mtp": recipe.mtp, "mtp_weight": recipe.mtp_weight}
