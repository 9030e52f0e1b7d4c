"""Objectives on a few unequal documents, and the files of teacher scores, with expected values by hand."""

from __future__ import annotations

import hashlib
import json
from dataclasses import make_dataclass
from math import exp, log
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

import meshwright as mw
from meshwright.engine.loss_documents import LossDocuments
from meshwright.objectives import (
    Classify,
    Distill,
    Dpo,
    Embedding,
    Orpo,
    Rerank,
    Reward,
    Simpo,
    TeacherScores,
    TeacherScoresWriter,
    add_embedding_files,
    teacher_scores,
    weights_fingerprint,
)
from meshwright.objectives.distillation import IDS, LOGPROBS, _log_rest, check_vocabularies
from meshwright.objectives.embedding import _roles
from meshwright.objectives.pairs import REFERENCE, _log_odds
from meshwright.objectives.rerank import ANSWERS
from meshwright.objectives.teacher_scores import document_key
from tests import trials, worlds

F64 = torch.float64

# Two pairs whose documents are not neighbours: A chosen, B chosen, B rejected, A rejected; sums -1, -4, -2, -6 at the
# labels, which are 2, 1, 4 and 3. The reference gives -2, -3, -1, -3.
SIZES, GROUPS, LABELS = [3, 1, 4, 4], [5, 8, 8, 5], [2, 1, 4, 3]
SUMS, REFERENCES = [-1.0, -4.0, -2.0, -6.0], [-2.0, -3.0, -1.0, -3.0]
PAIRS = LossDocuments(
    SIZES,
    GROUPS,
    torch.tensor([n < num for size, num in zip(SIZES, LABELS, strict=True) for n in range(size)] + [False]),
)


def scores_of_pairs(name: str) -> dict[str, torch.Tensor]:
    """Return equal scores at the labels of a document, and others where no label is."""
    each = [
        [total / num if n < num else 99.0 for n in range(size)]
        for size, num, total in zip(SIZES, LABELS, SUMS, strict=True)
    ]
    return {name: torch.tensor([x for row in each for x in row] + [99.0], dtype=F64)}


REFERENCE_T = torch.tensor([x for size, x in zip(SIZES, REFERENCES, strict=True) for _ in range(size)] + [0], dtype=F64)


def minus_log_sigmoid(x: float) -> float:
    return log(1 + exp(-x))


def log_odds(logprob: float) -> float:
    return logprob - log(1 - exp(logprob))


# Means: A -0.5 and -2, B -4 and -0.5. Ratios to the reference: A 1 and -3, B -1 and -1; per label 0.5, -1, -1, -0.25.
A, B = log_odds(-0.5) - log_odds(-2.0), log_odds(-4.0) - log_odds(-0.5)
BY_HAND: dict[str, tuple[Any, list[float], dict[str, list[float]]]] = {
    "sigmoid": (Dpo(beta=0.3), [minus_log_sigmoid(0.3 * 4), log(2)],
        dict(rewards_chosen=[0.3, -0.3], rewards_rejected=[-0.9, -0.3], accuracy=[1, 0], margins=[1.2, 0])),
    "smoothed": (Dpo(beta=0.3, label_smoothing=0.1, sft_weight=0.2),
        [0.9 * minus_log_sigmoid(1.2) + 0.1 * minus_log_sigmoid(-1.2) + 0.2 * 0.5, log(2) + 0.2 * 4],
        dict(rewards_chosen=[0.3, -0.3], rewards_rejected=[-0.9, -0.3], accuracy=[1, 0], margins=[1.2, 0])),
    "sigmoid_norm": (Dpo(beta=2, kind="sigmoid_norm"), [minus_log_sigmoid(2 * 1.5), minus_log_sigmoid(2 * -0.75)],
        dict(rewards_chosen=[2, -2], rewards_rejected=[-6, -2], accuracy=[1, 0], margins=[8, 0])),
    "ipo": (Dpo(beta=0.4, kind="ipo"), [(1.5 - 1.25) ** 2, (-0.75 - 1.25) ** 2],
        dict(rewards_chosen=[0.4, -0.4], rewards_rejected=[-1.2, -0.4], accuracy=[1, 0], margins=[1.6, 0])),
    "orpo": (Orpo(weight=0.5), [0.5 + 0.5 * minus_log_sigmoid(A), 4 + 0.5 * minus_log_sigmoid(B)],
        dict(rewards_chosen=[-0.25, -2], rewards_rejected=[-1, -0.25], accuracy=[1, 0], log_odds=[A, B])),
    "simpo": (Simpo(beta=2.0, margin=0.7), [minus_log_sigmoid(3 - 0.7), minus_log_sigmoid(-7 - 0.7)],
        dict(rewards_chosen=[-1, -8], rewards_rejected=[-4, -1], accuracy=[1, 0], margins=[3, -7])),
    "reward": (Reward(centre=0.05), [minus_log_sigmoid(5) + 0.05 * 49, minus_log_sigmoid(-2) + 0.05 * 36],
        dict(rewards_chosen=[-1, -4], rewards_rejected=[-6, -2], accuracy=[1, 0], margins=[5, -2])),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_terms_and_metrics_of_pairs(name: str) -> None:
    objective, terms, metrics = BY_HAND[name]
    scores = scores_of_pairs("values" if name == "reward" else "logprobs")
    made, made_metrics = objective(scores, {REFERENCE: REFERENCE_T}, PAIRS)
    assert made.tolist() == pytest.approx(terms, rel=1e-12)
    assert {key: x.tolist() for key, x in made_metrics.items()} == {
        key: pytest.approx(x, abs=1e-12) for key, x in metrics.items()
    }
    assert (objective.loss.per, objective.loss.metrics) == ("group", (*metrics,))


def test_odds_of_a_sure_answer_are_finite() -> None:
    for dtype in (torch.float32, F64):
        made = _log_odds(torch.tensor([log(0.8), -1e-9, 0.0, -40.0], dtype=dtype))
        assert made.tolist() == pytest.approx([log(4), 9 * log(10), -log(torch.finfo(dtype).tiny), -40], rel=1e-5)


def test_classes_and_answers() -> None:
    values = torch.tensor([[1.0, 3.0, 0.0], [2.0, 1.0, 0.0], [5.0, 0.0, 0.0]], dtype=F64)
    terms, metrics = Classify()({"values": values}, {"labels": torch.tensor([1, 2, -100])})
    assert terms.tolist() == pytest.approx([-(3 - log(exp(1) + exp(3) + 1)), log(exp(2) + exp(1) + 1), 0])
    assert metrics["accuracy"].tolist() == [1, 0, 0]
    with pytest.raises(mw.DataError, match="for a head of 1"):
        Classify()({"values": values[:, 0]}, {"labels": torch.tensor([0, 0, -100])})
    for label in (3, 7):
        with pytest.raises(mw.DataError, match=f"label {label} for a head of 3"):
            Classify()({"values": values}, {"labels": torch.tensor([1, label, -100])})
    # "no" is 9 and "yes" is 4.
    logprobs = torch.tensor([[-2.0, -1.0], [-1.0, -3.0], [-1.0, -3.0]], dtype=F64)
    answers = torch.tensor([[9, 4]] * 3)
    terms, metrics = Rerank()({"candidate_logprobs": logprobs}, {"labels": torch.tensor([4, 4, 9]), ANSWERS: answers})
    assert terms.tolist() == pytest.approx([log(1 + exp(-1)), log(1 + exp(2)), log(1 + exp(-2))])
    assert metrics["accuracy"].tolist() == [1, 0, 1]
    assert Rerank.with_answers(mw.pack([[1, 2]]), (9, 4)).fields[ANSWERS].tolist() == [[9, 4]] * 2


# Distillation


@pytest.mark.parametrize("alpha", [0.25, 1.0])
def test_terms_of_distillation(alpha: float) -> None:
    """The last token has one candidate; the teacher's likeliest is no candidate there."""
    objective = Distill(3.0, alpha=alpha, top_k=2)
    teacher = torch.tensor([[0.5, 0.3], [0.2, 0.7], [0.6, 0.9]], dtype=F64).log()
    student = torch.tensor([[0.4, 0.1], [0.6, 0.3], [0.5, 0.1]], dtype=F64).log()
    rest = torch.tensor([0.5, 0.1, 0.5], dtype=F64).log()
    scores = {"candidate_logprobs": student, "rest_logprobs": rest, "logprobs": torch.tensor([-1.0, -2.0, -3.0])}
    ids = torch.tensor([[5, 6], [5, 6], [5, -1]])
    terms, metrics = objective(scores, {IDS: ids, LOGPROBS: teacher})
    kl = [
        0.5 * log(0.5 / 0.4) + 0.3 * log(0.3 / 0.1) + 0.2 * log(0.2 / 0.5),
        0.2 * log(0.2 / 0.6) + 0.7 * log(0.7 / 0.3) + 0.1 * log(0.1 / 0.1),
        0.6 * log(0.6 / 0.5) + 0.4 * log(0.4 / 0.5),
    ]
    assert metrics["kl"].tolist() == pytest.approx(kl)
    assert metrics["cross_entropy"].tolist() == [1, 2, 3]
    assert metrics["agreement"].tolist() == [1, 0, 1]
    own = [alpha * 9 * x + (1 - alpha) * ce for x, ce in zip(kl, (1, 2, 3), strict=True)]
    assert terms.tolist() == pytest.approx(own)


def test_the_loss_of_distillation_asks_for_its_scores() -> None:
    of = lambda loss: (loss.candidates, loss.candidate_temperature, loss.rest, loss.metrics)  # noqa: E731 - short
    metrics = ("kl", "cross_entropy", "agreement")
    assert of(Distill(3.0).loss) == (IDS, 3.0, True, metrics)
    assert of(Distill(3.0, rest="renormalise").loss) == (IDS, 3.0, False, metrics)


@pytest.mark.parametrize("total", [1e-12, 1e-8, 0.3, 0.499, 0.501, 0.9, 1 - 1e-6, 1 - 1e-10])
def test_the_rest_keeps_its_digits(total: float) -> None:
    made = _log_rest(torch.tensor([log(total), 0.0, 1e-3], dtype=F64)).tolist()
    assert made[0] == pytest.approx(log(1 - total), rel=1e-9)
    assert made[1] == made[2] == pytest.approx(log(torch.finfo(F64).eps), rel=1e-6)


def model_of(vocab: int, **more: Any) -> Any:
    return SimpleNamespace(blueprint=SimpleNamespace(vocab=vocab, **more))


def test_vocabularies_may_differ_by_padding() -> None:
    for teacher, student in ((5024, 4000), (4000, 5024), (4000, 4000)):
        check_vocabularies(model_of(teacher), model_of(student))
    for teacher, student in ((5025, 4000), (4000, 5025)):
        with pytest.raises(mw.ConfigError, match="tokenizers differ"):
            check_vocabularies(model_of(teacher), model_of(student))
    Distill(top_k=8).check_rest(9)
    Distill(top_k=9, rest="renormalise").check_rest(9)
    with pytest.raises(mw.ConfigError, match="top_k=9 leaves no other tokens"):
        Distill(top_k=9).check_rest(9)


# Embeddings


def test_roles_of_groups_that_are_not_neighbours() -> None:
    """Group 4 has the documents 0, 2 and 5; group 1 has 1 and 4; group 9 has 3, 6 and 7."""
    docs = LossDocuments([1] * 8, [4, 1, 4, 9, 1, 4, 9, 9], torch.ones(8, dtype=torch.bool))
    for row_N, rows in ((None, docs.group_D), (torch.arange(8) + 10, torch.arange(8) + 10)):
        roles = _roles(docs, row_N)
        assert roles.query.number_N.tolist() == [0, 1, 3]
        assert roles.candidate.number_N.tolist() == [2, 4, 5, 6, 7]
        assert roles.candidate.group_N.tolist() == [0, 1, 0, 2, 2]
        assert roles.own_G.tolist() == [0, 1, 3]
        assert torch.equal(roles.query.row_N, rows[[0, 1, 3]])
        assert torch.equal(roles.candidate.row_N, rows[[2, 4, 5, 6, 7]])


def test_false_negatives_are_left_out_of_the_loss_alone() -> None:
    """Angles of unit vectors: the candidate of the other group is nearer to the first query than its own positive."""
    angles = torch.tensor([0.0, 0.8, 1.5, 0.2], dtype=F64)  # query, positive, query, positive
    hidden = torch.stack([angles.cos(), angles.sin()], 1) * torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    docs = LossDocuments([1] * 4, [0, 0, 1, 1], torch.ones(4, dtype=torch.bool))
    cos = lambda a, b: float((angles[a] - angles[b]).cos())  # noqa: E731 - short
    for margin, kept in ((0.25, True), (cos(0, 3) - cos(0, 1) - 1e-6, False), (0.0, False)):
        terms, metrics = Embedding(temperature=0.5, false_negative_margin=margin)({"hidden": hidden}, {}, docs)
        first = log(1 + exp((cos(0, 3) - cos(0, 1)) / 0.5)) if kept and cos(0, 3) - cos(0, 1) <= margin else 0
        second = log(1 + exp((cos(2, 1) - cos(2, 3)) / 0.5)) if cos(2, 1) - cos(2, 3) <= margin else 0
        assert terms.tolist() == pytest.approx([first, second]), margin
        assert metrics["positive_cosine"].tolist() == pytest.approx([cos(0, 1), cos(2, 3)])
        assert metrics["negative_cosine"].tolist() == pytest.approx([cos(0, 3), cos(2, 1)])
        assert metrics["accuracy"].tolist() == [0, 0]


@pytest.mark.parametrize("dims", [(), (2, 3)])
def test_both_directions_leave_out_groups_of_the_same_row(dims: tuple[int, ...]) -> None:
    """Groups 0 and 2 are of one row; group 0 also has a hard negative. The loss is a mean over prefixes."""
    docs = LossDocuments([1] * 7, [4, 4, 4, 1, 1, 9, 9], torch.ones(7, dtype=torch.bool))
    hidden = torch.arange(21.0, dtype=F64).mul(0.7).cos().view(7, 3)
    row_N = torch.tensor([5, 5, 5, 6, 6, 5, 5])
    queries, positives, candidates = [0, 3, 5], [1, 4, 6], {0: [1, 2], 1: [4], 2: [6]}
    rows, expected = [5, 6, 5], torch.zeros(3, dtype=F64)
    for dim in dims or (3,):
        unit = hidden[:, :dim] / hidden[:, :dim].norm(dim=1, keepdim=True)
        cosine = (unit @ unit.t() / 0.5).tolist()
        for g in range(3):
            groups = [h for h in range(3) if h == g or rows[h] != rows[g]]
            own = cosine[queries[g]][positives[g]]
            forth = log(sum(exp(cosine[queries[g]][c]) for h in groups for c in candidates[h])) - own
            back = log(sum(exp(cosine[positives[g]][queries[h]]) for h in groups)) - own
            expected[g] += (forth + back) / 2 / len(dims or (3,))
    objective = Embedding(temperature=0.5, symmetric=True, dims=dims)
    terms, _ = objective({"hidden": hidden}, {"row": row_N}, docs)
    assert terms.tolist() == pytest.approx(expected.tolist())
    with pytest.raises(mw.ConfigError, match="more than the 3 numbers"):
        Embedding(dims=(2, 4))({"hidden": hidden}, {}, docs)


def embedder(rank: int, kept: dict[str, bytes], names: tuple[str, ...] = ()) -> Any:
    small = make_dataclass("Small", ["kept", "names"])(kept, names)
    module = SimpleNamespace(shape=SimpleNamespace(width=36))
    blueprint = SimpleNamespace(scores=("hidden",), module=module)
    return SimpleNamespace(blueprint=blueprint, mesh=SimpleNamespace(rank=rank), small=small)


def test_files_of_an_embedding_model() -> None:
    model = embedder(0, {"other": b"x"})
    add_embedding_files(model, query_prompt="q: ", document_prompt="d: ")
    made = {name: json.loads(content) for name, content in model.small.kept.items() if name != "other"}
    assert model.small.kept["other"] == b"x"
    assert [(each["idx"], each["path"], each["type"].rpartition(".")[2]) for each in made["modules.json"]] == [
        (0, "", "Transformer"), (1, "1_Pooling", "Pooling"), (2, "2_Normalize", "Normalize"),
    ]  # fmt: skip
    pooling = made["1_Pooling/config.json"]
    assert pooling["word_embedding_dimension"] == 36
    assert [name for name, value in pooling.items() if value is True] == ["pooling_mode_lasttoken", "include_prompt"]
    assert made["config_sentence_transformers.json"]["prompts"] == {"query": "q: ", "document": "d: "}
    assert made["config_sentence_transformers.json"]["similarity_fn_name"] == "cosine"


def test_only_rank_0_holds_files_and_a_model_keeps_its_own() -> None:
    other = embedder(1, {})
    add_embedding_files(other, query_prompt="q: ")
    assert other.small.kept == {}
    settings = "config_sentence_transformers.json"
    own = embedder(0, {settings: json.dumps({"prompts": {"query": "old"}}).encode()}, ("modules.json",))
    add_embedding_files(own, document_prompt="d: ", query_prompt="new")
    assert json.loads(own.small.kept[settings]) == {"prompts": {"query": "new", "document": "d: "}}
    assert [*own.small.kept] == [settings]


# Teacher scores


def weight_files(at: Path) -> dict[str, bytes]:
    """Return files of several blocks: in the second file two blocks are equal."""
    block = bytes(range(250)) * 4
    return {"a.safetensors": b"x" * 1500 + b"y" * 700, "b.safetensors": block * 2 + b"z", "config.json": b"{}"}


def test_a_fingerprint_reads_every_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_scores, "_BLOCK", 1000)
    monkeypatch.setattr(
        teacher_scores, "open_source", lambda path: SimpleNamespace(files=["b.safetensors", "a.safetensors"])
    )
    files = weight_files(tmp_path)

    def fingerprint(**changes: bytes) -> str:
        for name, content in {**files, **{f"{name}.safetensors": x for name, x in changes.items()}}.items():
            (tmp_path / name).write_bytes(content)
        return weights_fingerprint(tmp_path)

    blocks = {
        (name, at): content[at : at + 1000] for name, content in files.items() for at in range(0, len(content), 1000)
    }
    by_hand = sorted((key, xxhash.xxh3_128_hexdigest(content)) for key, content in blocks.items())
    expected = hashlib.sha256(repr(by_hand).encode()).hexdigest()[:32]
    assert fingerprint() == expected
    b = files["b.safetensors"]
    others = [fingerprint(b=b[:-1] + b"y"), fingerprint(b=b[:1500] + b"!" + b[1501:]), fingerprint(b=b[:-1])]
    others.append(fingerprint(a=b, b=files["a.safetensors"]))
    assert len({expected, *others}) == 5
    fingerprint()
    assert worlds.run(2, lambda: weights_fingerprint(tmp_path, trials.mesh_of(dict(fsdp=2)))) == [expected] * 2


def test_the_key_of_a_document_is_of_its_tokens() -> None:
    expected = xxhash.xxh3_128_hexdigest(bytes([5, 0, 0, 0, 0, 1, 0, 0]))
    for tokens in (torch.tensor([5, 256]), torch.tensor([5, 256], dtype=torch.int32), torch.tensor([5, 9, 256])[::2]):
        assert document_key(tokens) == expected
    assert document_key(torch.tensor([256, 5])) != expected


class Mesh:
    """The mesh of one rank."""

    def __init__(self, rank: int = 0, **coords: int) -> None:
        self.rank, self.coords, self.data_rank = rank, {"cp": 0, "tp": 0, "pp": 0, "fsdp": 1, **coords}, 1
        self.lacking = set[str]()  # of the other data rank

    def together(self, act: Any, *_: Any) -> Any:
        return act()

    def gather_objects(self, own: Any, axes: tuple[str, ...]) -> list[Any]:
        assert axes == ("replicate", "fsdp")
        return [own, self.lacking]


def writer_of(at: Path, mesh: Mesh, **options: Any) -> TeacherScoresWriter:
    model: Any = SimpleNamespace(mesh=mesh)
    return TeacherScoresWriter(at, Distill(2.0, top_k=2), model, teacher="t", **options)


@pytest.mark.parametrize("axis", ["cp", "tp", "pp", "fsdp", "replicate"])
def test_one_rank_of_each_data_rank_writes(tmp_path: Path, axis: str) -> None:
    assert writer_of(tmp_path, Mesh(**{axis: 1}))._writes == (axis in ("fsdp", "replicate"))


def test_a_writer_skips_documents_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_scores, "_FILE_BYTES", 36)  # a document of three tokens takes 3 * 2 * (4 + 2) bytes
    asked: list[Any] = []

    def top(model: Any, batches: list[mw.Batch], k: int, *, temperature: float) -> list[dict[str, torch.Tensor]]:
        asked.append((k, temperature, len(batches)))
        ids = [batch.tokens[:, None] + torch.arange(k) for batch in batches]
        return [{"ids": x, "logprobs": -x.double()} for x in ids]

    monkeypatch.setattr(teacher_scores, "top_logprobs", top)
    one, two = mw.pack([[5, 6, 7], [8, 9]], length=6), mw.pack([[8, 9], [1, 2, 3], [5, 6, 7], [1, 2, 3]])
    with writer_of(tmp_path, Mesh(), dtype="float16") as writer:
        writer.score([one])
        writer.score([one, two])
        writer.score([mw.pack([[1, 2, 3]])])
        cast(Any, writer.mesh).lacking.add("of the other data rank")
        writer.score([two])
    assert asked == [(2, 2.0, 1), (2, 2.0, 2), (2, 2.0, 1)]
    files = sorted(tmp_path.glob("scores-*"))
    assert [file.name for file in files] == ["scores-00001-00000.safetensors", "scores-00001-00001.safetensors"]
    tensors = load_file(files[0]) | load_file(files[1])
    assert {key.partition(".")[0] for key in tensors} == {
        document_key(torch.tensor(x)) for x in ([5, 6, 7], [8, 9], [1, 2, 3])
    }
    key = document_key(torch.tensor([8, 9]))
    assert (tensors[f"{key}.ids"].tolist(), tensors[f"{key}.ids"].dtype) == ([[8, 9], [9, 10]], torch.int32)
    assert (tensors[f"{key}.logprobs"].tolist(), tensors[f"{key}.logprobs"].dtype) == (
        [[-8, -9], [-9, -10]],
        torch.float16,
    )
    assert json.loads((tmp_path / "teacher.json").read_text()) == {
        "format": 1, "teacher": "t", "temperature": 2.0, "top_k": 2, "dtype": "float16",
    }  # fmt: skip
    assert len(writer_of(tmp_path, Mesh(rank=3), dtype="float16")._known) == 3
    assert writer_of(tmp_path / "new", Mesh(rank=3))._known == set()
    assert not (tmp_path / "new").exists(), "rank 0 makes it"
    with pytest.raises(mw.ConfigError, match="dtype='float16', and 'float32' is wanted"):
        writer_of(tmp_path, Mesh())


def test_an_error_leaves_scores_unwritten(tmp_path: Path) -> None:
    """Other ranks may never come to the end, so this one does not wait for them."""
    writer = writer_of(tmp_path, Mesh())
    writer._tensors = {"a.ids": torch.zeros(2, 2)}
    with pytest.raises(ZeroDivisionError), writer:
        raise ZeroDivisionError
    assert [*tmp_path.glob("scores-*")] == []


def test_scores_of_images_are_not_kept(tmp_path: Path) -> None:
    """The key of a document does not depend on its images."""
    batches: Any = [mw.pack([[1, 2]]), SimpleNamespace(frames=(1,), tokens=torch.arange(2), split=lambda x: [x])]
    with pytest.raises(mw.DataError, match="do not hold images"):
        writer_of(tmp_path, Mesh()).score(batches)


def test_padding_has_no_candidates(tmp_path: Path) -> None:
    """A batch of padding alone has fields of the same kinds as others."""
    (tmp_path / "teacher.json").write_text(json.dumps(dict(format=1, teacher="t", temperature=1.0, top_k=3)))
    tokens = torch.tensor([5, 6])
    made = {"ids": torch.tensor([[1, 2, 3], [8, 9, 1]], dtype=torch.int32), "logprobs": -torch.ones(2, 3).half()}
    save_file({f"{document_key(tokens)}.{name}": x for name, x in made.items()}, tmp_path / "scores-0.safetensors")
    stored = TeacherScores(tmp_path, Distill(top_k=2))
    filled = stored.add_to(mw.pack([tokens.tolist()], length=3), 9).fields
    padding = mw.Batch(torch.zeros(3).long(), torch.full((3,), -100), (0, 3), num_filler=3)
    empty = stored.add_to(padding, 9).fields
    assert filled[IDS][:2].tolist() == [[1, 2], [8, -1]]
    assert empty[IDS].tolist() == [[-1, -1]] * 3
    assert (empty[LOGPROBS].dtype, filled[LOGPROBS].dtype) == (torch.float32, torch.float32)
    assert len(stored) == 1
    assert stored.document(tokens)[1].dtype == torch.float32
    assert cast(Any, stored)._opened.keys() == {"scores-0.safetensors"}
