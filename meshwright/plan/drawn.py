"""The schedule of a pipeline as a picture: a row for each place on pp, a box for each action, as long as it takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..errors import counted
from ..layout import Slot
from ..layout.schedule import BACKWARD, FORWARD, INPUT, WEIGHT
from .figures import Figures
from .html import Cell, bytes_cell, section, table, tag, wrap
from .pipeline import about_schedule, place_lines, timetable, told

_MOST_BOXES = 2_048  # more are too narrow to be told apart
_MOST_NUMBERED = 80  # units of time, in which a number can be read
_KINDS = {
    FORWARD: "forward", BACKWARD: "backward", INPUT: "backward: gradient of the input",
    WEIGHT: "backward: gradients of the weights",
}  # fmt: skip


def pipeline_section(figures: Figures) -> str:
    text = (
        f"{about_schedule(figures)}. This is an estimate: a backward takes twice as long as a forward, a stage as long "
        "as the elements that a token is multiplied with. Attention among tokens and transfers take no time here. The "
        "bytes are exact."
    )
    return section("The stages of the pipeline", tag("p", text), *_picture(figures), _places(figures))


def _places(figures: Figures) -> str:
    rows = (
        [
            Cell(f"pp {line.place}", "name"), Cell("\n".join(told(s) for s in line.stages), "lines"),
            Cell("\n".join(f"{s.share:.1%}" for s in line.stages), "number lines"), Cell(f"{line.idle:.1%}", "number"),
            line.most_kept, bytes_cell(line.num_bytes),
        ]
        for line in place_lines(figures)
    )  # fmt: skip
    note = "Kept: the most micro-batches of a stage whose activations a rank has at once. Stored: by its first rank."
    return table(["place", "has", "of the work", "waits", "keeps", "stored"], rows) + tag("p", note, "note")


def _picture(figures: Figures) -> Iterator[str]:
    rows = timetable(figures).rows
    num = sum(map(len, rows))
    if num > _MOST_BOXES:
        yield tag("p", f"{counted(num, 'action')} are too many to be drawn; fewer --micro-batches show how it begins.")
        return
    span = timetable(figures).makespan
    numbered = span <= _MOST_NUMBERED
    drawn = (_row(place, row, span, numbered) for place, row in enumerate(rows))
    yield wrap("div", *drawn, kind="times", style=f"--span:{span:.2f}")
    kinds = [kind for kind in _KINDS if any(slot.action.kind == kind for row in rows for slot in row)]
    keys = [wrap("span", wrap("i", kind=kind), _KINDS[kind]) for kind in kinds]
    if any(len({slot.action.stage for slot in row}) > 1 for row in rows):
        keys.append(wrap("span", wrap("i", kind="F later"), "in a later stage of the place"))
    keys += [tag("span", "the number is the micro-batch", "number-key")] if numbered else []
    yield wrap("p", *keys, kind="times-key")


def _row(place: int, row: Sequence[Slot], span: float, numbered: bool) -> str:
    first = min(slot.action.stage for slot in row)
    boxes = (
        wrap(
            "i", str(action.batch) if numbered else "", kind=action.kind + " later" * (action.stage > first),
            style=f"left:{100 * start / span:.2f}%;width:{100 * (end - start) / span:.2f}%",
        )
        for start, end, action in row
    )  # fmt: skip
    return wrap("div", tag("b", str(place)), wrap("div", *boxes))
