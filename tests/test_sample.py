"""Samples equal transformers' on every mesh, and training does not depend on them."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.cli import main
from meshwright.data import tokenizer_of
from meshwright.engine import Decoding
from meshwright.engine.sampling import _choose, _generator, _room
from meshwright.train import config_file, launch
from meshwright.train.run import run
from tests import parts, tiny, worlds
from tests.runs import STEPS, chats, file_of, lines, losses, on_mesh, source

PROMPTS, TOKENS = [[5, 6, 7, 8, 9], [11], [23, 42, 99, 3, 100, 7, 7, 12]], 3
MESHES = {
    **({"qwen3": [dict(fsdp=2)]} if parts.ALL else {}),
    "qwen3_moe": [dict(fsdp=2, ep=2), dict(tp=2, ep=2)],
    "qwen3_5": [dict(tp=2)],
}


def peer(at: Path) -> list[list[int]]:
    """Generate with transformers, a prompt at a time, with its cache."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(at, dtype=torch.float32)
    how: dict[str, Any] = dict(do_sample=False, max_new_tokens=TOKENS, eos_token_id=None, pad_token_id=0)
    requested = [torch.tensor([prompt]) for prompt in PROMPTS]
    message = [model.generate(ids, attention_mask=torch.ones_like(ids), **how) for ids in requested]
    return [each[0, len(prompt) :].tolist() for each, prompt in zip(message, PROMPTS, strict=True)]


def samples_of(at: Path, mesh: dict[str, int]) -> list[list[list[int]]]:
    """Sample greedily, twice with one seed, and with another seed."""
    model = mw.load(at, mw.Mesh(**mesh), dtype=torch.float32)
    numbers = torch.get_rng_state()
    drawn = functools.partial(mw.sample, model, PROMPTS, tokens=TOKENS, top_p=0.9)
    greedy = mw.sample(model, PROMPTS, tokens=TOKENS)
    with pytest.MonkeyPatch.context() as patch:  # ranks whose bits are others
        if model.mesh.rank:
            patch.setattr(sys.modules[_choose.__module__], "_choose", lambda logits_PV, *_: logits_PV.argmin(-1))
        assert mw.sample(model, PROMPTS, tokens=TOKENS) == greedy
    ended = mw.sample(model, PROMPTS, tokens=TOKENS, stop={greedy[0][1], greedy[1][0]})
    for before, after in zip(greedy, ended, strict=True):
        at_stop = [n for n, token in enumerate(before) if token in (greedy[0][1], greedy[1][0])]
        assert after == before[: at_stop[0] + 1 if at_stop else TOKENS]
    with pytest.raises(mw.DataError if model.mesh.rank == 0 else mw.RankError, match="is empty"):
        mw.sample(model, PROMPTS if model.mesh.rank else [[5], []], tokens=TOKENS)
    message = [greedy, drawn(), drawn(), drawn(seed=1)]
    assert torch.equal(torch.get_rng_state(), numbers)
    return message


def test_it_is_what_transformers_writes_on_every_mesh(tmp_path: Path) -> None:
    places = {name: tiny.directory(tmp_path / name, name) for name in MESHES}
    alone = {name: functools.partial(samples_of, at, {}) for name, at in places.items()}
    pairs = {
        (name, str(mesh)): functools.partial(samples_of, places[name], mesh)
        for name, meshes in MESHES.items()
        for mesh in meshes
    }
    one = worlds.in_turn(1, alone)
    for name, [(greedy, drawn, again, other)] in one.items():
        assert greedy == peer(places[name]), name
        assert drawn == again != other
        assert drawn != greedy
    for (name, mesh), ranks in worlds.in_turn(2, pairs).items():
        assert ranks == one[name] * 2, (name, mesh)


def test_what_is_drawn() -> None:
    """Tokens are drawn by probability, from the smallest set that has top_p together."""
    logits = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15]).log().expand(4000, -1)

    def drawn(num: int, **how: float) -> Counter[int]:
        dice = [_generator(3, number) for number in range(num)]
        return Counter(_choose(logits[:num], Decoding(1, **how), dice).tolist())  # type: ignore[arg-type] # no ints

    result = drawn(4000, top_p=0.65)
    assert set(result) == {1, 3}
    assert result[1] / 4000 == pytest.approx(0.4 / 0.7, abs=0.03)
    assert set(drawn(200, top_p=1.0)) == {0, 1, 2, 3, 4}
    assert set(drawn(200, top_p=0.4)) == {1}
    # At 0.5 probabilities are squared: 0.4^2 of a sum of 0.285.
    assert drawn(4000, temperature=0.5)[1] / 4000 == pytest.approx(0.16 / 0.285, abs=0.03)
    assert set(drawn(200, temperature=0.5, top_p=0.5)) == {1}
    assert drawn(4000, temperature=1.0) == drawn(4000, top_p=1.0)


def test_room() -> None:
    """Sequences fit, few lengths occur, and short texts do not pay for long ones."""
    rooms = [_room(num, 200) for num in range(200)]
    assert all(room >= num for num, room in enumerate(rooms))
    assert sorted({*rooms}) == [16, 32, 64, 128, 200]


def with_and_without(path: Path) -> None:
    """Run twice in one world, without and with samples."""
    sampled = ['sample.prompts=["3?","7?"]', "sample.every=1", "sample.tokens=4", "sample.top_p=0.9"]
    for name, sets in {"plain": [], "sampled": sampled}.items():
        run(config_file.read(path, [*sets, f"out={path.parent / name / 'out'}"]))


def test_training_does_not_see_it(tmp_path: Path) -> None:
    """Losses and checkpoints are the same bits, with what the router remembers."""
    model = source(tmp_path / "m", "qwen3_5_moe")
    chats(tmp_path / "chats.jsonl")
    path = file_of(tmp_path, model, save={"export": False}, mesh={"fsdp": 2, "ep": 2}, train={"steps": 2})
    worlds.run(2, with_and_without, path)
    result = {}
    for at in (tmp_path / "plain", tmp_path / "sampled"):
        checkpoint = at / "out" / "checkpoints" / "step-000002"
        files = {f.relative_to(checkpoint): f.read_bytes() for f in checkpoint.rglob("*.safetensors")}
        result[at.name] = losses(at), files, [line["load"] for line in lines(at, "experts")]
    assert result["plain"] == result["sampled"]
    assert len(result["plain"][1]) > 2
    message = [(line["step"], line["number"], line["prompt"]) for line in lines(tmp_path / "sampled", "sample")]
    assert message == [(step, number, prompt) for step in (1, 2) for number, prompt in enumerate(("3?", "7?"))]


def generated(at: Path, prompt: str, tokens: int, before: Sequence[dict[str, str]] = ()) -> str:
    """Generate like a server, with the template and its end token, after the messages before."""
    from transformers import AutoModelForCausalLM

    model, tokenizer = AutoModelForCausalLM.from_pretrained(at, dtype=torch.float64), tokenizer_of(at)
    requested = [*before, {"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(requested, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    message = model.generate(**ids, do_sample=False, max_new_tokens=tokens, eos_token_id=tokenizer.eos_token_id)
    return str(tokenizer.decode(message[0, ids["input_ids"].shape[1] :])).removesuffix("<|im_end|>")


def test_samples_of_a_run_are_those_of_its_export(tmp_path: Path) -> None:
    model = source(tmp_path / "m", "qwen3_tied")
    chats(tmp_path / "chats.jsonl")
    prompts = ["3?", "Hello there"]
    path = file_of(tmp_path, model, sample={"prompts": prompts, "tokens": 12}, optim={"lr": 3e-3})
    on_mesh(path, {})
    message = lines(tmp_path, "sample")
    assert [line["step"] for line in message] == [STEPS] * 2
    assert [line["text"] for line in message] == [generated(tmp_path / "out" / "export", each, 12) for each in prompts]
    assert "x" in message[0]["text"]
    requested = [part for prompt in prompts for part in ("--prompt", prompt)]
    common = [*requested, "--tokens", "12"]
    [of_run] = worlds.run(1, printed, [str(tmp_path / "out"), *common, "--json"])
    assert json.loads(of_run) == [{"prompt": line["prompt"], "text": line["text"]} for line in message]
    [of_chat] = worlds.run(1, chatted, str(tmp_path / "out"), [*prompts, "/reset", prompts[0]])
    first = message[0]["text"]
    before = [{"role": "user", "content": prompts[0]}, {"role": "assistant", "content": first.strip()}]
    second = generated(tmp_path / "out" / "export", prompts[1], 12, before)
    assert of_chat == f"{first}\n{second}\n{first}\n"
    [of_export] = worlds.run(1, printed, [str(tmp_path / "out" / "export"), *common, "--text", "--top-p", "0.5"])
    assert [line for line in of_export.splitlines() if line.startswith("> ")] == ["> 3?", "> Hello there"]


def printed(arguments: list[str], command: str = "sample") -> str:
    """Run the command."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([command, *arguments]) == 0
    return out.getvalue()


def chatted(at: str, lines: list[str]) -> str:
    """Chat through a pipe."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return printed([at, "--tokens", "12"], "chat")


@pytest.mark.parametrize(
    ("sets", "wanted"),
    [
        (["sample.tokens=200"], r"of a sample: prompt 0 has \d+ tokens, and with the 200 after it more than the 128"),
        (["data.0.kind=text", "sample.tokens=126"], "prompt 1 has 7 tokens"),
        (["data.0.template_args.enable_thinking=1", "data.0.template={at}/wrong"], "the template refuses the first 1"),
        (['sample.prompts=["a",""]'], "prompt 1 is empty"),
        (["data.0.kind=tokens", "model={at}/bare"], r"holds no tokenizer; put its files into it, or leave prompts of"),
    ],
)  # fmt: skip
def test_what_cannot_be_sampled_from_is_refused_before_the_run(tmp_path: Path, sets: list[str], wanted: str) -> None:
    model = source(tmp_path / "m", "qwen3_tied")
    tiny.directory(tmp_path / "bare", "qwen3_tied")
    (tmp_path / "wrong").write_text("{{ raise_exception('no') }}")
    chats(tmp_path / "chats.jsonl")
    path = file_of(tmp_path, model, sample={"prompts": ["3?", "Hello!!"]})
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(config.replace('"model_type"', '"max_position_embeddings": 128, "model_type"'))
    with pytest.raises(mw.MeshwrightError, match=wanted):
        launch.prepared(config_file.read(path, [each.format(at=tmp_path) for each in sets]))


def messages_of(at: Path, **args: Any) -> list[str]:
    model, message = mw.load(at, mw.Mesh(), head=args.pop("head", "lm")), []
    for wrong in args.pop("cases"):
        with pytest.raises(mw.MeshwrightError) as error:
            mw.sample(model, **{"prompts": [[5]], "tokens": 2, **wrong})
        message.append(str(error.value))
    return message


def test_what_is_refused_from_python(tmp_path: Path) -> None:
    at = tiny.directory(tmp_path / "m", "qwen3", max_position_embeddings=16)
    cases = {
        "tokens=0 must be": {"tokens": 0},
        "top_p=1.5 must be": {"top_p": 1.5},
        "temperature=0 must be": {"temperature": 0},
        "stop=3 must be a list of token ids": {"stop": 3},
        "stop='</s>' must be": {"stop": "</s>"},
        "a list of lists": {"prompts": []},
        "prompt 0 is not a list of token ids": {"prompts": ["Hello"]},
        "prompt 1 is empty": {"prompts": [[5], []]},
        "outside the vocabulary of 131": {"prompts": [[131]]},
        "prompt 0 has 15 tokens, and with the 2 after it more than the 16": {"prompts": [[5] * 15]},
    }
    [text] = worlds.run(1, functools.partial(messages_of, at, cases=list(cases.values())))
    assert all(wanted in message for wanted, message in zip(cases, text, strict=True)), text
    [[message]] = worlds.run(1, functools.partial(messages_of, at, head="value", cases=[{}]))
    assert "does not score the vocabulary" in message
