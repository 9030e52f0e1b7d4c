"""Refuse blueprints that cannot be loaded; log matrices that stay wide, and MTP heads that are new or go stale."""

from __future__ import annotations

from collections.abc import Collection, Container

from ..blueprint import Blueprint
from ..errors import ConfigError, counted
from ..log import logger
from ..mesh import Mesh
from ..models import PREFIX
from ..sharding import MTP


def refuse_training_read_only(blueprint: Blueprint, trained: Container[str]) -> None:
    """Refuse to train parameters in a format that is read only, such as 4 bits: an export could not write them."""
    for param in blueprint.table:
        read_only = blueprint.keymap.only_read(param)
        if read_only is not None and param.name in trained:
            key, form = read_only
            raise ConfigError(
                f"{key} is {form}, a format that Meshwright reads but cannot train, and train= includes {param.name}; "
                "train other parameters, such as train=['*norm*'], adapters with lora=mw.Lora(), or none with "
                "train=[], or use the model in bfloat16 or FP8"
            )


def log_left_wide(names: list[str], mesh: Mesh) -> None:
    """Log which matrices are stored as values although others of their kind are stored in 4 bits."""
    if names and mesh.rank == 0:
        logger.info(
            "%s is stored as values and not in 4 bits, as %s: the columns of a rank are not whole blocks",
            names[0], counted(len(names), "such matrix", "such matrices"),
        )  # fmt: skip


def log_mtp(blueprint: Blueprint, trained: Collection[str], mesh: Mesh) -> None:
    """Warn that an MTP head is new, or that it goes stale because the trunk is trained without it."""
    if mesh.rank:
        return
    if any(name.startswith(MTP) for name in blueprint.keymap.fresh):
        logger.warning("the files have no MTP head (mtp.*), so a new one is drawn, with seed 0")
    elif blueprint.recipe.mtp == "carried" and trained and any(k.startswith(PREFIX) for k in blueprint.keymap.carried):
        logger.warning(
            "the MTP head (mtp.*) is kept as it is and goes stale: the more the model changes, the fewer of its drafts "
            'are accepted in speculative decoding. mtp="head" trains it too; the model trains as without it'
        )
