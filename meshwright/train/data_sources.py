"""The data of a config: documents of each source, and the plan of the streams."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

from ..checkpoint import extents_of_model
from ..data import (
    SUFFIXES,
    Batch,
    Chat,
    ChatOptions,
    Documents,
    Feed,
    ImageLimits,
    Make,
    Part,
    Placeholders,
    Plan,
    Processor,
    Ready,
    TextOnly,
    Texts,
    TokenizeSpec,
    Unused,
    fetched_files,
    files_of,
    fingerprint_of,
    generation_config_of,
    is_saved,
    prepare,
    saved_files,
    source_of,
    stop_ids_of,
    template_of,
    tokenizer_of,
)
from ..errors import ConfigError, DataError, counted
from ..mesh import Mesh
from ..models import patch_of, placeholders_of, take, text_config
from ..weights import download, is_hub_id, path_of, read_config
from .config import Config, SourceSection, TrainSection
from .config_checks import num_tokens

Made = TypeVar("Made")
_OF_ROWS = ("kind", "fields", "thinking", "turns", "template", "template_args")


@dataclass(frozen=True)
class RowReader:
    """Of the files of data, for the model of `directory`. `tower`: it sees. `cache`: where documents are kept."""

    directory: Path
    cache: Path
    tower: bool = False
    processes: int = 1

    def processor(self, section: SourceSection) -> Processor | None:
        """What reads the pictures that a source shows."""
        if not self.tower or section.kind != "chat":
            return None
        config, pictures = read_config(self.directory), section.pictures
        ids = placeholders_of(config)
        image, video = tokenizer_of(self.directory).convert_ids_to_tokens(list(ids))
        wishes = ImageLimits(_root(section), pictures.max_pixels, pictures.max_video_pixels, pictures.fps)
        return Processor(self.directory, Placeholders(image, video, ids), patch_of(config), wishes)


def _root(section: SourceSection) -> Path:
    """Where relative paths of pictures begin."""
    first = path_of(section.path if isinstance(section.path, str) else section.path[0])
    return path_of(section.pictures.root) if section.pictures.root else first if first.is_dir() else first.parent


@dataclass(frozen=True)
class TrainingData:
    """What is trained on."""

    documents: Sequence[Documents]
    plan: Plan
    num_steps: int
    processor: Processor | None = None

    def left_out(self) -> Iterator[str]:
        """Yield a line for each source with documents that are left out because they are longer than a stream."""
        for documents, source in zip(self.documents, self.plan.sources, strict=True):
            if too_long := int((source.lengths == 0).sum()):
                what = counted(too_long, "document")
                yield f"{what} of {documents.name} longer than {self.plan.length:,} tokens left out"

    def feed(self, mesh: Mesh, micro_batches: int) -> Feed:
        """The batches of this data rank, of which each step takes `micro_batches`."""
        return Feed(
            self.documents, self.plan, micro_batches=micro_batches, rank=mesh.data_rank, num_ranks=mesh.num_data_ranks,
            processor=self.processor,
        )  # fmt: skip


def documents_of(section: SourceSection, reader: RowReader, *, name: str = "") -> Documents:
    """The documents of a source, tokenised."""
    paths = [section.path] if isinstance(section.path, str) else section.path
    make, told, unused = maker(section, reader)
    files = tuple(file.absolute() for path in paths for file in _files(path, section))
    name = name or section.name or ", ".join(paths)
    recipe = TokenizeSpec(name, files, make, told, section.split, section.on_bad, unused)
    return prepare(recipe, reader.cache, processes=reader.processes)


def _files(path: str, section: SourceSection) -> list[Path]:
    """Files as they are; or of a data set, which says itself which files are its."""
    at, part = path_of(path), Part(section.hf_subset, section.hf_split, section.hf_revision)
    if is_saved(at):
        return saved_files(at, part)
    if at.is_dir() and part != Part():
        return fetched_files(str(at), part)
    if _is_of_hub(path):
        return fetched_files(path, part)
    if part != Part():
        raise DataError(f"{at} is no data set, and hf_subset, hf_split and hf_revision are of one; leave them out")
    return files_of(at)


def check_source_files(section: SourceSection) -> None:
    """Refuse files of a source that are not there. What lies on the hub is looked at when it is downloaded."""
    for path in [section.path] if isinstance(section.path, str) else section.path:
        if not _is_of_hub(path):
            _files(path, section)


def _is_of_hub(path: str) -> bool:
    at = path_of(path)
    return not at.exists() and is_hub_id(path) and at.suffix not in SUFFIXES


def names_of(sections: Sequence[SourceSection]) -> list[str]:
    """What the user calls them, or else the last part of the path; the whole path where two would be the same."""
    paths = [[s.path] if isinstance(s.path, str) else s.path for s in sections]
    short = [s.name or Path(each[0]).name for s, each in zip(sections, paths, strict=True)]
    return [
        name if short.count(name) == 1 else s.name or ", ".join(each)
        for s, each, name in zip(sections, paths, short, strict=True)
    ]


def maker(section: SourceSection, reader: RowReader) -> tuple[Make, str, Unused]:
    """Return what turns a row into documents, all that it depends on, and which fields of a row it does not use.

    Refuse a source whose rows cannot be tokenised: no tokenizer, no chat template.
    """
    directory = reader.directory
    told = json.dumps(section.model_dump(include={*_OF_ROWS}), sort_keys=True)
    if section.kind == "tokens":
        ready = Ready(vocab_size_of(directory), section.fields)
        return *_unseeing(ready.documents, f"{told} {ready.vocab_size}", reader), ready.unused
    tokenizer, told = tokenizer_of(directory), told + fingerprint_of(directory)
    if section.kind == "text":
        texts = Texts(tokenizer, section.fields)
        return *_unseeing(texts.documents, told, reader), texts.unused
    template, processor = read_template(section.template), reader.processor(section)
    told += template + (processor.settings_key if processor else "")
    chat = _chat(section, directory, tokenizer, template, processor)
    return chat.documents, told, chat.unused


def vocab_size_of(directory: Path) -> int:
    return int(take(text_config(read_config(directory)), "vocab_size", int))


def _unseeing(make: Make, told: str, reader: RowReader) -> tuple[Make, str]:
    if not reader.tower:
        return make, told
    places = placeholders_of(read_config(reader.directory))
    return TextOnly(make, places).documents, f"{told} {places}"


def _chat(
    section: SourceSection, directory: Path, tokenizer: Any, template: str, processor: Processor | None = None
) -> Chat:
    options = ChatOptions(section.thinking, section.turns, template or None, section.template_args, section.fields)
    return Chat(tokenizer, options, stop_ids_of(tokenizer, generation_config_of(directory)), processor)


def prompter(section: SourceSection, directory: Path, tokenizer: Any) -> Callable[[str], list[int]]:
    """What turns a text into the ids that a model goes on from, as it was trained on this source."""
    if section.kind == "chat":
        return _chat(section, directory, tokenizer, read_template(section.template)).prompt
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False))


def model_directory(model: str) -> Path:
    """Where config, tokenizer and templates lie."""
    path = path_of(model)
    if path.is_dir():
        extents_of_model(path)  # a damaged tokenizer of a checkpoint is named before anything is read with it
        return path
    if not is_hub_id(model):
        raise ConfigError(f"model = {model!r} is no directory and no hub id (org/name)")
    return download(model, weights=False)


def read_template(path: str) -> str:
    return template_of(path_of(path)) if path else ""


def all_of(makes: Iterable[Callable[[], Made]]) -> list[Made]:
    """Make everything, and raise what failed together."""
    made, failures = list[Made](), list[DataError]()
    for make in makes:
        try:
            made.append(make())
        except DataError as error:
            failures.append(error)
    if len(failures) > 1:
        raise DataError("\n".join(map(str, failures))) from failures[0]
    if failures:
        raise failures[0]
    return made


def training_data(config: Config, directory: Path, cache: Path, *, processes: int = 1) -> TrainingData:
    """Of the training. Every process makes the same."""
    reader = RowReader(directory, cache, config.train.tower, processes)
    named = zip(config.data, names_of(config.data), strict=True)
    documents = all_of(partial(documents_of, section, reader, name=name) for section, name in named)
    train, length, plans = config.train, config.train.length, cache / "plans"
    sources = [
        source_of(found, length, weight=section.weight, share=section.share, too_long=is_too_long(section))
        for found, section in zip(documents, config.data, strict=True)
    ]
    steps = _num_steps(train)
    if steps is not None:
        plan = Plan(sources, length=length, seed=config.seed, streams=steps * train.streams_per_step, cache=plans)
    else:
        plan = Plan(sources, length=length, seed=config.seed, epochs=train.epochs or 1, cache=plans)
    processor = next(filter(None, map(reader.processor, config.data)), None)  # all read a picture alike
    return TrainingData(documents, plan, ceil(plan.num_streams / train.streams_per_step), processor)


def is_too_long(section: SourceSection) -> Any:
    """What becomes of documents that are."""
    return section.too_long or ("cut" if section.kind == "text" else "stop")


def _num_steps(train: TrainSection) -> int | None:
    if train.tokens is not None:
        return ceil((num_tokens(train.tokens) or 0) / (train.streams_per_step * train.length))
    return train.steps


_ONLY = "held-out"


def sections_of(config: Config) -> Mapping[str, SourceSection]:
    """The held-out sets by name; none where the file has no [eval]."""
    section = config.eval
    if section.path:
        return {section.name or _ONLY: section}
    return {each.name: each for each in section.sets}


def held_out_of(config: Config, directory: Path, cache: Path, *, processes: int = 1) -> dict[str, TrainingData]:
    """The held-out sets by name, tokenised and packed. Every process makes the same."""
    reader, sections = RowReader(directory, cache, config.train.tower, processes), sections_of(config)
    made = all_of(partial(_data, section, config.train.length, reader) for section in sections.values())
    return dict(zip(sections, made, strict=True))


def _data(section: SourceSection, length: int, reader: RowReader) -> TrainingData:
    documents = documents_of(section, reader)
    plan = Plan([source_of(documents, length, too_long=is_too_long(section))], length=length, epochs=1)
    return TrainingData([documents], plan, plan.num_streams, reader.processor(section))


def batches_of(data: TrainingData, mesh: Mesh) -> Sequence[Batch]:
    """The batches of this data rank; the last ones may be of filler."""
    feed = data.feed(mesh, micro_batches=1)
    batches = [feed.step(first).batches[0] for first in range(0, data.plan.num_streams, mesh.num_data_ranks)]
    feed.close()
    return batches
