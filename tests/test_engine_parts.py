"""Parts of the engine one by one, on unequal numbers by hand: the router, the MTP loss, norms, scores, batches."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.axes import Axes
from meshwright.engine import adapters, batching, inference, sampling
from meshwright.engine.gradient_norms import GradientNorms
from meshwright.engine.loss_terms import Terms
from meshwright.engine.mtp import MtpData, MtpTraining, next_labels, next_weights, unreached_embedding
from meshwright.engine.router import Router, pooled_counts, refuse_pooled, step_load
from meshwright.engine.step_results import loss_sum, norm_sum
from meshwright.errors import ConfigError
from meshwright.models import Balance, Want
from tests.test_engine_checks import BATCH

of = SimpleNamespace
F64 = torch.float64


class Mesh:
    """The mesh of one rank, on which an all-reduce adds what other ranks have."""

    def __init__(self, others: dict[str, Tensor] | None = None, **more: Any) -> None:
        self.device = self.host = torch.device("cpu")
        self.axes, self.rank, self.coords, self.others = Axes(), 0, {}, others or {}
        vars(self).update(more)

    def all_reduce_(self, x: Tensor, at: Any) -> Tensor:
        return x.add_(self.others.get(at.name, 0))

    def token_range(self, num: int) -> tuple[int, int]:
        return vars(self).get("range", (0, num))

    def to_host(self, results: list[Tensor]) -> list[Tensor]:
        return results


# The router: two layers of the three are on this stage, with three experts; a token gets two of them.


def router_of(mode: str, coefficient: float = 0.5, others: dict[str, Tensor] | None = None) -> Router:
    balance = Balance(3, 2, coefficient)
    balance.num_layers = 3
    balance.counts = {0: torch.tensor([4.0, 1.0, 1.0]), 2: torch.tensor([2.0, 3.0, 1.0])}
    balance.probs = {0: torch.tensor([1.5, 1.0, 0.5]), 2: torch.tensor([1.0, 1.0, 1.0])}
    mesh: Any = Mesh(others)
    return Router(balance, mesh, mode)


COUNTS = "the router's pooled counts"
PROBS_E = torch.tensor([2.5, 2.0, 1.5], dtype=F64)


def test_pooled_slopes_are_those_of_all_ranks() -> None:
    """Shares are of the tokens of a micro-batch, over layers and ranks, and the loss is a mean over micro-batches."""
    router = router_of("pooled", others={COUNTS: torch.tensor([0.0, 2.0, 6.0], dtype=F64)})
    part = router.set_slope(step_tokens=999, num_batches=4)
    counts_E, num = torch.tensor([6.0, 6.0, 8.0], dtype=F64), 10  # 20 choices of 2 for each token
    slope_E = 0.5 * 3 * counts_E / num / num / 4
    assert torch.allclose(router.balance.slope_E, slope_E)
    assert float(part) == pytest.approx(float((slope_E * PROBS_E).sum()))
    assert router._local_LE.tolist() == [[4, 1, 1], [0, 0, 0], [2, 3, 1]]


def test_previous_slopes_are_of_the_last_applied_step() -> None:
    router = router_of("previous")
    router.set_slope(step_tokens=8, num_batches=4)
    even_E = torch.full((3,), 0.5 * 3 * (2 / 3) / (8 * 3), dtype=F64)
    assert torch.allclose(router.balance.slope_E, even_E)
    load_LE = torch.tensor([[3.0, 1.0, 2.0], [6.0, 0.0, 0.0], [3.0, 0.0, 3.0]], dtype=F64)
    router.resume(load_LE.tolist())
    assert torch.equal(router.load_LE, load_LE)
    assert not router._local_LE.any()
    router.set_slope(step_tokens=8, num_batches=4)
    slope_E = 0.5 * 3 * torch.tensor([12.0, 1.0, 5.0], dtype=F64) * 2 / 18 / (8 * 3)
    assert torch.allclose(router.balance.slope_E, slope_E)
    router.set_slope(step_tokens=0, num_batches=4)
    assert torch.allclose(router.balance.slope_E, slope_E * 8)
    router.resume()
    router.set_slope(step_tokens=8, num_batches=4)
    assert torch.allclose(router.balance.slope_E, even_E), "without a load as before the first step"


def test_loads_are_of_all_micro_batches_and_ranks() -> None:
    """A step that was discarded leaves no counts, and "previous" does not use its load."""
    others = {"the load of the experts": torch.ones(3, 3, dtype=F64)}
    router = router_of("previous", coefficient=0.0, others=others)
    for _ in range(2):
        assert float(router.set_slope(8, 2)) == 0
    assert router.balance.slope_E is None
    router.sum_load()
    assert router.load_LE.tolist() == [[9, 3, 3], [1, 1, 1], [5, 7, 3]]
    assert not router.trained_load.any()
    router.set_slope(8, 1)
    router.forget()
    router.set_slope(8, 1)
    router.sum_load()
    assert router.load_LE.tolist() == [[5, 2, 2], [1, 1, 1], [3, 4, 2]]
    router.trained()
    assert torch.equal(router.trained_load, router.load_LE)


@pytest.mark.parametrize(
    ("pp", "mode", "coefficient", "layers", "refused"),
    [(2, "pooled", 0.1, 3, True), (1, "pooled", 0.1, 3, False), (2, "previous", 0.1, 3, False),
     (2, "pooled", 0.0, 3, False), (2, "pooled", 0.1, 0, False)],
)  # fmt: skip
def test_pooled_counts_need_all_layers_at_once(
    pp: int, mode: str, coefficient: float, layers: int, refused: bool
) -> None:
    router = router_of(mode, coefficient)
    router.balance.num_layers = layers
    if not refused:
        refuse_pooled(router, pp)
        return
    with pytest.raises(ConfigError, match=f"pp={pp}"):
        refuse_pooled(router, pp)


def test_bytes_of_the_sums_of_a_step() -> None:
    balance = router_of("pooled").balance
    assert [each(balance).num_bytes for each in (pooled_counts, step_load)] == [24, 72]
    modes = ("carried", "head", "all")
    assert [loss_sum(of(mtp=mode)).num_bytes for mode in modes] == [24, 40, 40]  # type: ignore[arg-type]
    assert [norm_sum(of(mtp=mode)).num_bytes for mode in modes] == [8, 16, 8]  # type: ignore[arg-type]


# The MTP head

WEIGHTED = mw.pack(
    [[1, 2, 3], [4, 5], [6]], trained=[[0, 1, 1], [1, 1], [1]], length=8,
    fields={"weight": [[2.0, 3.0, 5.0], [7.0, 11.0], [13.0]]},
)  # fmt: skip


def test_labels_and_weights_of_the_next_token() -> None:
    assert WEIGHTED.labels.tolist() == [2, 3, -100, 5, -100, -100, -100, -100]
    assert next_labels(WEIGHTED).tolist() == [3, -100, -100, -100, -100, -100, -100, -100]
    made = next_weights(WEIGHTED)
    assert made is not None
    assert made.tolist()[:6] == [3, 5, 0, 11, 0, 0]
    assert next_weights(BATCH) is None


@pytest.mark.parametrize(("lo", "hi"), [(0, 6), (2, 6), (0, 2)])
def test_the_loss_of_the_head_is_divided_by_that_of_the_step(lo: int, hi: int) -> None:
    """The reported loss is unweighted, and each rank adds its own tokens."""
    batch = mw.pack([[1, 2, 3, 4, 5, 6]], fields={"weight": [[9.0, 1.0, 2.0, 4.0, 8.0, 9.0]]})
    training: Any = object.__new__(MtpTraining)
    training.model, training.weight = of(mesh=Mesh(range=(lo, hi))), 0.3
    logprobs, hits = -torch.tensor([1.0, 10, 100, 1000, 5, 5]), torch.tensor([True, False, True, True, True, True])
    loss, reported = training.loss(batch, (logprobs[lo:hi], hits[lo:hi]), MtpData(weight=20.0, num_targets=8))
    terms, right = [1.0, 20, 400, 8000, 0, 0], [1, 0, 1, 1, 0, 0]
    assert float(loss) == pytest.approx(0.3 * sum(terms[lo:hi]) / 20)
    assert reported.tolist() == pytest.approx([sum(terms[lo:hi]) / 20, sum(right[lo:hi]) / 8])
    loss, reported = training.loss(batch, (logprobs[lo:hi], hits[lo:hi]), MtpData())
    assert float(loss) == float(reported[0]) == 0
    plain, _ = training.loss(replace(batch, fields={}), (logprobs[lo:hi], hits[lo:hi]), MtpData(20.0, 8))
    assert float(plain) == pytest.approx(0.3 * sum([1, 10, 100, 1000, 0, 0][lo:hi]) / 20)


@pytest.mark.parametrize(
    ("mtp", "tied", "stages", "trainable", "looked_up"),
    [("head", False, [3], ["embed.weight", "a"], True), ("head", True, [3], ["embed.weight"], False),
     ("all", False, [3], ["embed.weight"], False), ("head", False, [0, 3], ["embed.weight"], False),
     ("head", False, [3], ["a"], False)],
)  # fmt: skip
def test_an_embedding_that_only_the_detached_head_uses(
    mtp: str, tied: bool, stages: list[int], trainable: list[str], looked_up: bool
) -> None:
    blueprint = of(module=of(tied=tied))
    model: Any = of(stages=[of(number=n) for n in stages], recipe=of(mtp=mtp), blueprint=blueprint, trainable=trainable)
    assert unreached_embedding(model) == ["embed.weight"] * looked_up


def test_norms_of_the_head_are_apart() -> None:
    model: Any = of(
        mesh=Mesh({"the norm": torch.tensor([7.0, 9.0], dtype=F64)}), owned={"a", "m"}, recipe=of(mtp="head")
    )
    grads = {"a": torch.tensor([1.0, 1.0]), "m": torch.tensor([4.0]), "b": torch.tensor([100.0])}
    norms = GradientNorms(model, frozenset({"m", "n"}))
    assert [[*group] for group in norms.groups(grads)] == [["a", "b"], ["m"]]
    assert norms.on_host(grads) == [3.0, 5.0]
    clip = norms.clip(torch.tensor([3.0, 5.0]), 2.0, lambda: None)
    assert (float(clip.norm), clip.max_norm, {name: float(x) for name, x in clip.apart.items()}) == (
        3.0, 2.0, {"m": 5.0, "n": 5.0}
    )  # fmt: skip
    one = GradientNorms(of(**{**vars(model), "mesh": Mesh()}), frozenset())  # type: ignore[arg-type]
    assert one.on_host(grads) == [pytest.approx(math.sqrt(18))]


# Scores of a loss


def test_scores_that_a_loss_gets_and_their_request() -> None:
    names = lambda want, **fields: Terms(of(), want).names(mw.Loss(lambda s, f: s, **fields))  # type: ignore[arg-type]  # noqa: E731
    assert names("logprobs") == ("logprobs",)
    assert names("entropy", candidates="ids", rest=True) == (
        "logprobs", "entropy", "candidate_logprobs", "rest_logprobs"
    )  # fmt: skip
    assert names("values", candidates="ids") == ("values", "candidate_logprobs")
    wanted = lambda **fields: Terms(of(), "logprobs").wanted(mw.Loss(lambda s, f: s, **fields), 0.7, True)  # type: ignore[arg-type]  # noqa: E731
    assert wanted() == Want("logprobs", True, 0.7, candidate_temperature=0.7)
    own = wanted(candidates="ids", candidate_temperature=2.0, rest=True)
    assert own == Want("logprobs", True, 0.7, 0, "ids", 2.0, True)


@pytest.mark.parametrize(
    ("want", "shape"),
    [
        (Want("logits"), (12, 33)), (Want("top_logprobs", num_top=5), (4, 5, 2)), (Want("hidden"), (4, 36)),
        (Want("values"), (4, 7)), (Want("entropy"), (4, 2)), (Want("logprobs"), (4,)),
    ],
)  # fmt: skip
def test_shapes_of_scores_on_stages_without_the_head(
    monkeypatch: pytest.MonkeyPatch, want: Want, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(inference, "vocab_slice_size", lambda _: 33)
    module = of(shape=of(width=36, labels=of(num=7)))
    model: Any = of(mesh=Mesh(axes=Axes(cp=2, tp=3)), blueprint=of(module=module))
    assert inference._scores_shape(model, 24, want) == shape
    module.shape.labels.num = 1
    assert inference._scores_shape(model, 24, Want("values")) == (4,)


@pytest.mark.parametrize(("dtype", "wide"), [(torch.bfloat16, torch.float32), (F64, F64)])
def test_scores_of_the_last_stage_reach_all(dtype: torch.dtype, wide: torch.dtype) -> None:
    others = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    model: Any = of(mesh=Mesh({inference.SCORES.name: others}), dtype=dtype)
    made = inference._from_last_stage(model, [], (2, 2))
    assert (made.tolist(), made.dtype) == (others.tolist(), wide)
    model.mesh.others = {}
    results = [torch.ones(2, dtype=dtype), torch.full((2,), 2.0, dtype=dtype)]
    made = inference._from_last_stage(model, results, (2, 2))
    assert (made.tolist(), made.dtype) == ([[1, 1], [2, 2]], wide)
    assert inference._from_last_stage(model, results[:1], (1, 2)).tolist() == [[1, 1]]


@pytest.mark.parametrize(
    ("known", "want", "names"),
    [
        (("logprobs", "entropy", "top_logprobs"), "entropy", ["logprobs", "entropy"]),
        (("values",), "values", ["values"]), (("hidden",), "hidden", ["hidden"]),
    ],
)  # fmt: skip
def test_scores_are_those_of_the_head(
    monkeypatch: pytest.MonkeyPatch, known: tuple[str, ...], want: str, names: list[str]
) -> None:
    """A column for each name; one batch gives no list."""

    def whole(model: Any, batches: list[Any], made: Want, call: str) -> list[Tensor]:
        assert (made, call) == (Want(want, temperature=0.7), "scores")
        shape = (3, 2) if len(names) > 1 else (3,)
        return [torch.arange(float(math.prod(shape))).view(shape) + 10 * at for at in range(len(batches))]

    monkeypatch.setattr(inference, "check_is_model", lambda _: None)
    monkeypatch.setattr(inference, "_whole_scores", whole)
    model: Any = of(blueprint=of(scores=known))
    one, two = inference.scores(model, [BATCH, BATCH], temperature=0.7)
    assert [*one] == [*two] == names
    assert two[names[-1]].tolist() == ([11, 13, 15] if len(names) > 1 else [10, 11, 12])
    assert one[names[0]].tolist() == ([0, 2, 4] if len(names) > 1 else [0, 1, 2])
    assert [*inference.scores(model, BATCH, temperature=0.7)] == names


def test_padding_of_the_last_slice_of_a_vocabulary_is_cut_off() -> None:
    """Slices of 3, 3 and 1: this rank has the last."""
    sent: list[Tensor] = []

    def gather_rows(x: Tensor, axes: tuple[str, ...]) -> Tensor:
        assert axes == ("tp",)
        sent.append(x)
        return torch.cat([torch.arange(12.0).view(6, 2), x])

    model: Any = of(blueprint=of(vocab=7), mesh=Mesh(axes=Axes(tp=3), gather_rows=gather_rows))
    made = inference.gather_vocabulary(model, torch.tensor([[12.0], [13.0]]))
    assert sent[0].tolist() == [[12, 13], [0, 0], [0, 0]]
    assert made.tolist() == [[*range(0, 13, 2)], [*range(1, 14, 2)]]


# Samples


def sampler_of(**mesh: Any) -> Any:
    return of(mesh=Mesh(**mesh), blueprint=of(module=of(tower=None)))


def test_sequences_are_padded_for_the_next_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_FIRST_ROOM", 2)
    generated = [[4], [8, 9, 3]]
    batch = sampling._pack_sequences(sampler_of(axes=Axes(cp=2, tp=2)), [[7], [5, 6]], generated, sampling.Decoding(3))
    assert batch.bounds == (0, 4, 9, 12)
    assert batch.tokens.tolist() == [7, 4, 0, 0, 5, 6, 8, 9, 3, 0, 0, 0]
    assert batch.is_target_T.nonzero()[:, 0].tolist() == [1, 8]
    assert [sampling._room(num, 100) for num in (0, 2, 3, 4, 5)] == [2, 2, 4, 4, 8]


@pytest.mark.parametrize("rank", [0, 1])
def test_logits_of_prompts_come_from_the_rank_with_their_last_tokens(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Tokens 2, 3 and 6 have labels: the first two are on cp rank 0."""
    batch = mw.pack([[1, 2, 3], [4], [5, 6, 7, 8]], labels=[[-100, -100, 0], [0], [-100, -100, 0, -100]])
    own = torch.tensor([[5.0, 6.0]] if rank else [[1.0, 2.0], [3.0, 4.0]])
    monkeypatch.setattr(sampling.parallel, "run_forward", lambda *_: [own])
    monkeypatch.setattr(sampling, "vocab_slice_size", lambda _: 2)
    monkeypatch.setattr(sampling, "gather_vocabulary", lambda _, local_PV: local_PV)
    model = of(
        mesh=Mesh(axes=Axes(cp=2), coords={"cp": rank}), dtype=torch.bfloat16, blueprint=of(module=of(tower=None))
    )
    logits_PV = sampling._next_logits(model, batch)  # type: ignore[arg-type]
    assert logits_PV.dtype == torch.float32
    assert logits_PV.tolist() == ([[1, 2], [3, 4], [0, 0]] if rank == 0 else [[0, 0], [0, 0], [5, 6]])
    model.blueprint.module.tower = of(ids=(1,))
    assert sampling._next_logits(model, batch)[:, 1].tolist() == [-math.inf] * 3  # type: ignore[arg-type]


def test_a_draw_depends_on_the_seed_and_the_prompt() -> None:
    draws = {
        torch.rand(1, generator=sampling._generator(*each)).item()
        for each in ((0, 0), (0, 1), (1, 0), (1, 1), (1, 11), (11, 1))
    }
    assert len(draws) == 6
    logits_PV = torch.tensor([[1.0, 3.0, 2.0], [5.0, 0.0, 4.0]])
    assert sampling._choose(logits_PV, sampling.Decoding(1), []).tolist() == [1, 0]
    greedy = [sampling.Decoding(1, *each).is_greedy for each in ((), (0.9,), (None, 1.0), (0.9, 0.5))]
    assert greedy == [True, False, False, False]


# Batches


def test_the_longest_documents_are_placed_first() -> None:
    """Units of 3, 7 (two documents), 5, 2 and 5 tokens in batches of 8."""
    units, sizes = [[0], [1, 4], [2], [3], [5]], [3, 4, 5, 2, 3, 5]
    assert batching._bins(units, sizes, 8, "length") == [[1, 4], [2, 0], [5, 3]]
    with pytest.raises(mw.DataError, match=r"the group of documents \[1, 4\] of 7 tokens does not fit into length=6"):
        batching._bins(units, sizes, 6, "length")
    with pytest.raises(mw.DataError, match="document 2 of 5 tokens"):
        batching._bins([*units[:1], *units[2:]], sizes, 4, "length")


@pytest.mark.parametrize(
    ("length", "max_tokens", "share", "expected"),
    [(12, None, 4, 12), (None, 15, 4, 12), (None, 4, 4, 4), (4, None, 4, 4), (14, None, 4, "choose 16"),
     (None, 3, 4, "less than"), (0, None, 4, "less than"), (8, 8, 4, "either"), (None, None, 4, "either"),
     (8.0, None, 4, "whole"), (None, True, 1, "whole")],
)  # fmt: skip
def test_the_tokens_of_a_batch_divide_over_its_ranks(length: Any, max_tokens: Any, share: int, expected: Any) -> None:
    if isinstance(expected, int):
        assert batching._check_length(length, max_tokens, share) == expected
        return
    with pytest.raises(mw.DataError, match=expected):
        batching._check_length(length, max_tokens, share)


def test_padding_alone_is_no_document() -> None:
    whole = mw.pack([[1, 2], [3]], fields={"x": [[[1.0, 2.0]] * 2, [[3.0, 4.0]]], "n": [[1, 2], [3]]})
    empty = batching._empty_batch(whole, 5)
    assert (len(empty), empty.num_documents, empty.num_filler, empty.num_targets) == (5, 0, 5, 0)
    assert {name: (tuple(x.shape), x.dtype) for name, x in empty.fields.items()} == {
        "x": ((5, 2), torch.float32), "n": ((5,), torch.int64)
    }  # fmt: skip
    batch = mw.Batch(torch.arange(6), torch.arange(6), (0, 2, 3, 6), num_filler=3, numbers=(4, 0))
    assert batching._number_of_tokens(batch).tolist() == [5, 5, 1, 0, 0, 0]
    assert batching._units(mw.pack([[1], [2], [3], [4]], groups=[7, 2, 7, 5])) == [[0, 2], [1], [3]]


# Adapters


def test_modules_without_adapters_are_named_in_every_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    param = lambda name, *layouts, adapter=False: of(  # noqa: E731 - short
        name=name, adapter=adapter, layouts=[of(keys=keys) for keys in layouts]
    )
    monkeypatch.setattr(adapters, "_pairs_by_base", lambda _: {"q.weight": 1})
    table = [param("q.weight", ["q.weight"]), param("q.lora.a", ["x"], adapter=True)]
    table.append(param("o", ["o.weight"], ["o1.weight", "b"]))
    assert adapters._plain_modules(of(table=table)) == ["o", "o1", "b"]  # type: ignore[arg-type]
