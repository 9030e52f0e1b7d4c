"""`token_once` sends a token once to each rank with its experts: equal results, fewer rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright import parallel
from meshwright.axes import Axes
from meshwright.cli import main
from meshwright.errors import ConfigError
from meshwright.models import qwen3_moe
from meshwright.parallel.expert_exchange import Group
from meshwright.sharding import ROWS, WEIGHTS, divides, expected_rows, hops
from meshwright.verify import Finding, Trial
from tests import parts, tiny, trials, worlds
from tests.test_savings import source, tried

__all__ = ["source"]  # a fixture

Source = Callable[..., Path]
CASES: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    # `token_once=2`: over one rank of each node of two.
    ("qwen3_5_moe", dict(fsdp=2, ep=2), dict(recompute="selective", narrow_grads=True)),
    ("qwen3_moe", dict(fsdp=2, cp=2, ep=2), dict(recompute="selective", narrow_grads=True)),
    ("qwen3_moe", dict(pp=2, fsdp=2, ep=2), dict(sum_once=True)),
    ("qwen3_5_moe", dict(fsdp=2, tp=2, ep=4), dict(recompute="full")),
    ("qwen3_moe", dict(replicate=2, tp=4, ep=4), dict(token_once=2, narrow_grads=True)),
    ("qwen3_5_moe", dict(fsdp=4, ep=4), dict(token_once=2, recompute="full")),
    ("qwen3_moe", dict(tp=4, ep=4), dict()),
    ("qwen3_moe", dict(fsdp=2, tp=2, ep=4), dict(token_once=2)),
    ("qwen3_moe", dict(pp=2, fsdp=4, ep=4), dict(token_once=2, sum_once=True)),
    ("qwen3_5_moe", dict(replicate=2, tp=2, ep=2), dict(offload=True)),
    ("qwen3_5_moe", dict(fsdp=2, cp=2, tp=2, ep=8), dict(token_once=4, offload=True)),
    ("qwen3_moe", dict(fsdp=2, tp=4, ep=8), dict(token_once=2, recompute="selective")),
]


def compared(source: Source, name: str, mesh: dict[str, int], more: dict[str, Any]) -> Trial:
    fewer: dict[str, Any] = {} if parts.ALL else dict(num_hidden_layers=2)
    if fewer and "5" in name:
        fewer |= dict(layer_types=["linear_attention", "full_attention"])
    trial = tried(source(name, **fewer), mesh, **{"token_once": True, **more})
    return replace(trial, steps=trial.steps if parts.ALL else 1)


SMALL = dict(num_hidden_layers=1, mlp_only_layers=[])  # one layer of experts
ROUTES = {
    "an expert a rank": dict(num_experts=4),  # every copy is a row of its own
    "one expert each": dict(num_experts_per_tok=1),
    "all experts": dict(num_experts_per_tok=8),
}
PAIRS: list[tuple[str, Any]] = [
    (route, once) for number, route in enumerate(ROUTES) for once in ([True, 2], [2, True])[number % 2]
]
OVER_NODES = dict(fsdp=2, tp=2, ep=4)
FROZEN: list[tuple[Any, str]] = [(True, "layers.1.*"), *([(True, "head.*"), (2, "layers.1.*")] if parts.ALL else [])]


def brief(source: Path, mesh: dict[str, int], once: bool | int, steps: int = 1) -> Trial:
    trial = tried(source, mesh, token_once=once)
    return replace(trial, steps=trial.steps if parts.ALL else steps)


def routed(source: Source, route: str, once: bool | int) -> Trial:
    """A second step has few tokens: some experts get none. Two ranks suffice for `True`."""
    mesh = OVER_NODES if parts.ALL or once == 2 else dict(fsdp=2, ep=2)
    return brief(source("qwen3_moe", **ROUTES[route], **SMALL), mesh, once, steps=2 if once == 2 else 1)


def frozen(source: Source, once: bool | int, trained: str) -> Trial:
    ranks = 2 * int(once)
    return brief(source("qwen3_moe"), dict(fsdp=ranks, ep=ranks), once).with_options(train=[trained])


@pytest.fixture(scope="module")
def findings_of(source: Source) -> Callable[[str], list[Finding]]:
    """Run all trials of a mesh in one world, and those with planted bugs."""
    several = {str(case): compared(source, *case) for case in (CASES if parts.ALL else CASES[:1])}
    several |= {str(pair): routed(source, *pair) for pair in parts.every(3, PAIRS, 1)}
    several |= {str(case): frozen(source, *case) for case in FROZEN}
    several |= {bug: several[str(BASE[once])] for once, bugs in PLANTED.items() for bug in bugs}

    def run(group: Sequence[str]) -> dict[str, list[Finding]]:
        return trials.findings_in_turn({name: several[name] for name in group}, planted)

    return worlds.shared({name: trial.axes for name, trial in several.items()}, run)


@pytest.mark.parametrize("case", CASES if parts.ALL else CASES[:1], ids=str)
def test_results_equal_one_process(findings_of: Callable[[str], list[Finding]], case: Any) -> None:
    assert findings_of(str(case)) == []


@pytest.mark.parametrize("pair", parts.every(3, PAIRS, 1), ids=str)
def test_any_number_of_experts(findings_of: Callable[[str], list[Finding]], pair: tuple[str, bool | int]) -> None:
    assert findings_of(str(pair)) == []


@pytest.mark.parametrize("case", FROZEN, ids=str)
def test_frozen_layers_have_no_backward(findings_of: Callable[[str], list[Finding]], case: Any) -> None:
    """Neither gradients nor collectives of backward exist for frozen layers."""
    assert findings_of(str(case)) == []


def rows_sent(directory: Path, token_once: bool | int, skewed: bool) -> tuple[Any, ...]:
    """Return the rows this rank sends in a forward, the rows expected once and per expert, the loss and gradients."""
    model = mw.load(
        directory, trials.mesh_of(OVER_NODES), dtype=torch.float64, memory=mw.MemoryOptions(token_once=token_once)
    )
    engine, expected, real = mw.Engine(model, lr=1e-2), Counter[str](), qwen3_moe.ops.route
    ep, num = OVER_NODES["ep"], model.config["num_experts"]

    def route(*args: Any) -> tuple[Tensor, Tensor]:
        weight_Tk, expert_Tk = real(*args)
        if skewed:  # the other two ranks get no rows
            expert_Tk = torch.arange(expert_Tk.shape[1]).expand_as(expert_Tk)
        for each in expert_Tk.tolist():
            ranks = {expert // (num // ep) for expert in each}
            expected["once"] += len(ranks) + (len({rank // 2 for rank in ranks}) if token_once == 2 else 0)
            expected["each"] += len(each)
        return weight_Tk, expert_Tk

    sent = Counter[str]()

    def counting(send: Any, group: Group, x: Tensor, received: list[int], sizes: list[int], what: str = "") -> Any:
        sent[what] += sum(sizes)
        return send(group, x, received, sizes, what)

    begin, exchange = Group.begin, Group.exchange
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwen3_moe.ops, "route", route)
        patch.setattr(Group, "begin", lambda *args: counting(begin, *args))
        patch.setattr(Group, "exchange", lambda *args: counting(exchange, *args))
        loss = engine.backward(tiny.batches(model.mesh.data_rank)[:1])
    return sent[ROWS], expected["once"], expected["each"], loss, mw.gather(model, "grad")


@pytest.fixture(scope="module")
def sent(source: Source) -> dict[tuple[bool | int, bool], list[tuple[Any, ...]]]:
    cases = {(once, skewed): partial(rows_sent, source("qwen3_moe", **SMALL), once, skewed)
             for once, skewed in product((False, True, 2), (False, True))}  # fmt: skip
    return worlds.in_turn(4, cases)


@pytest.mark.parametrize("once", [True, 2], ids=["a rank", "a node"])
@pytest.mark.parametrize("skewed", [False, True], ids=["spread", "all to two ranks"])
def test_each_rank_gets_a_token_once(sent: dict[Any, Any], skewed: bool, once: bool | int) -> None:
    """With nodes of two, each node gets it once too. Skewed tokens all go to two ranks of one node."""
    plain, deduplicated, hops = sent[False, skewed], sent[once, skewed], int(once)
    for (*_, loss, grads), (_, expected, each, same, others) in zip(plain, deduplicated, strict=True):
        assert abs(loss - same) < 1e-12
        assert all(torch.allclose(grads[key], others[key], rtol=1e-9, atol=1e-12) for key in grads)
        if skewed:
            assert expected * 3 == each * (1 + hops), "the first rank has two of the three experts"
        else:
            assert expected < each * hops
    rows, once_each = (sum(rank[at] for rank in deduplicated) for at in (0, 1))
    assert rows == 2 * once_each, "to the experts and back"


def test_expected_rows_equal_counts() -> None:
    """Many tokens with random experts are counted."""
    for top_k, num, ranks in ((8, 128, 8), (3, 8, 4), (1, 8, 2), (8, 128, 128), (4, 4, 2)):
        drawn = torch.rand(20000, num, generator=torch.Generator().manual_seed(0)).topk(top_k).indices
        of_rank = torch.zeros(20000, ranks).scatter_(1, drawn // (num // ranks), 1.0)
        assert expected_rows(20000, top_k, num, ranks) == pytest.approx(of_rank.sum().item(), rel=0.01)
    assert expected_rows(1000, 8, 128, 128) == 8000
    assert expected_rows(1000, 8, 128, 8) == 5339


def test_hops_over_nodes() -> None:
    """With nodes of 4, rank 5 of 8 sends to rank 1, its peer in the other node, which sends on within that node."""
    to_nodes, within = hops("d", 16, Axes(fsdp=8, ep=8), 4)
    assert Axes(fsdp=8, ep=8).group(5, to_nodes.axes) == (1, 5)
    assert Axes(fsdp=8, ep=8).group(5, within.axes) == (4, 5, 6, 7)
    assert [(hop.size, hop.num_experts, hop.num_here, hop.places) for hop in (to_nodes, within)] == [
        (2, 16, 8, 2), (4, 8, 2, 8),
    ]  # fmt: skip
    (straight,) = hops("d", 16, Axes(fsdp=8, ep=8), True)
    assert hops("d", 16, Axes(fsdp=8, ep=8), 8) == hops("d", 16, Axes(fsdp=8, ep=8), False) == (straight,)
    assert (straight.axes, straight.size, straight.num_here) == (("ep",), 8, 2)


def test_wrong_node_sizes_are_refused(source: Source, capsys: pytest.CaptureFixture[str]) -> None:
    for size in (-1, 0, 2.0, "2", None):
        with pytest.raises(ConfigError, match="is not a number of ranks; give True"):
            mw.MemoryOptions(token_once=size)  # type: ignore[arg-type]
    plan = ["plan", str(source("qwen3_moe")), "--mesh", "fsdp=4,ep=4", "--token-once-a-node"]
    assert main([*plan, "3", "--json"]) == 2
    out, err = capsys.readouterr()
    assert "token_once: nodes of 3 ranks do not divide ep=4; choose from 2, 4" in err
    assert "nodes of 3 ranks" in json.loads(out)["refused"][0]
    assert main([*plan, "2"]) == 0
    for size in (3, 6):
        with pytest.raises(ConfigError, match=f"nodes of {size} ranks do not divide"):
            hops("d", 16, Axes(fsdp=4, ep=4), size)
    sizes = (False, True, 2, 3, 4, 6, 8)
    assert [divides(size, 4) for size in sizes] == [True, True, True, False, True, False, True]


def gradients(directory: Path, once: bool | int, dtype: torch.dtype) -> dict[str, Tensor]:
    model = mw.load(directory, trials.mesh_of(OVER_NODES), dtype=dtype, memory=mw.MemoryOptions(token_once=once))
    mw.Engine(model, lr=1e-2).backward(tiny.batches(model.mesh.data_rank))
    return {name: grad.float() for name, grad in mw.gather(model, "grad").items()}


@parts.IN_MATRIX
def test_bfloat16_has_one_more_rounding(source: Source) -> None:
    """`token_once` rounds the sums of a rank too: three roundings instead of two. Sums of a node are a fourth."""
    each = ((False, torch.float64), *((once, torch.bfloat16) for once in (False, True, 2)))
    runs = worlds.in_turn(4, {how: partial(gradients, source("qwen3_moe", **SMALL), *how) for how in each})
    wide, plain, once, by_node = (runs[how][0] for how in each)

    def median_error(grads: dict[str, Tensor]) -> float:
        errors = sorted(((grads[key] - wide[key]).norm() / wide[key].norm()).item() for key in wide)
        return errors[len(errors) // 2]

    assert median_error(once) < 1.05 * (3 / 2) ** 0.5 * median_error(plain)
    assert median_error(by_node) < 1.05 * (4 / 2) ** 0.5 * median_error(plain)


def _weights_in_the_order_they_came(patch: pytest.MonkeyPatch) -> None:
    real = parallel.expert_dedup._by_expert
    patch.setattr(parallel.expert_dedup, "_by_expert", lambda sent: (real(sent)[0].sort().values, real(sent)[1]))


def _weights_constant(patch: pytest.MonkeyPatch) -> None:
    real = Group.begin

    def begin(self: Any, x: Tensor, received: list[int], sent: list[int], what: str) -> Any:
        return real(self, x.detach() + 0 * x if what == WEIGHTS else x, received, sent, what)

    patch.setattr(Group, "begin", begin)


def _a_row_for_each_copy(patch: pytest.MonkeyPatch) -> None:
    """Send without deduplication: results stay right, and only the bill shows it."""
    patch.setattr(parallel.expert, "dispatch_once", parallel.expert.dispatch)


def _never_by_node(patch: pytest.MonkeyPatch) -> None:
    """Send directly to ranks: results stay right, and nodes exchange more than the bill says."""
    real = parallel.expert.hops
    patch.setattr(parallel.expert, "hops", lambda at, num, axes, once: real(at, num, axes, bool(once)))


def _from_one_node_alone(patch: pytest.MonkeyPatch) -> None:
    """Lose the results of other nodes on their way back."""
    real = parallel.expert_dedup._send

    def send(*args: Any) -> Any:
        sent, group = real(*args), args[-1]
        if not group.hop.at.endswith("to nodes"):
            return sent
        return replace(
            sent, back=lambda y: sent.back(y.where(torch.arange(len(y))[:, None] < sent.sizes.rows_in[0], 0))
        )

    patch.setattr(parallel.expert_dedup, "_send", send)


PLANTED: dict[bool | int, dict[str, Callable[[pytest.MonkeyPatch], None]]] = {
    True: {
        "weights in the order they came": _weights_in_the_order_they_came,
        "weights without gradients": _weights_constant,
        "a row for each copy": _a_row_for_each_copy,
    },
    2: {"never by node": _never_by_node, "from one node alone": _from_one_node_alone},
}


BASE: dict[bool | int, Any] = {True: ("all experts", True), 2: ("an expert a rank", 2)}


@contextmanager
def planted(name: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for bugs in PLANTED.values():
            bugs.get(name, lambda _: None)(patch)
        yield


@pytest.mark.parametrize("bug", [bug for bugs in PLANTED.values() for bug in bugs])
def test_oracles_detect_planted_bugs(findings_of: Callable[[str], list[Finding]], bug: str) -> None:
    """The mesh has two ranks, or two nodes of two."""
    assert findings_of(bug)
