"""What will be trained, for people."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil
from pathlib import Path

import numpy as np
from rich.text import Text

from ..data import Documents, Tokens, tokenizer_of
from ..errors import DataError, counted
from .config import Config
from .data_sources import TrainingData

_HEAD = ("source", "rows", "documents", "tokens", "learnt", "longest")
_WELL_FILLED = 0.9  # the share of a stream that documents take, below which another length is worth a try
_SAME = re.compile(r"(<\|\w+\|>)\1{3,}")  # a mark of the tokenizer, again and again


def dry_run(config: Config, data: TrainingData, held_out: Mapping[str, TrainingData]) -> str:
    """The data, the streams and the steps."""
    train, plan = config.train, data.plan
    epochs = plan.epochs_before(plan.num_streams)
    lines = [_row(_HEAD, "in the run")]
    for number, (documents, weight) in enumerate(zip(data.documents, plan.weights, strict=True)):
        lines += _of_source(documents.name, data, number, f"{weight * epochs:.3g} times")
    for name, each in held_out.items():
        lines += _of_source(f"held out: {name}", each, 0, f"every {counted(config.eval.every, 'step')}")
    sample = range(0, plan.num_streams, ceil(plan.num_streams / 1000))
    used = float(np.mean([sum(map(len, plan.stream(number))) for number in sample])) / plan.length
    ranks = config.mesh.num_data_ranks
    per_rank = train.streams_per_step // ranks
    lines += [
        f"{counted(plan.num_streams, 'stream')} of {plan.length:,} tokens, {1 - used:.2%} of them filler",
        f"{counted(data.num_steps, 'step')} of {train.streams_per_step * plan.length:,} tokens: "
        f"{counted(per_rank, 'micro-batch', 'micro-batches')} on each of {counted(ranks, 'data rank')}",
    ]
    if used < _WELL_FILLED:
        lines.append("Packing leaves much room: streams of another length, or more documents, fill better")
    return "\n".join(lines)


def _row(cells: Sequence[object], last: str) -> str:
    """The name, five numbers, and how often the source is read."""
    name, rows, documents, tokens, learnt, longest = (f"{c:,}" if isinstance(c, int) else str(c) for c in cells)
    return f"{name[-28:]:<28} {rows:>9} {documents:>10} {tokens:>13} {learnt:>13} {longest:>8}  {last}"


def _of_source(name: str, data: TrainingData, number: int, last: str) -> Iterator[str]:
    documents, source = data.documents[number], data.plan.sources[number]
    found = documents.statistics_of(source.lengths > 0)
    yield _row((name, found.rows, found.documents, found.tokens, found.targets, found.longest), last)
    if seen := int(documents.num_views.sum()):
        yield f"  with {counted(seen, 'picture or video', 'pictures and videos')}"
    left_out = [f"{found.skipped} bad"] * bool(found.skipped)
    left_out += [f"{found.without_targets} without anything to learn"] * bool(found.without_targets)
    if left_out:
        yield f"  rows left out: {', '.join(left_out)}"
    if found.too_long:
        yield f"  {counted(found.too_long, 'document')} longer than {data.plan.length:,} tokens left out"
    if documents.unused:
        yield f"  fields that are not used: {', '.join(documents.unused)}"


def shown(data: TrainingData, directory: Path, num: int) -> Iterator[Text]:
    """Documents of each source, spread over it: what is learnt in green, and in brackets for who sees no colours."""
    spell = _speller(directory)
    for documents in data.documents:
        for number in np.linspace(0, len(documents) - 1, min(num, len(documents))).astype(int).tolist():
            yield _document(documents, number, spell)


def _speller(directory: Path) -> Callable[[Tokens, int, int], str]:
    try:
        tokenizer = tokenizer_of(directory)
    except DataError:  # rows of ids need none
        return lambda document, start, stop: " ".join(map(str, document.ids[start:stop]))
    return lambda document, start, stop: _short(str(tokenizer.decode(document.ids[start:stop])))


def _short(text: str) -> str:
    """With the places of a picture counted, of which there are hundreds."""
    return _SAME.sub(lambda found: f"{found[1]} x {len(found[0]) // len(found[1])} ", text)


def _document(documents: Documents, number: int, spell: Callable[[Tokens, int, int], str]) -> Text:
    document, at = documents.tokens(number), 0
    head = f"{documents.place(number)}: {counted(len(document), 'token')}, {document.num_targets} learnt"
    text = Text(f"{head}\n", style="bold")
    for start, stop in document.spans:
        text.append(spell(document, at, start), style="not bold dim")
        text.append(f"[{spell(document, start, stop)}]", style="not bold green")
        at = stop
    return text.append(spell(document, at, len(document)) + "\n", style="not bold dim")
