"""Training data do not depend on the mesh, nor on where a run was cut off; and little of it is padding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshwright as mw
from meshwright.data import packing_plan as planning
from meshwright.data.packing_plan import DataSource, Piece, Plan, best_fit
from meshwright.data.permute import permuted

T = 64
EIGHT = np.array([5] * 8)


def lengths(num: int, median: float = 20, sigma: float = 1.0, most: int = T, seed: int = 0) -> Any:
    drawn = np.random.default_rng(seed).lognormal(np.log(median), sigma, num)
    return np.clip(drawn.astype(np.int64), 2, most)


def three(**options: Any) -> Plan:
    sources = [
        DataSource("once", lengths(300)),
        DataSource("half", lengths(201, seed=1), weight=0.5),
        DataSource("twice", lengths(97, seed=2), weight=2),
    ]
    return Plan(sources, **{"length": T, "epochs": 2, "seed": 5, **options})


def described(pieces: Iterable[Piece]) -> list[tuple[int, int, int]]:
    return [(piece.epoch, piece.source, piece.document) for piece in pieces]


def whole(plan: Plan) -> list[Piece]:
    return [piece for j in range(plan.num_streams) for piece in plan.stream(j)]


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1000, 4097])
def test_a_permutation(size: int) -> None:
    assert sorted(permuted(np.arange(size), size, 3, "key")) == list(range(size))


def test_it_never_changes() -> None:
    """A run that goes on under another version must see the documents that it has not seen."""
    assert permuted(np.arange(8), 1000, 7, "epoch", 0).tolist() == [506, 906, 836, 682, 828, 385, 169, 742]
    assert permuted(np.arange(5), 5, 0, "source", 1, 2).tolist() == [4, 3, 0, 1, 2]


def test_it_is_uniform() -> None:
    """Chi squared has 225 degrees of freedom: the place of each of 16, over 4,000 keys."""
    seen = np.zeros((16, 16))
    for key in range(4000):
        seen[np.arange(16), permuted(np.arange(16), 16, key)] += 1
    chi = float(((seen - 250) ** 2 / 250).sum())
    assert 150 < chi < 320, chi


def test_every_document_once_an_epoch() -> None:
    times = Counter((p.source, p.document, p.epoch) for p in whole(three()))
    once, half, twice = ({k: n for k, n in times.items() if k[0] == s} for s in range(3))
    assert once == {(0, d, e): 1 for d in range(300) for e in (0, 1)}
    assert twice == {(2, d, e): 2 for d in range(97) for e in (0, 1)}
    assert sorted((s, d) for s, d, _ in half) == [(1, d) for d in range(201)]  # both epochs together, each once
    assert set(half.values()) == {1}


@pytest.mark.parametrize("change", [dict(seed=6), dict(length=2 * T)], ids=str)
def test_another_seed_or_length_is_another_plan(change: dict[str, Any]) -> None:
    assert three(**change).fingerprint != three().fingerprint == three().fingerprint
    assert described(whole(three(**change))) != described(whole(three())) == described(whole(three()))


def run(plan: Plan, mesh: tuple[int, int], begin: int, steps: int | None) -> tuple[list[Any], int]:
    """Return the documents that N data ranks with R micro-batches train on from stream `begin`, and the next stream."""
    ranks, batches = mesh
    seen, at = [], begin
    while at < plan.num_streams and (steps is None or at < begin + steps * ranks * batches):
        seen += [described(plan.stream(at + m * ranks + r)) for m in range(batches) for r in range(ranks)]
        at += ranks * batches
    return seen, at


@pytest.mark.parametrize("cut", [1, 7, 13])
def test_a_run_goes_on_on_another_mesh(cut: int) -> None:
    undisturbed, _ = run(three(), (1, 4), 0, None)
    first, at = run(three(), (4, 1), 0, cut)
    rest, _ = run(three(), (2, 2), at, None)
    assert first + rest == undisturbed
    assert [d for stream in undisturbed for d in stream] == described(whole(three()))


def test_packing_wastes_less_than_2_percent() -> None:
    each = lengths(20_000, 2000, 1.0, 8192)
    plan = Plan([DataSource("a", each)], length=8192, epochs=1)
    assert 1 - each.sum() / (plan.num_streams * 8192) < 0.02


def test_streams_of_a_window_are_mixed() -> None:
    """Best fit puts the longest documents first: unmixed, the curve of the loss would show every window."""
    plan = Plan([DataSource("a", lengths(40_000, 8))], length=T, epochs=1)
    assert len(plan._windows) > 15
    begin, end = [], []
    for window, after in zip(plan._windows, plan._windows[1:], strict=False):
        half = (after.first - window.first) // 2
        for numbers, mean in ((range(half), begin), (range(half, 2 * half), end)):
            mean.append(np.mean([len(p) for j in numbers for p in plan.stream(window.first + j)]))
    assert np.mean(begin) == pytest.approx(np.mean(end), rel=0.05)


def test_epochs_that_hold_no_document_are_passed_over() -> None:
    """Two documents at a weight of 0.25: every second epoch takes one."""
    plan = Plan([DataSource("a", np.array([5, 6]), weight=0.25)], length=T, epochs=8)
    assert sorted(piece.document for piece in whole(plan)) == [0, 0, 1, 1]


def test_shares_of_tokens() -> None:
    sources = [DataSource("small", lengths(100), share=0.2), DataSource("large", lengths(5000, seed=1), share=0.8)]
    plan = Plan(sources, length=T, streams=700)
    tokens = Counter[int]()
    for piece in whole(plan):
        tokens[piece.source] += len(piece)
    assert tokens[0] / tokens.total() == pytest.approx(0.2, abs=0.01)
    assert plan.num_streams == 700
    assert max(plan.weights) == 1
    assert plan.epochs_before(700) > 1


def test_too_short_documents_are_left_out() -> None:
    plan = Plan([DataSource("a", np.array([1, 5, 0, 6]))], length=T, epochs=1)
    assert sorted(p.document for p in whole(plan)) == [1, 3]


@pytest.mark.parametrize(
    ("sources", "options", "wanted"),
    [
        ([], {}, "no document"),
        ([DataSource("a", np.array([5, T + 1]))], {}, "a are longer than a stream of 64 tokens, the longest has 65"),
        ([DataSource("a", np.array([5]))], dict(streams=3), "give one of them"),
        ([DataSource("a", EIGHT)], dict(epochs=1e12),
         r"1e\+12 epochs are 1e\+12 passes over 8 documents; at most 1,000,000,000 .*give fewer epochs"),
        ([DataSource("a", EIGHT)], dict(epochs=None, streams=32 * 10**15), "give fewer steps or tokens"),
        ([DataSource("a", EIGHT, weight=1e18)], {}, r"1e\+18 takes 8e\+18 documents of a in an epoch; at most"),
        ([DataSource("a", EIGHT, weight=1e-300)], dict(epochs=None, streams=9),
         r"none of the 8 documents of a; give 0\.12 or more, or leave"),
        ([DataSource("a", EIGHT, share=1 - 1e-9), DataSource("b", np.array([5]), share=1e-9)],
         dict(epochs=None, streams=9), "a share of 1e-09 of 576 tokens is not one token of b"),
    ],
)  # fmt: skip
def test_what_is_refused(sources: list[DataSource], options: dict[str, Any], wanted: str) -> None:
    with pytest.raises(mw.DataError, match=wanted):
        Plan(sources, **{"length": T, "epochs": 1, **options})


def test_how_many_epochs_are_done() -> None:
    plan = three()
    done = [plan.epochs_before(j) for j in range(plan.num_streams + 1)]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0.0, 2.0)
    some = three(epochs=None, streams=plan.num_streams // 4)
    assert some.epochs_before(some.num_streams) == pytest.approx(0.5, abs=0.05)
    assert three(epochs=1.5).epochs_before(10**9) == pytest.approx(1.5, abs=0.01)


@pytest.mark.parametrize("options", [{}, dict(epochs=None, streams=7), dict(epochs=0.3)])
def test_where_windows_begin_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any) -> None:
    made = three(cache=tmp_path, **options)
    with monkeypatch.context() as patched:
        patched.setattr(Plan, "_build_windows", lambda _: pytest.fail("it is computed again"))
        again = three(cache=tmp_path, **options)
    assert described(whole(again)) == described(whole(made)) == described(whole(three(**options)))
    assert again.fingerprint == made.fingerprint
    three(cache=tmp_path, seed=6, **options)
    for amount in (dict(epochs=0.7), dict(epochs=None, streams=11)):
        other = three(cache=tmp_path, **{**options, "streams": None, **amount})
        assert described(whole(other)) == described(whole(three(**{**options, "streams": None, **amount})))
    assert len([*tmp_path.iterdir()]) == 4


@pytest.mark.parametrize("damage", [
    lambda data: data[: len(data) // 2],
    lambda data: b"",
    lambda data: data[:-24] + bytes([data[-24] ^ 1]) + data[-23:],
    lambda data: bytes(len(data)),
], ids=["truncated", "empty", "flipped", "zeroed"])  # fmt: skip
def test_a_damaged_plan_is_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    made = three(cache=tmp_path)
    [file] = tmp_path.iterdir()
    whole_file = file.read_bytes()
    file.write_bytes(damage(whole_file))
    for _ in range(2):  # the second one finds it mended
        assert described(whole(three(cache=tmp_path))) == described(whole(made))
        assert [each.read_bytes() for each in tmp_path.iterdir()] == [whole_file]
    [warning] = caplog.messages
    assert str(file) in warning
    assert "damaged" in warning


@pytest.mark.parametrize("change", [
    dict(content="other"), dict(weight=2.0), dict(cut=True), dict(lengths=np.array([5, 3, 8])),
    dict(lengths=np.array([3, 5, 9])),
], ids=str)  # fmt: skip
def test_whatever_changes_the_streams_changes_the_fingerprint(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    one, two = DataSource("one", np.array([4, 4])), DataSource("two", np.array([3, 5, 8]))
    key = lambda *sources, **options: Plan(sources, length=9, epochs=1, **options).fingerprint  # noqa: E731 - short
    same = key(one, two)
    others = [key(one, replace(two, **change)), key(two, one), key(one), key(one, two, seed=1)]
    for name in ("WINDOW", "_VERSION"):
        with monkeypatch.context() as patched:
            patched.setattr(planning, name, 999)
            others.append(key(one, two))
    halves, quarters = (key(replace(one, share=part), replace(two, share=1 - part)) for part in (0.5, 0.25))
    assert len({same, halves, quarters, *others}) == 9
    assert key(replace(one, name="other"), two) == same


def test_another_format_of_cached_plans_is_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (2, 3):
        monkeypatch.setattr(planning, "_CACHE_FORMAT", number)
        three(cache=tmp_path)
    assert len([*tmp_path.iterdir()]) == 2


def test_passes_of_a_number_of_streams() -> None:
    """An epoch has 2 x (4 + 6) + 0.5 x 10 tokens, without the document of one token; 10 streams of 8 take 80."""
    sources = [DataSource("a", np.array([4, 1, 6]), weight=2), DataSource("b", np.array([5, 5]), weight=0.5)]
    assert Plan(sources, length=8, streams=10).num_epochs == 80 / 25
    assert Plan(sources, length=8, epochs=0.75).num_epochs == 0.75


def test_weights_of_shares_end_an_epoch_with_the_first_source_that_is_used_up() -> None:
    """A quarter of all tokens uses 10 tokens up before three quarters use 32."""
    sources = [DataSource("a", np.array([4, 6]), share=0.25), DataSource("b", np.array([8, 8, 8, 8]), share=0.75)]
    assert Plan(sources, length=8, epochs=1).weights == pytest.approx((1, 30 / 32))


@pytest.mark.parametrize(
    ("weight", "options", "passes"),
    [
        (1, dict(epochs=2), True), (1, dict(epochs=2.1), False), (0.1, dict(epochs=9), True),
        (0.1, dict(epochs=11), False), (2, dict(epochs=1), True), (2.1, dict(epochs=0.5), False),
        (1, dict(streams=5), True), (1, dict(streams=6), False),
    ],
)  # fmt: skip
def test_the_most_documents_of_a_run(
    monkeypatch: pytest.MonkeyPatch, weight: float, options: dict[str, Any], passes: bool
) -> None:
    """A run may see at most ten of five documents of 5 trainable tokens, in streams of 10."""
    monkeypatch.setattr(planning, "MOST_DOCUMENTS", 10)
    source = DataSource("a", np.array([5] * 5 + [1] * 7), weight=weight)
    if passes:
        assert Plan([source], length=10, **options).num_streams > 0
        return
    with pytest.raises(mw.DataError, match="at most 10"):
        Plan([source], length=10, **options)


@pytest.mark.parametrize(("share", "passes"), [(0.05, True), (1 / 32, True), (0.03, False)])
def test_a_share_is_one_token_of_the_run_or_more(share: float, passes: bool) -> None:
    sources = [DataSource("a", EIGHT, share=1 - share), DataSource("b", EIGHT, share=share)]
    if passes:
        assert Plan(sources, length=8, streams=4).num_streams == 4
        return
    with pytest.raises(mw.DataError, match="of 32 tokens is not one token of b"):
        Plan(sources, length=8, streams=4)


@pytest.mark.parametrize(
    ("size", "cuts"), [(2, [0, 2]), (7, [0, 7]), (8, [0, 6, 8]), (9, [0, 7, 9]), (15, [0, 7, 13, 15]), (14, [0, 7, 14])]
)
def test_a_last_piece_has_two_tokens_or_more(size: int, cuts: list[int]) -> None:
    plan = Plan([DataSource("a", np.array([size]), cut=True)], length=7, epochs=1)
    pieces = sorted(whole(plan), key=lambda piece: piece.start)
    assert [(piece.start, piece.stop) for piece in pieces] == [*pairwise(cuts)]


@pytest.mark.parametrize(
    ("num", "share", "windows"),
    [
        (12, 1, [(0, 5), (5, 12)]), (12, 0.5, [(0, 6)]), (13, 1, [(0, 5), (5, 10), (10, 13)]), (2, 0.1, [(0, 1)]),
        (10, 1, [(0, 5), (5, 10)]), (7, 0.5, [(0, 4)]), (11, 1, [(0, 5), (5, 11)]), (4, 0.9, [(0, 4)]),
    ],
)  # fmt: skip
def test_a_window_takes_documents_until_it_is_full(
    monkeypatch: pytest.MonkeyPatch, num: int, share: float, windows: list[tuple[int, int]]
) -> None:
    """A window of 2 streams has five documents of 4 tokens; a last one under half of that joins the one before."""
    monkeypatch.setattr(planning, "WINDOW", 2)
    plan = Plan([DataSource("a", np.array([4] * num))], length=10, epochs=share)
    assert [(window.start, window.stop) for window in plan._windows] == windows


def test_progress_in_epochs_of_unequal_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs of 1.5 x 5 documents have 8 and 7 of them (one a stream), in windows of 4 streams."""
    monkeypatch.setattr(planning, "WINDOW", 4)
    plan = Plan([DataSource("a", np.array([4] * 5), weight=1.5)], length=4, epochs=2)
    assert plan.num_streams == 15
    wanted = [n / 8 for n in range(8)] + [1 + n / 7 for n in range(8)]
    assert [plan.epochs_before(number) for number in range(16)] == pytest.approx(wanted)


def test_streams_never_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each source, each pass over it, each epoch and each window has an order of its own, which never changes."""
    monkeypatch.setattr(planning, "WINDOW", 2)
    sources = [DataSource("a", np.array([4] * 3), weight=2), DataSource("b", np.array([4] * 5))]
    plan = Plan(sources, length=8, epochs=2, seed=3)
    streams = ["".join(f"{'ab'[p.source]}{p.document}" for p in plan.stream(n)) for n in range(plan.num_streams)]
    first = ["b2a2", "b1b3", "a1a0", "b0a0", "a2", "b4a1"]
    assert streams == [*first, "a2b2", "b1a2", "a1b4", "b0a0", "a0a1", "b3"]


def test_best_fit_takes_equal_documents_in_their_order() -> None:
    assert best_fit([3, 7, 3, 4, 6, 3], 10) == [[1, 0], [4, 3], [2, 5]]
    assert best_fit([5, 5, 5], 10) == [[0, 1], [2]]
    assert best_fit([], 10) == []
