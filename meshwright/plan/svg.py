"""Draw the diagrams of a page: the mesh with a cell per rank, the groups of each axis, and the pipeline schedule.

Large meshes are shown in part: a browser should not draw thousands of cells that all look the same.
"""

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

_MOST_CELLS, _SAMPLE = 256, 128  # if a replica has more ranks than the first number, only the second number is drawn
# Up to these shades, in percent, numbers keep their colour on a light page and on a dark one; above them they invert,
# for a contrast of 4.5 to 1 (WCAG AA).
_DARKEST, _LIGHTEST = 84, 66
_MEANING = {
    "pp": "each rank holds different layers; micro-batches pass through them in turn",
    "replicate": "whole copies of the model, each with its own data; gradients are reduced once a step",
    "fsdp": "each rank has its own data, and stores a shard of the rows of every parameter",
    "cp": "the ranks share their data: each has a part of the tokens, and in attention a part of the heads",
    "tp": "the ranks share their data; each computes some heads and hidden units",
    "efsdp": "the ranks hold the same experts, each a shard of their rows",
    "ep": "the experts are spread over these ranks; tokens travel to them and back",
}


@dataclass(frozen=True)
class Blocks:
    """The layout of the diagram: one replica, whose ranks are drawn in blocks of consecutive ranks.

    `width`: cells in a row of a block. `cells`: ranks of a block. `num_ranks`: the ranks of the replica at one place on
    pp; only the first `shown` are drawn. `firsts`: the first rank of each drawn place on pp.
    """

    width: int
    cells: int
    num_ranks: int
    shown: int
    firsts: tuple[int, ...]

    @property
    def num_of_place(self) -> int:
        """Return the number of blocks of a place on pp."""
        return -(-self.shown // self.cells)

    @property
    def num(self) -> int:
        """Return the number of all blocks."""
        return len(self.firsts) * self.num_of_place

    def ranks_of(self, number: int) -> range:
        """Return the ranks of a block."""
        place, block = divmod(number, self.num_of_place)
        first, at = self.firsts[place], block * self.cells
        return range(first + at, first + min(at + self.cells, self.shown))

    @property
    def height(self) -> int:
        """Return the number of rows of a block."""
        return -(-self.cells // self.width)


def blocks_of(axes: Axes) -> Blocks:
    """Choose the blocks: groups of tp or, if those are larger, of ep. Their ranks communicate in every layer.

    With neither, the replica is one block. A row does not split a group of tp, unless such a group is very wide.
    """
    replica = axes.fsdp * axes.cp * axes.tp
    shown = replica if replica <= _MOST_CELLS else _SAMPLE
    group = axes.ep if axes.ep > axes.tp and axes.ep % axes.tp == 0 else axes.tp
    cells = min(group if group > 1 else shown, shown)
    widest = 16 if cells > 64 else 8
    firsts = axes.group(0, ("pp",))
    # All places on pp hold the same number of ranks: if there are too many, one represents all.
    firsts = firsts if len(firsts) * shown <= _MOST_CELLS else firsts[:1]
    # The widest row that divides a group of tp, or the whole block without tp.
    even = [n for n in range(2, widest + 1) if (axes.tp if axes.tp > 1 else cells) % n == 0]
    return Blocks(max(even, default=min(widest, cells)), cells, replica, shown, firsts)


def mesh_diagram(figures: Figures) -> Iterator[str]:
    """Draw the mesh, and below it a small map of the groups of each axis."""
    if figures.axes.world == 1:
        yield tag("p", "One process holds everything.")
        return
    # Without experts the axis ep does nothing, and the diagram should not show its groups.
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
    yield tag("p", "Below, for each axis of more than one rank: the ranks with which rank 0 communicates over it.")
    yield wrap("div", *(_axis(line, axes, blocks) for line in axis_lines(figures)), kind="axes-map")


def _caption(axes: Axes) -> str:
    """Say what a cell and its shade mean."""
    same = "ranks of one shade hold the same experts" + (" of a place" if axes.pp > 1 else "")
    shade = f"its place on ep: {same}" if axes.ep > 1 else "its data rank"
    replica = f"One replica of {axes.replicate:,} is shown. " if axes.replicate > 1 else ""
    places = "The ranks of a place on pp hold the same layers. " if axes.pp > 1 else ""
    return f"{replica}{places}Each cell is a rank, and its shade is {shade}."


def _block(axes: Axes, blocks: Blocks, number: int) -> str:
    """Draw a block of ranks."""
    cells = "".join(_cell(axes, blocks, rank) for rank in blocks.ranks_of(number))
    return wrap("div", cells, kind="block", style=f"--columns:{blocks.width}")


def _cell(axes: Axes, blocks: Blocks, rank: int) -> str:
    """Draw a rank, shaded by its experts or its data; its coordinates are the tooltip."""
    at = axes.coords(rank)
    if axes.ep > 1:
        place, last = at["ep"], axes.ep - 1
    else:
        place, last = axes.data_rank(rank), (blocks.shown - 1) // (axes.cp * axes.tp)
    shade = round(100 * place / max(last, 1))
    names = ("pp", "cp", "tp", *(("efsdp", "ep") if axes.ep > 1 else ()))
    live = ", ".join(f"{axis} {at[axis]}" for axis in names if axes.size_of(axis) > 1)
    title = f"rank {rank}: data rank {axes.data_rank(rank)}" + (f", {live}" if live else "")
    return wrap("i", str(rank), kind=_ink(shade), title=title, style=f"--shade:{shade}%")


def _ink(shade: int) -> str:
    """Return the class that inverts the colour of a number, on every page ("deep") or on dark ones ("middle")."""
    return "deep" if shade > _DARKEST else "middle" if shade > _LIGHTEST else ""


def _more(axes: Axes, blocks: Blocks) -> str:
    """Say which ranks are not drawn."""
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
    """Draw the groups of an axis, with its meaning."""
    about = f"{counted(line.num_groups, 'group')} of {line.size:,}\none is {line.first_group}"
    if line.num_groups == 1:
        about = f"one group of all {line.size:,} ranks"
    named = [tag("b", f"{line.axis} = {line.size:,}"), tag("span", _MEANING[line.axis]), tag("small", about)]
    return wrap("figure", _map(axes, blocks, line.axis), wrap("figcaption", *named))


def _map(axes: Axes, blocks: Blocks, axis: str) -> str:
    """Draw all cells small, and fill those in the group of rank 0 on an axis. Using only two SVG paths keeps the page
    small."""
    # Units of the drawing: a cell is 5 wide and high, with a gap of 1, and 4 more between blocks.
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
    """Return the number of columns of a small map: no gaps, and a shape as close to 3:2 as possible."""
    full = [n for n in range(1, blocks.num + 1) if blocks.num % n == 0]
    return min(full, key=lambda n: abs(log(n * n * blocks.width / (blocks.num * blocks.height) / 1.5)))


_MOST_BOXES = 2_048  # boxes of a schedule: more would be too narrow to see
_MOST_NUMBERED = 80  # units of time: in a longer schedule boxes are too narrow for numbers
_KINDS = {
    FORWARD: "forward", BACKWARD: "backward", INPUT: "backward: gradient of the input",
    WEIGHT: "backward: gradients of the weights",
}  # fmt: skip


def pipeline_section(figures: Figures) -> str:
    """Return the section of the pipeline: its schedule, and a table of its stages."""
    text = (
        f"{about_schedule(figures)}. This is an estimate: a backward takes twice as long as a forward, and the time "
        "of a stage is proportional to the parameters that a token is multiplied with. Attention over tokens and "
        "transfers take no time in it. The bytes are exact."
    )
    return section("The stages of the pipeline", tag("p", text), *_pipeline_diagram(figures), _places(figures))


def _places(figures: Figures) -> str:
    """Return a table of the places on pp: their layers, work, bubble and memory."""
    rows = (
        [
            Cell(f"pp {line.place}", "name"), Cell("\n".join(layers_of_stage(s) for s in line.stages), "lines"),
            Cell("\n".join(f"{s.share:.1%}" for s in line.stages), "number lines"), Cell(f"{line.idle:.1%}", "number"),
            line.most_kept, bytes_cell(line.num_bytes),
        ]
        for line in place_lines(figures)
    )  # fmt: skip
    note = (
        "Keeps: the peak number of micro-batches of a stage whose activations a rank keeps. Stored: by its first rank."
    )
    return table(["place", "stages", "of the work", "idle", "keeps", "stored"], rows) + tag("p", note, "note")


def _pipeline_diagram(figures: Figures) -> Iterator[str]:
    """Draw the schedule: a row for each place on pp, a box for each action, as long as it takes."""
    rows = timetable(figures).rows
    num = sum(map(len, rows))
    if num > _MOST_BOXES:
        yield tag(
            "p", f"{counted(num, 'action')} are too many to be drawn; fewer --micro-batches show how a step begins."
        )
        return
    span = timetable(figures).makespan  # the width of the diagram in units of time
    numbered = span <= _MOST_NUMBERED
    drawn = (_row(place, row, span, numbered) for place, row in enumerate(rows))
    yield wrap("div", *drawn, kind="times", style=f"--span:{span:.2f}")
    kinds = [kind for kind in _KINDS if any(slot.action.kind == kind for row in rows for slot in row)]
    keys = [wrap("span", wrap("i", kind=kind), _KINDS[kind]) for kind in kinds]
    if any(len({slot.action.stage for slot in row}) > 1 for row in rows):
        keys.append(wrap("span", wrap("i", kind="F later"), "in a later stage of the place"))
    # Below the width at which CSS hides the numbers, it hides this key too.
    keys += [tag("span", "the number is the micro-batch", "number-key")] if numbered else []
    yield wrap("p", *keys, kind="times-key")


def _row(place: int, row: Sequence[Slot], span: float, numbered: bool) -> str:
    """Draw the actions of a place on pp. Actions of later stages are underlined; on a terminal they are lower-case
    letters."""
    first = min(slot.action.stage for slot in row)
    boxes = (
        wrap(
            "i", str(action.batch) if numbered else "", kind=action.kind + " later" * (action.stage > first),
            style=f"left:{100 * start / span:.2f}%;width:{100 * (end - start) / span:.2f}%",
        )
        for start, end, action in row
    )  # fmt: skip
    return wrap("div", tag("b", str(place)), wrap("div", *boxes))
