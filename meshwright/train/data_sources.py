"""Make the data of a config: tokenised documents of each source, and the packing plan of the streams.

`data/` knows nothing of run files. This module turns sections into its arguments: files, a function from rows to
documents, a key of all settings for the token cache. Everything is a pure function of config and files, so all
processes make the same data without talking to each other, and the launcher can tokenise before any rank starts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import ceil
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ..checkpoint import extents_of_model
from ..data import (
    SUFFIXES,
    Batch,
    Chat,
    ChatOptions,
    ChatPairs,
    Documents,
    EmbeddingRows,
    Feed,
    ImageLimits,
    Labelled,
    Make,
    Part,
    Placeholders,
    Plan,
    Processor,
    Ready,
    RerankRows,
    TextOnly,
    TextPairs,
    Texts,
    TokenizeSpec,
    Tokens,
    Unused,
    WholeText,
    encoded,
    fetched_files,
    files_of,
    fingerprint_of,
    generation_config_of,
    is_saved,
    prepare,
    saved_files,
    scored,
    source_of,
    stop_ids_of,
    template_of,
    tokenizer_of,
)
from ..errors import ConfigError, DataError, counted
from ..mesh import Mesh
from ..models import label_names, patch_of, placeholders_of, take, text_config
from ..objectives import ROW, Classify, Embedding, Objective, Rerank
from ..weights import download, is_hub_id, path_of, read_config
from .config import Config, SourceSection
from .config_checks import num_steps

Result = TypeVar("Result")
_ROW_FIELDS = ("kind", "fields", "thinking", "turns", "template", "template_args")


@dataclass(frozen=True)
class RowReader:
    """Options for reading data files for the model in `directory`.

    `cache`: where tokenised documents are stored. `tower`: the model reads images, so chats may contain them.
    `objective`: says what becomes of a row; None: a document. `processes`: how many tokenise at once.
    """

    directory: Path
    cache: Path
    tower: bool = False
    objective: Objective | None = None
    processes: int = 1

    @classmethod
    def of(cls, config: Config, directory: Path, cache: Path, processes: int = 1) -> RowReader:
        """Return the reader of a run's data."""
        return cls(directory, cache, config.train.tower, config.objective_options, processes)

    @property
    def rows(self) -> str:
        """The kind of documents that a row becomes, as `Objective.rows` says."""
        return "documents" if self.objective is None else self.objective.rows

    @property
    def rows_key(self) -> str:
        """The settings of the objective that change documents, for the key of the token cache."""
        match self.objective:
            case Classify():
                return f"labelled {self.label_names}"
            case Embedding() as each:
                return f"retrieval {each.query_prompt!r} {each.document_prompt!r}"
            case Rerank() as each:
                return f"reranked {each.instruction!r} {each.answers}"
        return "" if self.rows == "documents" else self.rows

    @property
    def label_names(self) -> list[str]:
        """The names of the classes that rows may have."""
        given = self.objective.labels if isinstance(self.objective, Classify) else ()
        names = [*given] or label_names(text_config(read_config(self.directory)))
        if len(names) < 2:
            raise ConfigError(f"config.json of {self.directory} names no classes; set labels of [classify]")
        return names

    @property
    def names_of_classes(self) -> dict[int, str]:
        """The names of the labels that documents have at their last token, by label; empty if they have none."""
        match self.objective:
            case Classify():
                return dict(enumerate(self.label_names))
            case Rerank() as each:
                return dict(zip(answer_ids(self), each.answers, strict=True))
        return {}

    def processor(self, section: SourceSection) -> Processor | None:
        """Return the reader of a source's images and videos; None if the model or the source has none."""
        if not self.tower or section.kind != "chat":
            return None
        config, images = read_config(self.directory), section.images
        ids = placeholders_of(config)
        image, video = tokenizer_of(self.directory).convert_ids_to_tokens(list(ids))
        limits = ImageLimits(_root(section), images.max_pixels, images.max_video_pixels, images.fps)
        return Processor(self.directory, Placeholders(image, video, ids), patch_of(config), limits)


def _as_it_is(document: Tokens) -> Tokens:
    return document  # not a lambda: it is pickled for the processes that tokenise


# The function that makes each document of a pair.
_PAIRS: Mapping[str, Callable[[Tokens], Tokens]] = {"pairs": _as_it_is, "scored_pairs": scored}


def _root(section: SourceSection) -> Path:
    """Return the directory that relative paths of images start from."""
    if section.images.root:
        return path_of(section.images.root)
    first = path_of(section.path if isinstance(section.path, str) else section.path[0])
    return first if first.is_dir() else first.parent


@dataclass(frozen=True)
class TrainingData:
    """The data of a run, or of one held-out set: documents of each source and the packing plan."""

    documents: Sequence[Documents]
    plan: Plan
    num_steps: int
    processor: Processor | None = None

    def left_out(self) -> Iterator[str]:
        """Yield a line for each source with documents that are dropped because they are longer than a stream."""
        for documents, source in zip(self.documents, self.plan.sources, strict=True):
            if too_long := int((source.lengths == 0).sum()):
                dropped = counted(too_long, "document")
                yield f"{dropped} of {documents.name} longer than {self.plan.length:,} tokens left out"

    def feed(self, mesh: Mesh, micro_batches: int) -> Feed:
        """Return the batches of this data rank, `micro_batches` of them for each step."""
        return Feed(
            self.documents, self.plan, micro_batches=micro_batches, rank=mesh.data_rank, num_ranks=mesh.num_data_ranks,
            processor=self.processor,
        )  # fmt: skip


def documents_of(section: SourceSection, reader: RowReader, *, name: str = "") -> Documents:
    """Tokenise the documents of a source, or read them from the cache."""
    paths = [section.path] if isinstance(section.path, str) else section.path
    make, settings_key, unused = maker(section, reader)
    files = tuple(file.absolute() for path in paths for file in _files(path, section))
    name = name or section.name or ", ".join(paths)
    spec = TokenizeSpec(name, files, make, settings_key, section.split, section.on_bad, unused)
    return prepare(spec, reader.cache, processes=reader.processes)


def _files(path: str, section: SourceSection) -> list[Path]:
    """Return the files of a path: a file, a directory, or a Hugging Face data set.

    A saved data set lists its own files in its state.json. Data sets of the hub are downloaded. The options `hf_...`
    only mean something for data sets, and are refused elsewhere instead of ignored.
    """
    at, part = path_of(path), Part(section.hf_subset, section.hf_split, section.hf_revision)
    if is_saved(at):
        return saved_files(at, part)
    if at.is_dir() and part != Part():
        return fetched_files(str(at), part)
    if _is_of_hub(path):
        return fetched_files(path, part)
    if part != Part():
        raise DataError(
            f"{at} is not a data set, but hf_subset, hf_split and hf_revision are options of one; leave them out"
        )
    return files_of(at)


def check_source_files(section: SourceSection) -> None:
    """Refuse a source with missing files. Data sets on the hub are checked when they are downloaded."""
    for path in [section.path] if isinstance(section.path, str) else section.path:
        if not _is_of_hub(path):
            _files(path, section)


def _is_of_hub(path: str) -> bool:
    """Return whether a path is a hub id. A misspelt file such as `data/chats.jsonl` looks like one but has a suffix."""
    at = path_of(path)
    return not at.exists() and is_hub_id(path) and at.suffix not in SUFFIXES


def names_of(sections: Sequence[SourceSection]) -> list[str]:
    """Return the names of sources for messages and metrics.

    A name is `name`, else the last part of the path, else the whole path if two sources share that part.
    """
    paths = [[s.path] if isinstance(s.path, str) else s.path for s in sections]
    short = [s.name or Path(each[0]).name for s, each in zip(sections, paths, strict=True)]
    return [
        name if short.count(name) == 1 else s.name or ", ".join(each)
        for s, each, name in zip(sections, paths, short, strict=True)
    ]


def maker(section: SourceSection, reader: RowReader) -> tuple[Make, str, Unused]:
    """Return a function from a row to documents, a key of all that it depends on, and the fields of rows it ignores.

    The key names entries of the token cache: if anything that could change a token is missing in it, stale tokens are
    trained on without an error. So it includes the settings, a hash of the tokenizer files, and the template's text.

    Refuse a source whose rows cannot be tokenised: no tokenizer, no chat template.
    """
    directory = reader.directory
    key = json.dumps(section.model_dump(include={*_ROW_FIELDS}), sort_keys=True)
    key += reader.rows_key
    if section.kind == "tokens":
        ready = Ready(vocab_size_of(directory), section.fields)
        return *_without_images(ready.documents, f"{key} {ready.vocab_size}", reader), ready.unused
    tokenizer, key = tokenizer_of(directory), key + fingerprint_of(directory)
    if isinstance(reader.objective, Embedding):
        prompts = reader.objective.query_prompt, reader.objective.document_prompt
        groups = EmbeddingRows(tokenizer, *prompts, section.fields)
        return groups.documents, key, groups.unused
    if section.kind == "text":
        texts = _text_rows(section, reader, tokenizer)
        return *_without_images(texts.documents, key, reader), texts.unused
    template, processor = read_template(section.template), reader.processor(section)
    key += template + (processor.settings_key if processor else "")
    rows = _chat_rows(section, reader, tokenizer, template, processor)
    return rows.documents, key, rows.unused


class _Rows(Protocol):
    """A reader of rows: to documents, and which fields it leaves out."""

    def documents(self, row: Mapping[str, Any]) -> list[Tokens]: ...

    def unused(self, row: Mapping[str, Any]) -> set[str]: ...


def _text_rows(section: SourceSection, reader: RowReader, tokenizer: Any) -> _Rows:
    """Return the reader of rows of plain text."""
    if reader.rows in _PAIRS:
        return TextPairs(tokenizer, _PAIRS[reader.rows], section.fields)
    if reader.rows == "labelled":
        text = WholeText(tokenizer)
        return Labelled(text.document, text.unused, reader.label_names, section.fields)
    return Texts(tokenizer, section.fields)


def _chat_rows(
    section: SourceSection, reader: RowReader, tokenizer: Any, template: str, processor: Processor | None
) -> _Rows:  # fmt: skip
    """Return the reader of rows of chats."""
    if reader.rows == "documents":
        return _chat(section, reader.directory, tokenizer, template, processor)
    # Pairs and labels rename the fields of a row themselves. A reranker answers at once.
    changed = {"fields": {}, **({"thinking": False} if reader.rows == "reranked" else {})}
    chat = _chat(section.model_copy(update=changed), reader.directory, tokenizer, template, processor)
    if reader.rows in _PAIRS:
        return ChatPairs(chat, _PAIRS[reader.rows], section.fields)
    if isinstance(reader.objective, Rerank):
        return RerankRows(RerankPrompt(chat, reader.objective), answer_ids(reader), section.fields)
    return Labelled(chat.document, chat.unused, reader.label_names, section.fields)


@dataclass(frozen=True)
class RerankPrompt:
    """The prompt of a reranker, with the words of Qwen3-Reranker's model card."""

    chat: Chat
    objective: Rerank

    def __call__(self, query: str, document: str) -> list[int]:
        no, yes = self.objective.answers
        system = (
            "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that "
            f'the answer can only be "{yes}" or "{no}".'
        )
        user = f"<Instruct>: {self.objective.instruction}\n<Query>: {query}\n<Document>: {document}"
        return self.chat.request([{"role": "system", "content": system}, {"role": "user", "content": user}]).ids


def answer_ids(reader: RowReader) -> tuple[int, int]:
    """Return the ids of both answers of a reranker. Refuse answers of several tokens."""
    assert isinstance(reader.objective, Rerank), "the caller has looked"
    tokenizer, ids = tokenizer_of(reader.directory), list[int]()
    for answer in reader.objective.answers:
        tokens = encoded(tokenizer, answer)
        if len(tokens) != 1:
            raise ConfigError(f"rerank.answers: {answer!r} is {len(tokens)} tokens of this model; give answers of one")
        ids += tokens
    return ids[0], ids[1]


def vocab_size_of(directory: Path) -> int:
    """Return the vocabulary size of the model, which may be larger than that of its tokenizer."""
    return int(take(text_config(read_config(directory)), "vocab_size", int))


def _without_images(make: Make, key: str, reader: RowReader) -> tuple[Make, str]:
    """Refuse placeholder tokens of images in sources without images, and extend the key by that check.

    The tower would look for the image that such a token stands for.
    """
    if not reader.tower:
        return make, key
    places = placeholders_of(read_config(reader.directory))
    return TextOnly(make, places).documents, f"{key} {places}"


def _chat(
    section: SourceSection, directory: Path, tokenizer: Any, template: str, processor: Processor | None = None
) -> Chat:
    options = ChatOptions(section.thinking, section.turns, template or None, section.template_args, section.fields)
    return Chat(tokenizer, options, stop_ids_of(tokenizer, generation_config_of(directory)), processor)


def chat_of(section: SourceSection, directory: Path, tokenizer: Any, processor: Processor | None = None) -> Chat:
    """Return the `Chat` that formats conversations like the rows of a source."""
    return _chat(section, directory, tokenizer, read_template(section.template), processor)


def prompter(section: SourceSection, directory: Path, tokenizer: Any) -> Callable[[str], list[int]]:
    """Return a function from a prompt to token ids, formatted as the model was trained on this source.

    A chat model that is sampled without its template answers worse, for no fault of the training.
    """
    if section.kind == "chat":
        return chat_of(section, directory, tokenizer).prompt
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False))


def model_directory(model: str) -> Path:
    """Return the directory with config, tokenizer and templates; without weights for a hub id."""
    path = path_of(model)
    if path.is_dir():
        extents_of_model(path)  # verifies checksums: a damaged tokenizer of a checkpoint must not be used
        return path
    if not is_hub_id(model):
        raise ConfigError(f"model = {model!r} is neither a directory nor a hub id (org/name)")
    return download(model, weights=False)


def check_tokenizers(other: Path, own: Path, what: str) -> None:
    """Refuse another model with another tokenizer. `what`: the field that names the model."""
    vocabularies = [tokenizer_of(each, "take a model that has one").get_vocab() for each in (other, own)]
    if vocabularies[0] != vocabularies[1]:
        differ = {token for token, number in vocabularies[0].items() if vocabularies[1].get(token) != number}
        example = f" ({len(differ)} tokens differ, such as {min(differ)!r})" if differ else ""
        raise ConfigError(f"{what}: {other} has another tokenizer than {own}{example}; take a model with the same")


def read_template(path: str) -> str:
    """Return the text of a chat template, "" for no path."""
    return template_of(path_of(path)) if path else ""


def all_of(makes: Iterable[Callable[[], Result]]) -> list[Result]:
    """Call all functions and return their results, or raise one error with the messages of all that failed."""
    results, failures = list[Result](), list[DataError]()
    for make in makes:
        try:
            results.append(make())
        except DataError as error:
            failures.append(error)
    if len(failures) > 1:
        raise DataError("\n".join(map(str, failures))) from failures[0]
    if failures:
        raise failures[0]
    return results


def training_data(config: Config, directory: Path, cache: Path, *, processes: int = 1) -> TrainingData:
    """Return the documents and the packing plan to train on. Every process makes the same.

    `directory`: the model's, for its tokenizer. The number of steps follows from the plan: the last step may be partly
    padding.
    """
    reader = RowReader.of(config, directory, cache, processes)
    named = zip(config.data, names_of(config.data), strict=True)
    documents = _numbered(all_of(partial(documents_of, section, reader, name=name) for section, name in named), reader)
    train, length, plans = config.train, config.train.length, cache / "plans"
    sources = [
        source_of(
            each, length, weight=section.weight, share=section.share, too_long=overlong_policy(section, reader.rows)
        )
        for each, section in zip(documents, config.data, strict=True)
    ]
    steps = num_steps(config)
    if steps is not None:
        plan = Plan(sources, length=length, seed=config.seed, streams=steps * train.streams_per_step, cache=plans)
    else:
        plan = Plan(sources, length=length, seed=config.seed, epochs=train.epochs or 1, cache=plans)
    # The processor of any source serves all: the documents store the sizes of their images.
    processor = next(filter(None, map(reader.processor, config.data)), None)
    return TrainingData(documents, plan, ceil(plan.num_streams / train.streams_per_step), processor)


def _numbered(documents: Sequence[Documents], reader: RowReader) -> list[Documents]:
    """Return the documents of retrieval with the number of their row, among those of all sources."""
    if reader.rows != "retrieval":
        return [*documents]
    firsts = accumulate(map(len, documents), initial=0)
    return [each.with_values({ROW: each.row_numbers() + first}) for each, first in zip(documents, firsts, strict=False)]


def overlong_policy(section: SourceSection, rows: str) -> Any:
    """Return what to do with documents longer than a stream: "stop", "drop" or "cut".

    A text may be cut anywhere. The end of a chat is its answer, so it is cut only if `too_long` says so.
    """
    return section.too_long or ("cut" if section.kind == "text" and rows == "documents" else "stop")


_DEFAULT_NAME = "held-out"  # of a single set without a name


def sections_of(config: Config) -> Mapping[str, SourceSection]:
    """Return the held-out sections by name; empty if the file has no [eval]."""
    section = config.eval
    if section.path:
        return {section.name or _DEFAULT_NAME: section}
    return {each.name: each for each in section.sets}


def held_out_of(config: Config, directory: Path, cache: Path, *, processes: int = 1) -> dict[str, TrainingData]:
    """Return the held-out sets by name, tokenised and packed. Every process makes the same."""
    reader, sections = RowReader.of(config, directory, cache, processes), sections_of(config)
    sets = all_of(partial(_held_out_set, section, config.train.length, reader) for section in sections.values())
    return dict(zip(sections, sets, strict=True))


def _held_out_set(section: SourceSection, length: int, reader: RowReader) -> TrainingData:
    """Pack one pass over a held-out set. Its order does not matter for the loss, so it has no seed."""
    (documents,) = _numbered([documents_of(section, reader)], reader)
    plan = Plan([source_of(documents, length, too_long=overlong_policy(section, reader.rows))], length=length, epochs=1)
    return TrainingData([documents], plan, plan.num_streams, reader.processor(section))


def batches_of(data: TrainingData, mesh: Mesh) -> Sequence[Batch]:
    """Return the batches of this data rank for an evaluation.

    All data ranks need the same number, as they run the same collectives. The last one may be all padding, which adds
    nothing to the loss.
    """
    feed = data.feed(mesh, micro_batches=1)
    batches = [feed.step(first).batches[0] for first in range(0, data.plan.num_streams, mesh.num_data_ranks)]
    feed.close()
    return batches
