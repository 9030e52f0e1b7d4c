"""Checks before a resume, a conversion and an export: the state, the adapters and the options that must fit."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.checkpoint import Keep
from meshwright.engine import adapters, checkpoint, convert, optimizer_state, resume_checks
from meshwright.errors import CheckpointError, ConfigError
from meshwright.recipe import Lora
from tests.refusals import Refusal

AT = Path("step-000007")
U8, BF16, F32, F64 = torch.uint8, torch.bfloat16, torch.float32, torch.float64
of = SimpleNamespace
export: Any = importlib.import_module("meshwright.engine.export")  # the package has a function of this name


def recipe(**fields: Any) -> Any:
    return of(**{"lora": None, "mtp": "carried", "frozen": None, **fields})


def tensors(**shapes: tuple[int, ...]) -> dict[str, Any]:
    return {name.replace("__", "."): of(shape=shape) for name, shape in shapes.items()}


# The record of adapters

BASE = of(source=of(checksum=lambda: "abc"))


def adapted(frozen: str | None = None, keymap: Any = BASE, **lora: Any) -> Any:
    fields = Lora(**lora) if lora else None
    return of(recipe=recipe(lora=fields, frozen=frozen), keymap=keymap, blueprint=of(origin="seed 5"))


PLAIN = dict(rank=4, alpha=8.0, expert_rank=2)


def test_a_record_of_adapters_holds_what_they_depend_on() -> None:
    assert adapters.adapter_record(adapted()) is None
    expected = dict(rank=4, alpha=8.0, expert_rank=2, rslora=True, base="abc")
    assert adapters.adapter_record(adapted(**PLAIN, rslora=True)) == expected
    assert adapters.adapter_record(adapted("nf4", **PLAIN, rslora=True)) == {**expected, "frozen": "nf4"}
    fresh = adapters.adapter_record(adapted(keymap=of(source=None), **PLAIN))
    assert fresh == {**expected, "rslora": False, "base": "seed 5"}


SAVED = dict(rank=4, alpha=8.0, expert_rank=2, rslora=False, base="abc")
# A scale of alpha / rank = 2, and with rsLoRA alpha / sqrt(rank).
ADAPTERS: dict[str, Refusal] = {
    "another rank": Refusal(lambda saved: adapters.check_same_adapters(adapted(**PLAIN), saved, AT),
        {**SAVED, "rank": 2, "alpha": 4.0}, CheckpointError, r"rank=2, the engine's model has 4; load the model with "
        r"lora\.rank=2", (SAVED, {**SAVED, "alpha": 4.0, "rslora": True}, {**SAVED, "alpha": 8.0 * (1 + 1e-12)})),
    "another scale": Refusal(lambda saved: adapters.check_same_adapters(adapted(**PLAIN), saved, AT),
        {**SAVED, "rslora": True}, CheckpointError, "rslora=True"),
    "another alpha": Refusal(lambda saved: adapters.check_same_adapters(adapted(**PLAIN), saved, AT),
        {**SAVED, "alpha": 8.1}, CheckpointError, "alpha=8.1, the engine's model has 8.0"),
    "another expert rank": Refusal(lambda saved: adapters.check_same_adapters(adapted(**PLAIN), saved, AT),
        {**SAVED, "expert_rank": None}, CheckpointError, "expert_rank=None"),
    "another base": Refusal(lambda saved: adapters.check_same_adapters(adapted(**PLAIN), saved, AT),
        {**SAVED, "base": "x"}, CheckpointError, "base='x' & load the base that they were trained with"),
    "another format": Refusal(lambda saved: adapters.check_same_adapters(adapted("nf4", **PLAIN), saved, AT), SAVED,
        CheckpointError, "frozen=None, the engine's model has 'nf4' & load the model with frozen=None",
        ({**SAVED, "frozen": "nf4"},)),
    "no adapters": Refusal(lambda saved: adapters.check_same_adapters(adapted(), saved, AT), SAVED, CheckpointError,
        "has adapters & no lora=", (None,)),
    "a whole model": Refusal(lambda saved: adapters.check_same_adapters(adapted(**PLAIN), saved, AT), None,
        CheckpointError, "has no adapters & lora=", (SAVED,)),
}  # fmt: skip


@pytest.mark.parametrize("case", ADAPTERS)
def test_adapters_of_another_kind_are_refused(case: str) -> None:
    ADAPTERS[case].check()


@pytest.mark.parametrize(
    ("factor", "base"),
    [
        ("layers.0.attn.q.lora.a", "layers.0.attn.q.weight"),
        ("layers.0.attn.q.lora.b", "layers.0.attn.q.weight"),
        ("layers.3.mlp.experts.down_lora.a", "layers.3.mlp.experts.down"),
        ("layers.3.mlp.experts.gate_up_lora.b", "layers.3.mlp.experts.gate_up"),
    ],
)
def test_a_factor_belongs_to_one_parameter(factor: str, base: str) -> None:
    assert adapters.base_of(factor) == base
    assert adapters._owner(f"{factor}{optimizer_state.SCALES}") == factor


@pytest.mark.parametrize(
    ("served", "choice", "layout"),
    [(None, {"experts": "per-expert"}, "per-expert"), (None, {"experts": "fused"}, "fused"), (None, {}, "fused"),
     ("per-expert", {"experts": "fused"}, "per-expert"), ("fused", {"experts": "per-expert"}, "fused")],
)  # fmt: skip
def test_the_layout_of_a_server_comes_before_that_of_the_source(
    monkeypatch: pytest.MonkeyPatch, served: str | None, choice: dict[str, str], layout: str
) -> None:
    monkeypatch.setattr(adapters, "family_of", lambda config: of(served=served))
    assert adapters.default_layout(of(keymap=of(choice=choice), config={})) == layout  # type: ignore[arg-type]


# Parameters, shapes and options of a checkpoint

scale = lambda value: {"adapter_scale": torch.tensor(value, dtype=torch.float64)}  # noqa: E731 - short
model = lambda **fields: of(blueprint=of(tower=fields.pop("tower", False)), recipe=recipe(**fields))  # noqa: E731
adapter_keys = lambda entries, keys=None: resume_checks.check_adapter_keys(  # noqa: E731 - short
    of(entries=entries, directory=AT), of(keys=keys or tensors(a=(2, 3), b=(3,)))
)
CHECKS: dict[str, Refusal] = {
    "a tower": Refusal(lambda tower: resume_checks.check_tower(model(tower=True), AT, tower), False, CheckpointError,
        "saved with tower=False & has tower=True", (True,)),
    "no tower": Refusal(lambda tower: resume_checks.check_tower(model(), AT, tower), True, CheckpointError,
        "saved with tower=True", (False,)),
    "a trained MTP head": Refusal(lambda trained: resume_checks.check_mtp(model(), trained, AT),
        ["layers.0", "head.mtp.norm"], CheckpointError, "trained its MTP head", (["layers.0", "head.norm"], [])),
    "a carried MTP head": Refusal(lambda mtp: resume_checks.check_mtp(model(mtp=mtp), ["head.mtp.norm"], AT), "carried",
        CheckpointError, "trained its MTP head", ("head", "all")),
    "a target more": Refusal(adapter_keys, tensors(a=(2, 3), b=(3,), c=(1,)), CheckpointError,
        r"c is \[1\] in & and missing in the engine's model \(1 such", (tensors(b=(3,), a=(2, 3)),)),
    "a target less": Refusal(adapter_keys, tensors(a=(2, 3)), CheckpointError, r"b is missing in & and \[3\] in"),
    "another shape": Refusal(adapter_keys, tensors(a=(3, 2), b=(3,)), CheckpointError, r"a is \[3, 2\] & \[2, 3\]"),
    "an MTP head without adapters": Refusal(lambda keys: adapter_keys(tensors(a=(2,)), keys),
        tensors(a=(2,), mtp__b=(2,)), CheckpointError, "has no MTP head that was trained", (tensors(a=(2,)),)),
    "a scale": Refusal(lambda value: optimizer_state.check_same_scale(Lora(rank=4, alpha=8.0), scale(value)), 2.001,
        CheckpointError, "scale 2.001, this engine's have 2", (2.0,)),
    "a scale of no adapters": Refusal(lambda lora: optimizer_state.check_same_scale(lora, scale(1.0)),
        Lora(rank=4, alpha=8.0), CheckpointError, "scale 1", (None,)),
    "a state dict": Refusal(lambda state: optimizer_state.check_same_keys({"weights": {"a": 1}}, state), [1],
        ConfigError, "not a list", ({"weights": {"a": 2}},)),
    "a plane less": Refusal(lambda state: optimizer_state.check_same_keys({"weights": {"a": 1}, "exp_avg": {"b": 1}},
        state), {"weights": {"a": 1}}, CheckpointError, r"exp_avg/b is in this engine alone",
        ({"weights": {"a": 1}, "exp_avg": {"b": 1}, "other": {"c": 1}},)),
    "a key more": Refusal(lambda keys: optimizer_state.check_same_keys({"weights": {"a": 1}}, {"weights": keys}),
        {"a": 1, "b": 1, "c": 1}, CheckpointError, r"weights/b is in the state dict alone \(2 such"),
    "keep=0": Refusal(lambda keep: checkpoint._check_keep(Keep(keep)), 0, ConfigError, "keep=0", (1, None)),
    "keep=True": Refusal(lambda keep: checkpoint._check_keep(Keep(keep)), True, ConfigError, "keep=True"),
    "keep=1.5": Refusal(lambda keep: checkpoint._check_keep(Keep(keep)), 1.5, ConfigError, "keep=1.5"),
    "keep_every=0": Refusal(lambda every: checkpoint._check_keep(Keep(2, every)), 0, ConfigError, "keep_every=0",
        (1, None)),
    "keep_every alone": Refusal(lambda keep: checkpoint._check_keep(Keep(keep, 5)), None, ConfigError, "give keep= too",
        (1,)),
    "NaN in a state": Refusal(checkpoint._checked_json, {"x": float("nan")}, ConfigError, "state= is not JSON",
        ({"x": [1, "a", None]},)),
    "a tensor in a state": Refusal(checkpoint._checked_json, [torch.ones(1)], ConfigError, "state= is not JSON"),
    "a model": Refusal(lambda engine: checkpoint._checked_model(engine, "save"), of(), ConfigError,
        "mw.save takes an engine, not a SimpleNamespace", (object.__new__(mw.Engine),)),
    "a store": Refusal(checkpoint._checked_path, "s3://bucket/x", CheckpointError, "is not a directory", ("x", AT)),
    "two formats": Refusal(lambda dtype: export._format_of(object.__new__(mw.Model), dtype, "fp8", False), BF16,
        ConfigError, "give one of them", (None,)),
}  # fmt: skip


@pytest.mark.parametrize("case", CHECKS)
def test_what_a_resume_cannot_use_is_refused(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mw.Engine, "model", None, raising=False)
    CHECKS[case].check()


def test_the_state_of_a_caller_has_one_text_on_all_ranks() -> None:
    assert checkpoint._checked_json({"b": 1, "a": 2}) == checkpoint._checked_json({"a": 2, "b": 1})
    assert checkpoint._checked_json({"b": 1}) != checkpoint._checked_json({"b": 2})


def test_a_difference_counts_in_either_direction() -> None:
    flat = resume_checks._flatten({"a": {"b": {"c": 1}, "d": 2}, "e": 3, "f": {}})
    assert flat == {"a.b.c": 1, "a.d": 2, "e": 3}
    assert resume_checks._differences({"a": 1, "b": 2, "n": None}, {"b": 3, "c": 4, "m": None}) == [
        ("a", 1, None), ("b", 2, 3), ("c", None, 4),
    ]  # fmt: skip


TABLE = {"a": {"rows": 4, "columns": 6}, "b": {"rows": 3}}


@pytest.mark.parametrize(
    ("kind", "table", "fresh", "message"),
    [
        ("qwen3", TABLE, [], ""),
        ("qwen2", TABLE, [], "is a qwen2, the engine's model a qwen3"),
        ("qwen3", {**TABLE, "a": {"rows": 6, "columns": 4}}, [], "a is .*6.* in step-000007 and .*4"),
        ("qwen3", {**TABLE, "c": {"rows": 1}}, [], "c is .* and missing in the engine"),
        ("qwen3", {"a": TABLE["a"]}, [], "b is missing in step-000007"),
        ("qwen3", TABLE, ["head.weight"], "has no head.weight; give a checkpoint that has it$"),
        ("qwen3", TABLE, ["head.mtp.norm"], r"has no head.mtp.norm; .*mw\.load draws a new MTP head"),
    ],
)
def test_a_resume_needs_the_same_parameters(
    monkeypatch: pytest.MonkeyPatch, kind: str, table: Any, fresh: list[str], message: str
) -> None:
    params = lambda table: of(params={name: of(dims=dims) for name, dims in table.items()})  # noqa: E731 - short
    monkeypatch.setattr(resume_checks, "saved_part", lambda model, table: (params(table), None))
    now: Any = of(config={"model_type": "qwen3"}, table=TABLE)
    saved_as: Any = of(config={"model_type": kind}, table=params(table), keymap=of(fresh=fresh))
    if not message:
        resume_checks.check_same_table(now, saved_as, AT)
        return
    with pytest.raises(CheckpointError, match=message):
        resume_checks.check_same_table(now, saved_as, AT)


@pytest.mark.parametrize(
    ("names", "trained", "carried"),
    [(None, ["a"], []), (["m", "n"], ["a"], ["m", "n"]), (["m", "n"], ["a", "m", "n"], [])],
)
def test_an_mtp_head_that_was_carried_has_no_state(names: Any, trained: list[str], carried: list[str]) -> None:
    engine: Any = of(mtp=None if names is None else of(names=names))
    assert resume_checks.carried_before(engine, {"trained": trained}) == carried


# Optimizer state


def test_codes_have_keys_of_their_own() -> None:
    assert optimizer_state.state_key("a.weight", U8) == "a.weight.codes"
    for dtype in (F32, BF16):
        assert optimizer_state.state_key("a.weight", dtype) == "a.weight"
    for key in ("a.weight", "a.weight.codes"):
        assert optimizer_state.file_key(key) == "a.weight"


def optimizer(**names: tuple[str, ...]) -> Any:
    options = mw.AdamW()
    return of(options=options, state_names={name: names.get(name, options.state_names) for name in "abc"})


def saved(*planes: str, step: int = 3) -> Any:
    return of(planes=dict.fromkeys(("weights", "master", *planes)), trainer={"step": step}, directory=AT)


def test_state_of_another_optimizer_is_refused() -> None:
    both, first = ("exp_avg", "exp_avg_sq"), ("exp_avg",)
    state_of, mixed = optimizer_state.state_of, optimizer(a=first)
    assert state_of(saved(*both), mixed, "abc") == [*both]
    assert state_of(saved(*both), mixed, "a") == [*both]
    assert state_of(saved(*first), mixed, "a") == [*first]
    assert state_of(saved(step=0), mixed, "abc") == []
    for source, trained in (
        (saved(*first), "ab"), (saved(), "a"), (saved(*both, "more"), "a"), (saved(*first, step=0), "b")
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match="has the optimizer state"):
            state_of(source, mixed, trained)


def test_names_of_state_are_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: Any = of(table={}, trained=(), blueprint=of(spec="spec"), pieces={"a": 1})
    make = lambda *names: of(state_names=names, quantised=lambda *_: ())  # noqa: E731 - short
    layout = optimizer_state.state_layout(kept, make("momentum", "second"))
    assert (layout.quantised, layout.spec, layout.pieces) == ((), "spec", {"a": 1})
    for names in (("a", "a"), ("a", "b c"), ("weights",), ("master",), ("counters",), ("random",), ("runs",)):
        with pytest.raises(ConfigError, match=f"has {names[-1]!r}"):
            optimizer_state.state_layout(kept, make(*names))


def test_rounding_is_seeded_by_the_place_in_the_whole_matrix() -> None:
    """Only pieces on this rank whose state is in 8 bits have a place."""
    pieces: Any = {name: of(row_numbers=name * 2, first_col=at) for at, name in enumerate("abcd")}
    made = optimizer_state.StateLayout(("b", "d", "of another rank"), of(), pieces).places()  # type: ignore[arg-type]
    assert {name: (place.rows, place.first_col) for name, place in made.items()} == {"b": ("bb", 1), "d": ("dd", 3)}


def test_scales_in_a_checkpoint_say_what_is_in_8_bits() -> None:
    suffix = optimizer_state.SCALES
    source: Any = of(planes={"exp_avg": of(entries={f"b{suffix}": 0, "a": 0, "b": 0, f"z{suffix}": 0})})
    assert optimizer_state.quantised_in(source, ["exp_avg"], ["a", "b"]) == ["b"]
    assert optimizer_state.quantised_in(source, [], ["a", "b"]) == []


# Conversions


def blueprint_of(monkeypatch: pytest.MonkeyPatch, source: Any = None) -> Any:
    monkeypatch.setattr(convert, "_param_keys", lambda _: iter(["a", "b", "c"]))
    monkeypatch.setattr(convert, "_shapes_of_scales", lambda _: {"a.scales": (2, 1)})
    keys = tensors(a=(4, 6), b=(3,), c=(2, 2), mtp__x=(9,))
    return of(keymap=of(keys=keys, source=source), directory="like")


COUNTERS = ["counters.step", "counters.tokens", "counters.router_load"]


@pytest.mark.parametrize(
    ("names", "changes", "message"),
    [
        (COUNTERS, {}, ""),
        (COUNTERS[1:], {}, "lacks counters"),
        (COUNTERS[::2], {}, "lacks counters"),
        (COUNTERS[:2], {}, "lacks counters"),
        (COUNTERS, {"weights": {"a": (4, 6), "b": (3,)}}, r"lacks weights\.c"),
        (COUNTERS, {"exp_avg": {"a": (4, 6), "a.scales": (1, 2)}}, r"exp_avg\.a\.scales is \(1, 2\)"),
        (COUNTERS, {"exp_avg": {"d": (4, 6)}}, r"exp_avg\.d is \(4, 6\) .* missing"),
        (COUNTERS, {"weights": {"a": (4, 6), "b": (3, 1), "c": (2, 2)}}, r"weights\.b is \(3, 1\) .* \(3,\) in like"),
    ],
)
def test_a_dcp_state_must_be_of_the_same_model(
    monkeypatch: pytest.MonkeyPatch, names: list[str], changes: Any, message: str
) -> None:
    planes = {"weights": {"a": (4, 6), "b": (3,), "c": (2, 2)}, "exp_avg": {"a": (4, 6), "a.scales": (2, 1)}}
    check = lambda: convert._check_state(AT, names, {**planes, **changes}, blueprint_of(monkeypatch))  # noqa: E731
    if not message:
        check()
        return
    with pytest.raises(CheckpointError, match=message):
        check()


def test_what_a_user_saved_beside_the_state_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    planes: Any = {"weights": {"x": 1}, "exp_avg": {"a": 1, "x": 1}, "scales": {"a.scales": 1}, "rng": {"host": 1}}
    shapes: Any = {name: {} for name in planes}
    convert._drop_foreign(planes, shapes, blueprint_of(monkeypatch))
    assert [*planes] == [*shapes] == ["weights", "exp_avg", "scales"]


def test_frozen_codes_come_from_the_files_of_like(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only matrices with scales that the state lacks: others are an error later."""
    monkeypatch.setattr(convert.weights, "whole_values", lambda files, key: f"values of {key}")
    files = of(scales={"a": 0, "b": 0}, entries=tensors(a=(4, 6), b=(3,), c=(2, 2)))
    planes: Any = {"weights": {"a": lambda: "state"}, "exp_avg": {}}
    shapes: Any = {"weights": {"a": (4, 6)}, "exp_avg": {}}
    convert._add_frozen(planes, shapes, blueprint_of(monkeypatch, files))
    assert {key: read() for key, read in planes["weights"].items()} == {"a": "state", "b": "values of b"}
    assert shapes == {"weights": {"a": (4, 6), "b": (3,)}, "exp_avg": {}}


def test_state_sets_of_an_optimizer() -> None:
    planes: Any = {"second": {}, "weights": {}, "master": {}, "first": {}}
    assert convert.State("dcp", of(keymap=0), planes).of_optimizer == ["first", "second"]  # type: ignore[arg-type]


# Exports


@pytest.mark.parametrize(
    ("dtype", "form", "merge", "read_only", "expected"),
    [
        (None, None, False, False, "source"), (None, None, True, False, "source"), (None, None, False, True, "source"),
        (None, None, True, True, "values"), (BF16, None, False, False, "values"), (None, "fp8", True, True, "fp8"),
    ],
)  # fmt: skip
def test_the_format_of_an_export(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, form: Any, merge: bool, read_only: bool, expected: str
) -> None:
    monkeypatch.setattr(export, "_read_only", lambda _: [("a", "4 bits")] * read_only)
    assert export._format_of(object.__new__(mw.Model), dtype, form, merge) == expected


@pytest.mark.parametrize(
    ("lora", "merge", "form", "read_only", "message"),
    [
        (None, False, "source", True, ""), (Lora(), True, "source", False, ""), (Lora(), True, "values", True, ""),
        (Lora(), False, "source", False, "would lose"), (None, True, "values", False, "no adapters"),
        (Lora(), True, "source", True, "a is 4 bits, a format that is only read"),
    ],
)  # fmt: skip
def test_a_merge_is_for_adapters_and_formats_that_are_written(
    monkeypatch: pytest.MonkeyPatch, lora: Any, merge: bool, form: str, read_only: bool, message: str
) -> None:
    monkeypatch.setattr(export, "_read_only", lambda _: [("a", "4 bits")] * read_only)
    check = lambda: export._check_merge(of(recipe=of(lora=lora)), export.ExportOptions(form=form, merge=merge))  # noqa: E731 - short
    if not message:
        check()
        return
    with pytest.raises(ConfigError, match=message):
        check()


@pytest.mark.parametrize(
    ("in_files", "scores", "new", "expected"),
    [(None, ("values",), True, True), ({}, ("values",), True, True), ({"score.weight": 1}, ("values",), True, False),
     ({}, ("logprobs",), True, False), ({}, ("values",), False, False)],
)  # fmt: skip
def test_a_value_head_is_new_if_no_file_has_it(in_files: Any, scores: Any, new: bool, expected: bool) -> None:
    source = None if in_files is None else of(entries=in_files)
    module = of(scores=scores, shape=of(labels=of(new=new)))
    assert export._has_new_value_head(of(keymap=of(source=source), blueprint=of(module=module))) == expected


@pytest.mark.parametrize(
    ("kept", "key_dtype", "value", "scaled", "refused"),
    [
        (F32, "F16", 70_000.0, False, True), (F32, "F16", -70_000.0, False, True), (F32, "F16", 65_000.0, False, False),
        (F32, "F16", float("inf"), False, False), (F32, "F16", 70_000.0, True, False),
        (F32, "BF16", 3.4e38, False, False), (F32, "F32", 3.4e38, False, False), (BF16, "F16", 70_000.0, False, True),
        (F64, "F32", -1e39, False, True), (F64, "BF16", 1e39, False, True), (F64, "F64", 1e39, False, False),
    ],
)  # fmt: skip
def test_a_weight_that_overflows_is_refused(
    monkeypatch: pytest.MonkeyPatch, kept: torch.dtype, key_dtype: str, value: float, scaled: bool, refused: bool
) -> None:
    stored = mw.weights.Values({"p": torch.tensor([1.0, value, 2.0], dtype=kept), "empty": torch.zeros(0)})
    parts = [of(name=name) for name in ("empty", "p", "of another rank")]
    monkeypatch.setattr(export.weights, "blocks_by_key", lambda *_: {"k": [(part, None) for part in parts]})
    model: Any = of(table=None, kept={"p": kept, "empty": kept, "of another rank": kept})
    keymap: Any = of(choice={}, keys={"k": of(name="k", dtype=key_dtype)}, scales={"k": 1} if scaled else {})
    if not refused:
        export.refuse_overflow_of(stored, model, keymap)
        return
    with pytest.raises(mw.errors.ExportError, match="k has a weight of"):
        export.refuse_overflow_of(stored, model, keymap)
