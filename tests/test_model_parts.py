"""Parts of a model: stages, adapters, linear layers, the layouts of their files, and what a head scores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import ops
from meshwright.errors import ConfigError
from meshwright.models import describe
from meshwright.models.decoder import Decoder, Embedding, LanguageHead, Tied, Want
from meshwright.models.linear import ALL, Linear, WideLinear, _is_whole, joined
from meshwright.models.lora import Adapter, ExpertAdapter, factor_key, modules_of
from meshwright.models.lora_targets import _matches, adapters_of, without_adapters
from meshwright.models.ngram_embedding import _in_parts
from meshwright.models.qwen3 import Attention, halves
from meshwright.models.qwen3_moe import fused, per_expert, turned
from meshwright.models.router_balance import Balance
from meshwright.recipe import ALL_LINEAR, Lora, Recipe
from meshwright.sharding import Box, Init
from tests import seeing
from tests.tiny import ODD


def model_of(name: str, recipe: Recipe = Recipe(), keys: Any = (), **changes: Any) -> Decoder:
    return describe({**ODD[name], **changes}, "model.", recipe, keys)[0]


@pytest.mark.parametrize(("tied", "mtp"), [(False, False), (True, False), (False, True), (True, True)])
def test_parts_have_the_ends_that_they_need(tied: bool, mtp: bool) -> None:
    recipe = Recipe(mtp="all") if mtp else Recipe()
    model = model_of("qwen3_5", recipe, tie_word_embeddings=tied)
    first, middle, last = (model.part([n], first=n == 0, last=n == 2) for n in range(3))
    assert [list(part.layers) for part in (first, middle, last)] == [["0"], ["1"], ["2"]]
    assert all(part.layers[str(n)] is model.layers[str(n)] for n, part in enumerate((first, middle, last)))
    assert first.embed is model.embed
    assert middle.embed is None
    assert (first.head, middle.head, last.head) == (None, None, model.head)
    wanted = type(model.embed) if mtp else Tied if tied else type(None)
    assert type(last.embed) is wanted
    assert wanted is type(None) or last.embed.weight is model.embed.weight
    assert [part.mtp is not None for part in (first, middle, last)] == [False, False, mtp]
    assert {part.tied for part in (first, middle, last)} == {tied}
    alone = model.with_layers([2, 0])
    assert (list(alone.layers), alone.embed, alone.head, alone.tower) == (["2", "0"], model.embed, model.head, None)
    assert len(model.every_layer) == 3 + mtp
    assert model.vocabulary == ("embed.weight" if tied else "head.weight")


@pytest.mark.parametrize(
    ("name", "changes", "recipe", "units", "kept"),
    [
        ("qwen3", {}, {}, ["embed", "layers.0", "layers.1", "head"], ["", "head"]),
        ("qwen3", dict(tie_word_embeddings=True), {}, ["layers.0", "layers.1"], ["", "layers.1"]),
        (
            "qwen3_5", {}, dict(mtp="head"), ["embed", *(f"layers.{n}" for n in range(3)), "head.mtp", "head"],
            ["", "head", "head.mtp", "embed"],
        ),
        (
            "qwen3_5", dict(tie_word_embeddings=True), dict(mtp="all"),
            [*(f"layers.{n}" for n in range(3)), "head.mtp"], ["", "head.mtp"],
        ),
    ],
)  # fmt: skip
def test_units_and_those_that_stay_gathered(name: str, changes: Any, recipe: Any, units: Any, kept: Any) -> None:
    model = model_of(name, Recipe(**recipe), **changes)
    names = {module: name for name, module in model.named_modules()}
    assert [names[unit] for unit in model.units()] == units
    assert {names[unit] for unit in model.kept_units()} == {*kept}


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5"])
def test_a_tower_is_on_the_first_stage(name: str) -> None:
    model, table = describe(seeing.ODD[name], "model.language_model.", Recipe(tower=True))
    assert model.part([0], first=True, last=False).tower is model.tower
    assert model.part([1], first=False, last=True).tower is None
    assert model.with_layers([0]).tower is None
    assert model.tower is not None
    names = {module: name for name, module in model.named_modules()}
    deep = [["tower.deep.0"], [], ["tower.deep.1"]] if name == "qwen3_vl" else [[]] * 3
    blocks = [each for n in range(3) for each in (f"tower.blocks.{n}", *deep[n])]
    assert [names[unit] for unit in model.tower.units()] == ["tower.patches", *blocks, "tower.merger"]
    assert model.tower.insert.width == 36 * (1 + 2 * (name == "qwen3_vl"))
    assert model.shape.sections == ((2, 2, 2) if name == "qwen3_vl" else (1, 1, 1))
    assert table.num_first_layers == (2 if name == "qwen3_vl" else 1)
    assert all(param.first for param in table if param.name.startswith("tower."))
    places = model.tower.is_place(torch.tensor([seeing.IMAGE, seeing.VIDEO, seeing.START, 0]))
    assert places.tolist() == [True, True, False, False]
    model.compute_in(torch.bfloat16)
    assert {model.embed.compute, model.tower.compute} == {torch.bfloat16}
    assert [param.layer for param in table if param.name.startswith("layers.2.")][:1] == [2]


@pytest.mark.parametrize(
    ("head", "tied", "keys", "carried"),
    [
        ("lm", False, (), set()), ("value", False, (), {"lm_head.weight"}), ("value", True, (), set()),
        ("none", False, (), {"lm_head.weight", "score.weight", "score.bias"}),
        ("none", True, (), {"score.weight", "score.bias"}),
    ],
)  # fmt: skip
def test_heads_that_are_dropped_are_carried(head: str, tied: bool, keys: Any, carried: set[str]) -> None:
    model, table = describe({**ODD["qwen3"], "tie_word_embeddings": tied}, "model.", Recipe(head=head), keys)
    assert {*table.carried} == carried
    assert [param.name for param in table if param.both_ends] == (["embed.weight"] if tied and head == "lm" else [])
    assert model.vocabulary == ("" if head != "lm" else "embed.weight" if tied else "head.weight")


def test_what_is_declared_is_not_carried() -> None:
    tower = {*describe(seeing.ODD["qwen3_5"], "model.language_model.", Recipe(tower=True))[1].carried}
    assert tower == {"mtp.*"}
    mtp = describe(ODD["qwen3_5"], "model.", Recipe(mtp="all"))[1]
    assert {*mtp.carried} == {"model.visual.*"}
    assert mtp["embed.weight"].both_ends
    assert all(param.optional for param in mtp if param.name.startswith("head.mtp."))
    has = describe(ODD["qwen3_5"], "model.", Recipe(mtp="all"), ("mtp.fc.weight",))[1]
    assert not any(param.optional for param in has)
    assert {param.layer for param in has if param.name.startswith("head.mtp.")} == {None}
    biased = describe(ODD["qwen3"], "model.", Recipe(head="value"), ("score.weight", "score.bias"))[1]
    assert {"head.bias", "head.weight"} <= biased.params.keys()


def test_the_router_of_an_mtp_head_has_a_weighted_balance_of_its_own() -> None:
    given = dict(router_aux_loss_coef=0.5, output_router_logits=True)
    model = model_of("qwen3_5_moe", Recipe(mtp="head", mtp_weight=0.25), **given)
    assert model.mtp is not None
    assert (model.balance.coefficient, model.mtp.balance.coefficient) == (0.5, 0.125)
    assert (model.balance.num_layers, model.mtp.balance.num_layers) == (3, 1)
    assert model.mtp.detached
    assert not model_of("qwen3_5_moe", Recipe(mtp="all")).mtp.detached
    groups = {param.group for param in describe(ODD["qwen3_5_moe"], "model.", Recipe(mtp="all"))[1]}
    assert groups == {"", "experts", "mtp.experts"}


def test_candidates_are_those_of_a_micro_batch() -> None:
    ids = torch.tensor([[3]])
    assert Want("logprobs", candidates="ids").of({"ids": ids}).ids_TK is ids
    assert Want("logprobs").of({"ids": ids}).ids_TK is None


class Draw(nn.Module):
    """Linear layers with numbers."""

    def __init__(self, *given: Linear) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linears = nn.ModuleList(given)
        for module in self.modules():
            for name, declared in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(torch.randn(declared.shape)))


def linear(rows: int, *, bias: bool = False) -> Linear:
    return Linear({"out": rows}, {"embed": 5}, 0.02, key="model.x", bias=bias)


def adapted(base: Linear, scale: float) -> Linear:
    base.lora = Adapter(base.weight.param, Lora(rank=2, alpha=2 * scale))
    return base


def by_hand(x: Tensor, base: Linear, rows: slice = ALL) -> Tensor:
    y = x @ base.weight[rows].T + (0 if base.bias is None else base.bias[rows])
    return y if base.lora is None else y + base.lora.scale * (x @ base.lora.a.T) @ base.lora.b[rows].T


@pytest.mark.parametrize("rows", [ALL, slice(1, 3), slice(0, 4)])
def test_joined_products_are_those_of_each_layer(rows: slice) -> None:
    one, two, three = Draw(adapted(linear(3), 1.5), linear(4), adapted(linear(4), 0.5)).linears
    x = torch.randn(7, 5)
    parts = ((one, ALL), (two, rows), (three, rows))
    for y, (base, some) in zip(joined(x, *parts), parts, strict=True):
        torch.testing.assert_close(y, by_hand(x, base, some))
    with without_adapters([one]):
        torch.testing.assert_close(joined(x, *parts)[0], x @ one.weight.T)
        torch.testing.assert_close(joined(x, *parts)[2], by_hand(x, three, rows))
        torch.testing.assert_close(one(x), x @ one.weight.T)
    torch.testing.assert_close(one(x), by_hand(x, one))
    biased = Draw(linear(3, bias=True), linear(4, bias=True)).linears
    for y, base, some in zip(joined(x, (biased[0], ALL), (biased[1], rows)), biased, (ALL, rows), strict=True):
        torch.testing.assert_close(y, by_hand(x, base, some))


@pytest.mark.parametrize(
    ("rows", "result"), [(ALL, True), (slice(0, 4), True), (slice(0, 3), False), (slice(1, 4), False)]
)
def test_all_rows_of_a_matrix(rows: slice, result: bool) -> None:
    assert _is_whole(rows, torch.empty(4, 2)) == result


def test_products_in_fp8_join_apart_and_know_their_blocks() -> None:
    plain, quantised = linear(3), linear(4)
    assert plain.fp8("weight") is False
    quantised.in_fp8 = frozenset({"weight"})
    assert quantised.fp8("weight") == (None,)
    assert quantised.fp8("other") is False
    quantised.blocks["weight"] = blocks = object()
    assert quantised.fp8("weight") == (blocks,)
    assert plain.matrix is plain.weight
    plain.grids["weight"] = grid = object()
    assert (type(plain.matrix), plain.matrix.grid) == (ops.FrozenWeight, grid)
    assert plain.as_operand("other", plain.weight) is plain.weight
    wide = WideLinear({"out": 2}, {"embed": 5}, 0.02, key="model.x").of_matrices(out=(1, 1))
    assert (wide.weight.param.low, wide.weight.param.matrices) == (False, {"out": (1, 1)})
    assert (plain.weight.param.low, plain.weight.param.matrices) == (True, {})


def test_adapters_lie_beside_their_base() -> None:
    model, table = describe(ODD["qwen3_moe"], "model.", Recipe(lora=Lora(rank=3, alpha=6, expert_rank=5, b_std=0.5)))
    a, b = (table[f"layers.1.mlp.gate_up.lora.{x}"] for x in "ab")
    assert (a.rows, a.cols, b.rows, b.cols) == (
        {"half": 2, "rank": 3}, {"embed": 36}, {"half": 2, "ffn": 44}, {"rank": 3},
    )  # fmt: skip
    assert (a.init, b.init) == (Init("uniform", 36**-0.5), Init("normal", 0.5))
    assert [(p.layer, p.first, p.decay, p.adapter) for p in (a, b)] == [(1, False, False, True)] * 2
    at = "base_model.model.model.layers.1.mlp"
    assert a.layouts[0].keys == {f"{at}.{x}_proj.lora_A.weight": (3, 36) for x in ("gate", "up")}
    assert b.layouts[0].keys == {f"{at}.{x}_proj.lora_B.weight": (44, 3) for x in ("gate", "up")}
    assert [block.ours for block in a.layouts[0].blocks] == [Box((n, 0, 0), (n + 1, 3, 36)) for n in (0, 1)]
    assert [block.ours for block in b.layouts[0].blocks] == [Box((n, 0, 0), (n + 1, 44, 3)) for n in (0, 1)]
    ea, eb = (table[f"layers.0.mlp.experts.down_lora.{x}"] for x in "ab")
    assert (ea.rows, ea.cols) == ({"expert": 8, "rank": 5}, {"expert_ffn": 20})
    assert (eb.rows, eb.cols) == ({"expert": 8, "embed": 36}, {"rank": 5})
    assert [*ea.layouts[0].keys] == ["base_model.model.model.layers.0.mlp.experts.down_proj.lora_A.weight"]
    o = table["layers.2.mixer.o.lora.a"]
    assert (o.rows, o.cols, o.init) == ({"rank": 3}, {"heads": 4, "head": 10}, Init("uniform", 40**-0.5))
    assert {each.scale for each in adapters_of(model)} == {2.0}
    assert len(adapters_of(model.layers["1"])) == 6
    assert modules_of(table["layers.1.mlp.gate_up.weight"]) == [f"model.layers.1.mlp.{x}_proj" for x in ("gate", "up")]
    assert factor_key("x", "B") == "base_model.model.x.lora_B.weight"
    plain = describe(ODD["qwen3_moe"], "model.", Recipe(lora=Lora(rank=3)))[1]
    assert plain["layers.0.mlp.experts.down_lora.a"].rows["rank"] == 3
    assert plain["layers.0.mlp.experts.down_lora.b"].init == Init("zeros")


def test_b_of_a_delta_net_is_reordered_as_its_base() -> None:
    table = describe(ODD["qwen3_5"], "model.", Recipe(lora=Lora(rank=3, targets=["in_proj_qkv"])))[1]
    base, b = table["layers.0.mixer.qkv.weight"], table["layers.0.mixer.qkv.lora.b"]
    for ours, of_base in zip(b.layouts[0].blocks, base.layouts[0].blocks, strict=True):
        assert ours.ours.slices[:2] == of_base.ours.slices[:2]
        assert (ours.source.start, ours.source.stop) == ((of_base.source.start[0], 0), (of_base.source.stop[0], 3))
        assert (ours.ours.shape[2], ours.shape) == (3, (of_base.shape[0], 3))


@pytest.mark.parametrize(
    ("target", "name", "result"),
    [
        (ALL_LINEAR, "a.b", True), ("b", "a.b", True), ("a.b", "a.b", True), ("b", "a.bb", False), ("b", "a.xb", False),
        ("*.1.*", "m.1.q", True), ("*.1.*", "m.11.q", False), ("M.*", "m.1", False),
        ("gate_up_proj", "m.experts.gate_proj", True), ("gate_up_proj", "m.experts.down_proj", False),
        ("gate_up_proj", "m.mlp.gate_proj", False), ("experts.0.up_proj", "m.experts.up_proj", True),
        ("*.experts.*.down_proj", "m.experts.down_proj", True), ("experts.1.up_proj", "m.experts.up_proj", False),
    ],
)  # fmt: skip
def test_targets_of_adapters(target: str, name: str, result: bool) -> None:
    assert _matches(target, name) == result


@pytest.mark.parametrize(
    ("targets", "message"),
    [(["gate_proj"], "name .*gate_proj without .*up_proj"), (["q_proj", "z_proj"], "z_proj match no linear layer")],
)
def test_targets_that_would_leave_something_out_are_refused(targets: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_of("qwen3", Recipe(lora=Lora(targets=targets)))
    model = model_of("qwen3", Recipe(lora=Lora(targets=["gate_proj", "up_proj", "*.1.*.q_proj"])))
    with_adapter = [name for name, module in model.named_modules() if isinstance(module, Adapter)]
    assert with_adapter == ["layers.0.mlp.gate_up.lora", "layers.1.mixer.q.lora", "layers.1.mlp.gate_up.lora"]
    model = model_of("qwen3_moe", Recipe(lora=Lora(targets=["experts.0.down_proj"])))
    with_adapter = [name for name, module in model.named_modules() if isinstance(module, ExpertAdapter)]
    assert with_adapter == [f"layers.{n}.mlp.experts.down_lora" for n in (0, 2)]


def test_adapters_are_on_again_after_an_error() -> None:
    model = model_of("qwen3_moe", Recipe(lora=Lora()))
    adapters = adapters_of(model)
    experts = next(each for each in adapters if isinstance(each, ExpertAdapter))
    seen = []

    def fail() -> None:
        with without_adapters(model.layers.values()):
            seen.append([each.on for each in adapters])
            seen.append(experts.factors(8))
            raise KeyError

    with without_adapters([model.layers["0"]]):
        with without_adapters([model]):
            pass
        assert {each.on for each in adapters_of(model.layers["0"])} == {False}, "the outer context goes on"
        assert {each.on for each in adapters_of(model.layers["1"])} == {True}
    with pytest.raises(KeyError):
        fail()
    assert seen == [[False] * len(adapters), None]
    assert all(each.on for each in adapters)
    factors = experts.factors(8)
    assert factors is not None
    assert (factors.a_ErI.shape[0], factors.b_EOr.shape[0], factors.scale) == (8, 8, experts.scale)


def test_layouts_of_experts_halves_and_tables() -> None:
    pairs = per_expert("m.", 3, 5, 7, ("gate", "up"))
    assert [*pairs.keys] == [f"m.{e}.{x}.weight" for e in range(3) for x in ("gate", "up")]
    assert pairs.blocks[3].ours == Box((1, 1, 0, 0), (2, 2, 5, 7))
    assert per_expert("m.", 3, 5, 7, ("down",)).blocks[2].ours == Box((2, 0, 0), (3, 5, 7))
    both, down = fused("k", (3, 2, 5, 7)), fused("k", (3, 1, 5, 7))
    assert (both.keys, both.blocks[0].ours.shape) == ({"k": (3, 10, 7)}, (3, 2, 5, 7))
    assert (down.keys, down.blocks[0].ours.shape) == ({"k": (3, 5, 7)}, (3, 5, 7))
    assert (turned(both).keys, turned(both).blocks[0].turned) == ({"k": (3, 7, 10)}, True)
    assert [(b.key, b.ours) for b in halves("m.", 5, 7).blocks] == [
        (f"m.{x}_proj.weight", Box((n, 0, 0), (n + 1, 5, 7))) for n, x in enumerate(("gate", "up"))
    ]
    assert [(b.key, b.ours, b.shape) for b in _in_parts("k.", 6, 7, 2).blocks] == [
        (f"k.ngram_embedding.shard_{n}.weight", Box((3 * n, 0), (3 * n + 3, 7)), (3, 7)) for n in range(2)
    ]


@pytest.mark.parametrize(
    ("start", "stop", "kv_start", "kv_stop", "rows"),
    [(0, 12, 0, 3, (0, 3)), (4, 8, 0, 3, (1, 2)), (6, 9, 0, 3, (1, 3)), (8, 12, 2, 3, (0, 1)), (3, 4, 0, 3, (0, 1))],
)
def test_kv_heads_that_the_query_heads_of_a_rank_use(
    start: int, stop: int, kv_start: int, kv_stop: int, rows: Any
) -> None:
    """12 query heads, 3 kv heads of 10 dims: each serves 4."""
    model = model_of("qwen3", num_attention_heads=12, num_key_value_heads=3)
    mixer = model.layers["0"].mixer
    assert isinstance(mixer, Attention)
    mixer.heads.start, mixer.heads.stop, mixer.kv.start, mixer.kv.stop = start, stop, kv_start, kv_stop
    assert mixer.kv_rows() == slice(10 * rows[0], 10 * rows[1])
    x_TGK = torch.arange(rows[1] - rows[0])[None, :, None].expand(2, -1, 10)
    if (start, stop) == (6, 9):  # heads 6 and 7 share a kv head, 8 has another
        assert mixer.shared(x_TGK)[0, :, 0].tolist() == [0, 0, 1]
    else:
        assert mixer.shared(x_TGK) is x_TGK


def test_loads_of_a_router_leave_padding_out() -> None:
    balance = Balance(4, 2, 0.5)
    assert (balance.join(), balance.join(), balance.num_layers) == (0, 1, 2)
    given = torch.tensor([[[0, 1], [2, 3]], [[1, 2], [3, 0]], [[-1, -1], [-1, -1]]])
    balance.begin(torch.tensor([True, True, False]), given)
    assert balance.given(1).tolist() == [[2, 3], [3, 0], [-1, -1]]
    experts, logits = torch.tensor([[0, 1], [1, 2], [3, 3]]), torch.zeros(3, 4)
    weights = torch.tensor([[0.5, 0.5]] * 3, requires_grad=True)
    logits[1, 3] = 50.0
    logits.requires_grad_()
    out = balance.watch(1, weights, logits, experts)
    assert balance.counts[1].tolist() == [1, 2, 1, 0]
    assert balance.probs[1].tolist() == pytest.approx([0.25, 0.25, 0.25, 1.25])
    balance.slope_E = torch.zeros(4)
    out.sum().backward()
    assert weights.grad.tolist() == [[1.0, 1.0]] * 3
    assert balance.chosen is None
    balance.chosen = {}
    balance.coefficient = 0.0
    assert balance.watch(0, weights, logits, experts) is weights
    assert balance.chosen[0].tolist() == experts.tolist()
    balance.watch(0, weights, logits, experts.flip(1))
    assert balance.chosen[0].tolist() == experts.flip(1).tolist(), "those of the last forward"
    balance.watch(2, weights, logits, experts)
    balance.watch(3, weights, logits, torch.zeros_like(experts))
    assert [balance.counts[layer].tolist() for layer in (0, 1, 2, 3)] == [[1, 2, 1, 0]] * 3 + [[4, 0, 0, 0]]
    balance.begin(torch.tensor([True]))
    assert (balance.given(0), balance.counts, balance.probs) == (None, {}, {})


def head_with_numbers() -> LanguageHead:
    """Return the head of a rank that has the words 5 to 17."""
    head = model_of("qwen3").head
    assert isinstance(head, LanguageHead)
    torch.manual_seed(4)
    head.norm = nn.Identity()
    head.weight = nn.Parameter(torch.randn(13, 6, dtype=torch.float64))
    head.vocab.start = 5
    return head


def test_scores_of_a_head_whose_first_word_is_not_the_first() -> None:
    head, x = head_with_numbers(), torch.randn(4, 6, dtype=torch.float64)
    labels = torch.tensor([5, -100, 9, 17])
    logps = (x @ head.weight.T / 0.5).log_softmax(-1)
    logprobs, entropy = head(x, labels.clamp(min=5), Want("entropy", temperature=0.5), None)
    torch.testing.assert_close(logprobs, logps.gather(1, (labels.clamp(min=5) - 5)[:, None])[:, 0])
    torch.testing.assert_close(entropy, -(logps.exp() * logps).sum(-1))
    best, ids = head(x, labels, Want("top_logprobs", num_top=1, temperature=0.5), None)
    assert ids.tolist() == (5 + logps.argmax(-1, keepdim=True)).tolist()
    torch.testing.assert_close(best, logps.amax(-1, keepdim=True))
    assert head.meet.floats, "the numbers of slices travel in float32"
    (logits,) = head(x, torch.tensor([0, -100, 9, 17]), Want("target_logits"), None)
    torch.testing.assert_close(logits, (x @ head.weight.T)[[0, 2, 3]])


def test_the_first_word_is_a_candidate_and_a_negative_one_is_none() -> None:
    head, x = head_with_numbers(), torch.randn(2, 6, dtype=torch.float64)
    head.vocab.start = 0
    ids = torch.tensor([[0, -1], [12, 0]])
    want = Want("logprobs", ids_TK=ids, temperature=3.0, candidate_temperature=0.5, rest=True)
    logprobs, of_candidates, rest = head(x, torch.tensor([3, 4]), want, None)
    logps = (x @ head.weight.T / 0.5).log_softmax(-1)
    torch.testing.assert_close(of_candidates, logps.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0))
    torch.testing.assert_close(rest[0], logps[0, 1:].logsumexp(-1))
    torch.testing.assert_close(rest[1], logps[1, 1:12].logsumexp(-1))
    torch.testing.assert_close(logprobs[0], (x @ head.weight.T / 3.0).log_softmax(-1)[0, 3])


@pytest.mark.parametrize("detached", [True, False])
def test_the_mtp_head_is_scored_at_temperature_1(detached: bool) -> None:
    head, x, z = head_with_numbers(), *(torch.randn(2, 6, dtype=torch.float64) for _ in range(2))
    labels, next_labels = torch.tensor([6, 7]), torch.tensor([8, 9])
    predict = lambda *_: (z, next_labels, detached)  # noqa: E731 - short
    logps, next_logps, is_likeliest = head(x, labels, Want("logprobs", mtp=True, temperature=0.5), None, predict)
    all_logits = [each @ head.weight.T for each in (x / 0.5, z)]
    for got, logits, wanted in zip((logps, next_logps), all_logits, (labels, next_labels), strict=True):
        torch.testing.assert_close(got, logits.log_softmax(-1).gather(1, wanted[:, None] - 5)[:, 0])
    assert is_likeliest.tolist() == (5 + all_logits[1].argmax(-1) == next_labels).tolist()
    assert next_logps.requires_grad is not detached


def drawn(module: nn.Module) -> None:
    """Give the declared parameters of a module numbers."""
    torch.manual_seed(5)
    for part in module.modules():
        for name, declared in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(torch.randn(declared.shape), requires_grad=False))


@pytest.mark.parametrize(("lengths", "chooses"), [((20, 3), True), ((3, 20), True), ((7, 7), False), ((6, 8), True)])
def test_blocks_are_chosen_if_any_document_has_more_than_the_budget(lengths: Any, chooses: bool) -> None:
    """A block has 2 tokens, and a query sees 3 blocks."""
    mixer, docs = model_of("qwen4_exp").layers["2"].mixer, ops.documents(lengths, "cpu")
    drawn(mixer.indexer)
    rope = ops.rope_tables(docs.positions_T, mixer.indexer.rotary)
    choice = mixer.indexer(torch.randn(docs.bounds[-1], 32), rope, docs)
    assert (choice is not None) == chooses


def test_short_documents_of_sparse_attention_begin_at_the_tokens_of_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    mixer, seen = model_of("qwen4_exp").layers["2"].mixer, []
    monkeypatch.setattr(type(mixer.indexer), "forward", lambda *_: None)
    mixer.swap.group = 2
    monkeypatch.setattr(ops, "attention", lambda *given: seen.append(given[4]))
    mixer.attend(torch.zeros(4, 32), None, None, (torch.zeros(4, 1, 2),) * 3)
    assert seen == [8]


def test_blocks_of_documents_with_images_are_rotated_where_rope_sees_their_first_token() -> None:
    indexer = model_of("qwen4_exp").layers["2"].mixer.indexer
    drawn(indexer)
    docs = ops.documents((6, 4), "cpu")
    blocks, keys_Sd = ops.blocks_of(docs.positions_T, 2), torch.randn(10, 12)
    turns = docs.positions_T[:, None].expand(-1, 3)
    plain = indexer.keys(keys_Sd, blocks, docs)
    means = ops.rms_norm(keys_Sd.view(5, 2, 12).mean(1), indexer.k_norm, indexer.eps, zero_centred=True)
    rope = ops.rope_tables(torch.tensor([0, 2, 4, 0, 2]), indexer.rotary)
    torch.testing.assert_close(plain, ops.rotate(means[:, None], *rope)[:, 0])
    torch.testing.assert_close(indexer.keys(keys_Sd, blocks, replace(docs, turns_T3=turns)), plain)
    later = indexer.keys(keys_Sd, blocks, replace(docs, turns_T3=turns + torch.tensor([0, 7, 0])))
    assert (later - plain).abs().amax(1).min() > 1e-2


def test_a_rank_embeds_the_words_that_it_has() -> None:
    embed = model_of("qwen3").embed
    assert isinstance(embed, Embedding)
    embed.weight = nn.Parameter(torch.arange(1.0, 9.0).view(4, 2))
    embed.vocab.start, embed.vocab.stop = 3, 7
    x = embed(torch.tensor([2, 3, 6, 7, 0, 4]))
    assert x.tolist() == [[0, 0], [1, 2], [7, 8], [0, 0], [0, 0], [3, 4]]
    x = embed(torch.tensor([3, 6]), torch.tensor([True, False]))
    assert x.tolist() == [[0, 0], [7, 8]], "an image stands there"
