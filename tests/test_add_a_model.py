"""The family of docs/add-a-model.md, which lies outside of the package: proven as those inside are, and every mistake
that the page names made and seen."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from examples import phi3
from meshwright.errors import RankError
from meshwright.models import FAMILIES
from tests import parts, tiny, trials, worlds
from tests.test_transformers import DOCUMENTS, agree, compare, ours, reference_outputs
from tests.test_weights import load_and_export, same_files

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "add-a-model.md").read_text("utf-8")
FILE = Path(phi3.__file__).read_text("utf-8")
MESHES: list[tuple[dict[str, int], dict[str, Any]]] = [
    (dict(tp=2), dict(num_key_value_heads=1)),  # fewer kv heads than ranks
    (dict(fsdp=2), {}),
    (dict(fsdp=2, tp=2), {}),
]
FIELDS: list[dict[str, Any]] = [
    {},
    dict(rope_parameters=dict(rope_type="default", rope_theta=1e6, partial_rotary_factor=0.4), rms_norm_eps=1e-2),
    dict(partial_rotary_factor=0.6, rope_theta=1e5),  # as older files have it
    dict(tie_word_embeddings=True, num_key_value_heads=1, head_dim=6),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.directory(tmp_path_factory.mktemp("phi3") / "m", "phi3", dtype=torch.bfloat16)


def test_the_page_quotes_the_file() -> None:
    shown = re.findall(r"```python\n(.*?)```", PAGE.partition("Whoever imports the file")[0], re.DOTALL)
    lines = [[line for line in text.splitlines() if line] for text in ("\n".join(shown), FILE)]
    assert lines[0] == lines[1], "docs/add-a-model.md and examples/phi3.py differ; copy the file into the page"


def test_it_agrees_with_transformers(tmp_path: Path) -> None:
    sources = {at: tiny.directory(tmp_path / str(at), "phi3", **changes) for at, changes in enumerate(FIELDS)}
    local = worlds.in_turn(1, {at: partial(ours, source) for at, source in sources.items()})
    peer = worlds.in_turn(1, {at: partial(reference_outputs, "phi3", FIELDS[at]) for at in sources})
    for at in sources:
        agree(local[at][0], peer[at][0])


@pytest.mark.parametrize("field", list(phi3.REFUSED))
def test_what_it_does_not_compute_is_refused(tmp_path: Path, field: str) -> None:
    value = {"hidden_act": "gelu", "attention_bias": True}.get(field, 3)
    (tmp_path / "config.json").write_text(json.dumps(tiny.of("phi3", **{field: value})))
    with pytest.raises(mw.ConfigError, match=rf"config\.json\b.*\b{field}={value!r}"):
        mw.init(tmp_path)


@pytest.mark.parametrize(("mesh", "changes"), parts.every(3, MESHES), ids=str)
def test_every_oracle_on_a_mesh(tmp_path: Path, mesh: dict[str, int], changes: dict[str, Any]) -> None:
    source = tiny.directory(tmp_path / "m", "phi3", dtype=torch.bfloat16, **changes)
    trial = trials.trial(source, mesh)
    assert trials.findings(replace(trial, steps=trial.steps if parts.ALL else 1)) == []


def train_and_export(source: Path, out: Path) -> torch.Tensor:
    model = mw.load(source, trials.mesh_of(dict(tp=2)), dtype=torch.float32)
    mw.Engine(model, lr=1e-2).step([mw.pack(DOCUMENTS, length=88)])
    mw.export(model, out, dtype=torch.float32)
    return mw.logits(model, mw.pack([DOCUMENTS[3]]))


def test_export_is_the_source_and_transformers_loads_what_was_trained(source: Path, tmp_path: Path) -> None:
    import transformers

    results = worlds.in_turn(2, {
        "loaded": partial(load_and_export, source, dict(tp=2), tmp_path / "loaded"),
        "trained": partial(train_and_export, source, tmp_path / "trained"),
    })  # fmt: skip
    assert all(results["loaded"])
    same_files(source, tmp_path / "loaded")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert type(model).__name__ == "Phi3ForCausalLM"
    with torch.no_grad():
        expected = model(torch.tensor([DOCUMENTS[3]])).logits[0]
    assert (results["trained"][0] - expected).abs().max() <= 1e-5 * expected.abs().max()


LEAVES = "return self.leave(self.down(ops.swiglu(self.gate_up(x_TD))))"
STAYS = "return self.down(ops.swiglu(self.gate_up(x_TD)))"
ENTERS = "x_TD = self.enter(x_TD)\n        return self.leave(self.down(ops.swiglu"
OVERLAP = r"\[40:60, 0:40\].*\boverlap"
BARE_OUTPUT = r"layers\.0\.mlp\.down\.weight\b.*\bnn\.Parameter\b"
D1 = r"D1 layers\.0\.mlp"
FORGOTTEN_LEAVE = [(LEAVES, STAYS)]
FORGOTTEN_DOORS = [(ENTERS, ENTERS.splitlines()[1].lstrip()), (LEAVES, STAYS)]
UNCUT = [('"ffn": ffn', '"hidden": ffn')]
GATE_IS_UP = [("self.gate_up(x_TD)", "self.gate_up(x_TD).unflatten(1, (2, -1)).flip(1).flatten(1)")]
V_AT_K = [("(H + G) * K", "H * K")]
V_IS_K = [("self.k = ", "self.x = "), ("self.v = ", "self.k = "), ("self.x = ", "self.v = ")]
DOWN = 'self.down = Linear({"embed": D}, {"ffn": ffn}, shape.std, key=at + "down_proj")'
BARE = [(DOWN, "self.down = nn.Linear(ffn, D, bias=False)")]
UNREAD = [('    "sliding_window": (None,),\n', "")]


def plant(monkeypatch: pytest.MonkeyPatch, edits: list[tuple[str, str]]) -> None:
    """Register the file with mistakes in it, until the test is over. The reference has them too, as it would have for
    their author."""
    monkeypatch.setattr(trials, "_references", {})
    text = FILE
    for old, new in edits:
        assert old in text, f"{old!r} is not in examples/phi3.py any more"
        text = text.replace(old, new)
    monkeypatch.setitem(FAMILIES, "phi3", FAMILIES["phi3"])
    exec(compile(text, "mistaken", "exec"), {"__name__": "mistaken", "torch": torch})


def output_of(source: Path, mesh: dict[str, int]) -> str:
    """All findings, or the error."""
    tried = replace(trials.trial(source, mesh), steps=1)
    try:
        return "\n".join(map(str, trials.findings(tried)))
    except RankError as error:
        return str(error)


@pytest.mark.parametrize(
    ("edits", "alone", "promised"),
    [
        pytest.param(FORGOTTEN_LEAVE, "", [r"size of tensor"], id="forgotten LEAVE"),
        pytest.param(FORGOTTEN_DOORS, "", [D1, r"(?<!between its )\bdoors enter and leave\b"], id="both doors"),
        pytest.param(UNCUT, "", [D1, r"\bno rule\b.*\bdoors enter and leave\b"], id="a dim that no rule cuts"),
        pytest.param(V_AT_K, OVERLAP, [OVERLAP], id="v at the rows of k"),
        pytest.param(BARE, BARE_OUTPUT, [BARE_OUTPUT], id="a bare parameter"),
    ],
)
def test_mistakes_that_verify_reports(
    source: Path, monkeypatch: pytest.MonkeyPatch, edits: list[tuple[str, str]], alone: str, promised: list[str]
) -> None:
    plant(monkeypatch, edits)
    if alone or parts.ALL:
        place = output_of(source, {})
        assert re.search(alone, place) if alone else not place, place
    there = output_of(source, dict(tp=2))
    quoted = re.findall(r"`([^`\n]+)`", PAGE)
    for pattern in promised:
        assert re.search(pattern, there), f"{pattern!r} is not in:\n{there}"
        kept = [words for words in quoted if re.search(pattern, words) and words in there]
        assert kept, f"docs/add-a-model.md quotes no message with {pattern!r}:\n{there}"


@pytest.mark.parametrize(
    ("edits", "changes"),
    [
        pytest.param(GATE_IS_UP, {}, id="gate and up swapped"),
        pytest.param(V_IS_K, {}, id="k and v swapped"),
        pytest.param(UNREAD, dict(sliding_window=3), id="a field that is not read"),
    ],
)
def test_mistakes_that_only_transformers_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edits: list[tuple[str, str]], changes: dict[str, Any]
) -> None:
    plant(monkeypatch, edits)
    source = tiny.directory(tmp_path / "s", "phi3", dtype=torch.bfloat16, **changes)
    if parts.ALL or edits is GATE_IS_UP:
        assert not output_of(source, dict(tp=2))
    with pytest.raises((AssertionError, RankError)):
        compare(tmp_path, "phi3", changes)
