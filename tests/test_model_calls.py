"""Calls on a model one by one: its base, sleep, samples, experts, resumes, and what is handed out."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.engine import checkpoint, inference, sampling, sleep, weight_deltas
from meshwright.engine import model as model_module
from meshwright.engine.asleep import OPTIMIZER, WEIGHTS, Asleep
from meshwright.errors import CheckpointError, ConfigError, StateError
from meshwright.recipe import Lora, Recipe

of: Any = SimpleNamespace
stream: Any = importlib.import_module("meshwright.engine.stream")  # the package has a function of this name
CPU = torch.device("cpu")

# The base, and whole weights


def model_of(**fields: Any) -> Any:
    model: Any = object.__new__(mw.Model)
    vars(model).update(fields)
    return model


@pytest.mark.parametrize(
    ("trained", "fresh", "message"),
    [
        (["q.a"], [], ""), (["q.a", "head.weight"], ["head.weight"], ""), (["q.a", "head.mtp.norm"], [], ""),
        (["q.a", "norm"], [], "norm is trained next to the adapters .1 such"),
        (["w", "q.a", "norm"], ["head.weight"], "w is trained next to the adapters .2 such"),
    ],
)  # fmt: skip
def test_a_base_is_that_which_the_adapters_were_given(trained: list[str], fresh: list[str], message: str) -> None:
    """A new head and the MTP head score no token of the base."""
    table = {name: of(adapter=name == "q.a") for name in trained}
    blueprint = of(table=table, keymap=of(fresh=fresh))
    model = model_of(trained=trained, blueprint=blueprint, calls=of(in_base=False), stages=())
    if message:
        with pytest.raises(ConfigError, match=message):
            model.base()
        return
    with model.base():
        assert model.calls.in_base
    assert not model.calls.in_base


@pytest.mark.parametrize(("scale", "bits"), [(None, 8), (1.0, 4)])
def test_codes_that_were_overwritten_are_noticed(scale: Any, bits: int) -> None:
    one, two = torch.ones(2, dtype=torch.uint8), torch.ones(2, dtype=torch.uint8)
    two.add_(1)
    loaded = {"one": (one, one._version), "two": (two, two._version)}
    model = model_of(calls=of(half_updated="", loaded=loaded), codings=dict.fromkeys(loaded, of(scale=scale)))
    model.check_whole()
    two.zero_()
    with pytest.raises(StateError, match=f"two is frozen and stays in {bits} bits"):
        model.check_whole()
    model.calls = of(half_updated="the update was interrupted", loaded={})
    with pytest.raises(StateError, match="interrupted; load the model again"):
        model.check_whole()


def test_an_origin_names_files_adapters_and_the_frozen_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that begin from adapters of the same path may still read other bytes."""
    made, sums = list[str](), {"p": " with checksum 1"}
    monkeypatch.setattr(model_module.peft_files, "checksum", lambda lora: sums.get(lora.path or "", ""))
    origin = lambda files, **fields: model_module._origin(  # noqa: E731 - short
        of(checksum=lambda: files), of(**{"lora": None, "frozen": None, **fields})
    )
    made += [origin("a"), origin("b"), origin("a", frozen="nf4"), origin("a", frozen="mxfp4")]
    made += [origin("a", lora=Lora(path="p")), origin("a", lora=Lora(rank=2)), origin("a", lora=Lora(rank=3))]
    sums["p"] = " with checksum 2"
    made.append(origin("a", lora=Lora(path="p")))
    assert len({*made}) == len(made)
    assert origin("a") == made[0]


def test_the_memory_of_training_is_that_of_the_stored_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "held_while_training", lambda *args, **more: (args, more))
    monkeypatch.setattr(model_module, "Need", lambda *args: args)
    recipe = of(memory=of(offload=True))
    blueprint, mesh = of(spec="spec", compute=torch.bfloat16, recipe=recipe), of(axes="axes")
    kept = {"a": torch.float32, "w": torch.bfloat16}
    fields = dict(blueprint=blueprint, mesh=mesh, trained=("a",), kept=kept, codings={"w": "code"}, low=of(names=["a"]))
    spec, axes, (args, more) = model_of(**fields).need("optimizer")
    assert (spec, axes, args) == ("spec", "axes", (torch.bfloat16, frozenset("a"), "optimizer"))
    assert more == {"offload": True, "narrow": {"a": 4, "w": 2}, "numbers": {"w": "code"}, "low": ["a"]}


def test_gradients_are_those_of_trained_parameters_until_they_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP may still hold unsharded gradients of a step that failed."""
    reset: list[Any] = []
    monkeypatch.setattr(model_module.parallel, "reset_after_forward", reset.append)
    monkeypatch.setattr(model_module.parallel, "local", lambda grad: grad)
    parameters = {name: torch.nn.Parameter(torch.ones(1)) for name in ("a", "none", "frozen")}
    for name in ("a", "frozen"):
        parameters[name].grad = torch.tensor([2.0])
    parameters["frozen"].requires_grad_(False)
    calls = of(asleep=Asleep(), pending="a step")
    model = model_of(_parameters=lambda: parameters, calls=calls, stages=(of(module="part"),))
    assert {name: grad.item() for name, grad in model.grads().items()} == {"a": 2}
    model.forget_grads()
    assert (model.grads(), calls.pending, reset) == ({}, None, [("part",)])
    assert parameters["frozen"].grad is None
    calls.asleep.add(OPTIMIZER, of(num_bytes=1))
    with pytest.raises(StateError, match="asleep"):
        model.grads()


def drawn(monkeypatch: pytest.MonkeyPatch, config: Any = None, **fields: Any) -> list[Any]:
    """Return what a model with new weights is made of, and which weights are drawn with which seed."""
    made: list[Any] = []
    blueprint = lambda *args, **more: made.append((args, more)) or "blueprint"  # noqa: E731 - short
    monkeypatch.setattr(model_module, "local_directory", lambda source, mesh, weights: made.append(weights) or "at")
    monkeypatch.setattr(model_module, "extents_of_model", made.append)
    monkeypatch.setattr(model_module, "read_config", lambda _: config or {})
    monkeypatch.setattr(model_module, "Blueprint", of(of=blueprint))
    monkeypatch.setattr(model_module, "put_on_mesh", lambda *args: of(pieces=["a", "b"], args=args))
    monkeypatch.setattr(model_module, "_fill_fresh", lambda model, *args: made.append(args))
    made.append(mw.init("source", object.__new__(mw.Mesh), seed=5, **fields).args[0])
    return made


def test_new_weights_are_all_drawn_with_one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The config of a damaged checkpoint is refused by its checksum."""
    recipe = Recipe(head="none", lora=Lora())
    made = drawn(monkeypatch, {"a": 1}, head="none", lora=Lora())
    blueprint = (({"a": 1}, None, recipe), {"directory": "at", "origin": "seed 5"})
    assert made == [False, "at", blueprint, (["a", "b"], 5), "blueprint"]


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        ({}, {"lora": Lora(path="p")}, "lora.path='p'"), ({}, {"frozen": "nf4", "lora": Lora()}, "frozen='nf4'"),
        ({"quantization_config": {}}, {}, "quantization_config"), ({}, {"dtype": torch.float16}, "dtype=torch.float16"),
    ],
)  # fmt: skip
def test_new_weights_have_no_files(monkeypatch: pytest.MonkeyPatch, config: Any, fields: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        drawn(monkeypatch, config, **fields)


# Sleep


class Copy:
    """A copy on the host that notes what is done with it."""

    def __init__(self, num_bytes: int, acts: list[str], fails: bool = False) -> None:
        self.num_bytes, self.acts, self.fails = num_bytes, acts, fails

    def restore(self) -> None:
        self.acts.append(f"restore {self.num_bytes}")
        if self.fails:
            raise MemoryError

    def free(self) -> None:
        self.acts.append(f"free {self.num_bytes}")


@pytest.mark.parametrize("fails", [True, False])
def test_what_cannot_wake_sleeps_on(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    acts: list[str] = []
    monkeypatch.setattr(sleep, "agree", lambda *_, **__: None)
    monkeypatch.setattr(sleep, "release_cached_memory", lambda _: None)
    asleep = Asleep()
    for part, copy in ((OPTIMIZER, Copy(5, acts)), (WEIGHTS, Copy(2, acts)), (WEIGHTS, Copy(1, acts, fails))):
        asleep.add(part, copy)  # type: ignore[arg-type]
    mesh = of(together=lambda act, *_: act(), synchronize=lambda: None, device=CPU)
    model = of(mesh=mesh, calls=of(asleep=asleep))
    if fails:
        with pytest.raises(MemoryError):
            sleep.wake_up(model, {WEIGHTS: True, OPTIMIZER: False})
    else:
        assert sleep.wake_up(model, {WEIGHTS: True, OPTIMIZER: False}) == 3
    assert acts == ["restore 2", "restore 1", *["free 2", "free 1"] * fails]
    assert [*asleep.copies] == [OPTIMIZER, *[WEIGHTS] * fails]
    assert sleep.wake_up(model, {WEIGHTS: False, OPTIMIZER: True}) == 5
    assert [*asleep.copies] == [WEIGHTS] * fails


@pytest.mark.parametrize("fails", ["", "settle", "fixed", "copy"])
def test_nothing_sleeps_unless_all_can_be_copied(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """A save in the background is settled first. Parts are noted as asleep before they are freed."""
    acts, asleep = list[str](), Asleep()
    tensors = {WEIGHTS: {"w": torch.ones(3)}, OPTIMIZER: {"m": torch.ones(5)}}

    def act(name: str) -> None:
        acts.append(name)
        if name == fails:
            raise StateError(name)

    def copy_of(copied: Any) -> Any:
        act("copy")
        num = sum(each.nbytes for each in copied)
        return of(num_bytes=num, free=lambda: acts.append(f"free {num} of {len(asleep.copies)}"))

    monkeypatch.setattr(sleep, "agree", lambda _, __, propose, asleep: propose())
    monkeypatch.setattr(sleep, "_to_be_freed", lambda *_: tensors)
    monkeypatch.setattr(sleep, "_check_resizable", lambda _: act("fixed"))
    monkeypatch.setattr(sleep, "HostCopy", of(of=copy_of))
    monkeypatch.setattr(sleep, "release_cached_memory", lambda _: None)
    mesh = of(rank=0, together=lambda act, *_: act(), synchronize=lambda: None, device=CPU)
    model = of(mesh=mesh, calls=of(asleep=asleep), recipe=of(memory=of(offload=False)))
    put = lambda: sleep.put_to_sleep(model, {WEIGHTS: True, OPTIMIZER: True}, None, lambda: act("settle"))  # noqa: E731
    if fails:
        with pytest.raises(StateError, match=fails):
            put()
        assert (asleep.copies, acts[-1]) == ({}, fails)
        return
    assert put() == 4 * (3 + 5)
    assert acts == ["settle", "fixed", "fixed", "copy", "copy", "free 12 of 1", "free 20 of 2"]
    assert [*asleep.copies] == [WEIGHTS, OPTIMIZER]


# Samples


def test_a_prompt_that_has_ended_gets_no_more_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice of rank 0 counts, which is the first of those of all ranks."""
    chosen = iter([[4, 5], [9, 6], [7, 8], [7, 9], [1, 1]])
    monkeypatch.setattr(sampling, "agree", lambda *_: None)
    monkeypatch.setattr(sampling, "_pack_sequences", lambda _, prompts, generated, how: [*map(len, generated)])
    monkeypatch.setattr(sampling, "_next_logits", lambda _, sizes: sizes)
    monkeypatch.setattr(sampling, "_choose", lambda *_: torch.tensor(next(chosen)))
    monkeypatch.setattr(sampling, "_generator", lambda *each: seeds.append(each))
    seeds: list[Any] = []
    gather = lambda own, *_: torch.cat([own, own + 50])  # noqa: E731 - short
    tokens = sampling.token_stream(of(mesh=of(gather_rows=gather)), [[1], [2]], sampling.Decoding(9, stop=(9,)))
    assert [*tokens] == [[4, 5], [9, 6], [None, 8], [None, 9]]
    assert seeds == [(0, 0), (0, 1)]
    chosen = iter([[4, 5], [9, 6], [7, 8]])
    model = of(mesh=of(gather_rows=lambda own, *_: own))
    assert mw.sample(model, [[1], [2]], tokens=2, stop=[9]) == [[4, 9], [5, 6]]


# Experts


def test_choices_of_experts_are_kept_for_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three layers are on this stage; another one adds its own."""
    balance = of(num_layers=3, top_k=2, chosen=None)

    def forward(model: Any, batches: Any, want: Any, call: str) -> None:
        balance.chosen[0] = torch.tensor([[1, 2], [3, 4]])
        balance.chosen[2] = torch.tensor([[5, 6], [7, 8]])
        if call in fails:
            raise StateError("refused")

    fails: set[str] = set()
    monkeypatch.setattr(inference, "check_is_model", lambda _: None)
    monkeypatch.setattr(inference, "score_without_grad", forward)
    others = torch.tensor([[0, 0], [9, 9], [0, 0]], dtype=torch.int32)
    mesh = of(
        token_range=lambda num: (2, 4), device=CPU, all_reduce_=lambda own, _: own + others,
        gather_rows=lambda own, axes: torch.cat([own, own]),
    )  # fmt: skip
    model = of(blueprint=of(balance=balance, scores=("logprobs",)), mesh=mesh)
    made = mw.expert_choices(model, mw.pack([[5, 6, 7, 8]]))
    assert made.tolist() == [[[1, 2], [9, 9], [5, 6]], [[3, 4], [9, 9], [7, 8]]] * 2
    assert balance.chosen is None
    fails.add("expert_choices")
    with pytest.raises(StateError):
        mw.expert_choices(model, mw.pack([[5, 6, 7, 8]]))
    assert balance.chosen is None, "later forwards would keep their choices too"


# What is handed out


def test_weights_of_an_interrupted_update_are_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise StateError("the update of step 3 was interrupted")

    for module in (stream, weight_deltas):
        monkeypatch.setattr(module, "check_is_model", lambda _: None)
        monkeypatch.setattr(module, "handout_of", lambda *_: of())
    model = of(check_whole=refuse, recipe=of(lora=None))
    for call in (lambda: list(mw.shards(model)), lambda: mw.WeightDeltas(model)):
        with pytest.raises(StateError, match="interrupted"):
            call()


@pytest.mark.parametrize(
    ("which", "checked"), [("weight", True), ("adapter", True), ("merged", False), ("grad", False)]
)
def test_weights_that_a_dtype_cannot_hold_are_refused(
    monkeypatch: pytest.MonkeyPatch, which: str, checked: bool
) -> None:
    """Merged weights are checked once they exist, on all ranks together."""
    seen: list[Any] = []
    monkeypatch.setattr(stream, "check_shapes", lambda *_: None)
    monkeypatch.setattr(stream, "refuse_overflow_of", lambda *each: seen.append(each))
    monkeypatch.setattr(stream, "merged_values", lambda _: "merged")
    together = of(together=lambda act, *_: act())
    values, grads = {"w": "weights"}, {"w": "gradients"}
    model = of(pieces={}, values=lambda: values, grads=lambda: grads, trainable=["w"], mesh=together)
    handout = of(wanted=of(which=which), written=of(scales={}), keymap="keys")
    stream.check_stored(model, handout)
    assert seen == [(values, model, "keys")] * checked
    seen.clear()
    made = stream.values_of(model, handout)
    assert made == {"merged": "merged", "grad": grads}.get(which, values)
    assert seen == [("merged", model, "keys")] * (which == "merged")


def test_gradients_of_a_stage_without_trained_parameters_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = of(grads=dict, trainable=[], values=lambda: {"w": 1})
    assert stream._stored(model, "grad") == {}
    assert stream._stored(model, "weight") == {"w": 1}
    model.trainable = ["w"]
    with pytest.raises(StateError, match="no gradients"):
        stream._stored(model, "grad")


@pytest.mark.parametrize("fails", ["", "ranks", "stored", "WeightDeltas.stream", "the end of WeightDeltas.stream"])
def test_changes_count_as_sent_once_all_ranks_have_taken_them(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    acts: list[str] = []

    def act(name: str) -> None:
        acts.append(name)
        if name == fails:
            raise StateError(name)

    def agree(_: Any, call: str, propose: Any) -> None:
        act(call)
        propose()

    def send(stored: Any, planned: Any, sent: Any, changed: list[Any], to_all: bool) -> Any:
        assert (stored, planned, sent, to_all) == ("stored values", [2], "sent", True)
        changed.append("change")
        yield "name", "indices", "values"

    fakes = dict(
        agree=agree, handout_of=lambda *_: of(keymap=0, keys=0, dtypes=0), values_of=lambda *_: "values",
        check_ranks=lambda _: act("ranks"), check_stored=lambda *_: act("stored"),
        weights=of(
            Change=str, buckets=lambda *each: each[-1], send_changes=send, move=lambda *each: act(f"move {each}")
        ),
    )  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(weight_deltas, name, fake)
    deltas: Any = object.__new__(mw.WeightDeltas)
    deltas._model = of(stored_model=lambda values: f"stored {values}", mesh=of(rank=2))
    deltas._wanted, deltas._sent = of(which="weight", dtype=None), "sent"
    if not fails:
        next(deltas.stream(ranks="all"))  # not to the end
        assert acts.pop() == "stored"
        acts.clear()
    with pytest.raises(StateError, match=fails) if fails else contextlib.nullcontext():
        assert [*deltas.stream(ranks="all")] == [("name", "indices", "values")]
    every = ["WeightDeltas.stream", "ranks", "stored", "the end of WeightDeltas.stream", "move ('sent', ['change'])"]
    assert acts == every[: every.index(fails) + 1 if fails else None]


# A resume


@pytest.mark.parametrize(("fails", "lora"), [(True, None), (False, None), (False, Lora())])
def test_a_resume_that_fails_half_way_leaves_a_mark(
    monkeypatch: pytest.MonkeyPatch, fails: bool, lora: Lora | None
) -> None:
    """Gradients of the weights before are dropped; on success the checkpoint is the origin of the weights, but not of
    the base of adapters."""
    monkeypatch.setattr(checkpoint, "replace", lambda blueprint, origin: of(origin=origin))
    discarded: list[int] = []
    model = of(calls=of(half_updated=""), blueprint=of(origin="files"), recipe=of(lora=lora))
    engine = of(model=model, discard=lambda: discarded.append(1))
    refused = pytest.raises(OSError, match="gone") if fails else contextlib.nullcontext()
    with refused, checkpoint._marked_half_restored(engine, Path("step-7")):
        assert "the resume from step-7 failed" in model.calls.half_updated
        if fails:
            raise OSError("gone")
    assert discarded == [1]
    assert bool(model.calls.half_updated) == fails
    assert model.blueprint.origin == ("files" if fails or lora else "the checkpoint step-7")


CHECKS = ["check_carried_mtp", "_blueprint_of", "check_same_table", "check_same_config"]


@pytest.mark.parametrize("numbers", [(), ("w",)])
@pytest.mark.parametrize("fails", ["", *CHECKS, "check_same", "fill"])
def test_weights_alone_are_checked_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch, numbers: tuple[str, ...], fails: str
) -> None:
    """Optimizer state and counters begin anew. Frozen codes are compared, and not read."""
    acts: list[tuple[str, tuple[Any, ...]]] = []

    def act(name: str, *args: Any) -> Any:
        acts.append((name, args))
        if name == fails:
            raise CheckpointError(name)
        return of(keymap=of(source=None), table="table")

    for name in CHECKS:
        monkeypatch.setattr(checkpoint, name, lambda *args, name=name: act(name, *args))
    fakes = {name: lambda *args, name=name: act(name, *args) for name in ("check_same", "fill")}
    monkeypatch.setattr(checkpoint, "weights", of(**fakes, plan_reads=lambda *args: [args[-1]]))
    monkeypatch.setattr(checkpoint, "replace", lambda _, **fields: of(**fields))
    mesh = of(rank=1, axes="axes", together=lambda act, *_: act())
    blueprint = of(head="value", spec="spec")
    values = lambda: of(apart=("live", "frozen"))  # noqa: E731 - short
    model = of(recipe=of(lora=None), blueprint=blueprint, mesh=mesh, values=values, numbers=numbers, calls=of())
    optimizer = of(steps=7, state={"m": 1})
    engine = of(model=model, steps=7, tokens=99, optimizer=optimizer, discard=lambda: None)
    loads: list[str] = []
    engine.router, engine.mtp = (
        of(resume=lambda: loads.append("even")),
        of(router=of(resume=lambda: loads.append("mtp"))),
    )
    source = of(directory=Path("hf"))
    every = [*CHECKS, *["check_same"] * bool(numbers), "fill"]
    if fails in every:
        with pytest.raises(CheckpointError, match=fails):
            checkpoint._resume_weights_only(engine, source, ["eps"])
        assert (engine.steps, engine.tokens, optimizer.state) == (7, 99, {"m": 1})
        every = every[: every.index(fails) + 1]
    else:
        made = checkpoint._resume_weights_only(engine, source, ["eps"])
        assert (made.step, made.tokens, made.state) == (0, 0, None)
        assert (engine.steps, engine.tokens, optimizer.steps, optimizer.state) == (0, 0, 0, {})
        assert loads == ["even", "mtp"]
        arguments = dict(acts)
        assert arguments["_blueprint_of"] == (model, source, "value")
        assert arguments["check_same_config"][2:] == (Path("hf"), ["eps"])
        assert arguments["fill"] == ("live", mesh, ["live"], range(1, 2), source)
        assert arguments.get("check_same", ("frozen", 1, ["frozen"], source)) == ("frozen", 1, ["frozen"], source)
    assert [name for name, _ in acts] == every
    model.recipe.lora = Lora()
    with pytest.raises(CheckpointError, match="the engine's has adapters"):
        checkpoint._resume_weights_only(engine, source, [])
