"""The mesh as a picture: a cell for each rank, in blocks, and for each axis the ranks that rank 0 meets on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import log

from ..axes import Axes
from ..errors import counted
from ..sharding import Slot
from ..sharding.schedules import BACKWARD, FORWARD, INPUT, WEIGHT
from .figures import Figures
from .html import Cell, bytes_cell, section, table, tag, wrap
from .pipeline_timing import about_schedule, layers_of_stage, place_lines, timetable
from .tables import AxisLine, axis_lines

_MOST_CELLS, _SAMPLE = 256, 128  # a replica of more ranks than the one is shown by the other
_DARKEST, _LIGHTEST = 84, 66  # percent of shade on which numbers stay as they are, on a light page and on a dark one
_MEANING = {
    "pp": "each rank holds other layers; micro-batches pass through them in turn",
    "replicate": "whole copies of the model, each with data of its own; gradients are summed once a step",
    "fsdp": "each rank has data of its own, and stores a shard of every row",
    "cp": "the ranks share their data: each has a part of the tokens, and in attention a part of the heads",
    "tp": "the ranks share their data; each computes some heads and hidden units",
    "efsdp": "the ranks hold the same experts, each a shard of their rows",
    "ep": "the experts are spread over these ranks; tokens travel to them and back",
}


@dataclass(frozen=True)
class Blocks:
    """Of the `num_ranks` of one replica at one place on pp the first `shown`, in blocks of `cells` neighbours, `width`
    of them in a row. `firsts`: the first rank of each place that is shown."""

    width: int
    cells: int
    num_ranks: int
    shown: int
    firsts: tuple[int, ...]

    @property
    def num_of_place(self) -> int:
        return -(-self.shown // self.cells)

    @property
    def num(self) -> int:
        return len(self.firsts) * self.num_of_place

    def ranks_of(self, number: int) -> range:
        """The ranks of a block."""
        place, block = divmod(number, self.num_of_place)
        first, at = self.firsts[place], block * self.cells
        return range(first + at, first + min(at + self.cells, self.shown))

    @property
    def height(self) -> int:
        return -(-self.cells // self.width)


def blocks_of(axes: Axes) -> Blocks:
    """A block is a group of tp or, where that is larger, of ep: these are neighbours, and meet in every layer.

    With neither there is one block. A row holds no part of a group of tp, unless such a group is very wide.
    """
    replica = axes.fsdp * axes.cp * axes.tp
    shown = replica if replica <= _MOST_CELLS else _SAMPLE
    group = axes.ep if axes.ep > axes.tp and axes.ep % axes.tp == 0 else axes.tp
    cells = min(group if group > 1 else shown, shown)
    widest = 16 if cells > 64 else 8
    firsts = axes.group(0, ("pp",))
    firsts = firsts if len(firsts) * shown <= _MOST_CELLS else firsts[:1]
    even = [n for n in range(2, widest + 1) if (axes.tp if axes.tp > 1 else cells) % n == 0]
    return Blocks(max(even, default=min(widest, cells)), cells, replica, shown, firsts)


def mesh_picture(figures: Figures) -> Iterator[str]:
    if figures.axes.world == 1:
        yield tag("p", "One process holds everything.")
        return
    axes = figures.axes if figures.blueprint.balance.num_experts else replace(figures.axes, ep=1)
    blocks = blocks_of(axes)
    yield tag("p", _caption(axes))
    roomy = " roomy" if blocks.shown <= 16 else ""
    for place in range(len(blocks.firsts)):
        numbers = range(place * blocks.num_of_place, (place + 1) * blocks.num_of_place)
        name = tag("span", f"pp {place}", "more") if axes.pp > 1 else ""
        last = place == len(blocks.firsts) - 1
        drawn = (_block(axes, blocks, number) for number in numbers)
        yield wrap("div", name, *drawn, _more(axes, blocks) if last else "", kind=f"mesh-map{roomy}")
    yield tag("p", "Below, for each axis of more than one rank: the ranks with which rank 0 talks over it.")
    yield wrap("div", *(_axis(line, axes, blocks) for line in axis_lines(figures)), kind="axes-map")


def _caption(axes: Axes) -> str:
    same = "ranks of one shade hold the same experts" + (" of a place" if axes.pp > 1 else "")
    shade = f"its place on ep: {same}" if axes.ep > 1 else "its data rank"
    replica = f"One replica of {axes.replicate:,} is shown. " if axes.replicate > 1 else ""
    places = "The ranks of a place on pp hold the same layers. " if axes.pp > 1 else ""
    return f"{replica}{places}Each cell is a rank, and its shade is {shade}."


def _block(axes: Axes, blocks: Blocks, number: int) -> str:
    cells = "".join(_cell(axes, blocks, rank) for rank in blocks.ranks_of(number))
    return wrap("div", cells, kind="block", style=f"--columns:{blocks.width}")


def _cell(axes: Axes, blocks: Blocks, rank: int) -> str:
    at = axes.coords(rank)
    if axes.ep > 1:
        place, last = at["ep"], axes.ep - 1
    else:
        place, last = axes.data_rank(rank), (blocks.shown - 1) // (axes.cp * axes.tp)
    shade = round(100 * place / max(last, 1))
    live = ", ".join(f"{axis} {at[axis]}" for axis in ("pp", "cp", "tp", "efsdp", "ep") if axes.size_of(axis) > 1)
    title = f"rank {rank}: data rank {axes.data_rank(rank)}" + (f", {live}" if live else "")
    return wrap("i", str(rank), kind=_ink(shade), title=title, style=f"--shade:{shade}%")


def _ink(shade: int) -> str:
    """Which pages turn the colour of a number, so that it stands out by 4.5 to 1."""
    return "deep" if shade > _DARKEST else "middle" if shade > _LIGHTEST else ""


def _more(axes: Axes, blocks: Blocks) -> str:
    texts = []
    if blocks.num_ranks > blocks.shown:
        left = counted(blocks.num_ranks - blocks.shown, "rank")
        texts.append(f"and {left} like these, to rank {blocks.firsts[-1] + blocks.num_ranks - 1:,}")
    if axes.pp > len(blocks.firsts):
        texts.append(f"one of {axes.pp:,} places on pp")
    if axes.replicate > 1:
        texts.append(f"one of {axes.replicate:,} such replicas")
    return "".join(tag("span", text, "more") for text in texts)


def _axis(line: AxisLine, axes: Axes, blocks: Blocks) -> str:
    about = f"{counted(line.num_groups, 'group')} of {line.size:,}\none is {line.first_group}"
    if line.num_groups == 1:
        about = f"one group of all {line.size:,} ranks"
    named = [tag("b", f"{line.axis} = {line.size:,}"), tag("span", _MEANING[line.axis]), tag("small", about)]
    return wrap("figure", _map(axes, blocks, line.axis), wrap("figcaption", *named))


def _map(axes: Axes, blocks: Blocks, axis: str) -> str:
    """The same cells, small; those that rank 0 meets on the axis are filled."""
    met, step = set(axes.group(0, (axis,))), 6
    columns = _columns(blocks)
    paths = {True: "", False: ""}
    for block in range(blocks.num):
        row, column = divmod(block, columns)
        for cell, rank in enumerate(blocks.ranks_of(block)):
            y, x = divmod(cell, blocks.width)
            left, top = column * (blocks.width * step + 4) + x * step, row * (blocks.height * step + 4) + y * step
            paths[rank in met] += f"M{left} {top}h5v5h-5z"
    wide = columns * (blocks.width * step + 4) - 5
    high = -(-blocks.num // columns) * (blocks.height * step + 4) - 5
    drawn = f'<path class="pale" d="{paths[False]}"/><path class="met" d="{paths[True]}"/>'
    shape = f'viewBox="0 0 {wide} {high}" style="max-width:{wide * 2}px" preserveAspectRatio="xMinYMid"'
    return f'<svg {shape} aria-hidden="true">{drawn}</svg>'


def _columns(blocks: Blocks) -> int:
    """Into how many columns the blocks of a small map go: full ones, half as wide again as high or nearly so."""
    full = [n for n in range(1, blocks.num + 1) if blocks.num % n == 0]
    return min(full, key=lambda n: abs(log(n * n * blocks.width / (blocks.num * blocks.height) / 1.5)))


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
            Cell(f"pp {line.place}", "name"), Cell("\n".join(layers_of_stage(s) for s in line.stages), "lines"),
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
