"""Exports of adapters and models, and the recipes of conversions, on stand-ins for models and files."""

from __future__ import annotations

import contextlib
import importlib
import json
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import meshwright as mw
from meshwright.checkpoint import Keep
from meshwright.engine import adapters, checkpoint, convert
from meshwright.errors import ConfigError, ExportError
from meshwright.recipe import Lora, Recipe
from meshwright.weights import peft_files

of: Any = SimpleNamespace
export: Any = importlib.import_module("meshwright.engine.export")  # the package has a function of this name
BF16, F32 = torch.bfloat16, torch.float32

# Adapters


def adapted(trained: tuple[str, ...] = ("q.a",), head: str = "lm", keys: str = "model.", **more: Any) -> Any:
    """Return a model with one adapter. `keys`: the prefix of its keys in the files."""
    blueprint = of(keymap=of(keys={f"{keys}embed_tokens.weight": 0}), head=head)
    fields = dict(recipe=of(lora=Lora()), trained=trained, blueprint=blueprint, directory=Path("base"), config={})
    table = {name: of(name=name, adapter=name.endswith(".a")) for name in ("q.a", "norm", "w")}
    return of(**{**fields, "table": table, **more})


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (adapted(), ("out", None), ""),
        (adapted(), (Path("out"), "per-expert"), ""),
        (adapted(("q.a", "norm")), ("out", None), "leave out norm .1 trained"),
        (adapted(("w", "q.a", "norm")), ("out", None), "leave out w .2 trained"),
        (adapted(recipe=of(lora=None)), ("out", None), "no adapters"),
        (adapted(), (7, None), "7 is not a path"),
        (adapted(), ("out", "split"), "layout='split' is unknown"),
        (adapted(keys=""), ("out", None), "those of a base model"),
    ],
)
def test_what_no_file_of_adapters_holds_is_refused(
    monkeypatch: pytest.MonkeyPatch, model: Any, arguments: Any, message: str
) -> None:
    monkeypatch.setattr(adapters, "check_is_model", lambda _: None)
    monkeypatch.setattr(adapters, "agree", lambda *_: None)
    monkeypatch.setattr(adapters, "default_layout", lambda _: "fused")
    if message:
        with pytest.raises(mw.MeshwrightError, match=message):
            adapters._agreed(model, "export_adapter", *arguments)
        return
    at, layout = adapters._agreed(model, "export_adapter", *arguments)
    assert (at, layout) == (Path("out").absolute(), arguments[1] or "fused")


@pytest.mark.parametrize(
    ("keys", "head", "why"),
    [
        ("model.", "lm", ""), ("model.", "value", ""), ("", "none", ""), ("", "lm", "those of a base model"),
        ("", "value", "those of a base model"), ("model.", "none", "those of a model with a head"),
    ],
)  # fmt: skip
def test_keys_of_adapters_fit_one_class(keys: str, head: str, why: str) -> None:
    said = adapters.why_without_class(adapted(head=head, keys=keys).blueprint)
    assert (why in said, bool(said)) == (True, bool(why))


@pytest.mark.parametrize(("rank", "overwrite"), [(0, True), (0, False), (1, False)])
def test_a_check_of_adapters_is_that_of_their_export(
    monkeypatch: pytest.MonkeyPatch, rank: int, overwrite: bool
) -> None:
    """Rank 0 writes. The directory of the base is never replaced."""
    seen: list[Any] = []
    monkeypatch.setattr(adapters, "_agreed", lambda *_: (Path("at/out"), "fused"))
    monkeypatch.setattr(adapters.weights, "check_target", seen.append)
    keys = {name: of(num_bytes=num) for name, num in (("a", 1 << 20), ("b", 23))}
    mesh = of(rank=rank, together=lambda act, *_: act())
    model = adapted(keymap=of(of_adapters=lambda: of(keys=keys)), mesh=mesh)
    for directory, source in ((Path("base"), Path("base")), (None, Path("at"))):
        seen.clear()
        model.directory = directory
        adapters.check_export_adapter(model, "out", overwrite=overwrite)
        assert len(seen) == (rank == 0)
        for target in seen:
            assert (target.directory, target.source, target.overwrite) == (Path("at/out"), source, overwrite)
            assert (1 << 20) + 23 <= target.num_bytes < (1 << 20) + (1 << 17)
            assert target.names == {peft_files.CONFIG_FILE, peft_files.WEIGHTS_FILE}
            assert target.config == peft_files.CONFIG_FILE


@pytest.mark.parametrize(
    ("head", "task"), [("lm", "CAUSAL_LM"), ("value", "FEATURE_EXTRACTION"), ("none", "FEATURE_EXTRACTION")]
)
def test_files_of_adapters_say_their_task_and_are_readable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, head: str, task: str
) -> None:
    """Gate and up of an expert share one A."""
    made: list[Any] = []
    both = torch.arange(6.0).view(2, 3)
    monkeypatch.setattr(adapters, "as_in_peft", lambda *_: {"gate": both, "up": both})
    monkeypatch.setattr(adapters.peft_files, "pairs_of", lambda params: [param.name for param in params])
    monkeypatch.setattr(adapters, "_plain_modules", lambda _: ["plain"])
    monkeypatch.setattr(adapters.peft_files, "config_of", lambda *args, **more: made.append((args, more)) or {"r": 8})
    model = adapted(head=head)
    model.table = [*model.table.values()]
    adapters._write(model, tmp_path, {}, "fused")
    config = json.loads((tmp_path / peft_files.CONFIG_FILE).read_text())
    assert config == {"r": 8, "task_type": task}
    assert made == [((Lora(), ["q.a"], "fused", "base"), {"plain": ["plain"]})]
    tensors = load_file(tmp_path / peft_files.WEIGHTS_FILE)
    assert all(torch.equal(tensors[name], both) for name in ("gate", "up"))
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1


# Exports


class Table(dict[str, Any]):
    @property
    def params(self) -> Table:
        return self


def test_each_parameter_is_checked_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes of all tensors of a rank are checked on it."""
    checked: list[list[str]] = [[] for _ in range(3)]
    shapes: list[Any] = []
    monkeypatch.setattr(export, "check_shapes", lambda _, *each: shapes.append(each))
    table = Table({name: name for name in "gfedcba"})
    for rank, of_rank in enumerate(checked):
        monkeypatch.setattr(export, "check_rows_to_write", lambda param, *_, of_rank=of_rank: of_rank.append(param))
        model = of(blueprint=of(spec=0), mesh=of(rank=rank, axes=of(world=3)), table=table)
        export.check_pieces(model, {"a": rank}, {"p": rank})
    assert shapes == [({"a": rank}, {"p": rank}) for rank in range(3)]
    assert checked == [["a", "d", "g"], ["b", "e"], ["c", "f"]]


@pytest.mark.parametrize(
    ("name", "shape", "fits"),
    [("a", (3, 4), True), ("a", (4, 3), False), ("codes", (3, 5), True), ("codes", (3, 4), False)],
)
def test_tensors_have_the_shapes_of_their_pieces(name: str, shape: tuple[int, ...], fits: bool) -> None:
    """Codes have one more column for scales."""
    model = of(codings={"codes": of(stored=lambda piece: (piece[0], piece[1] + 1))})
    values = mw.weights.Values({"other": torch.zeros(2), name: torch.zeros(shape)})
    pieces = {"other": of(shape=(2,)), "a": of(shape=(3, 4)), "codes": of(shape=(3, 4))}
    if fits:
        export.check_shapes(model, values, pieces)
        return
    with pytest.raises(ExportError, match=f"{name} is stored as"):
        export.check_shapes(model, values, pieces)


def test_formats_of_keys() -> None:
    """Codes are made from weights in the compute dtype, and of the modules that train in FP8."""
    calls: list[Any] = []
    keys = make_dataclass(
        "Keys", ["used", "scales"], namespace={
            "as_source": lambda self: ("source", self.used),
            "in_fp8": lambda self, *args: calls.append((self.used, *args)) or self,
        },
    )  # fmt: skip
    model = of(dtype=BF16, table="table", blueprint=of(spec=of(fp8_left_out=("*.o",))))
    assert export.in_format(keys(None, {}), model, "source") == ("source", BF16)
    assert export.in_format(keys(None, {}), model, "values") == keys(BF16, {})
    assert calls == []
    assert export.in_format(keys(None, {"a": 1}), model, "fp8") == keys(BF16, {"a": 1})
    assert calls == [(BF16, "table", ("*.o",))]
    with pytest.raises(ConfigError, match="whole 128 x 128 blocks"):
        export.in_format(keys(None, {}), model, "fp8")
    with pytest.raises(ConfigError, match="format='int8'"):
        export.in_format(keys(None, {}), model, "int8")


@pytest.mark.parametrize(
    ("says", "written", "fresh", "expected"),
    [
        (1, True, False, 1), (0, False, False, 0), (None, False, False, None), (None, True, False, None),
        (2, True, True, 2), (1, False, False, 0), (0, True, True, 1), (None, True, True, 1), (None, False, True, None),
    ],
)  # fmt: skip
def test_the_config_has_the_mtp_layers_of_the_files(
    monkeypatch: pytest.MonkeyPatch, says: int | None, written: bool, fresh: bool, expected: int | None
) -> None:
    """Readers take one layer where the field is absent, so only a new head needs it."""
    monkeypatch.setattr(export.weights, "exported_config", lambda config, dtype, keymap: {**config, "dtype": dtype})
    monkeypatch.setattr(export, "family_of", lambda _: of(mtp="layers"))
    config = {} if says is None else {"layers": says}
    blueprint = of(config=config, keymap=of(fresh=["head.mtp.norm"] if fresh else ["head.weight"], keys=["mtp.norm"]))
    keymap = of(keys=["mtp.norm", "norm"] if written else ["norm"])
    made = export.config_of(blueprint, BF16, keymap, say=False)
    assert made == {"dtype": BF16, **({} if expected is None else {"layers": expected})}
    monkeypatch.setattr(export, "family_of", lambda _: of(mtp=""))
    assert export.config_of(blueprint, BF16, keymap) == {**config, "dtype": BF16}


@pytest.mark.parametrize(("deltas", "refused"), [({"p": 0}, True), ({"q": 0}, False)])
def test_merged_weights_are_wider_than_their_base(monkeypatch: pytest.MonkeyPatch, deltas: Any, refused: bool) -> None:
    """Weights of float16 fit into float16, and with adapters they are sums in float32."""
    values = mw.weights.MergedValues({"p": torch.tensor([7e4, 1.0])}, {}, deltas, {})
    values._last["p"] = values.stored["p"]
    monkeypatch.setattr(export.weights, "blocks_by_key", lambda *_: {"k": [(of(name="p"), None)]})
    model = of(table=None, kept={"p": torch.float16})
    keymap = of(choice={}, keys={"k": of(name="k", dtype="F16")}, scales={})
    if not refused:
        export.refuse_overflow_of(values, model, keymap)
        return
    with pytest.raises(ExportError, match="k has a weight of 70000"):
        export.refuse_overflow_of(values, model, keymap)


# Conversions and checkpoints


def recipes(monkeypatch: pytest.MonkeyPatch, head: str = "lm") -> list[Recipe]:
    """Return a list to which each blueprint adds its recipe."""
    made: list[Recipe] = []

    def blueprint(config: Any, files: Any, recipe: Recipe, **_: Any) -> Any:
        made.append(recipe)
        return of(keymap=of(source=None))

    monkeypatch.setattr(convert, "check_has_base", lambda _: None)
    monkeypatch.setattr(convert.weights, "read_config", lambda _: {})
    monkeypatch.setattr(convert, "Blueprint", of(of=blueprint))
    return made


@pytest.mark.parametrize(
    ("changes", "recipe", "loads"),
    [
        ({}, Recipe(), ((), ())),
        ({"head": "value", "tower": True}, Recipe(head="value", tower=True), ((), ())),
        ({"trained": ["a", "head.mtp.norm"], "router_load": [[1.0, 2.0]], "mtp_router_load": [[3.0]]},
         Recipe(mtp="head"), (((1.0, 2.0),), ((3.0,),))),
    ],
)  # fmt: skip
def test_a_checkpoint_says_how_it_was_trained(
    monkeypatch: pytest.MonkeyPatch, changes: Any, recipe: Recipe, loads: Any
) -> None:
    """Float32 masters are its weights."""
    made, trainer = recipes(monkeypatch), {"head": "lm", "trained": ["a"], "step": 7, "tokens": 99, **changes}
    planes = {"weights": "rounded", "master": "wide", "exp_avg": "state"}
    opened = of(directory=Path("step"), trainer=trainer, planes=planes, parameters="wide")
    monkeypatch.setattr(convert.disk, "opened_at", lambda _: opened)
    monkeypatch.setattr(convert.disk, "check_bytes", lambda _: [])
    monkeypatch.setattr(convert, "_lazy_tensors", lambda source, _: source)
    state = convert._read_meshwright(Path("step"))
    assert made == [recipe]
    assert state.planes == {"weights": "wide", "exp_avg": "state"}
    assert (state.step, state.tokens, state.router_load, state.mtp_router_load) == (7, 99, *loads)


@pytest.mark.parametrize(
    ("keys", "recipe"),
    [
        (["model.norm"], Recipe()), (["score.weight"], Recipe(head="value")), (["mtp.norm"], Recipe(mtp="head")),
        (["model.visual.x", "score.weight"], Recipe(head="value", tower=True)),
    ],
)  # fmt: skip
def test_keys_of_a_dcp_state_say_how_it_was_trained(
    monkeypatch: pytest.MonkeyPatch, keys: list[str], recipe: Recipe
) -> None:
    made = recipes(monkeypatch)
    counters = {"step": torch.tensor(7), "tokens": torch.tensor(99), "router_load": torch.tensor([[1.5, 2.0]])}
    if recipe.mtp == "head":
        counters["mtp_router_load"] = torch.tensor([[3.0]])
    tensors = {f"counters.{name}": value for name, value in counters.items()}
    tensors |= {f"weights.{key}": torch.ones(2, 3) for key in keys} | {"exp_avg.model.norm.codes": torch.zeros(5)}
    files = of(shapes={name: tuple(x.shape) for name, x in tensors.items()}, tensor=tensors.__getitem__)
    monkeypatch.setattr(convert.disk, "TorchFiles", lambda _: files)
    monkeypatch.setattr(convert.weights, "open_source", lambda _: of())
    for name in ("_drop_foreign", "_add_frozen", "_check_state"):
        monkeypatch.setattr(convert, name, lambda *_: None)
    state = convert._read_torch(Path("dcp"), Path("like"))
    assert made == [recipe]
    assert {name: [*plane] for name, plane in state.planes.items()} == {"exp_avg": ["model.norm"], "weights": keys}
    assert torch.equal(state.planes["weights"][keys[0]](), torch.ones(2, 3))
    mtp = ((3.0,),) if recipe.mtp == "head" else ()
    assert (state.step, state.tokens, state.router_load, state.mtp_router_load) == (7, 99, ((1.5, 2.0),), mtp)


KEYS = {"fused": ["gate", "up"], "w": ["w"], "norm": ["norm"], "frozen": ["frozen"]}


@pytest.mark.parametrize(("head", "tower", "mtp"), [("lm", False, None), ("value", True, object())])
def test_a_converted_checkpoint_records_what_was_trained(
    monkeypatch: pytest.MonkeyPatch, head: str, tower: bool, mtp: Any
) -> None:
    """A parameter with state of all of its keys was trained; Muon keeps one tensor of a matrix."""
    seen: dict[str, Any] = {}
    note = lambda name, *at: lambda *args: seen.update({name: [args[i] for i in at]}) or ()  # noqa: E731 - short
    monkeypatch.setattr(convert, "_keys", lambda _, param: KEYS[param.name])
    monkeypatch.setattr(
        convert, "_state_dtypes", lambda state, trained: ("table", dict.fromkeys((*trained, "w.s"), F32))
    )
    monkeypatch.setattr(convert, "names_of_scales", lambda names: [f"{name}.s" for name in names])
    monkeypatch.setattr(convert, "_export", lambda *_: of(keymap="keys"))
    monkeypatch.setattr(convert, "about_model", lambda _: {})
    monkeypatch.setattr(convert.weights, "make_files", lambda *_: None)
    draft = of(path=Path("draft"), final=Path("step-000007"))
    names = dict(planes_of=note("planes", 3), write_beside=note("trainer", 2), commit=note("commit", 0))
    fakes = dict(Draft=lambda *_: contextlib.nullcontext(draft), random_plane=lambda *_: of(keymap=0, folder=""))
    monkeypatch.setattr(convert, "disk", of(**names, **fakes, write_part=lambda *_: "part"))
    blueprint = of(head=head, tower=tower, module=of(mtp=mtp), table=[of(name=name) for name in KEYS])
    blueprint.stored_dtypes = lambda dtype, trained: seen.update({"stored": (dtype, trained)})
    names_of = {"exp_avg": ["up", "gate", "w", "norm"], "exp_avg_sq": ["norm", "gate"]}
    planes: Any = {name: dict.fromkeys(keys) for name, keys in names_of.items()}
    state = convert.State("dcp", blueprint, {"weights": {}, **planes}, 7, 99, ((1.5,),), ((2.5,),))
    assert convert._write_meshwright(state, Path("out"), None, lambda _: None) == Path("step-000007")
    trained = ["fused", "w", "norm"]
    assert seen["trainer"] == [{
        "step": 7, "tokens": 99, "head": head, "tower": tower, "trained": trained, "settings": {}, "state": None,
        "router_load": ((1.5,),), **({} if mtp is None else {"mtp_router_load": ((2.5,),)}),
    }]  # fmt: skip
    assert seen["stored"] == (F32, {*trained})
    assert seen["planes"] == [{"exp_avg": dict.fromkeys([*trained, "w.s"], F32), "exp_avg_sq": {"norm": F32}}]


@pytest.mark.parametrize(
    ("start", "dtype", "values"),
    [(0, "F32", [1.5, -2.0]), (2, "F32", [1.5, -2.0]), (5, "F32", [1.5, -2.0]), (3, "BF16", [1.5, -2.0, 3.0])],
)
def test_tensors_are_read_at_any_byte(tmp_path: Path, start: int, dtype: str, values: list[float]) -> None:
    expected = torch.tensor(values, dtype=mw.weights.DTYPES[dtype])
    content = expected.view(torch.uint8).numpy().tobytes()
    (tmp_path / "a").write_bytes(b"x" * start + content + b"yyy")
    entry = of(file="a", dtype=dtype, start=start, stop=start + len(content), shape=(1, len(values)))
    source = of(scales={}, entries={"k": entry}, directory=tmp_path)
    assert torch.equal(convert._read_tensor(source, "k"), expected[None])


@pytest.mark.parametrize("dtype", [None, BF16])
def test_a_conversion_never_rounds_float32_parameters(monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    made: list[Any] = []
    keymap = of(recast=lambda *args: made.append(args) or "recast")
    monkeypatch.setattr(convert, "_keys", lambda _, param: KEYS[param.name])
    monkeypatch.setattr(convert, "config_of", lambda blueprint, dtype, keymap: {"dtype": dtype})
    monkeypatch.setattr(convert.weights, "read_small", lambda directory: f"files of {directory}")
    blueprint = of(
        table=[of(name=n, float32=n != "w") for n in ("fused", "w", "norm")], directory="like", keymap=keymap
    )
    export = convert._export(of(blueprint=blueprint, keymap=keymap), Path("out"), dtype)
    assert (export.config, export.small, export.directory) == (
        {"dtype": dtype},
        "files of like",
        Path("out").absolute(),
    )
    assert (export.keymap, made) == ((keymap, []) if dtype is None else ("recast", [(BF16, {"gate", "up", "norm"})]))


@pytest.mark.parametrize("mtp", [None, of(router=of(trained_load=torch.tensor([[3.0]])))])
def test_a_checkpoint_records_counters_and_how_the_model_is_run(monkeypatch: pytest.MonkeyPatch, mtp: Any) -> None:
    monkeypatch.setattr(checkpoint, "settings_of", lambda _: {"max_norm": 2.0})
    monkeypatch.setattr(checkpoint, "adapter_record", lambda _: {"rank": 4})
    model = of(blueprint=of(head="value", tower=True), recipe=of(frozen="nf4"))
    router = of(trained_load=torch.tensor([[1.0, 2.0]]))
    made = checkpoint._trainer(of(steps=7, tokens=99, model=model, trained=("a",), router=router, mtp=mtp))
    assert made == {
        "step": 7, "tokens": 99, "head": "value", "tower": True, "trained": ("a",), "settings": {"max_norm": 2.0},
        "router_load": [[1.0, 2.0]], "lora": {"rank": 4}, "frozen": "nf4",
        **({} if mtp is None else {"mtp_router_load": [[3.0]]}),
    }  # fmt: skip


SAVE_CHECKS = ["settle", "check_ready", "_check_keep", "check_pieces", "refuse_overflow", "_checked_json"]


@pytest.mark.parametrize("fails", SAVE_CHECKS)
def test_a_save_is_refused_before_anything_is_written(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """It waits for a save in the background, since both would write into one folder."""
    acts: list[Any] = []

    def act(name: str, *args: Any, **more: Any) -> str:
        acts.append((name, args, more))
        if name == fails:
            raise ExportError(name)
        return "text"

    for name in SAVE_CHECKS[1:]:
        monkeypatch.setattr(checkpoint, name, lambda *args, name=name: act(name, *args))
    values = {"weights": of(stored="w"), "exp_avg": of(stored="m")}
    monkeypatch.setattr(checkpoint, "_values_to_save", lambda _: values)
    monkeypatch.setattr(checkpoint, "_checked_model", lambda *_: "model")
    monkeypatch.setattr(checkpoint, "agree", lambda model, call, propose: propose())
    engine = of(
        settle_saving=lambda **more: act("settle", **more), trained=("a",), steps=3, state_layout=of(pieces="pieces")
    )
    choices, keep = export.ExportOptions(BF16), Keep(2)
    with pytest.raises(ExportError, match=fails):
        checkpoint._content(engine, "out", choices, keep, {"at": 1})
    pieces = [("check_pieces", ("model", each.stored, "pieces"), {}) for each in values.values()]
    every = [
        ("settle", (), {"wait": True}), ("check_ready", ("model", ("a",)), {}), ("_check_keep", (keep,), {}), *pieces,
        ("refuse_overflow", ("model", choices), {}), ("_checked_json", ({"at": 1},), {}),
    ]  # fmt: skip
    assert acts == every[: [name for name, *_ in every].index(fails) + 1]


def test_a_resume_waits_for_a_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be that of the checkpoint that is resumed."""
    settled: list[Any] = []
    asleep = of(check=lambda: settled.append("asleep"))
    engine = of(settle_saving=lambda **more: settled.append(more))
    monkeypatch.setattr(checkpoint, "_checked_model", lambda *_: of(calls=of(asleep=asleep), mesh=0))
    monkeypatch.setattr(checkpoint, "identity", lambda _: {})
    monkeypatch.setattr(checkpoint, "compare", lambda mesh, call, prepare: prepare())
    monkeypatch.setattr(checkpoint, "_open_on_rank_0", lambda *_: object())
    resumed = lambda engine, source, new_config: new_config  # noqa: E731 - short
    monkeypatch.setattr(checkpoint, "_resumed", resumed)
    assert checkpoint.resume(engine, "at", new_config="eps") == ["eps"]
    assert checkpoint.resume(engine, "at", new_config=("eps", "b")) == ["eps", "b"]
    assert settled == ["asleep", {"wait": True}] * 2
