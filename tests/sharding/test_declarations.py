"""Declarations that no model may make: each is refused with the name of the parameter."""

import pytest
import torch
from torch import nn

from meshwright.errors import LayoutError
from meshwright.sharding import Block, Box, Layout, Param, Table, collect, plain, segments, weight


class Model(nn.Module):
    """Declare `net.w` and others."""

    def __init__(self, **made):
        super().__init__()
        self.net = nn.Module()
        for name, value in made.items():
            setattr(self.net, name, value)


def block(start, stop, key, shape, reference=None):
    return Block(Box(start, stop), key, shape, reference or Box.whole(shape))


def one(*blocks, name="one"):
    return Layout(name, blocks)


def rows(*ranges, size=6, name="one"):
    """Row ranges of ours, each out of a key of its own."""
    return one(*(block((a,), (b,), f"k{i}", (b - a,)) for i, (a, b) in enumerate(ranges)), name=name)


def vector(*layouts, size=6, group="", **options):
    return weight({"embed": size}, layouts=layouts, group=group, **options)


def refused(match, **made):
    with pytest.raises(LayoutError, match=match):
        collect(Model(**made))


def test_a_good_model_is_collected():
    table = collect(Model(w=vector(rows((0, 2), (2, 6))), v=weight({"embed": 2}, {"chan": 3}, key="v")))
    assert [p.name for p in table] == ["net.w", "net.v"]
    assert [(p.shape, p.matrix) for p in table] == [((6,), (6,)), ((2, 3), (2, 3))]


def test_a_bare_parameter():
    refused(
        r"net\.bias\b.*nn\.Parameter\b.*weight\(", w=weight({"embed": 2}, key="w"), bias=nn.Parameter(torch.ones(2))
    )


def test_a_bare_parameter_inside_a_torch_module():
    refused(r"net\.linear\.weight\b.*nn\.Parameter\b", linear=nn.Linear(2, 2, device="meta"))


def test_a_buffer():
    model = Model(w=weight({"embed": 2}, key="w"))
    model.net.register_buffer("table", torch.ones(3, 2), persistent=False)
    with pytest.raises(LayoutError, match=r"net\.table\b.*\(3, 2\).*\bbuffer"):
        collect(model)


@pytest.mark.parametrize(
    ("ranges", "text"),
    [
        ([(0, 4), (3, 6)], r"^net\.w \(one\): .*\[0:4\].*\[3:6\].*\boverlap"),
        ([(0, 6), (0, 6)], r"^net\.w \(one\): .*overlap"),
        ([(0, 4)], r"^net\.w \(one\): .*\b4 of 6\b"),
        ([(1, 6)], r"^net\.w \(one\): .*\b5 of 6\b"),
        ([(0, 2), (3, 6)], r"^net\.w \(one\): .*\b5 of 6\b"),
        ([(0, 7)], r"^net\.w \(one\): .*\[0:7\].*\(6,\)"),
        ([], r"^net\.w \(one\): .*\b0 of 6\b"),
    ],
)
def test_blocks_that_do_not_tile_ours(ranges, text):
    refused(text, w=vector(rows(*ranges)))


def test_only_the_second_layout_is_wrong():
    layouts = (rows((0, 6), name="a"), rows((0, 3), name="b"))
    refused(r"^net\.w \(b\): .*\b3 of 6\b", w=vector(*layouts, group="g"))


def test_blocks_of_another_number_of_dims():
    refused(r"^net\.w \(one\)", w=vector(one(block((0, 0), (6, 1), "k", (6, 1)))))


def test_sizes_that_differ():
    refused(r"^net\.w: \[0:6\] of ours and \[0:5\] of k differ in size", w=vector(one(block((0,), (6,), "k", (5,)))))


def test_rows_of_the_source_without_a_parameter():
    reference = Box((0,), (6,))
    refused(r"^k: .*\b6 of 8\b", w=vector(one(block((0,), (6,), "k", (8,), reference))))


def test_rows_of_the_source_that_are_taken_twice():
    halves = [block((a,), (a + 3,), "k", (6,), Box((0,), (3,))) for a in (0, 3)]
    refused(r"^k: .*overlap", w=vector(one(*halves)))


def test_one_key_of_two_parameters():
    refused("^k: .*overlap", w=weight({"embed": 6}, key="k"), v=weight({"embed": 6}, key="k"))


def test_a_key_outside_of_its_shape():
    refused(r"^k: .*\[2:8\].*\(6,\)", w=vector(one(block((0,), (6,), "k", (6,), Box((2,), (8,))))))


def test_a_copy_of_another_size():
    copies = (block((0,), (6,), "again", (5,)),)
    refused(r"^net\.w: .*again differ in size", w=vector(Layout("one", rows((0, 6)).blocks, copies)))


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (lambda e, each: None if e == 3 else each, r"^net\.w5 \(per-expert\): .*\b14 of 16\b"),
        (lambda e, each: each._replace(ours=Box((0, 0), (1, 2))) if e == 1 else each, r"^net\.w5 .*overlap"),
        (lambda e, each: each._replace(shape=(3,)) if e == 2 else each, r"^5\.2: .*\b2 of 3\b"),
        (lambda e, each: each._replace(source=Box((0,), (1,))) if e == 2 else each,
            r"^net\.w5: .*\b5\.2 differ in size"),
        (lambda e, each: each._replace(key="4.2") if e == 2 else each, r"^4\.2: .*overlap"),
    ],
)  # fmt: skip
def test_one_layer_of_many_is_wrong(broken, text):
    """All others are of its kind, and right."""

    def layer(number, change):
        blocks = [change(e, block((e, 0), (e + 1, 2), f"{number}.{e}", (2,))) for e in range(8)]
        return weight({"expert": 8}, {"embed": 2}, layouts=[one(*filter(None, blocks), name="per-expert")])

    refused(
        text, **{f"w{number}": layer(number, broken if number == 5 else lambda _, each: each) for number in range(9)}
    )


def test_a_choice_without_a_group():
    refused(r"^net\.w has 2 layouts and group ''", w=vector(rows((0, 6), name="a"), rows((0, 6), name="b")))


def test_no_layout():
    refused(r"^net\.w has 0 layouts", w=vector())


def test_a_group_whose_members_disagree():
    a, b = (one(block((0,), (6,), key, (6,)), name=name) for key, name in (("x", "a"), ("y", "b")))
    c, d = (one(block((0,), (6,), key, (6,)), name=name) for key, name in (("z", "a"), ("q", "other")))
    refused(r"net\.v\b.*\['a', 'other'\].*\['a', 'b'\].*'g'", w=vector(a, b, group="g"), v=vector(c, d, group="g"))


def test_a_dim_among_rows_and_columns():
    with pytest.raises(LayoutError, match=r"\['embed'\]"):
        weight({"embed": 2}, {"embed": 2}, key="w")


def test_an_unknown_name():
    table = Table({"w": Param({"embed": 2}, {}, (), name="w")})
    with pytest.raises(LayoutError, match=r"'v'.* w "):
        table["v"]


def test_segments_must_fill_both_sides():
    """Three channels a head of which the cuts name two."""
    made = weight({"key": 2, "chan": 3}, {"embed": 2}, layouts=[segments("k", (2, 3, 2), (1, 1), (6, 2))])
    refused(r"^net\.w \(segments\): .*\b8 of 12\b", w=made)


def test_one_key_of_two_parameters_whose_layouts_have_other_names():
    layouts = [plain("k", (6,), 1, name) for name in ("plain", "other")]
    refused("^(net.v|k)", w=vector(layouts[0]), v=vector(layouts[1]))


def test_a_key_shared_rightly_by_layouts_of_other_names():
    halves = [one(block((0,), (3,), "k", (6,), Box((a,), (a + 3,))), name=f"from{a}") for a in (0, 3)]
    assert len(collect(Model(w=vector(halves[0], size=3), v=vector(halves[1], size=3))).params) == 2


def test_blocks_that_disagree_about_the_shape_of_a_key():
    first = one(block((0,), (3,), "k", (6,), Box((0,), (3,))))
    second = one(block((0,), (3,), "k", (600,), Box((3,), (6,))))
    refused("^(net.v|k)", w=vector(first, size=3), v=vector(second, size=3))


def test_a_block_that_has_no_view_in_our_shape():
    """Columns 0-1 of four rows are no vector without a copy; loading would fail in the middle."""
    left, right = (block((a,), (a + 8,), "k", (4, 4), Box((0, a // 4), (4, a // 4 + 2))) for a in (0, 8))
    refused("^net.w", w=vector(one(left, right), size=16))


def test_equal_blocks_leave_a_gap_in_a_larger_parameter():
    same = one(block((0,), (4,), "k", (4,)))
    refused(r"^net\.v \(one\): .*\b4 of 6\b", w=vector(rows((0, 4)), size=4), v=vector(same))


def test_equal_boxes_are_no_view_of_a_wider_source():
    """Two columns are a vector only if the source has no others."""
    narrow, wide = (block((0,), (8,), key, (4, cols), Box((0, 0), (4, 2))) for key, cols in (("a", 2), ("b", 4)))
    refused(r"^net\.v: \[0:4, 0:2\] of b \(4, 4\) is not a view", w=vector(one(narrow), size=8),
            v=vector(one(wide), size=8))  # fmt: skip


def test_a_key_of_two_groups():
    halves = [one(block((0,), (3,), "k", (6,), Box((a,), (a + 3,)))) for a in (0, 3)]
    w, same, other = (vector(halves[at], size=3, group=group) for at, group in ((0, "a"), (1, "a"), (1, "b")))
    refused(r"^k is made of parameters of several groups \['a', 'b'\]", w=w, v=other)
    assert len(collect(Model(w=w, v=same)).params) == 2
