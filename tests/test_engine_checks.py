"""Checks of batches, losses and gradients around a step: what they refuse, and the nearest case that passes."""

from __future__ import annotations

from dataclasses import astuple
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

import meshwright as mw
from meshwright.data.images import Frame, Images
from meshwright.engine import agreement, vision_sync
from meshwright.engine.agreement import Data, GatheredData, check_same_data, warn_of_same_data
from meshwright.engine.inference import _check_same_count, _top_of
from meshwright.engine.loss_call import NamedTensors, call_loss, perturbed
from meshwright.engine.loss_documents import LossDocuments
from meshwright.engine.validation import (
    check_apart,
    check_by_token,
    check_candidates,
    check_differentiable,
    check_given_experts,
    check_loading,
    check_metrics,
    check_no_placeholders,
    check_optimizer,
    check_read,
    check_terms,
    check_trainable,
    check_trains,
    check_unquantised,
    lr_of_step,
    norm_bound,
)
from meshwright.errors import ConfigError, DataError, RankError, StateError
from meshwright.models import Balance
from tests.refusals import Refusal

BATCH = mw.pack([[5, 6, 7]], length=4)


def balance(layers: int = 2, top_k: int = 3, experts: int = 5) -> Balance:
    made = Balance(experts, top_k)
    made.num_layers = layers
    return made


def experts(*last: int, shape: tuple[int, ...] = (2, 3)) -> mw.Batch:
    """Return a batch whose last token has these experts in its last layer, and other tokens 4, 0, 1."""
    chosen = torch.tensor([4, 0, 1])[: shape[1]].repeat(4, shape[0], 1)
    if last:
        chosen[-1, -1] = torch.tensor(last)
    return mw.Batch(BATCH.tokens, BATCH.labels, BATCH.bounds, num_filler=1, experts=chosen)


def fields(*names: str) -> set[str]:
    return set(names)


ones = torch.ones(3)
loss_of = lambda **options: mw.Loss(lambda s, f, d: s, per="document", candidates="ids", **options)  # noqa: E731 - short
CASES: dict[str, Refusal] = {
    "experts of another layer": Refusal(lambda batch: check_given_experts([BATCH, batch], balance()),
        experts(shape=(3, 2)), DataError, r"shape \(3, 2\) per token", (experts(), experts(shape=(2, 3)))),
    "expert 5": Refusal(lambda last: check_given_experts([experts(*last)], balance()), (5, 0, 1), DataError,
        r"token 3 has the experts \[5, 0, 1\] in layer 1 & 0..4", ((4, 3, 2), (-1, -1, -1))),
    "an expert twice": Refusal(lambda last: check_given_experts([experts(*last)], balance()), (2, 0, 2), DataError,
        r"\[2, 0, 2\]", ((2, 0, 1),)),
    "a part of the experts": Refusal(lambda last: check_given_experts([experts(*last)], balance()), (-1, 0, 2),
        DataError, r"\[-1, 0, 2\] & or all -1"),
    "experts of a dense model": Refusal(lambda layers: check_given_experts([experts()], balance(layers)), 0, DataError,
        "the model has no experts", (2,)),
    "a row of values": Refusal(lambda terms: check_terms(terms, (3,), "token"), torch.ones(3, 1), DataError,
        r"\(3, 1\) for \(3,\) tokens", (ones,)),
    "a number for each group": Refusal(lambda terms: check_terms(terms, (3,), "group"), ones.sum(), DataError,
        r"returned \(\) for \(3,\) groups", (ones,)),
    "whole numbers as terms": Refusal(lambda terms: check_terms(terms, (3,), "token"), ones.long(), DataError,
        "torch.int64", (ones.double(),)),
    "no tensor": Refusal(lambda terms: check_terms(terms, (), "micro_batch"), 1.0, DataError, "must return one number",
        (torch.tensor(1.0),)),
    "fewer metrics": Refusal(lambda made: check_metrics(made, ("a", "b"), ones), {"a": ones}, DataError, r"\['a'\]",
        ({"b": ones, "a": ones},)),
    "more metrics": Refusal(lambda made: check_metrics(made, ("a",), ones), {"b": ones, "a": ones}, DataError,
        r"\['a', 'b'\]", ({"a": ones},)),
    "a wide metric": Refusal(lambda made: check_metrics(made, ("a", "b"), ones), {"a": ones, "b": torch.ones(3, 1)},
        DataError, r"'b' of the loss has shape \(3, 1\)", ({"a": ones, "b": ones},)),
    "a mean as a metric": Refusal(lambda made: check_metrics(made, ("a",), ones), {"a": 0.5}, DataError, "shape float"),
    "a metric in a list": Refusal(lambda made: check_metrics(made, ("a",), ones), ["a"], DataError, "metrics list"),
    **{f"unread {name}": Refusal(check_read, fields("more", name), DataError,
        f"'{name}' is not read & rename it|padding", (fields("more"), fields("weight")))
        for name in ("attention_mask", "padding_mask", "weights", "loss_weight", "loss_weights", "loss_mask")},
    "weight of a document": Refusal(lambda per: check_read(fields("weight"), per), "document", DataError,
        "'weight' is not read & per document", ("token",)),
    "nothing trained": Refusal(check_trains, (), StateError, "no trained parameter", (("a",),)),
    "no gradient": Refusal(check_trainable, ones.sum(), StateError, "no trained parameter",
        (ones.clone().requires_grad_().sum(),)),
    "detached terms": Refusal(lambda terms: check_differentiable(terms, [ones, ones.clone().requires_grad_()]), ones,
        StateError, "none of its scores", (ones.clone().requires_grad_(),)),
    "detached scores": Refusal(lambda grad: check_differentiable(ones, [ones, ones.clone().requires_grad_(grad)]), True,
        StateError, "none of its scores", (False,)),
    "a placeholder": Refusal(lambda prompt: check_no_placeholders([[1], prompt], (70, 71)), [5, 71], DataError,
        "prompt 1 has the token 71", ([5, 72], [69])),
    "candidates of values": Refusal(lambda scores: check_candidates(loss_of(), 1.0, scores), ("values",), ConfigError,
        "predicts no tokens", (("logprobs", "entropy"),)),
    "two temperatures": Refusal(lambda t: check_candidates(loss_of(candidate_temperature=2.0), t, ("logprobs",)), 0.7,
        ConfigError, "temperature=0.7 & candidate_temperature=2.0", (1.0, 1)),
    "one temperature": Refusal(lambda t: check_candidates(loss_of(candidate_temperature=t), 1.0, ("logprobs",)), 0.0,
        ConfigError, "temperature=0.0", (2.0, None)),
    "mesh": Refusal(lambda mesh: check_loading(mesh, None), dict(fsdp=2), ConfigError, "mesh= & mw.Mesh", (None,)),
    "dtype": Refusal(lambda dtype: check_loading(None, dtype), torch.float16, ConfigError, "dtype=torch.float16",
        (None, torch.bfloat16, torch.float32, torch.float64)),
    "read": Refusal(lambda read: check_loading(None, None, read), "host", ConfigError, "read='host'",
        ("rank", "node")),
    "quantised config": Refusal(check_unquantised, {"quantization_config": {}}, ConfigError, "quantization_config",
        ({"quantization": {}},)),
    "optimizer": Refusal(check_optimizer, torch.optim.AdamW, ConfigError, "not a mw.Optimizer", (mw.AdamW(),)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_a_step_cannot_use_is_refused(case: str) -> None:
    CASES[case].check()


def test_a_step_under_no_grad_is_refused() -> None:
    with torch.no_grad(), pytest.raises(StateError, match="no trained parameter"):
        check_trains(("a",))


def test_experts_that_were_changed_are_checked_again() -> None:
    """A second check of the same tensor is free: until it is written to, or a model of other experts gets it."""
    batch = experts()
    check_given_experts([batch], balance())
    with pytest.raises(DataError, match=r"0\.\.3"):
        check_given_experts([batch], balance(experts=4))
    assert batch.experts is not None
    batch.experts[1, 0] = 2
    with pytest.raises(DataError, match=r"token 1 .* in layer 0"):
        check_given_experts([batch], balance())


def test_numbers_of_a_schedule_become_floats() -> None:
    made = [lr_of_step(lr, 3) for lr in (1, 0.25, torch.tensor([[0.5]]), np.float64(2), np.float32(4), np.int64(3))]
    assert (made, {*map(type, made)}) == ([1.0, 0.25, 0.5, 2.0, 4.0, 3.0], {float})
    assert [norm_bound(each) for each in (None, 2, 0.5)] == [None, 2.0, 0.5]


# Losses that depend on other tokens or documents

has_term = torch.tensor([True, True, True, False, True])
values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (lambda rows: values[rows], ""),
        (lambda rows: values[rows].where(has_term[rows], values[rows].sum()), ""),
        (lambda rows: values[rows] * float("nan"), ""),
        (lambda rows: values[rows] - values[rows].mean(), "depends on other tokens"),
        (lambda rows: values[rows] + 1e-3 * values[rows].sum() / values[rows].numel(), "depends on other tokens"),
        (lambda rows: values[rows] + torch.arange(len(values[rows])), "depends on other tokens"),
        (lambda rows: values[rows] + values, "fails on a part of its tokens"),
    ],
)
def test_a_term_of_a_token_is_compared_with_that_of_a_part(loss: Any, what: str) -> None:
    if not what:
        check_by_token(loss, has_term)
        return
    with pytest.raises(DataError, match=what):
        check_by_token(loss, has_term)
    check_by_token(loss, has_term[:1])


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (lambda numbers: values[[*numbers]], ""),
        (lambda numbers: values[[*numbers]].where(has_term[[*numbers]], values[[*numbers]].sum()), ""),
        (lambda numbers: values[[*numbers]] / values[[*numbers]].sum(), "of a group depends on other groups"),
        (lambda numbers: values[[*numbers]] + values, "fails on a part of its groups"),
    ],
)
def test_a_term_of_a_group_is_compared_with_that_of_a_part(loss: Any, what: str) -> None:
    if not what:
        check_apart(loss, has_term, "group")
        return
    with pytest.raises(DataError, match=what):
        check_apart(loss, has_term, "group")


# Calls of a loss


def model_of(**more: Any) -> Any:
    return SimpleNamespace(calls=SimpleNamespace(in_loss=False), mesh=SimpleNamespace(host=torch.device("cpu")), **more)


def test_a_loss_gets_copies_and_its_reads_are_noted() -> None:
    model, given = model_of(), {"labels": torch.tensor([1, 2]), "a": ones[:2].clone(), "b": ones[:2], "c": ones[:2]}
    seen = []

    def function(scores: Any, fields: Any) -> Any:
        seen.append(model.calls.in_loss)
        fields["a"].zero_()
        fields.get("b")
        return scores["logprobs"] * 3, {"two": 2 * scores["logprobs"], "one": scores["logprobs"]}

    loss, scores = mw.Loss(function, metrics=("one", "two")), {"logprobs": ones[:2].bfloat16().requires_grad_()}
    made = call_loss(model, loss, scores, given)
    assert (seen, model.calls.in_loss) == ([True], False)
    assert given["a"].tolist() == [1, 1]
    assert made.names_read == {"a", "b"}
    assert (made.terms.dtype, made.terms.tolist()) == (torch.float32, [3, 3])
    assert made.metrics.tolist() == [[1, 1], [2, 2]]
    assert not made.metrics.requires_grad
    with pytest.raises(KeyError, match=r"^'clip'$"):
        call_loss(model, mw.Loss(lambda s, f: {}["clip"]), scores, given)
    assert model.calls.in_loss is False
    with pytest.raises(DataError, match=r"metrics \['one', 'two'\], which it must declare"):
        call_loss(model, mw.Loss(function), scores, given)


@pytest.mark.parametrize(
    ("read", "names"),
    [
        (lambda fields: fields["a"], {"a"}), (lambda fields: fields.get("b"), {"b"}),
        (lambda fields: fields.get("none", 1), {"none"}), (lambda fields: [*fields.items()], {"a", "b"}),
        (lambda fields: [*fields.values()], {"a", "b"}), (len, set()),
    ],
)  # fmt: skip
def test_every_way_to_read_a_field_counts(read: Any, names: set[str]) -> None:
    tensors = NamedTensors({"a": ones, "b": ones}, (["logprobs"], ["a", "b"]))
    read(tensors)
    assert tensors.names_read == names


def test_perturbed_numbers_differ_from_token_to_token() -> None:
    """Fields of floating-point numbers change by a factor, and zeros too; whole numbers stay."""
    scores = {"logprobs": torch.zeros(5), "candidate_logprobs": torch.zeros(5, 2)}
    given = {"gain": torch.ones(5), "zero": torch.zeros(5, 2), "labels": torch.arange(5)}
    loss = mw.Loss(lambda s, f: s["logprobs"] * f["gain"])
    others, changed = perturbed(model_of(), loss, scores, given)
    for tensor in (others["logprobs"], others["candidate_logprobs"][:, 1], changed["gain"], changed["zero"][:, 0]):
        assert len({*tensor.tolist()}) == 5
    assert others["logprobs"].max() < 0
    assert changed["gain"].min() > 1
    large = perturbed(model_of(), loss, scores, {"gain": torch.full((5,), 1e4)})[1]["gain"]
    assert large.max() - large.min() > 1e3
    assert changed["labels"].tolist() == [0, 1, 2, 3, 4]
    one_class = mw.Loss(lambda s, f: s["logprobs"] if f["gain"].max() == 1 else 1 / 0)
    assert perturbed(model_of(), one_class, scores, given)[1]["gain"].tolist() == [1] * 5


def test_a_loss_of_groups_returns_a_term_for_each() -> None:
    docs = LossDocuments([1, 1, 1], [5, 5, 6], torch.ones(3, dtype=torch.bool))
    scores = {"values": ones}
    for per, num in (("document", 3), ("group", 2), ("step", 2)):
        loss = mw.Loss(lambda s, f, d, num=num: torch.ones(num), per=per)
        assert len(call_loss(model_of(), loss, scores, {}, docs).terms) == num
        with pytest.raises(DataError, match=f"must return one term per {'group' if per == 'step' else per}"):
            call_loss(model_of(), mw.Loss(lambda s, f, d, num=num: torch.ones(num + 1), per=per), scores, {}, docs)


# Images of a step


def shown(*frames: bool) -> list[Any]:
    """Return micro-batches. Some have images."""
    with_images = Images(torch.ones(4, 6), (Frame(2, 2, 0),))
    return [SimpleNamespace(frames=(1,) if each else (), images=with_images if each else None) for each in frames]


def test_a_mask_has_a_bit_for_each_micro_batch_with_images() -> None:
    assert vision_sync.images_mask(shown(False, True, True, False)) == 0b0110
    assert vision_sync.images_mask(shown(*[False] * 52, True)) == 1 << 52
    assert vision_sync.images_mask(shown(*[False] * 60, True, True)) == 1 << 52


def test_a_micro_batch_runs_the_tower_if_any_rank_has_images() -> None:
    tower: Any = SimpleNamespace(shape=SimpleNamespace(pixels=SimpleNamespace(num=6)))
    filled = mw.Batch(torch.arange(1), torch.arange(1), (0, 1), images=Images(torch.ones(4, 6), (Frame(2, 2, 0),)))
    bare = mw.pack([[5]])
    synced = vision_sync.sync_images([bare, filled, bare], 0b110, tower)
    assert [None if each.images is None else len(each.images.patches_PC) for each in synced] == [None, 4, 0]
    assert synced[2].images is not None
    assert synced[2].images.patches_PC.shape == (0, 6)
    late = vision_sync.sync_images([bare] * 54, 1 << 52, tower)
    assert [each.images is not None for each in late] == [False] * 52 + [True] * 2
    assert vision_sync.sync_images([filled], 0, tower)[0].images is None
    assert vision_sync.sync_images([filled], 0, None)[0] is filled


def with_image(tokens: list[int], labels: list[int], start: int | None, num: int = 6) -> mw.Batch:
    """Return a batch whose image of two tokens begins at `start`. `num`: the values of a patch."""
    images = None if start is None else Images(torch.ones(8, num), (Frame(2, 4, start),))
    return mw.Batch(torch.tensor(tokens), torch.tensor(labels), (0, len(tokens)), images=images)


SEEN = ([5, 70, 71, 6], [-100, -100, 6, -100])
IMAGES: dict[str, Refusal] = {
    "of another processor": Refusal(lambda num: with_image(*SEEN, 1, num), 7, DataError, "7 values & takes 6", (6,)),
    "of fewer values": Refusal(lambda num: with_image(*SEEN, 1, num), 5, DataError, "has 5 values"),
    "no image": Refusal(lambda start: with_image(*SEEN, start), None, DataError,
        "token 70 at position 1 stands for an image that the batch lacks", (1,)),
    "an image at text": Refusal(lambda start: with_image(*SEEN, start), 2, DataError, "token 70 at position 1 stands"),
    "text at an image": Refusal(lambda token: with_image([5, token, 71, 6], SEEN[1], 1), 5, DataError,
        "token 5 at position 1 is in the place of an image", (70, 71)),
    "a label of an image": Refusal(lambda label: with_image(SEEN[0], [-100, label, 6, -100], 1), 71, DataError,
        "label 71 at position 1 & set it to -100", (-100, 72, 69)),
}  # fmt: skip


@pytest.mark.parametrize("case", IMAGES)
def test_images_stand_at_their_placeholders(case: str) -> None:
    """In every batch. Labels of another head are classes, which may have the numbers of placeholders."""
    shape = SimpleNamespace(pixels=SimpleNamespace(num=6))
    is_place = lambda tokens: (tokens == 70) | (tokens == 71)  # noqa: E731 - short
    tower = cast(Any, SimpleNamespace(shape=shape, ids=(70, 71), is_place=is_place))
    first = mw.Batch(torch.tensor([1, 2]), torch.tensor([2, -100]), (0, 2))
    refusal = IMAGES[case]

    def check(bad: Any) -> None:
        batch = refusal.act(bad)
        vision_sync.check_images([first, batch], tower, token_labels=True)

    refusal._replace(act=check).check()
    vision_sync.check_images([with_image(SEEN[0], [71, 70, 6, -100], 1)], tower, token_labels=False)
    vision_sync.check_images([first], None, token_labels=True)
    with pytest.raises(DataError, match="1 frame of images, but the model was loaded without its tower"):
        vision_sync.check_images([first, with_image(*SEEN, 1)], None, token_labels=True)


@pytest.mark.parametrize(
    ("trained", "mask"),
    [
        (["visual.a"], 0b111), (["visual.a", "layers.0"], 0), (["visual.a", "layers.9"], 0b111), (["layers.9"], 0),
        ([], 0),
    ],
)  # fmt: skip
def test_a_tower_that_alone_is_trained_in_the_first_stage_always_runs(
    monkeypatch: pytest.MonkeyPatch, trained: list[str], mask: int
) -> None:
    """The last layer is on another pipeline stage."""
    monkeypatch.setattr(vision_sync, "stages_of_param", lambda param, _: (1,) if param == "layers.9" else (0,))
    monkeypatch.setattr(vision_sync, "TOWER", "visual.")
    table = {name: name for name in ("visual.a", "layers.0", "layers.9")}
    model = cast(Any, SimpleNamespace(trained=trained, trainable=trained, table=table, line=None))
    assert vision_sync.forced_tower_runs(model, 3) == mask
    assert vision_sync.forced_tower_runs(model, 60) == (mask and (1 << 53) - 1)
    of_tower = [name for name in trained if name.startswith("visual.")]
    assert vision_sync.unused_tower_parameters(model, 0) == of_tower
    assert vision_sync.unused_tower_parameters(model, 4) == []


# Agreements


def gathered(data_ranks: list[int], *data: Data) -> GatheredData:
    return GatheredData(torch.tensor([astuple(each) for each in data], dtype=torch.float64), torch.tensor(data_ranks))


def test_a_data_rank_has_one_row() -> None:
    """Ranks of the call may be those of some data ranks alone, in any order."""
    data = [Data(weight=float(n), num_targets=n, images_mask=1 << n) for n in range(5)]
    rows = gathered([2, 0, 2, 0, 3], *data)
    assert rows.first_rows.tolist() == [1, 5, 0, 4]
    assert rows.per_data_rank.column("num_targets").tolist() == [1, 0, 4]
    assert rows.per_data_rank.data_ranks.tolist() == [0, 2, 3]
    assert rows[3] == data[3]
    assert rows.images_mask == 0b11111


def measured(want: str, *batches: mw.Batch, mtp: str = "carried", tower: Any = None, **options: Any) -> Data:
    """Return what a rank of two says of its batches."""
    blueprint = SimpleNamespace(vocab=9, balance=balance(), module=SimpleNamespace(tower=tower))
    mesh, recipe = SimpleNamespace(axes=SimpleNamespace(cp=2, tp=1)), SimpleNamespace(mtp=mtp)
    model = cast(Any, SimpleNamespace(blueprint=blueprint, mesh=mesh, recipe=recipe))
    return agreement.data_of(model, batches, want, **options)


def test_a_rank_measures_all_of_its_batches() -> None:
    one, two = (
        mw.pack(documents, length=6, fields={"weight": [[x] * len(d) for x, d in zip(weights, documents, strict=True)]})
        for documents, weights in (([[1, 2, 3], [4, 5]], (0.5, 2.0)), ([[6, 7, 8]], (4.0,)))
    )
    data = measured("logprobs", one, two)
    checksum = agreement.checksum([x for batch in (one, two) for x in agreement._streams(batch)])
    sizes = dict(num_targets=5, num_batches=2, num_tokens=6, num_real=8, checksum=checksum)
    assert data == Data(weight=2 * 0.5 + 2.0 + 2 * 4.0, **sizes)
    assert measured("logprobs", one, two, per="document").weight == 3
    for mtp in ("head", "all"):
        with_head = measured("logprobs", one, two, mtp=mtp)
        assert with_head == Data(11.0, 0.5 + 4.0, num_mtp_targets=2, num_followed=5, **sizes)


def test_every_batch_of_a_step_is_checked() -> None:
    """Labels of another head than a vocabulary's are classes, or mark tokens."""
    good, unshifted = mw.pack([[1, 2, 3, 4]]), mw.pack([[1, 2, 3, 4]], labels=[[1, 2, 3, 4]])
    for want in ("values", "hidden"):
        assert measured(want, good, unshifted).num_targets == 7
    shape = SimpleNamespace(pixels=SimpleNamespace(num=6))
    tower = SimpleNamespace(shape=shape, ids=(7,), is_place=lambda tokens: tokens == 7)
    image = with_image([5, 7, 7, 6], [7, -100, -100, -100], 1)
    assert measured("values", image, tower=tower).images_mask == 1
    with pytest.raises(DataError, match="label 7 at position 0 stands for an image"):
        measured("logprobs", image, tower=tower)
    ids = good.with_fields(ids=torch.ones(4, 1, dtype=torch.int64))
    assert measured("logprobs", ids, ids, candidates="ids").num_targets == 6
    for batches, options in (
        ((good, unshifted), {}), ((ids, good), {"candidates": "ids"}), ((good, experts(5, 0, 1)), {}),
        ((good, mw.pack([[1, 9, 1, 1]])), {}), ((good, mw.pack([[1, 2]])), {}), ((mw.pack([[1, 2, 3]]),), {}),
    ):  # fmt: skip
        with pytest.raises(DataError):
            measured("logprobs", *batches, **options)


def test_ranks_of_one_data_rank_with_other_batches_are_named() -> None:
    mesh: Any = SimpleNamespace(axes="fsdp=2 tp=2", ranks_over=lambda axes: torch.tensor([4, 5, 6, 7]))
    one, two = Data(num_targets=3, checksum=1), Data(num_targets=3, checksum=2)
    check_same_data(gathered([0, 1, 0, 1], one, two, one, two), mesh)
    with pytest.raises(RankError, match="ranks 5 and 7 are one data rank"):
        check_same_data(gathered([0, 1, 0, 1], one, two, one, one), mesh)


@pytest.mark.parametrize(
    ("checksums", "targets", "num", "warns"),
    [
        ((7, 7), 3, 2, True), ((7, 8), 3, 2, False), ((7, 7), 0, 2, False), ((7, 7), 3, 1, False),
        ((7, 7, 8), 3, 3, False),
    ],
)  # fmt: skip
def test_the_same_documents_on_all_data_ranks_are_worth_a_warning(
    monkeypatch: pytest.MonkeyPatch, checksums: tuple[int, ...], targets: int, num: int, warns: bool
) -> None:
    said: list[int] = []
    monkeypatch.setattr(agreement, "_warn_of_same_data", said.append)
    data = [Data(num_targets=targets, checksum=each) for each in checksums]
    warn_of_same_data(gathered([*range(len(data))], *data), num)
    assert said == [num] * warns


def test_a_replica_scores_as_many_batches_on_all_ranks() -> None:
    _check_same_count(gathered([0, 0, 1], *[Data(num_batches=2)] * 3))
    with pytest.raises(RankError, match="rank 2 of the replica scores 1 batch, and the first 2"):
        _check_same_count(gathered([0, 0, 1], Data(num_batches=2), Data(num_batches=2), Data(num_batches=1)))


def test_what_padding_predicts_is_left_out() -> None:
    top_Tk2 = torch.tensor([[[-0.5, 7.0], [-1.5, 3.0]]] * 4)
    made = _top_of(BATCH, top_Tk2.clone())
    assert made["ids"].tolist() == [[7, 3]] * 3 + [[-1, -1]]
    assert made["logprobs"].tolist() == [[-0.5, -1.5]] * 3 + [[0, 0]]
    assert _top_of(mw.pack([[5, 6, 7, 8]]), top_Tk2)["ids"].tolist() == [[7, 3]] * 4
