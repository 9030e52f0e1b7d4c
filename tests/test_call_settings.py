"""Every argument of a call that must be the same on all ranks is among the settings that ranks compare."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.axes import Axes
from meshwright.checkpoint import Keep
from meshwright.engine import adapters, batching, checkpoint, inference, sampling, sleep, weight_deltas
from meshwright.engine.agreement import Data
from meshwright.engine.asleep import Asleep
from meshwright.models import Want
from meshwright.recipe import Lora

of: Any = SimpleNamespace
export: Any = importlib.import_module("meshwright.engine.export")  # the package has functions of these names
stream: Any = importlib.import_module("meshwright.engine.stream")
F32, BF16 = torch.float32, torch.bfloat16
Settings = dict[str, object]


class Compared(Exception):
    """The settings of a call."""

    def __init__(self, settings: Mapping[str, object]) -> None:
        self.settings = {name: str(value) for name, value in settings.items()}


def _agree(_model: Any, call: str, propose: Callable[[], Any], *_: Any, **__: Any) -> None:
    raise Compared({"the call": call, **propose().settings})


def _compare(_mesh: Any, call: str, prepare: Callable[[], Any], *_: Any) -> None:
    raise Compared({"the call": call, **prepare()[1]})


BATCH = mw.pack([[5, 6, 7, 8]])
MODEL = of(
    table={}, trained=(), keymap=of(choice={}), blueprint=of(scores=("logprobs", "top_logprobs"), vocab=99),
    recipe=of(lora=Lora()), calls=of(asleep=Asleep()), mesh=of(axes=Axes(), data_rank=0, num_data_ranks=1),
    stored=dict, pieces={}, check_whole=lambda: None,
)  # fmt: skip


def _stream(model: Any, **options: Any) -> Any:
    given = {"which": "weight", "form": "values", "dtype": None, "ranks": "first", **options}
    ranks = given.pop("ranks")
    return list(stream._streamed(model, stream.Wanted(**given), ranks))


def _deltas(model: Any, *, ranks: str = "first", **wanted: Any) -> Any:
    deltas = object.__new__(mw.WeightDeltas)
    deltas._model, deltas._wanted = model, stream.Wanted(**{"which": "weight", **wanted})
    return list(deltas._changes(of(), [], ranks))


def _new_deltas(model: Any, *, dtype: Any = None) -> Any:
    return mw.WeightDeltas(model, "merged", dtype=dtype)


def _sample(model: Any, *, prompts: Any = ((5, 6), (7,)), **options: Any) -> Any:
    return list(sampling.token_stream(model, prompts, sampling.Decoding(**{"tokens": 3, "stop": (2, 1), **options})))


def _scores(model: Any, **options: Any) -> Any:
    want = Want(**{"score": "top_logprobs", "temperature": 1.0, "num_top": 4, **options})
    return inference.score_without_grad(model, [BATCH], want, "top_logprobs")


def _export(model: Any, **options: Any) -> Any:
    return export._agreed_export(model, "export", "out", export.ExportOptions(**options))


def _adapter(model: Any, *, at: str = "out", layout: str = "fused") -> Any:
    return adapters._agreed(model, "export_adapter", at, layout)


def _engine(model: Any, **changes: Any) -> Any:
    return of(**{"model": model, "steps": 3, "trained": (), "settle_saving": lambda wait: None, **changes})


def _save(model: Any, *, at: str = "out", dtype: Any = None, state: Any = 1, steps: int = 3, **keep: Any) -> Any:
    kept = Keep(**{"last": 2, "every": 4, **keep})
    return checkpoint._content(_engine(model, steps=steps), at, export.ExportOptions(dtype), kept, state)


def _resume(model: Any, *, at: str = "out", new_config: Any = ("b", "a")) -> Any:
    return checkpoint.resume(_engine(model), at, new_config=new_config)


def _sleep(model: Any, **wanted: bool) -> Any:
    raise Compared(sleep._proposal({"weights": True, "optimizer": True, **wanted}).settings)


def _batches(model: Any, *, sizes: Any = None, **options: Any) -> Any:
    given = {"groups": [0, 0], "fields": {"gain": [[1.0] * 3, [2.0]]}, "labels": [[1, 2, 3], [4]], **options}
    return batching.batches([[5, 6, 7], [8]], model.mesh, **(sizes or {"length": 8}), **given)


CALLS: dict[Any, dict[str, Any]] = {
    _stream: dict(which="grad", form="fp8", dtype=BF16, ranks="all"),
    _deltas: dict(which="merged", dtype=BF16, ranks="all"),
    _new_deltas: dict(dtype=BF16),
    _sample: dict(
        prompts=((5, 6), (8,)), tokens=4, top_p=0.5, temperature=0.5, stop=(1, 3), seed=1,
    ),
    _scores: dict(temperature=0.5, num_top=3),
    _export: dict(dtype=BF16, overwrite=True, keep_lm_head=True, form="fp8", merge=True),
    _adapter: dict(at="other", layout="per-expert"),
    _save: dict(at="other", dtype=F32, state=2, steps=4, last=3, every=5),
    _resume: dict(at="other", new_config="a"),
    _sleep: dict(weights=False, optimizer=False),
    _batches: dict(
        sizes={"length": 9}, groups=[0, 1], fields={"gain": [[1.0] * 3, [3.0]]}, labels=[[1, 2, 3], [5]],
    ),
}  # fmt: skip
CASES = [(call, name) for call, options in CALLS.items() for name in options]


@pytest.fixture
def settings_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    """Return a function that runs a call up to the comparison and returns its settings."""
    for module in (stream, weight_deltas, sampling, inference, export, adapters, checkpoint):
        monkeypatch.setattr(module, "agree", _agree)
    for module in (batching, checkpoint):
        monkeypatch.setattr(module, "compare", _compare)
    passes = lambda *_, **__: None  # noqa: E731 - short
    for module, names in (
        (stream, "check_stored handout_of"), (sampling, "_check doing"),
        (weight_deltas, "check_stored check_is_model chosen handout_of"),
        (inference, "check_temperature"), (export, "check_is_model _check_merge check_pieces refuse_overflow"),
        (adapters, "check_is_model why_without_class"), (checkpoint, "check_ready refuse_overflow doing"),
    ):  # fmt: skip
        for name in names.split():
            monkeypatch.setattr(module, name, passes)
    monkeypatch.setattr(inference, "data_of", lambda *_: Data())
    monkeypatch.setattr(checkpoint, "_checked_model", lambda engine, _: engine.model)
    monkeypatch.setattr(checkpoint, "_values_to_save", lambda _: {})
    monkeypatch.setattr(checkpoint, "identity", lambda _: {})

    def settings(call: Callable[..., object], **options: Any) -> Settings:
        with pytest.raises(Compared) as compared:
            call(MODEL, **options)
        return compared.value.settings

    return settings


@pytest.mark.parametrize(("call", "name"), CASES, ids=lambda each: each if isinstance(each, str) else each.__name__)
def test_an_argument_that_differs_is_among_the_settings(
    settings_of: Callable[..., Settings], call: Any, name: str
) -> None:
    assert settings_of(call) == settings_of(call)
    assert settings_of(call) != settings_of(call, **{name: CALLS[call][name]})


def test_orders_that_change_nothing_are_equal_settings(settings_of: Callable[..., Settings]) -> None:
    assert settings_of(_sample, stop=(1, 2)) == settings_of(_sample, stop=[2, 1])
    assert settings_of(_resume, new_config=["a", "b"]) == settings_of(_resume)
    assert settings_of(_save, at=str(Path("out").absolute())) == settings_of(_save)
    assert settings_of(_batches, sizes={"length": 8}) != settings_of(_batches, sizes={"max_tokens": 8})
    assert settings_of(_batches, sizes={"max_tokens": 8}) != settings_of(_batches, sizes={"max_tokens": 7})
