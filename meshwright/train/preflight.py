"""Checks that `meshwright data`, `--dry-run` and `train` make before any row is read and before any rank runs.

They cover packages, the model and its mesh, the files of all sources, templates and prompts. A check does not raise: it
yields the path of the field and a message, so that all mistakes are reported at once, each with its line in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..blueprint import Blueprint
from ..engine import why_without_class
from ..errors import MeshwrightError
from ..log import logger
from ..plan import find
from ..recipe import Lora
from ..weights import path_of
from ..weights.peft_files import recipe_of
from .config import Config, Place
from .config_checks import place_of, sources_in
from .config_model import check_state, model_of, objections_to, optimizer_of
from .data_sources import RowReader, check_source_files, check_tokenizers, maker, model_directory, read_template
from .metrics import missing_packages
from .samples import prompts_of

Mistakes = Iterator[tuple[Place, str]]


def mistakes(config: Config) -> Mistakes:
    """Yield the mistakes in what the file refers to: packages, files, the model, templates, prompts.

    Checks that need the model are skipped if it cannot be opened; likewise those of prompts if the first source, whose
    template formats them, cannot be read.
    """
    yield from missing_packages(config)
    yield from _file_mistakes(config)
    try:
        directory = model_directory(config.model)
        blueprint = model_of(config)
    except MeshwrightError as error:
        yield place_of(str(error), config, ("model",)), str(error)
        return
    yield from _other_models(config, directory)
    unreadable = [*_reader_mistakes(config, directory)]
    yield from unreadable
    if not any(place[:2] == ("data", 0) for place, _ in unreadable):  # its template formats the prompts
        yield from _refused(("sample", "prompts"), partial(prompts_of, config.sample, config.data[0], directory))
    # Optimizer state is checked only on a valid mesh: its blocks depend on how the mesh cuts parameters.
    refused = objections_to(blueprint, config)
    yield from ((place_of(text, config, ("mesh",)), text) for text in refused)
    yield from _trained_mistakes(config, blueprint)
    yield from _adapter_mistakes(config, blueprint)
    if not refused:
        yield from _refused(("optim", "state_dtype"), partial(check_state, blueprint, config))


def _trained_mistakes(config: Config, blueprint: Blueprint) -> Mistakes:
    """Check that patterns match parameters, and that the optimizer can update those that are trained."""
    try:
        trained = blueprint.trained()
    except MeshwrightError as error:
        yield ("train", "train"), str(error)
        return
    try:
        optimizer_of(config.optim).check(blueprint.table, trained)
    except MeshwrightError as error:
        yield place_of(str(error), config, ("optim", "kind")), str(error)


def _adapter_mistakes(config: Config, blueprint: Blueprint) -> Mistakes:
    """Check that the run file says of its adapters what their files say, and that they can be written at the end."""
    if config.lora is None:
        return
    if config.lora.path is not None:  # the files decide; a default that is written down is no default
        lora = Lora(**config.lora.model_dump())
        yield from _refused(("lora", "path"), partial(recipe_of, lora, stated=config.lora.model_fields_set))
    if config.save.export and not config.save.merged and (why := why_without_class(blueprint)):
        yield ("save", "merged"), f"{why}. Set merged = true: the run then writes the merged weights alone"


def _file_mistakes(config: Config) -> Mistakes:
    """Check that the files of all sources exist, and that templates can be read."""
    for place, section in sources_in(config):
        if section.path:
            yield from _refused((*place, "path"), partial(check_source_files, section))
        yield from _refused((*place, "template"), partial(read_template, section.template))


def _other_models(config: Config, directory: Path) -> Mistakes:
    """Check the reference model of a run, or its teacher: that it can be opened, and has the tokenizer of the model."""
    named = {("dpo", "reference"): config.dpo and config.dpo.reference}
    named |= {("distill", "teacher"): config.distill and config.distill.teacher}

    def check(name: str, what: str) -> None:
        find(
            name,
            replace(config.recipe, lora=None, train=(), mtp="carried", frozen=None),
            weights=False,
            say=logger.info,
        )
        check_tokenizers(model_directory(name), directory, what)

    for place, name in named.items():
        if name:
            yield from _refused(place, partial(check, name, ".".join(place)))


def _reader_mistakes(config: Config, directory: Path) -> Mistakes:
    """Check that the model's tokenizer and template fit each source."""
    reader = RowReader.of(config, directory, path_of(config.cache))
    for place, section in sources_in(config):
        if section.path:
            yield from _refused((*place, "template"), partial(maker, section, reader))


def _refused(place: Place, check: Callable[[], object]) -> Mistakes:
    """Turn what a check raises into a mistake at a place."""
    try:
        check()
    except MeshwrightError as error:
        yield place, str(error)
