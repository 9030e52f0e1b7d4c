"""Checks that `meshwright data`, `--dry-run` and `train` make before any row is read and before any rank runs.

Packages, the model and its mesh, the files of all sources, templates and prompts. Each mistake has its place in the
file, so that all are told at once with their lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from ..errors import MeshwrightError
from ..weights import path_of
from .config import Config, Place
from .config_checks import place_of, sources_in
from .config_model import check_state, model_of, objections_to
from .data_sources import RowReader, check_source_files, maker, model_directory, read_template
from .metrics import missing_packages
from .samples import prompts_of

Mistakes = Iterator[tuple[Place, str]]


def mistakes(config: Config) -> Mistakes:
    """Say what is wrong with what the file names. What depends on the model waits until there is one."""
    yield from missing_packages(config)
    yield from _of_files(config)
    try:
        directory = model_directory(config.model)
        blueprint = model_of(config)
    except MeshwrightError as error:
        yield place_of(str(error), config, ("model",)), str(error)
        return
    unreadable = [*_of_readers(config, directory)]
    yield from unreadable
    if not any(place[:2] == ("data", 0) for place, _ in unreadable):  # prompts are written as its rows are
        yield from _refused(("sample", "prompts"), partial(prompts_of, config.sample, config.data[0], directory))
    refused = objections_to(blueprint, config)
    yield from ((place_of(text, config, ("mesh",)), text) for text in refused)
    yield from _refused(("train", "train"), blueprint.trained)
    if not refused:
        yield from _refused(("optim", "state_dtype"), partial(check_state, blueprint, config))


def _of_files(config: Config) -> Mistakes:
    for place, section in sources_in(config):
        if section.path:
            yield from _refused((*place, "path"), partial(check_source_files, section))
        yield from _refused((*place, "template"), partial(read_template, section.template))


def _of_readers(config: Config, directory: Path) -> Mistakes:
    reader = RowReader(directory, path_of(config.cache), config.train.tower)
    for place, section in sources_in(config):
        if section.path:
            yield from _refused((*place, "template"), partial(maker, section, reader))


def _refused(place: Place, check: Callable[[], object]) -> Mistakes:
    try:
        check()
    except MeshwrightError as error:
        yield place, str(error)
