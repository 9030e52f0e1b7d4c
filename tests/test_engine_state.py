"""State that changes its form, resumes, conversions, adapters, and what a sync hands out, by hand."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.engine import adapters, checkpoint, convert, loading_checks, optimizer_state, resume_checks
from meshwright.errors import CheckpointError, ConfigError
from meshwright.optim import LocalOptimizer, Place
from meshwright.recipe import Lora

of: Any = SimpleNamespace
stream: Any = importlib.import_module("meshwright.engine.stream")  # the package has a function of this name
F32, BF16, U8 = torch.float32, torch.bfloat16, torch.uint8
AT = Path("step-000007")

# Optimizer state in another form


def optimizer_of(quantised: str = "", dtype: Any = U8) -> LocalOptimizer:
    options = mw.AdamW(state_dtype=dtype)
    params = [of(name=name, decay=True, by_rows=False, matrices=None) for name in "abc"]
    places = {name: Place(lambda _: torch.arange(3), 0) for name in quantised}
    return LocalOptimizer(options, params, places)  # type: ignore[arg-type]


def stored_on(rank_has: str = "ab") -> dict[str, torch.Tensor]:
    shapes = dict(a=(3, 256), b=(3, 512), c=(0, 256))
    return {name: torch.zeros(shapes[name]) for name in (*rank_has, "c")}


def forms(state: Any) -> dict[str, list[tuple[torch.dtype, tuple[int, ...]]]]:
    return {name: [(each.dtype, tuple(each.shape)) for each in tensors] for name, tensors in state.items()}


WIDE_A, CODES_A = [(F32, (3, 256))] * 2, [(U8, (3, 256))] * 2
WIDE_B, CODES_B = [(F32, (3, 512))] * 2, [(U8, (3, 512))] * 2
SCALES_A, SCALES_B = [(F32, (3, 1))] * 2, [(F32, (3, 2))] * 2


@pytest.mark.parametrize(
    ("saved", "kept", "read", "taken"),
    [
        ("", "", {"a": WIDE_A, "b": WIDE_B}, {"a": WIDE_A, "b": WIDE_B}),
        ("b", "b", {"a": WIDE_A, "b": CODES_B, "b.scales": SCALES_B},
         {"a": WIDE_A, "b": CODES_B, "b.scales": SCALES_B}),
        ("a", "b", {"a": CODES_A, "a.scales": SCALES_A, "b": WIDE_B},
         {"a": WIDE_A, "b": CODES_B, "b.scales": SCALES_B}),
        ("", "ab", {"a": WIDE_A, "b": WIDE_B},
         {"a": CODES_A, "a.scales": SCALES_A, "b": CODES_B, "b.scales": SCALES_B}),
    ],
)  # fmt: skip
def test_state_is_read_as_it_was_saved_and_kept_as_the_engine_wants(
    saved: str, kept: str, read: dict[str, Any], taken: dict[str, Any]
) -> None:
    """An empty piece has no state."""
    optimizer, stored = optimizer_of(kept), stored_on()
    state = optimizer_state.to_be_read(optimizer, stored, iter(saved))
    assert forms(state) == read
    for name in "ab":
        if name not in saved:
            for at, tensor in enumerate(state[name]):
                tensor.copy_(torch.linspace(0.5, 1.0, tensor.numel()).view_as(tensor) + at)
    before = {name: [each.clone() for each in tensors] for name, tensors in state.items()}
    optimizer.steps = 4
    optimizer_state.take_state(optimizer, state, stored, iter(saved))
    assert forms(optimizer.state) == taken
    for name in {*"ab"} - {*saved} - {*kept}:
        assert all(map(torch.equal, optimizer.state[name], before[name]))


def test_codes_are_decoded_with_the_scales_of_their_own_plane() -> None:
    optimizer, stored = optimizer_of("a"), stored_on("a")
    state = optimizer_state.to_be_read(optimizer, stored, [])
    wide = [torch.full((3, 256), value) for value in (0.5, 0.25)]
    for tensor, value in zip(state["a"], wide, strict=True):
        tensor.copy_(value)
    optimizer_state.take_state(optimizer, state, stored, [])
    codes, other = optimizer.state, optimizer_of(dtype=BF16)
    optimizer_state.take_state(other, dict(codes), stored, ["a"])
    assert {*other.state} == {"a"}
    for tensor, value in zip(other.state["a"], wide, strict=True):
        assert tensor.dtype == BF16
        assert torch.equal(tensor.float(), value)


def test_dtypes_of_state_on_all_ranks() -> None:
    """Codes have float32 scales. Muon keeps one state of a matrix."""
    optimizer: Any = of(
        options=mw.AdamW(state_dtype=U8), state_names={"a": ("exp_avg",), "a.scales": ("exp_avg",),
        "b": ("exp_avg", "exp_avg_sq"), "c": ("exp_avg", "exp_avg_sq")},
    )  # fmt: skip
    model: Any = of(trained=("a", "b"), kept={"a": F32, "b": torch.float64, "c": F32})
    layout: Any = of(quantised=("a",))
    made = optimizer_state.dtypes_of(model, optimizer, layout)
    assert made == {"exp_avg": {"a": U8, "a.scales": F32, "b": torch.float64}, "exp_avg_sq": {"b": torch.float64}}
    optimizer.options = mw.AdamW(state_dtype=BF16)
    assert optimizer_state.dtypes_of(model, optimizer, of(quantised=()))["exp_avg"] == {"a": BF16, "b": BF16}


def test_a_state_dict_has_the_state_of_empty_pieces_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks have the same keys. State that no step has made yet is made; scales are those of their parameter."""
    seen: dict[str, Any] = {}

    def planes_of(table: Any, keymap: Any, kept: Any, dtypes: Any) -> list[Any]:
        seen["dtypes"] = dtypes
        return [of(name=name, keymap=0) for name in ("weights", *dtypes)]

    def sharded(whole: Any, pieces: Any, owned: Any, keymap: Any) -> Any:
        seen["owned"] = owned
        return whole

    fakes = dict(planes_of=planes_of, sharded=sharded, with_zeros=lambda values, *_: values)
    monkeypatch.setattr(optimizer_state, "disk", of(**fakes))
    optimizer, live = optimizer_of("a"), stored_on()
    optimizer.state = optimizer.new_state({"b": live["b"]})
    optimizer.state["b"][1].fill_(3.0)
    model: Any = of(values=lambda: of(apart=(live, None)), owned={"a"}, trained=("a", "b", "c"), table=0, keymap=0)
    made = optimizer_state.planes_in_memory(model, optimizer, of(spec=of(table=0), pieces=0))
    state = ["a.codes", "a.scales", "b", "c"]
    assert {name: sorted(plane) for name, plane in made.items()} == {
        "weights": ["a", "b", "c"], "exp_avg": state, "exp_avg_sq": state,
    }  # fmt: skip
    assert made["exp_avg_sq"]["b"] is optimizer.state["b"][1]
    assert (made["exp_avg"]["c"].shape, seen["owned"]) == ((0, 256), {"a", "a.scales"})
    assert seen["dtypes"]["exp_avg"] == {"a": U8, "a.scales": F32, "b": F32, "c": F32}


# Resume


def test_counters_of_a_checkpoint() -> None:
    """Random numbers continue only where the checkpoint has a row for this rank."""
    loads: dict[str, Any] = {}
    router = lambda name: of(resume=lambda load: loads.update({name: load}))  # noqa: E731 - short
    state = torch.get_rng_state()
    expected = torch.rand(3)
    for mtp, rows, saved in ((None, None, {}), (of(router=router("mtp")), {"host": state}, {}),
                             (of(router=router("mtp")), {"host": state}, {"mtp_router_load": [[3.0]]})):  # fmt: skip
        loads.clear()
        engine: Any = of(optimizer=of(steps=0), router=router("trunk"), mtp=mtp, model=of(mesh=of(device=1, host=1)))
        trainer = {"step": 7, "tokens": 99, "router_load": [[1.0, 2.0]], **saved}
        torch.manual_seed(3)
        checkpoint._restore_counters(engine, of(trainer=trainer, random_rows=lambda _, rows=rows: rows))
        assert (engine.steps, engine.optimizer.steps, engine.tokens) == (7, 7, 99)
        of_mtp = {} if mtp is None else {"mtp": saved.get("mtp_router_load")}
        assert loads == {"trunk": [[1.0, 2.0]], **of_mtp}
        assert torch.equal(torch.rand(3), expected) == (rows is not None)


def test_random_states_of_a_rank() -> None:
    made = checkpoint._random_states(of(mesh=of(device="cpu", host="cpu")))
    assert made == {"host": bytes(torch.get_rng_state().numpy())}


def carrying(own: Any, mtp: str = "carried", rank: int = 0, carried: tuple[str, ...] = ("mtp.a", "mtp.b", "x")) -> Any:
    mesh = of(rank=rank, together=lambda act, *_: act())
    return of(keymap=of(source=own, carried=carried), recipe=of(mtp=mtp), mesh=mesh)


def files(**dtypes: str) -> Any:
    return of(entries={name.replace("__", "."): of(dtype=dtype) for name, dtype in dtypes.items()}, directory=AT)


def test_the_carried_mtp_head_must_be_that_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors in another dtype, of one side alone, or that are no part of the head are not compared."""
    own, other = files(mtp__a="BF16", mtp__b="F32", x="F32"), files(mtp__a="BF16", mtp__b="F32", x="F32")
    differing = {"mtp.b"}
    first = lambda source, key: key if source is own or key not in differing else "other bytes"  # noqa: E731 - short
    monkeypatch.setattr(resume_checks.weights, "first_bytes", first)
    check = resume_checks.check_carried_mtp
    with pytest.raises(CheckpointError, match=r"mtp\.b is not that of"):
        check(carrying(own), other)
    check(carrying(own, rank=1), other)
    check(carrying(own, mtp="head"), other)
    check(carrying(None), other)
    check(carrying(own), files(mtp__a="BF16", mtp__b="F16", x="F32"))
    check(carrying(own), files(mtp__a="BF16"))
    differing.clear()
    differing.add("x")
    check(carrying(own), other)


def resumed(trained: str, frozen: Any, saved: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the warnings of `check_same` on rank 0."""
    said: list[str] = []
    monkeypatch.setattr(resume_checks, "check_same_table", lambda *_: None)
    monkeypatch.setattr(resume_checks, "settings_of", lambda _: {"lr": 1, "betas": 2, "new": 3})
    monkeypatch.setattr(resume_checks.logger, "warning", lambda text, *args: said.append(text % args))
    engine: Any = of(trained=tuple(trained), mtp=of(names=["m"]) if "m" in trained else None,
        model=of(mesh=of(rank=0, axes="fsdp=2"), recipe=of(frozen=frozen)))  # fmt: skip
    checkpoint_of: Any = of(directory=AT, manifest=of(about={}))
    resume_checks.check_same(engine, checkpoint_of, of(), {"settings": {}, **saved})
    return said


def test_a_resume_trains_the_same_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that was carried may be trained from now on. Only settings that were saved can differ."""
    assert resumed("ab", None, {"trained": ["b", "a"]}, monkeypatch) == []
    assert "carried its MTP head" in resumed("abm", None, {"trained": ["a", "b"]}, monkeypatch)[0]
    settings = {"lr": 1, "betas": 5, "old": 6}
    assert resumed("a", None, {"trained": ["a"], "settings": settings}, monkeypatch) == [
        "betas was 5 in step-000007, and is 2 now", "old was 6 in step-000007, and is None now",
    ]  # fmt: skip
    assert resumed("a", "nf4", {"trained": ["a"], "frozen": "nf4"}, monkeypatch) == []
    assert resumed("a", "nf4", {"trained": ["a"]}, monkeypatch) == [], "a converted checkpoint does not know it"
    for trained, saved, words in (("ab", ["a"], "only this engine trains b"), ("a", ["a", "b"], "only the checkpoint")):
        with pytest.raises(CheckpointError, match=words):
            resumed(trained, None, {"trained": saved}, monkeypatch)
    with pytest.raises(CheckpointError, match="frozen='nf4'"):
        resumed("a", None, {"trained": ["a"], "frozen": "nf4"}, monkeypatch)


KEYS = {"a": ["a.gate", "a.up"], "b": ["b"], "c": ["c"]}


def state_checked(
    planes: dict[str, list[str]], trained: str, monkeypatch: pytest.MonkeyPatch, quantised: str = "", **options: Any
) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(resume_checks, "keys_of_state", lambda _, name: KEYS[name])
    monkeypatch.setattr(resume_checks.logger, "warning", lambda text, *args: said.append(text % args))
    names = {"a": ("exp_avg",), "b": ("exp_avg", "exp_avg_sq"), "c": ("exp_avg", "exp_avg_sq")}
    wanted = options.get("options", mw.AdamW())
    engine: Any = of(trained="abc", optimizer=of(options=wanted, state_names=names), model=of(mesh=of(rank=0)))
    source: Any = of(directory=AT, planes={name: of(entries=dict.fromkeys(keys)) for name, keys in planes.items()})
    resume_checks.check_state(engine, source, of(), trained, quantised)
    return said


def test_state_of_each_parameter_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys of a parameter count; state that this optimizer does not keep is dropped with a warning."""
    whole = ["a.gate", "a.up", "b"]
    assert state_checked({"exp_avg": whole, "exp_avg_sq": ["b"]}, "ab", monkeypatch) == []
    [said] = state_checked({"exp_avg": [*whole, "c"], "exp_avg_sq": [*whole, "c"]}, "abc", monkeypatch)
    assert "has exp_avg_sq of 1 parameters, such as a" in said
    for planes in ({"exp_avg": ["a.gate", "b"], "exp_avg_sq": ["b"]}, {"exp_avg": whole, "exp_avg_sq": ["a.gate"]}):
        with pytest.raises(CheckpointError, match=r"has no exp_avg(_sq)? of (a\.up|b)"):
            state_checked(planes, "ab", monkeypatch)
    without_codes = type("Plain", (), {"codes": (), "state_names": ("exp_avg",)})()
    with pytest.raises(CheckpointError, match="has optimizer state in 8 bits"):
        state_checked({"exp_avg": whole, "exp_avg_sq": whole}, "a", monkeypatch, "a", options=without_codes)


# Conversions


def test_dtypes_of_state_that_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales show what is in 8 bits, and the first wide tensor the dtype of the rest."""
    monkeypatch.setattr(convert, "_keys", lambda _, param: KEYS[param])
    monkeypatch.setattr(convert, "with_scales", lambda table, quantised: [*quantised])
    first = {"a.gate": U8, "a.scales": F32, "b": BF16, "c": BF16}
    planes = {"exp_avg": {key: lambda d=dtype: torch.zeros(1, dtype=d) for key, dtype in first.items()}}
    state: Any = of(blueprint=of(table={name: name for name in KEYS}), planes=planes, of_optimizer=["exp_avg"])
    expected = {"a": U8, "b": BF16, "c": BF16, "a.scales": F32}
    dtypes_of: Any = convert._state_dtypes
    assert dtypes_of(state, ["a", "b", "c"]) == (["a"], expected)
    assert dtypes_of(state, ["a"]) == (["a"], {"a": U8, "a.scales": F32})


def test_a_tied_head_is_a_copy_of_the_first_key(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = {"embed": of(blocks=[of(key="e")], copies=[of(key="head"), of(key="head2")]),
               "experts": of(blocks=[of(key="x0"), of(key="x1")], copies=[of(key="x copy")]),
               "plain": of(blocks=[of(key="p")], copies=[])}  # fmt: skip
    monkeypatch.setattr(convert.weights, "chosen", lambda param, _: layouts[param])
    copies = convert._sources_of_copies(of(table=[*layouts], keymap=of(choice={})))
    assert copies == {"head": "e", "head2": "e", "x copy": "x0"}


# Adapters


def test_a_factor_is_assembled_from_its_keys() -> None:
    blocks = [of(key=key, ours=of(slices=(slice(at, at + 1),)), view=lambda x: x.view(1, 2, 3))
              for key, at in (("up", 1), ("gate", 0))]  # fmt: skip
    param = of(layouts=[of(blocks=blocks), of(blocks=[])], shape=(2, 2, 3), matrix=(4, 3))
    whole = {"gate": torch.arange(6.0).view(2, 3), "up": 10 + torch.arange(6.0).view(2, 3)}
    assert torch.equal(adapters._assembled(param, whole), torch.cat([whole["gate"], whole["up"]]))


def adapted(monkeypatch: pytest.MonkeyPatch, made_of: dict[str, str], part: dict[str, str]) -> Any:
    """Return what a checkpoint of adapters holds. `made_of`: the parameters of each key; `part`: the trained ones."""
    keymap_type = dataclasses.make_dataclass("KeyMap", ["keys", "carried", "fresh", "metadata", "choice"])
    table_type = dataclasses.make_dataclass("Table", ["params", "carried"])
    key = lambda name: of(name=name, _replace=lambda file: (name, file))  # noqa: E731 - short
    keymap = keymap_type({name: key(name) for name in made_of}, frozenset("c"), frozenset("f"), {}, {})
    own = table_type(dict.fromkeys(["q.lora.a", "w", "norm"]), ("c",))
    monkeypatch.setattr(adapters.weights, "blocks_by_key", lambda table, _: made_of if table is own else part)
    names = ["q.lora.a", "w", "norm", "q.lora.a.scales", "w.scales"]
    model: Any = of(recipe=of(lora=Lora()), keymap=keymap, trained=("q.lora.a", "norm"), table=own)
    return adapters.saved_part(model, table_type({name: name for name in names}, ("c",)))


def test_a_checkpoint_of_adapters_holds_what_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales go with their parameter. All keys are in one file, and nothing is carried."""
    table, keymap = adapted(monkeypatch, {"ka": "1", "kw": "12", "kn": "1"}, {"ka": "1", "kn": "1", "ka.scales": "1"})
    assert ([*table.params], table.carried) == (["q.lora.a", "norm", "q.lora.a.scales"], ())
    file = adapters.weights.ADAPTERS
    assert keymap.keys == {"ka": ("ka", file), "kn": ("kn", file)}
    assert (keymap.carried, keymap.fresh, [*keymap.metadata]) == (frozenset(), frozenset(), [file])
    with pytest.raises(ConfigError, match="kw is one tensor of the files"):
        adapted(monkeypatch, {"ka": "1", "kw": "12", "kn": "1"}, {"ka": "1", "kw": "1"})


# Loading


def test_formats_that_are_only_read_cannot_be_trained() -> None:
    keymap = of(only_read=lambda param: ("k", "4 bits") if param.name == "w" else None)
    blueprint: Any = of(table=[of(name="w"), of(name="norm")], keymap=keymap)
    loading_checks.refuse_training_read_only(blueprint, ["norm"])
    with pytest.raises(ConfigError, match="k is 4 bits"):
        loading_checks.refuse_training_read_only(blueprint, ["norm", "w"])


@pytest.mark.parametrize(
    ("fresh", "carried", "mtp", "trained", "rank", "words"),
    [
        (["head.mtp.norm"], [], "head", ["a"], 0, "a new one is drawn"),
        (["head.weight"], [], "head", ["a"], 0, None),
        ([], ["mtp.norm"], "carried", ["a"], 0, "goes stale"),
        ([], ["mtp.norm"], "carried", [], 0, None),
        ([], ["mtp.norm"], "head", ["a"], 0, None),
        ([], ["visual.x"], "carried", ["a"], 0, None),
        ([], ["mtp.norm"], "carried", ["a"], 1, None),
    ],
)
def test_warnings_of_an_mtp_head(
    fresh: list[str], carried: list[str], mtp: str, trained: list[str], rank: int, words: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    said: list[str] = []
    monkeypatch.setattr(loading_checks.logger, "warning", said.append)
    blueprint: Any = of(keymap=of(fresh=fresh, carried=carried), recipe=of(mtp=mtp))
    loading_checks.log_mtp(blueprint, trained, of(rank=rank))
    assert len(said) == (words is not None)
    assert (words or "") in "".join(said)


# What a sync hands out


class Keys:
    """A key map that notes which keys it was reduced to."""

    carried = frozenset({"mtp"})

    def __init__(self, kind: str = "all") -> None:
        self.kind, self.choice = kind, dict[str, str]()
        self.keys = {name: of(name=name, _replace=lambda dtype, name=name: of(name=name, dtype=dtype), dtype="BF16")
                     for name in ("w", "frozen", "both", "mtp")}  # fmt: skip

    def of_adapters(self) -> Keys:
        return Keys("adapters")

    def of_base(self) -> Keys:
        return Keys("base")


@pytest.mark.parametrize(
    ("which", "form", "dtype", "kind", "keys", "by_param"),
    [
        ("weight", "values", None, "all", ["w", "frozen", "both"], None),
        ("weight", "fp8", None, "all", ["w", "frozen", "both"], None),
        ("merged", "values", None, "base", ["w", "frozen", "both"], None),
        ("adapter", "values", None, "adapters", ["w", "frozen", "both"], None),
        ("weight", "values", F32, "all in float32", ["w", "frozen", "both"], None),
        ("grad", "values", None, "all", ["w"], "kept"),
    ],
)
def test_what_is_handed_out(
    which: str, form: str, dtype: Any, kind: str, keys: list[str], by_param: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Carried keys never go. Gradients exist of keys whose parameters are all trained; FP8 is made from float32."""
    made_of = {"w": "a", "frozen": "z", "both": "az"}
    monkeypatch.setattr(stream, "in_dtype", lambda keymap, model, dtype: Keys("all in float32"))
    monkeypatch.setattr(stream, "in_format", lambda keymap, model, form: of(scales={"w"} if form == "fp8" else set()))
    monkeypatch.setattr(stream.weights, "blocks_by_key", lambda *_: {
        key: [(of(name=name), None) for name in names] for key, names in made_of.items()})  # fmt: skip
    monkeypatch.setattr(stream.weights, "dtypes_of", lambda table, keymap, keys, by_param: (keymap, keys, by_param))
    model: Any = of(keymap=Keys(), table=None, trained=("a", "b"), kept="kept", recipe=of(lora=None))
    handout: Any = stream.handout_of(model, stream.Wanted(which, form, dtype))
    assert (handout.keymap.kind, [key.name for key in handout.keys], handout.by_param) == (kind, keys, by_param)
    assert [key.name for key in handout.keys if key.dtype == "F32"] == (["w"] if form == "fp8" else [])
    assert handout.dtypes == (handout.keymap, handout.keys, by_param)


@pytest.mark.parametrize(
    ("which", "form", "dtype"),
    [("both", "values", None), ("grad", "fp8", None), ("adapter", "source", None), ("grad", "values", F32),
     ("weight", "fp8", F32)],
)  # fmt: skip
def test_handouts_that_do_not_exist(which: str, form: str, dtype: Any) -> None:
    with pytest.raises(ConfigError, match="stream"):
        stream.handout_of(of(), stream.Wanted(which, form, dtype))
