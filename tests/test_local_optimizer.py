"""The optimizer of one rank: which state a piece has, which slices one call updates, and when an update is fused."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from meshwright.axes import Axes
from meshwright.errors import ConfigError, LayoutError
from meshwright.optim import (
    AdamW,
    Clip,
    LocalOptimizer,
    Muon,
    Slices,
    WholeMatrices,
    adamw,
    gradient_norm,
    int8_state,
    local,
)
from meshwright.optim.int8_state import is_quantised, names_of_scales, num_blocks, seed_of, with_scales, zero_codes
from meshwright.sharding import Param, Piece, Rules, Table, pieces

BF16, F32, CPU = torch.bfloat16, torch.float32, torch.device("cpu")


def param(name: str, cols: int = 0, **options: Any) -> Param:
    return Param({"rows": 6}, {"cols": cols} if cols else {}, (), name=name, **options)


TABLE = Table(
    {each.name: each for each in (param("w", 4), param("norm", decay=False), param("table", 4, by_rows=True))}
)


def clip(norm: float, max_norm: float, **apart: float) -> Clip:
    others = {name: torch.tensor(each) for name, each in apart.items()}
    return Clip(torch.tensor(norm), max_norm, lambda: None, others)


@pytest.mark.parametrize(("columns", "blocks"), [(1, 1), (255, 1), (256, 1), (257, 2), (512, 2), (513, 3)])
def test_the_last_block_of_a_row_may_be_shorter(columns: int, blocks: int) -> None:
    assert num_blocks(columns) == blocks


@pytest.mark.parametrize(
    ("of", "quantised"),
    [
        (param("w", 256), True), (param("w", 255), False), (param("w"), False), (param("w", 256, adapter=True), False),
        (param("w", 256, by_rows=True), False),
    ],
)  # fmt: skip
def test_matrices_with_a_whole_block_in_each_row_are_quantised(of: Param, quantised: bool) -> None:
    assert is_quantised(of) == quantised
    piece = (3, of.matrix[1] if of.cols else 1)
    narrow = 3 * piece[1] + 3 * 4  # a byte per element, and a scale of 4 bytes per row
    options, wide = AdamW(state_dtype=torch.uint8), 3 * piece[1] * 4
    assert options.state_bytes(torch.float32, of, piece) == 2 * (narrow if quantised else wide)
    assert options.quantised(Table({"w": of}), ["w"]) == (("w",) if quantised else ())
    assert AdamW().quantised(Table({"w": of}), ["w"]) == ()
    assert options.least_bytes(Table({"w": of}), torch.float32) == 2 * (1 if quantised else 4)


def test_state_takes_the_bytes_of_its_dtype_or_of_the_parameters() -> None:
    of = param("w", 256)
    for state_dtype, stored, itemsize in ((None, torch.float32, 4), (BF16, torch.float32, 2), (None, BF16, 2)):
        assert AdamW(state_dtype=state_dtype).state_bytes(stored, of, (3, 256)) == 2 * 3 * 256 * itemsize
    codes = AdamW(state_dtype=torch.uint8)
    assert codes.state_bytes(torch.float32, param("w", 300), (3, 300)) == 2 * (3 * 300 + 3 * 2 * 4), "2 scales a row"
    model = Table({"w": param("w", 4, matrices={}), "norm": param("norm")})
    assert Muon().least_bytes(model, torch.float32) == 4, "a matrix has a single state"


def test_scales_are_declared_like_a_matrix_with_a_column_for_each_block() -> None:
    of = Param({"heads": 2, "head": 3}, {"wide": 300, "more": 2}, (), "group", name="w", layer=5, decay=False)
    table = with_scales(Table({"w": of, "norm": param("norm")}), ["w"])
    assert [*table.params] == ["w", "norm", *names_of_scales(["w"])] == ["w", "norm", "w.scales"]
    scales = table["w.scales"]
    assert (scales.rows, scales.cols) == ({"heads": 2, "head": 3}, {"wide": 3})
    assert (scales.layer, scales.group, scales.layouts[0].blocks[0].key) == (5, "", "w.scales")


def test_zero_codes_have_a_scale_for_each_block() -> None:
    made = zero_codes("w", torch.ones(3, 300, dtype=BF16), 2)
    assert {name: [(x.shape, x.dtype) for x in each] for name, each in made.items()} == {
        "w": [(torch.Size((3, 300)), torch.uint8)] * 2,
        "w.scales": [(torch.Size((3, 2)), torch.float32)] * 2,
    }


def test_every_name_state_and_step_has_a_seed_of_its_own() -> None:
    seeds = {seed_of(name, which, step) for name in "ab" for which in range(2) for step in range(5)}
    assert len(seeds) == 20


def test_an_empty_piece_has_no_state() -> None:
    optimizer = LocalOptimizer(AdamW(state_dtype=BF16), TABLE)
    pieces = {"w": torch.zeros(2, 4), "norm": torch.zeros(0)}
    assert {name: [x.dtype for x in each] for name, each in optimizer.new_state(pieces).items()} == {"w": [BF16] * 2}
    assert [*optimizer.new_state(pieces, empty=True)] == ["norm"]
    optimizer.make_state(pieces)
    assert optimizer.num_bytes == 2 * 8 * 2
    assert [*optimizer.tensors] == ["w (0)", "w (1)"]
    kept = optimizer.state["w"]
    optimizer.make_state(pieces | {"norm": torch.zeros(3)})
    assert optimizer.state["w"] is kept
    assert {name: [*each] for name, each in optimizer.by_name(optimizer.state).items()} == {
        "exp_avg": ["w", "norm"], "exp_avg_sq": ["w", "norm"],
    }  # fmt: skip


def test_a_call_gets_slices_of_one_dtype_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_PART", 10)
    sizes = {"a": 4, "b": 6, "c": 1, "d": 23, "e": 7}
    pieces = {name: torch.zeros(size) for name, size in sizes.items()} | {"f": torch.zeros(2, dtype=BF16)}
    assert [*local._parts(pieces)] == [
        [("a", None), ("b", None)], [("c", None)], [("d", slice(0, 10))], [("d", slice(10, 20))],
        [("d", slice(20, 23)), ("e", None)], [("f", None)],
    ]  # fmt: skip
    rows = {"q": torch.zeros(3, 4)}
    assert [*local._parts(rows, ["q"])] == [[("q", slice(0, 8))], [("q", slice(8, 12))]]
    assert [*local._parts({"q": torch.zeros(2, 12)}, ["q"])] == [[("q", slice(0, 12))], [("q", slice(12, 24))]]


@pytest.mark.parametrize("max_norm", [2.0, 9.0])
def test_rows_of_a_table_without_gradient_keep_their_bytes(monkeypatch: pytest.MonkeyPatch, max_norm: float) -> None:
    monkeypatch.setattr(local, "_PART", 8)  # two rows at a time
    options = Recorded(state_dtype=BF16, betas=(0.5, 0.5), weight_decay=0.5)
    optimizer, table, grad = LocalOptimizer(options, TABLE), torch.ones(6, 4), torch.zeros(6, 4)
    grad[[1, 4, 5], 2] = torch.tensor([4.0, -4.0, 2.0])
    optimizer.step({"table": table}, {"table": grad}, 0.1, clip(4.0, max_norm))
    assert (table[[0, 2, 3]] == 1).all()
    means, squares = optimizer.state["table"]
    factor = min(1.0, max_norm / 4)
    assert torch.equal(means.float(), grad * factor / 2)
    assert torch.equal(squares.float(), (grad * factor).square() / 2)
    assert torch.allclose(table[1], torch.tensor([0.95, 0.95, 0.85, 0.95]))
    assert torch.allclose(table[4], torch.tensor([0.95, 0.95, 1.05, 0.95]))


class Recorded(AdamW):
    """An AdamW whose fused update takes everything, and notes what it gets."""

    def fuses(self, param: Tensor, grad: Tensor) -> bool:
        return param.dtype == grad.dtype

    def fused_update(self, slices: Any, clip: Clip, *, lr: float, step: int, decays: bool) -> None:
        calls.append((slices.names, len(slices.state), lr, step, decays))


calls: list[Any] = []


def test_a_fused_step_gets_what_decays_apart() -> None:
    calls.clear()
    optimizer = LocalOptimizer(Recorded(), TABLE)
    pieces = {"norm": torch.zeros(6), "w": torch.zeros(6, 4)}
    for _ in range(2):
        optimizer.step(pieces, pieces, 0.1, clip(1.0, 1.0))
    kinds = ((["w"], True), (["norm"], False))
    assert calls == [(names, 2, 0.1, step, decays) for step in (1, 2) for names, decays in kinds]


def test_a_step_clips_itself_only_where_each_dense_piece_has_a_fused_update() -> None:
    pieces = {"norm": torch.zeros(6), "w": torch.zeros(6, 4), "table": torch.zeros(6, 4)}
    grads = {name: torch.zeros_like(each) for name, each in pieces.items()}
    assert LocalOptimizer(Recorded(), TABLE).fuses(pieces, grads | {"table": grads["table"].to(BF16)})
    assert not LocalOptimizer(Recorded(), TABLE).fuses(pieces, grads | {"w": grads["w"].to(BF16)})
    assert not LocalOptimizer(Recorded(), TABLE).fuses(pieces, {"table": grads["table"]})
    place: Any = SimpleNamespace()
    assert not LocalOptimizer(Recorded(), TABLE, quantised={"w": place}).fuses(pieces, grads)
    assert not LocalOptimizer(Recorded(), TABLE, matrices=place).fuses(pieces, grads)
    strided = LocalOptimizer(Recorded(), TABLE)
    strided.state["w"] = (torch.zeros(6, 4), torch.zeros(4, 6).T)
    assert not strided.fuses(pieces, grads)


def test_a_parameter_apart_is_clipped_by_its_own_norm() -> None:
    of = clip(4.0, 2.0, table=1.0)
    assert [of.norm_of(name).item() for name in ("w", "table")] == [4.0, 1.0]
    assert [clip(norm, 2.0).factor.item() for norm in (1.0, 2.0, 8.0)] == [1.0, 1.0, 0.25]


MANY = Table(
    {
        each.name: each
        for each in (
            param("w", 4), param("norm", decay=False), param("more", 4), param("whole", 4), param("bias", decay=False),
            param("sent", 4), param("plain", 4),
        )
    }
)  # fmt: skip


class Mixed(AdamW):
    """An optimizer that updates some parameters as whole matrices, with no state or one tensor of it."""

    def state_names_of(self, param: Param) -> tuple[str, ...]:
        return {"whole": ("exp_avg",), "sent": (), "plain": ()}.get(param.name, self.state_names)

    def updates_whole(self, param: Param) -> bool:
        return param.name in ("whole", "sent")

    def update(self, slices: Any, *, lr: float, step: int, decays: bool) -> None:
        """Change nothing."""


def test_parameters_of_a_call_agree_in_decay_state_and_whether_they_are_whole() -> None:
    pieces = {name: torch.zeros(6, 4) for name in MANY.params} | {"bias": torch.zeros(6, dtype=BF16)}
    optimizer = LocalOptimizer(Mixed(state_dtype=torch.float32), MANY)
    optimizer.make_state(pieces)
    divided = optimizer._divided(pieces)
    assert [([name for name, _ in each.slices], each.decays, each.whole, each.live) for each in divided] == [
        (["whole"], True, True, True), (["plain"], True, False, True), (["w", "more"], True, False, True),
        (["norm"], False, False, True), (["bias"], False, False, False),
    ]  # fmt: skip


def test_a_step_divides_again_when_other_parameters_have_gradients() -> None:
    optimizer, pieces = LocalOptimizer(AdamW(), MANY), {name: torch.ones(6, 4) for name in ("w", "more")}
    for names in (["w"], ["w", "more"], ["more"], ["w"]):
        before = {name: each.clone() for name, each in pieces.items()}
        optimizer.step(pieces, {name: torch.ones(6, 4) for name in names}, 0.1)
        assert [name for name, each in pieces.items() if not torch.equal(each, before[name])] == names
    assert optimizer.steps == 4


def test_a_rank_without_rows_of_a_matrix_takes_part_in_its_update() -> None:
    got: list[Any] = []
    matrices: Any = SimpleNamespace(update=lambda *args: got.append(args))
    optimizer = LocalOptimizer(Mixed(), MANY, matrices=matrices)
    stored, grads = {"w": torch.zeros(6, 4), "whole": torch.zeros(6, 4), "sent": torch.zeros(0, 4)}, {}
    optimizer.step(stored, {"w": torch.zeros(6, 4)}, 0.1)
    assert not got
    grads = {name: torch.full_like(each, 2) for name, each in stored.items()}
    optimizer.step(stored, grads, 0.3)
    ((own, of, state, lr),) = got
    assert (own.keys(), of.keys(), lr, state is optimizer.state) == ({"whole"}, {"whole", "sent"}, 0.3, True)
    assert own["whole"] is stored["whole"]
    assert of["sent"] is grads["sent"]


def test_a_device_is_asked_once_for_its_kernel() -> None:
    asked: list[Any] = []

    class Asked(AdamW):
        def fuses(self, param: Tensor, grad: Tensor) -> bool:
            asked.append((param.device.type, param.dtype, grad.dtype))
            return param.device.type == "meta"

    optimizer = LocalOptimizer(Asked(), TABLE)
    answers = [optimizer.has_kernel(torch.device(device)) for device in ("cpu", "meta", "cpu", "meta")]
    assert answers == [False, True, False, True]
    assert asked == [(device, torch.float32, torch.float32) for device in ("cpu", "meta")]


@pytest.mark.parametrize(
    ("local_sizes", "misfit"),
    [
        (dict(wide=6, more=256), ""),  # whole
        (dict(wide=3, more=256), ""),
        (dict(wide=2, more=128), "256 of the 1536 columns of w"),  # cut along another dim than the first
        (dict(wide=6, more=128), "768 of the 1536 columns of w"),
    ],
)
def test_a_cut_falls_between_blocks_of_the_first_dim(
    local_sizes: dict[str, int], misfit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = Param({"rows": 6}, {"wide": 6, "more": 256}, (), name="w")
    narrow = Param({"rows": 6}, {"cols": 300}, (), name="v")
    sizes = {"w": local_sizes, "v": {"cols": 300}}
    monkeypatch.setattr(int8_state, "local_sizes", lambda param, _, axes: {3: sizes}[axes.tp][param.name])
    spec: Any = SimpleNamespace(table=Table({"v": narrow, "w": of}), rules=None)
    assert int8_state._misfit(spec, 3, ["v", "w"]) == misfit
    assert not int8_state._misfit(spec, 3, ["v"]), "columns that are not cut may end in a shorter block"
    sizes["v"] = {"cols": 150}
    assert int8_state._misfit(spec, 3, ["w", "v"]) == (misfit or "150 of the 300 columns of v")


def test_a_mesh_that_cuts_a_block_is_refused_with_those_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_state, "tp_sizes", lambda _: [1, 2, 3, 4, 8])
    monkeypatch.setattr(int8_state, "_misfit", lambda _spec, tp, names: "" if tp in (1, 3, 8) else f"{tp} of {names}")
    int8_state.check_blocks(SimpleNamespace(), Axes(tp=8, fsdp=4), ["w"], "go")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=re.escape("tp=4 a rank has 4 of ['w']; choose tp from 1, 3, 8, or go")):
        int8_state.check_blocks(SimpleNamespace(), Axes(tp=4, fsdp=8), ["w"], "go")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        dict(eps=0.0), dict(eps=-1e-8), dict(weight_decay=-0.1), dict(betas=(0.9, 1.0)), dict(betas=(-0.1, 0.9)),
        dict(state_dtype=BF16, betas=(0.99, 0.9)), dict(state_dtype=BF16, betas=(0.9, 0.99)),
    ],
    ids=str,
)  # fmt: skip
def test_options_of_adamw_that_train_wrong_are_refused(wrong: dict[str, Any]) -> None:
    name = [*wrong][-1]
    with pytest.raises(ConfigError, match=re.escape(f"{name}={wrong[name]}")):
        AdamW(**wrong)
    assert AdamW(eps=1e-30, weight_decay=0, betas=(0, 0.98), state_dtype=BF16).betas == (0, 0.98)


class Halved(AdamW):
    """An optimizer of a user that changes the update and keeps the formula."""

    def update(self, slices: Any, *, lr: float, step: int, decays: bool) -> None:
        super().update(slices, lr=lr / 2, step=step, decays=decays)


def test_a_subclass_with_an_update_of_its_own_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "SLOW", ())
    monkeypatch.setattr(adamw, "agrees", lambda *_: True)
    x = torch.zeros(8)
    assert [options.fuses(x, x) for options in (AdamW(), Halved(), Muon())] == [True, False, False]


class Numbers(NamedTuple):
    lr: float
    step: int
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_norm: float


class Part(NamedTuple):
    weight: Tensor
    grad: Tensor
    mean: Tensor
    square: Tensor


def kernel(part: Part, norm: Tensor, numbers: Numbers) -> None:
    """Do what a fused kernel does: clip, and write nothing where the norm is not finite."""
    if not norm.isfinite():
        return
    options = AdamW(betas=numbers.betas, eps=numbers.eps, weight_decay=numbers.weight_decay)
    grad = part.grad.double() * min(1.0, numbers.max_norm / norm.item())
    weight, mean, square = (each.double() for each in (part.weight, part.mean, part.square))
    weight, moments = options.plain_update(
        weight, grad, (mean, square), lr=numbers.lr, step=numbers.step, decays=numbers.weight_decay > 0
    )
    for kept, new in zip((part.weight, part.mean, part.square), (weight, *moments), strict=True):
        kept.copy_(new)


Kernel = Callable[[Part, Tensor, Numbers], None]


def install(update: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(Update=Numbers, Slice=Part, update=update)
    monkeypatch.setitem(sys.modules, "meshwright.ops.kernels.adamw", module)
    monkeypatch.setattr("meshwright.ops.kernels.adamw", module, raising=False)


@pytest.mark.parametrize("decays", [False, True])
def test_a_fused_update_gets_its_numbers_and_marks_what_it_wrote(decays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    install(lambda part, norm, numbers: seen.append((part, norm.item(), numbers)), monkeypatch)
    options = AdamW(betas=(0.7, 0.8), eps=1e-5, weight_decay=0.3)
    weights, grads, means, squares = ([torch.full((2, 3), 10.0 * n + at) for at in range(2)] for n in range(4))
    grads[1] = torch.ones(3, 2).T
    slices = Slices(["w", "v"], weights, grads, (means, squares))
    options.fused_update(slices, clip(4.0, 2.0, v=1.0), lr=0.1, step=7, decays=decays)
    numbers = Numbers(0.1, 7, (0.7, 0.8), 1e-5, 0.3 * decays, 2.0)
    assert [each[1:] for each in seen] == [(4.0, numbers), (1.0, numbers)]
    for at, (part, _, _) in enumerate(seen):
        assert (part.weight is weights[at], part.mean is means[at], part.square is squares[at]) == (True,) * 3
        assert part.grad.is_contiguous()
        assert torch.equal(part.grad, grads[at])
    assert {each._version for each in (*weights, *means, *squares)} == {1}
    assert {each._version for each in grads} == {0}, "gradients are only read"


WRONG: dict[str, Kernel] = {
    "": kernel,
    "unclipped": lambda part, norm, numbers: kernel(part, norm, numbers._replace(max_norm=1e9)),
    "written despite NaN": lambda part, norm, numbers: kernel(part, norm.nan_to_num(1.0, 1e9), numbers),
    "written despite an infinite norm": lambda part, norm, numbers: kernel(part, norm.clamp(max=1e3), numbers),
    "without decay": lambda part, norm, numbers: kernel(part, norm, numbers._replace(weight_decay=0.0)),
    "decays always": lambda part, norm, numbers: kernel(part, norm, numbers._replace(weight_decay=0.1)),
    "a step ahead": lambda part, norm, numbers: kernel(part, norm, numbers._replace(step=numbers.step + 1)),
    "not the last elements": lambda part, norm, numbers: kernel(Part(*(x[:1024] for x in part)), norm, numbers),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(("grads", "state"), [(F32, F32), (BF16, BF16)])
def test_the_trial_of_a_kernel_compares_it_with_the_formula(
    wrong: str, grads: torch.dtype, state: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(WRONG[wrong], monkeypatch)
    got, expected = adamw._compare(CPU, grads, state)
    assert [(x.dtype, x.shape) for x in got] == [(x.dtype, x.shape) for x in expected]
    assert {len(x) for x in got} == {4096, 1031}
    far = max(float((x.double() - y.double()).norm() / y.double().norm()) for x, y in zip(got, expected, strict=True))
    assert (far <= adamw._OFF[state]) == (not wrong), far


def test_squares_are_those_of_owned_elements_of_every_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64: the root of 3 in bfloat16 has a square of 3.008."""
    monkeypatch.setattr(gradient_norm, "_SMALL", 3)
    monkeypatch.setattr(gradient_norm, "_PART", 4)
    grads = {
        "narrow": torch.ones(3, dtype=BF16), "wide": torch.full((5,), 0.1, dtype=torch.float64),
        "small": torch.tensor([2.0]), "large": torch.arange(9.0).view(3, 3).T, "of another": torch.full((2,), 1e3),
    }  # fmt: skip
    total = gradient_norm.squares(grads, {*grads} - {"of another"}, CPU)
    assert total.dtype == torch.float64
    assert total.item() == pytest.approx(3 + 5 * 0.01 + 4 + 204, rel=1e-15)
    assert gradient_norm.squares(grads, (), CPU).item() == 0


HEADS = Param({"heads": 4, "head": 1}, {"embed": 6}, (), name="w", matrices={}, decay=False)


def test_muon_bills_what_it_sends_and_counts_its_operations() -> None:
    """A shard has two of four heads. Newton-Schulz has 5 steps of products with r * r * (2 * c + r) elements."""
    axes = Axes(fsdp=2)
    (there, back), none = (Muon(by_head=each).charges([HEADS], Rules(), axes, 1, 4) for each in (False, True))
    assert [(each.num_bytes, each.count) for each in (there, back)] == [(0, 1), (12 * 2, 1)]
    assert none == []
    operations = [Muon(by_head=each).operations([HEADS, param("norm")], Rules(), axes, 0) for each in (False, True)]
    assert operations == [2 * 5 * 4 * 4 * (2 * 6 + 4), 2 * 5 * 2 * (2 * 6 + 1)]
    assert AdamW().operations([HEADS], Rules(), axes, 0) == 0


def test_a_checkpoint_says_which_optimizer_and_which_momentum_it_has() -> None:
    options = Muon(momentum=0.9, exclude=("a", "b"), betas=(0.8, 0.9))
    assert options.settings() == {
        "kind": "muon", "state": "None", "betas": [0.8, 0.9], "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.9,
        "nesterov": True, "scale": "match_rms_adamw", "by_head": False, "exclude": ["a", "b"],
        "matrix_dtype": "torch.bfloat16", "momentum_is": "momentum * M + (1 - momentum) * gradient",
    }  # fmt: skip


def whole_matrices(options: Muon, *params: Param) -> tuple[WholeMatrices, dict[str, Piece]]:
    """Return the updates of matrices on one process."""
    spec: Any = SimpleNamespace(table=Table({each.name: each for each in params}), rules=Rules())
    spec.params, axes = lambda *_: [*params], Axes()
    mesh: Any = SimpleNamespace(axes=axes, rank=0, device=CPU, size_of=lambda _: 1)
    held = pieces(spec, axes, 0)
    return WholeMatrices(options, spec, mesh, held), held


def test_a_plan_of_matrices_is_for_the_parameters_of_the_step() -> None:
    matrices, _ = whole_matrices(Muon(), *(param(name, 4, matrices={}) for name in "abc"))
    plans = [matrices.plan(names) for names in ("ab", "ac", "ac")]
    assert [[each.name for each in plan.matrices] for plan in plans] == [["a", "b"], ["a", "c"], ["a", "c"]]
    assert plans[1] is plans[2]


@pytest.mark.parametrize("decays", [False, True])
def test_a_matrix_decays_as_it_is_declared(decays: bool) -> None:
    options = Muon(matrix_dtype=None, weight_decay=0.5, scale="original", nesterov=False)
    matrices, _ = whole_matrices(options, param("w", 4, matrices={}, decay=decays))
    weight, momentum = torch.arange(24.0).view(6, 4), torch.eye(6, 4)
    expected = weight * (1 - 0.1 * 0.5 * decays) - 0.1 * (6 / 4) ** 0.5 * options.matrix_direction(momentum)
    matrices.update({"w": weight}, {"w": torch.zeros(6, 4)}, {"w": [momentum]}, 0.1)
    torch.testing.assert_close(weight, expected)
