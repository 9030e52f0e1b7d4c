"""Tables, diagrams and words of a plan, from small figures with uneven numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import meshwright as mw
from meshwright.axes import Axes
from meshwright.plan import figures as plan_figures
from meshwright.plan import html, page, svg
from meshwright.plan.figures import Figures, RankMemory, live_axes
from meshwright.plan.mesh_checks import reasons
from meshwright.plan.pipeline_timing import StageLine, layers_of_stage
from meshwright.plan.tables import ChargeLine, _pattern, axis_lines, charge_lines, ranges
from meshwright.plan.terminal import placement
from meshwright.plan.wording import in_unit, kind, large, peak_note, roughly, saved, span, unit_of
from meshwright.recipe import MemoryOptions
from meshwright.sharding import GRADIENTS, Charge, Stored

GB = 10**9


def fake(**fields: Any) -> Any:
    return cast(Any, SimpleNamespace(**fields))


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("layers.12.up.weight", ("layers.{i}.up.weight", 12)),
        ("layers.3.experts.40.up", ("layers.{i}.experts.40.up", 3)),
        ("embed.weight", ("embed.weight", None)),
        ("layers.0", ("layers.{i}", 0)),
    ],
)
def test_patterns_of_names(name: str, pattern: tuple[str, int | None]) -> None:
    assert _pattern(name) == pattern


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""), ([4], "4"), ([0, 1, 2, 3, 8], "0-3 8"),
        ([3, 7, 11], "3-11 by 4"), ([3, 7], "3 7"), ([0, 1, 2], "0-2"),
        ([0, 2, 3, 5], "0 2-3 5"), ([5, 4, 3], "5-3 by -1"),
    ],
)  # fmt: skip
def test_ranges_of_numbers(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def test_charges_that_differ_only_in_their_layer_share_a_line() -> None:
    both = ("fsdp", "cp")
    charges = [
        Charge("layers.0.up", "all_gather", both, 10, 2), Charge("norm", "all_reduce", ("tp",), 4, 1),
        Charge("layers.1.up", "all_gather", both, 10, 2), Charge("layers.2.up", "all_gather", ("fsdp",), 10, 2),
        Charge("layers.3.up", "all_gather", both, 11, 2), Charge("layers.5.up", "all_gather", both, 10, 2),
        Charge("layers.4.up", "all_gather", both, 10, 2, (1, 20)),
    ]  # fmt: skip
    first, norm, *others = charge_lines(fake(axes=Axes(fsdp=3, cp=2), charges=charges))
    assert first == ChargeLine("layers.{i}.up", "0-1 5", "all_gather", "fsdp=3 cp=2", 6, 10, 6, 60, both, None)
    assert (norm.layers, norm.over, norm.num_ranks, norm.count) == ("", "-", 1, 1)
    assert [(line.layers, line.over, line.one_bytes, line.between) for line in others] == [
        ("2", "fsdp=3", 10, None), ("3", "fsdp=3 cp=2", 11, None), ("4", "fsdp=3 cp=2", 10, (1, 20)),
    ]  # fmt: skip


def test_axes_of_more_than_one_rank() -> None:
    axes = Axes(pp=2, fsdp=6, tp=1, ep=3)
    lines = axis_lines(fake(axes=axes, live=["pp", "fsdp", "efsdp", "ep"]))
    assert [(line.axis, line.size, line.num_groups) for line in lines] == [
        ("pp", 2, 6), ("fsdp", 6, 2), ("efsdp", 2, 6), ("ep", 3, 4),
    ]  # fmt: skip
    assert [line.first_group for line in lines] == [ranges(axes.group(0, (line.axis,)), ", ") for line in lines]
    assert live_axes(("pp", "tp", "ep"), axes) == "pp=2 ep=3"
    assert live_axes(("tp",), axes) == "-"
    live = cast(Any, Figures.live).fget
    for experts, names in ((0, ["pp", "fsdp"]), (3, ["pp", "fsdp", "efsdp", "ep"])):
        assert live(fake(blueprint=fake(balance=fake(num_experts=experts)), axes=axes)) == names


def test_collectives_are_summed_by_axes_and_operation() -> None:
    """Rows of the same axes are neighbours, in the order of their first collective."""
    charges = [
        Charge("a", "all_gather", ("fsdp", "cp"), 10, 2), Charge("b", "all_reduce", ("tp",), 5, 3),
        Charge("c", "reduce_scatter", ("fsdp",), 7, 1), Charge("d", "all_gather", ("fsdp",), 1, 4),
        Charge("e", "all_gather", ("tp",), 9, 1),
    ]  # fmt: skip
    rows = cast(Any, Figures.traffic).func(fake(charges=charges, axes=Axes(fsdp=3, tp=2)))
    assert [(row.over, row.num_ranks, row.op, row.count, row.num_bytes, row.axes) for row in rows] == [
        ("fsdp=3", 3, "all_gather", 6, 24, ("fsdp",)), ("fsdp=3", 3, "reduce_scatter", 1, 7, ("fsdp",)),
        ("tp=2", 2, "all_reduce", 3, 15, ("tp",)), ("tp=2", 2, "all_gather", 1, 9, ("tp",)),
    ]  # fmt: skip


STORED = (Stored("parameters", 60), Stored(GRADIENTS, 7), Stored("moments", 100, host=True))


def test_bytes_of_a_rank() -> None:
    memory = RankMemory(3, STORED)
    assert (memory.num_bytes, memory.host_bytes, memory.device_bytes) == (167, 100, 67)
    assert memory.parts == {"parameters": 60, GRADIENTS: 7, "moments on the host": 100}


def test_the_rank_that_stores_most_comes_first() -> None:
    def memories(*num_bytes: int) -> list[tuple[int, int]]:
        need = fake(stored=lambda rank: [Stored("x", num_bytes[rank])])
        ranks = cast(Any, Figures.memories).func(fake(need=need, extremes=[*range(len(num_bytes))]))
        return [(each.rank, each.num_bytes) for each in ranks]

    assert memories(5, 9, 2, 9) == [(1, 9), (2, 2)]
    assert memories(5, 5) == [(0, 5)]


def test_a_kind_that_one_rank_stores_has_a_row_for_both() -> None:
    """Colours of bars and rows are numbers of kinds, so both ranks have the same kinds in the same order."""
    memories = [RankMemory(1, STORED), RankMemory(0, (Stored("copies", 5), Stored(GRADIENTS, 6)))]
    by_kind = cast(Any, Figures.by_kind).fget(fake(memories=memories))
    most = {"parameters": 60, GRADIENTS: 7, "moments on the host": 100, "copies": 0}
    assert by_kind == [most, {"parameters": 0, GRADIENTS: 6, "moments on the host": 0, "copies": 5}]
    assert [*by_kind[0]] == [*by_kind[1]] == [*most]


def test_the_sender_is_the_rank_with_the_most_bytes() -> None:
    bills = {0: [(5, 100)], 6: [(3, 200), (1, 1)], 12: [(1, 600)]}
    bill = lambda rank: [Charge("x", "send", ("pp",), num, count) for count, num in bills[rank]]  # noqa: E731
    assert cast(Any, Figures.sender).func(fake(axes=Axes(pp=3, fsdp=6), bill=bill)) == 6


def test_gradients_at_the_peak_are_explained_if_there_are_fewer() -> None:
    assert peak_note(fake(most=RankMemory(0, STORED), gradients=7)) is None
    note = peak_note(fake(most=RankMemory(0, STORED), gradients=9))
    assert note is not None
    assert "7 bytes of 9 bytes of gradients" in note
    need = fake(rank=None)
    stored = lambda rank: [Stored("x", 1), Stored(GRADIENTS, rank), Stored(GRADIENTS, 50, host=True)]  # noqa: E731
    figures, every = fake(need=need, most=fake(rank=7)), fake(stored=stored)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_figures, "replace", lambda given, passing: every)
        assert cast(Any, Figures.gradients).func(figures) == 7


def test_numbers_in_words() -> None:
    units = [unit_of(num)[0] for num in (0, 999, 1000, 999_949, 999_950, 10**12)]
    assert units == ["bytes", "bytes", "kB", "kB", "MB", "TB"]
    assert [in_unit(1_234_567_890, unit_of(10**6)), in_unit(1, ("bytes", 1))] == ["1,234.568 MB", "1 byte"]
    assert (roughly(2_149_000_000), large(999_999), large(1_000_000)) == ("about 2.1 GB", "999,999", "1 million")
    assert (span(5, 5), span(1, 7, " - ")) == ("5 bytes", "1 byte - 7 bytes")
    figures = fake(optimizer=fake(label="moments, Adam"))
    assert [kind(what, figures) for what in ("parameters", "moments on the host", "codes")] == [
        "parameters, float32", "moments, Adam on the host", "codes",
    ]  # fmt: skip


def test_placements_and_reasons() -> None:
    line = fake(cut="ff by tp=2", shards="-", copies="cp=3")
    assert placement(line) == ["cut ff by tp=2", "copies over cp=3"]
    assert placement(fake(cut="-", shards="fsdp=2", copies="-")) == ["rows over fsdp=2"]
    assert placement(fake(cut="-", shards="-", copies="-")) == ["whole"]
    assert layers_of_stage(StageLine(1, 4, 4, 0.5)) == "stage 1: layer 4"
    assert layers_of_stage(StageLine(2, 4, 6, 0.5)) == "stage 2: layers 4-6"
    assert reasons(["one"]) == "one"
    assert reasons(["one", "two"]) == "the mesh is impossible, for 2 reasons:\n  - one\n  - two"


def test_bars_are_shares_of_the_whole() -> None:
    drawn = html.bar([(1, "a"), (2, "b")], 8, 6)
    assert [part for part in drawn.split('"') if "%" in part] == ["width:12.500%", "width:25.000%", "left:75.000%"]
    assert "tint0" in drawn
    assert "tint1" in drawn
    assert "mark" not in html.bar([(1, "a")], 8, 8) + html.bar([(1, "a")], 8)
    assert "width:0.000%" in html.bar([(0, "a")], 0)


def test_cells() -> None:
    assert html._as_cell(12345) == html.Cell("12,345", "number")
    assert html._as_cell(1.5) == html.Cell("1.5")
    assert html.span_cell(1000, 1000).title == "1,000 bytes"
    assert html.span_cell(1, 1000).title == "1 to 1,000 bytes"
    assert html.bytes_cell(1234, "x") == html.Cell("1.234 kB", "x", title="1,234 bytes")
    td = html._td(html.Cell("a `b`", "k", "<n>", 't"', 0.125), "L&")
    assert td == (
        '<td class="k" data-label="L&amp;" title="t&quot;"><div>a <code>b</code><small>&lt;n&gt;</small>'
        '<i class="share" style="width:12.50%"></i></div></td>'
    )
    assert page._in(("kB", 1000), 1500).title == "1,500 bytes"
    assert html._footer(dict(torch="2", date="D", seed="5", command="c")) == (
        "<footer><p>Made on D, seed 5 with torch 2, by the command</p><pre>c</pre></footer>\n"
    )


@pytest.mark.parametrize(
    ("axes", "rank", "shade", "title"),
    [
        (Axes(fsdp=5, tp=2), 4, 50, "rank 4: data rank 2, tp 0"),
        (Axes(fsdp=5, tp=2), 9, 100, "rank 9: data rank 4, tp 1"),
        (Axes(fsdp=6, ep=3), 4, 50, "rank 4: data rank 4, efsdp 1, ep 1"),
        (Axes(tp=2), 1, 0, "rank 1: data rank 0, tp 1"),
    ],
)
def test_cells_of_ranks(axes: Axes, rank: int, shade: int, title: str) -> None:
    """The shade runs from the first data rank, or place on ep, to the last."""
    cell = svg._cell(axes, svg.blocks_of(axes), rank)
    assert f"--shade:{shade}%" in cell
    assert f'title="{title}' in cell


def test_blocks_of_a_diagram() -> None:
    assert [svg._ink(shade) for shade in (66, 67, 84, 85)] == ["", "middle", "middle", "deep"]
    blocks = svg.Blocks(width=3, cells=4, num_ranks=99, shown=10, firsts=(0, 40))
    assert (blocks.num_of_place, blocks.num, blocks.height) == (3, 6, 2)
    assert [blocks.ranks_of(n) for n in (0, 2, 3, 5)] == [range(4), range(8, 10), range(40, 44), range(48, 50)]
    more = svg._more(Axes(pp=3, replicate=2, fsdp=99), blocks)
    for text in ("and 89 ranks like these, to rank 138", "one of 3 places on pp", "one of 2 such replicas"):
        assert text in more
    assert svg._more(Axes(pp=2, fsdp=10), svg.Blocks(3, 4, 10, 10, (0, 10))) == ""


@pytest.mark.parametrize(
    ("memory", "optimizer", "wanted"),
    [
        ({}, mw.AdamW(), []),
        (dict(recompute="full", offload=True), mw.AdamW(), ["recompute=full", "offload=True"]),
        (dict(token_once=2), mw.AdamW(state_dtype=torch.bfloat16), ["token_once=2", "state_dtype=bfloat16"]),
        (dict(reshard=False, compiled=False), mw.AdamW(), ["reshard=False", "compiled=False"]),
        ({}, mw.AdamW(state_dtype=torch.uint8), ["state_dtype=uint8"]),
    ],
)  # fmt: skip
def test_options_that_differ_from_their_defaults(memory: dict[str, Any], optimizer: Any, wanted: list[str]) -> None:
    figures = cast(Any, SimpleNamespace(memory=MemoryOptions(**memory), optimizer=optimizer))
    assert saved(figures) == wanted
