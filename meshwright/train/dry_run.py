"""Reports of `meshwright data` and `--dry-run`: tables of the data, and documents with their trained tokens marked.

Training on the wrong tokens is easy to miss, since that loss falls too. So these reports show the data after template,
tokenizer and packing, not the rows of the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import ceil
from pathlib import Path

import numpy as np
from rich.text import Text

from ..data import Documents, Processor, Tokens, View, tokenizer_of
from ..errors import DataError, counted
from ..objectives import Distill
from ..plan.figures import COMPUTE
from ..weights import path_of
from .config import Config
from .data_sources import TrainingData
from .teacher_files import check_stored, lacking

_HEAD = ("source", "rows", "documents", "tokens", "trained", "longest")
_WELL_FILLED = 0.9  # with a smaller part of the streams used by documents, another length is worth a try
_REPEATED = re.compile(r"(<\|\w+\|>)\1{3,}")  # a special token four times or more in a row


def dry_run(config: Config, data: TrainingData, held_out: Mapping[str, TrainingData]) -> str:
    """Return the table of sources, and the number of streams and steps."""
    train, plan = config.train, data.plan
    epochs = plan.epochs_before(plan.num_streams)
    lines = [_row(_HEAD, "in the run")]
    for number, (documents, weight) in enumerate(zip(data.documents, plan.weights, strict=True)):
        lines += _source_lines(documents.name, data, number, f"{weight * epochs:.3g} times")
    for name, each in held_out.items():
        lines += _source_lines(f"held out: {name}", each, 0, f"every {counted(config.eval.every, 'step')}")
    # The used part is estimated from about 1000 streams: a plan may have millions.
    sample = range(0, plan.num_streams, ceil(plan.num_streams / 1000))
    used = float(np.mean([sum(map(len, plan.stream(number))) for number in sample])) / plan.length
    ranks = config.mesh.num_data_ranks
    per_rank = train.streams_per_step // ranks
    lines += [
        f"{counted(plan.num_streams, 'stream')} of {plan.length:,} tokens, {1 - used:.2%} of them padding",
        f"{counted(data.num_steps, 'step')} of {train.streams_per_step * plan.length:,} tokens: "
        f"{counted(per_rank, 'micro-batch', 'micro-batches')} on each of {counted(ranks, 'data rank')}",
    ]
    lines += _teacher_lines(config, data, held_out)
    if config.recipe.dtype != COMPUTE:
        lines.append(f"Bytes and times of the plan are for compute in bfloat16; this run has {config.train.dtype}")
    if used < _WELL_FILLED:
        lines.append("Packing leaves much padding: try another length, or more documents")
    return "\n".join(lines)


def _teacher_lines(config: Config, data: TrainingData, held_out: Mapping[str, TrainingData]) -> Iterator[str]:
    """Yield which scores of the teacher a run will compute. Refuse stored scores that do not fit."""
    section, objective = config.distill, config.objective_options
    if section is None or not isinstance(objective, Distill) or not (section.teacher and section.scores):
        return
    folder = path_of(section.scores)
    check_stored(folder, objective)
    sets = {"the data": data, **{f"held out: {name}": each for name, each in held_out.items()}}
    lack = [name for name, each in sets.items() if lacking(folder, [each])]
    if lack:
        yield f"Scores of the teacher lack for {', '.join(lack)}: computed before training, and kept in {folder}"
    else:
        yield f"Scores of the teacher: all are in {folder}; the teacher is not loaded"


def _row(cells: Sequence[object], last: str) -> str:
    """Format a table row: the name, five numbers, and how often the source is read."""
    name, rows, documents, tokens, trained, longest = (f"{c:,}" if isinstance(c, int) else str(c) for c in cells)
    return f"{name[-28:]:<28} {rows:>9} {documents:>10} {tokens:>13} {trained:>13} {longest:>8}  {last}"


def _source_lines(name: str, data: TrainingData, number: int, last: str) -> Iterator[str]:
    """Yield the row of a source, and a line for everything of it that is not trained on."""
    documents, source = data.documents[number], data.plan.sources[number]
    stats = documents.statistics_of(source.lengths > 0)
    yield _row((name, stats.rows, stats.documents, stats.tokens, stats.targets, stats.longest), last)
    if num_views := int(documents.num_views.sum()):
        yield f"  with {counted(num_views, 'image or video', 'images and videos')}"
    skipped = [f"{stats.skipped} bad"] * bool(stats.skipped)
    skipped += [f"{stats.without_targets} without trained tokens"] * bool(stats.without_targets)
    if skipped:
        yield f"  rows left out: {', '.join(skipped)}"
    if stats.too_long:
        yield f"  {counted(stats.too_long, 'document')} longer than {data.plan.length:,} tokens left out"
    if documents.unused:
        yield f"  unused fields: {', '.join(documents.unused)}"


def shown(
    data: TrainingData, directory: Path, num: int, names: Mapping[int, str] | None = None
) -> Iterator[Text]:  # fmt: skip
    """Yield `num` documents of each source, evenly spaced; trained tokens are green, and in brackets for plain text.

    `names`: the names of the labels at last tokens.
    """
    spell = _speller(directory)
    for documents in data.documents:
        for number in np.linspace(0, len(documents) - 1, min(num, len(documents))).astype(int).tolist():
            yield _document(documents, number, spell, names or {})
            yield from (Text(f"  {_view(view, data.processor)}") for view in documents.tokens(number).views)


def _view(view: View, processor: Processor | None) -> str:
    """Name an image or video with its size after scaling, and the tokens that it takes."""
    assert processor is not None, "documents with images are made with a processor"
    _, height, width = view.grid
    name = view.files[0] + (f" and {len(view.files) - 1} more" if len(view.files) > 1 else "")
    frames = f"{counted(len(view.taken), 'frame')} of " if view.taken else ""
    size = f"{width * processor.patch} x {height * processor.patch} pixels"
    return f"{name}: {frames}{size}, {counted(processor.num_tokens(view), 'token')}"


def _speller(directory: Path) -> Callable[[Tokens, int, int], str]:
    """Return a function that decodes a range of a document; without a tokenizer it prints ids."""
    try:
        tokenizer = tokenizer_of(directory)
    except DataError:  # `kind = "tokens"` needs no tokenizer
        return lambda document, start, stop: " ".join(map(str, document.ids[start:stop]))
    return lambda document, start, stop: _short(str(tokenizer.decode(document.ids[start:stop])))


def _short(text: str) -> str:
    """Shorten runs of one special token to a count: an image has hundreds of placeholders."""
    return _REPEATED.sub(lambda match: f"{match[1]} x {len(match[0]) // len(match[1])} ", text)


def _document(
    documents: Documents, number: int, spell: Callable[[Tokens, int, int], str], names: Mapping[int, str]
) -> Text:
    """Format a document with its trained spans in green and brackets, below the place of its row in the file.

    Documents that belong together, such as both answers of a pair, follow each other, each with a line of its own.
    """
    document = documents.tokens(number)
    what = f"{document.num_targets} trained" if not document.classes else "a label at the end of each document"
    text = Text(f"{documents.place(number)}: {counted(len(document), 'token')}, {what}\n", style="bold")
    ends, labels = [*accumulate(document.sizes)], [f" -> [{names.get(label, label)}]" for label in document.classes]
    for part, (end, size) in enumerate(zip(ends, document.sizes, strict=True), 1):
        if len(ends) > 1:
            text.append(f"document {part} of {len(ends)}:\n", style="bold")
        at = end - size
        for start, stop in (span for span in document.spans if end - size <= span[0] < end):
            text.append(spell(document, at, start), style="not bold dim")
            text.append(f"[{spell(document, start, stop)}]", style="not bold green")
            at = stop
        text.append(spell(document, at, end), style="not bold dim")
        text.append(labels[part - 1] if labels else "", style="not bold green")
        text.append("\n")
    return text
