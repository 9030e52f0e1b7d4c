"""Objectives of preference pairs against TRL, and rows of preferences as pairs of documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.data import Chat, ChatOptions, ChatPairs, TextPairs, batch_of, scored
from meshwright.objectives import Dpo, Reward
from tests import trl_peer, worlds
from tests.templates import GOOD, tokenizer
from tests.words import words

THEIRS = json.loads(trl_peer.STORED.read_text())
OURS: dict[str, Any] = {
    "sigmoid": Dpo(beta=0.1), "sigmoid_norm": Dpo(beta=2.0, kind="sigmoid_norm"),
    "ipo": Dpo(beta=0.5, kind="ipo"), "reward": Reward(centre=0.01),
}  # fmt: skip


def steps_of(kind: str, source: Path, texts: list[Any]) -> list[dict[str, float]]:
    """Train on pairs as TRL does: the first three, then the next three, ..."""
    objective, optim = OURS[kind], trl_peer.OPTIM
    model = mw.load(source, mw.Mesh(), head=objective.head, dtype=torch.float32)
    engine = mw.Engine(
        model, lr=optim["lr"], loss=objective.loss, max_norm=1.0,
        optimizer=mw.AdamW(betas=optim["betas"], eps=optim["eps"], weight_decay=0.0),
    )  # fmt: skip
    batches = [batch_of(texts[at : at + trl_peer.PAIRS], 256) for at in range(0, len(texts), trl_peer.PAIRS)]
    if objective.head == "lm":
        sums = [[float(x.double().sum()) for x in b.split(mw.logprobs(model, b))] for b in batches]
        spread = [b.join([torch.full((len(x),), s) for x, s in zip(b.split(b.tokens), v, strict=True)])
                  for b, v in zip(batches, sums, strict=True)]  # fmt: skip
        batches = [b.with_fields(reference=x) for b, x in zip(batches, spread, strict=True)]
    records = [engine.step([batch]) for batch in batches]
    return [{"loss": each.loss, "grad_norm": each.grad_norm, **each.metrics} for each in records]


def trained_as_trl(at: Path) -> dict[str, list[dict[str, float]]]:
    lm, finish = trl_peer.directory(at / "m"), {"lm": _as_it_is, "value": scored}
    sources = {kind: lm if kind != "reward" else trl_peer.classifier(at / "r") for kind in OURS}
    pairs = {head: TextPairs(tokenizer(), each) for head, each in finish.items()}
    texts = {head: [d for row in trl_peer.rows() for d in each.documents(row)] for head, each in pairs.items()}
    return {kind: steps_of(kind, sources[kind], texts[each.head]) for kind, each in OURS.items()}


def _as_it_is(document: Any) -> Any:
    return document


def test_the_first_steps_are_those_of_trl(tmp_path: Path) -> None:
    [ours] = worlds.run(1, trained_as_trl, tmp_path)
    for kind, steps in THEIRS.items():
        for number, (theirs, own) in enumerate(zip(steps, ours[kind], strict=True)):
            if number == 0:
                theirs.pop("accuracy")  # both answers have the same reward, up to rounding
            assert {name: own[name] for name in theirs} == pytest.approx(theirs, abs=1e-4, rel=1e-4), (kind, number)


def chat_pairs(**options: Any) -> ChatPairs:
    known = tokenizer()
    return ChatPairs(Chat(known, ChatOptions(template=GOOD["hybrid"], **options)), _as_it_is)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SAME: list[dict[str, Any]] = [
    {"prompt": "Hi", "chosen": "yes", "rejected": "no"},
    {"prompt": [_user("Hi")], "chosen": [_answer("yes")], "rejected": [_answer("no")]},
    {"messages": [_user("Hi")], "chosen": _answer("yes"), "rejected": _answer("no")},
    {"conversations": [{"from": "human", "value": "Hi"}], "chosen": {"from": "gpt", "value": "yes"},
     "rejected": {"from": "gpt", "value": "no"}},
    {"instruction": "Hi", "input": "", "chosen": "yes", "rejected": "no"},
    {"chosen": [_user("Hi"), _answer("yes")], "rejected": [_user("Hi"), _answer("no")]},
    {"prompt": "Hi", "chosen": [_user("Hi"), _answer("yes")], "rejected": [_user("Hi"), _answer("no")]},
]  # fmt: skip


def test_all_formats_make_the_same_pair() -> None:
    pairs = [chat_pairs().documents(row) for row in SAME]
    assert all(len(each) == 1 for each in pairs)
    first = pairs[0][0]
    for [pair] in pairs:
        assert pair.ids.tolist() == first.ids.tolist()
        assert (pair.spans, pair.parts) == (first.spans, first.parts)
    size = first.parts[0]
    known = tokenizer()
    trained = [known.decode(first.ids[a:b]) for a, b in first.spans]
    assert [text.split("<|")[0].strip() for text in trained] == ["yes", "no"]
    assert first.ids[: first.spans[0][0]].tolist() == first.ids[size : first.spans[1][0]].tolist()


def test_only_turns_that_differ_are_trained() -> None:
    """A turn of the assistant before the answers belongs to the prompt; both prompts think if one answer does."""
    history = [_user("Hi"), _answer("hello"), _user("So?")]
    thought = {**_answer("yes"), "reasoning_content": "hm"}
    [pair] = chat_pairs().documents({"messages": history, "chosen": thought, "rejected": "no"})
    known = tokenizer()
    chosen, rejected = (known.decode(pair.ids[a:b]) for a, b in pair.spans)
    assert "hm" in chosen
    assert "hello" not in chosen + rejected
    [whole] = chat_pairs().documents({"chosen": [*history, thought], "rejected": [*history, _answer("no")]})
    assert whole.ids.tolist() == pair.ids.tolist()


def test_the_rest_of_a_row_reaches_both_prompts() -> None:
    """The history of Alpaca is a part of the prompt too."""
    more = {"system": "S", "tools": [{"name": "look"}]}
    [pair] = chat_pairs().documents({**more, "prompt": "Hi", "chosen": "yes", "rejected": "no"})
    chat = chat_pairs().chat
    alone = [chat.documents({**more, "prompt": "Hi", "completion": text})[0].ids.tolist() for text in ("yes", "no")]
    assert pair.ids.tolist() == [*alone[0], *alone[1]]
    assert "look" in tokenizer().decode(alone[0])
    alpaca = {"instruction": "So", "input": "then?", "history": [["Hi", "hello"]], "chosen": "yes", "rejected": "no"}
    messages = [_user("Hi"), _answer("hello"), _user("So\n\nthen?")]
    [expected] = chat_pairs().documents({"messages": messages, "chosen": "yes", "rejected": "no"})
    assert chat_pairs().documents(alpaca)[0].ids.tolist() == expected.ids.tolist()


SHOWN = "{{ mood | default('-') }}{{ enable_thinking }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("options", "given", "thought", "begins"),
    [
        ({}, None, "", "-False"), ({}, None, "hm", "-True"), ({}, {"mood": "x"}, "hm", "xTrue"),
        ({}, {"enable_thinking": 3}, "hm", "-3"), (dict(thinking=False), None, "hm", "-False"),
        (dict(thinking=True), {"mood": "x"}, "", "xTrue"), (dict(template_args={"enable_thinking": 4}), None, "", "-4"),
        (dict(template_args={"mood": "y"}), {"mood": "x"}, "", "xFalse"),
    ],
)  # fmt: skip
def test_arguments_of_the_template_of_a_pair(
    options: dict[str, Any], given: dict[str, Any] | None, thought: str, begins: str
) -> None:
    """Whether an answer thinks says nothing where the options or the row do."""
    pairs = ChatPairs(Chat(tokenizer(), ChatOptions(template=SHOWN, **options)), _as_it_is)
    chosen = {**_answer("yes"), "reasoning_content": thought}
    row = {"prompt": "Hi", "chosen": chosen, "rejected": "no", "chat_template_kwargs": given}
    [pair] = pairs.documents(row)
    wanted = [f"{begins}Hi<|im_end|>{answer}<|im_end|>" for answer in ("yes", "no")]
    assert tokenizer().decode(pair.ids) == "".join(wanted)


def test_fields_of_a_pair_that_are_not_used() -> None:
    row = {"prompt": "a", "good": "b", "rejected": "c", "chosen": "d", "system": "S", "id": 3, "input": None}
    assert ChatPairs(chat_pairs().chat, _as_it_is, {"chosen": "good"}).unused(row) == {"chosen", "id"}
    assert TextPairs(tokenizer(), _as_it_is, {"chosen": "good"}).unused(row) == {"chosen", "id", "system"}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "Hi", "chosen": "yes"}, words("prompt, chosen", "rejected", "fields=")),
    ({"prompt": "Hi", "chosen": "no", "rejected": "no"}, words("the same")),
    ({"chosen": "yes", "rejected": "no"}, words("no prompt")),
    ({"prompt": "Hi", "chosen": "yes", "rejected": "no", "margin": 0.5}, words("'margin'")),
    ({"prompt": "Ho", "chosen": [_user("Hi"), _answer("a")], "rejected": [_user("Hi"), _answer("b")]},
     words("do not contain the prompt")),
    ({"chosen": [_user("Hi"), _answer("a"), _user("x")], "rejected": [_user("Hi"), _answer("b")]},
     words("last message of chosen")),
    ({"prompt": "Hi", "chosen": [_answer("a")], "rejected": 3}, words("rejected|assistant", "list of messages")),
]  # fmt: skip


@pytest.mark.parametrize(("row", "message"), REFUSED, ids=lambda x: "" if isinstance(x, dict) else x[:30])
def test_rows_that_are_no_pair_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(mw.DataError, match=message):
        chat_pairs().documents(row)


def test_a_reward_model_has_one_label_an_answer() -> None:
    [pair] = TextPairs(tokenizer(), scored).documents({"prompt": "a", "chosen": "bcd", "rejected": "e"})
    batch = batch_of([pair, pair], 40)
    assert batch.groups == (0, 0, 1, 1)
    assert batch.is_target_T.nonzero().flatten().tolist() == [b - 1 for b in batch.bounds[1:5]]
    assert pair.num_targets == 2


def test_nothing_predicts_the_first_token_of_an_answer_without_a_prompt() -> None:
    """Nor does the end of the answer before it."""
    [pair] = TextPairs(tokenizer(), _as_it_is).documents({"chosen": "bcd", "rejected": "efgh"})
    batch = batch_of([pair], 20)
    assert batch.labels[[b - 1 for b in batch.bounds[1:]]].tolist() == [-100] * 3
    assert pair.num_targets == batch.num_targets == len(pair) - 2
