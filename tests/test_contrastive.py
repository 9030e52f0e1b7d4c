"""Losses over all documents of a step, on meshes: equal to loops by hand, and to sentence-transformers."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.engine.loss_documents import LossDocuments
from meshwright.engine.step_rows import StepRows
from meshwright.objectives import Embedding, add_embedding_files, last_token_labels
from meshwright.objectives.embedding_files import _with_prompts
from meshwright.ops.part_sizes import shrunk_part_sizes
from tests import contrast, parts, rl_losses, tiny, trials, worlds
from tests.contrast import CASES
from tests.words import words

MESHES: list[dict[str, int]] = [
    dict(fsdp=2), dict(tp=2), dict(cp=2), dict(pp=2), dict(fsdp=2, tp=2, ep=2), dict(), dict(replicate=2),
    dict(cp=2, tp=2), dict(pp=2, fsdp=2), dict(fsdp=2, cp=2),
]  # fmt: skip
ROUTED = "two batches"
WHITENED = mw.Loss(contrast.whitened, per="step", metrics=("num_targets",))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture whose aux loss has a gradient."""
    return tiny.directory(tmp_path_factory.mktemp("contrast") / "m", "qwen3_moe", router_aux_loss_coef=0.1)


def engine_of(source: Path, mesh: dict[str, int], loss: Any, **options: Any) -> mw.Engine:
    head = {"head": "lm", "entropy": True, "temperature": 0.7} if loss is WHITENED else {"head": "none"}
    aux = "previous" if "pp" in mesh else "pooled"
    return trials.build(source, mesh, loss=loss, router_aux=aux, **head, **options)


def _loss(case: str) -> mw.Loss:
    return WHITENED if case == "whitened" else CASES[case][0].loss


def documents_of(case: str) -> list[list[int]]:
    return rl_losses.documents() if case == "whitened" else contrast.documents()


def batches_of(mesh: mw.Mesh, case: str) -> list[mw.Batch]:
    if case != "whitened":
        given = documents_of(case)
        labels = last_token_labels(given)
        return mw.batches(given, mesh, length=CASES[case][1], labels=labels, groups=contrast.NUMBERS)
    return mw.batches(
        documents_of(case), mesh, max_tokens=64, trained=rl_losses.masks(), groups=rl_losses.GROUPS,
        fields={"advantage": rl_losses.fields()["advantage"]},
    )  # fmt: skip


def _grads(engine: mw.Engine, batches: list[mw.Batch]) -> tuple[float, dict[str, Tensor]]:
    loss = engine.backward(batches)
    grads = mw.gather(engine.model, "grad")
    engine.discard()
    return loss, grads


def of_mesh(source: Path, mesh: dict[str, int], case: str) -> dict[str, Any]:
    """Loss, metrics and gradients of a step. One case trains the router too."""
    loss = _loss(case)
    engine = engine_of(source, mesh, loss)
    batches = batches_of(engine.model.mesh, case)
    if case != ROUTED:
        engine.router.balance.coefficient = 0.0
    total, grads = _grads(engine, batches)
    actual = {
        "loss": total, "grads": grads, "metrics": engine.metrics, "batches": len(batches),
        "load": float(engine.router.load_LE.sum()), "num_tokens": sum(map(len, documents_of(case))),
    }  # fmt: skip
    return {**actual, **(_routed(engine, batches, actual) if case == ROUTED else {})}


def _routed(engine: mw.Engine, batches: list[mw.Batch], actual: dict[str, Any]) -> dict[str, Any]:
    """Take away what the router's aux loss adds: that of a loss of zeros on the same batches."""
    loss, engine.loss = engine.loss, mw.Loss(lambda s, f, d: d.sum(s["hidden"].sum(-1)) * 0, per="document")
    aux_loss, aux_grads = _grads(engine, batches)
    engine.loss = loss
    assert engine.evaluate(batches) == pytest.approx(actual["loss"] - aux_loss, rel=1e-9)
    record = engine.step(batches)
    assert record.router_loss == pytest.approx(aux_loss, rel=1e-12)
    assert record.loss == pytest.approx(actual["loss"], rel=1e-12)
    assert record.num_tokens == actual["num_tokens"]
    grads = {key: x - aux_grads[key] for key, x in actual["grads"].items()}
    return {"loss": record.loss - record.router_loss, "grads": grads, "metrics": dict(record.metrics)}


def by_hand(source: Path, case: str) -> dict[str, Any]:
    """Compute the step in one process, from one long batch and loops."""
    engine, results = engine_of(source, {}, _loss(case)), dict[str, Any]()

    def whole(scores: Any, fields: Any, docs: Any) -> Tensor:
        if case == "whitened":
            loss, results["metrics"] = contrast.whitened_by_hand(scores, fields, docs.sizes, rl_losses.GROUPS)
        else:
            last = [rows[-1] for rows in docs.split(scores["hidden"])]
            loss, results["metrics"] = contrast.by_hand(CASES[case][0], last)
        results["loss"] = float(loss.detach())
        return loss

    engine.router.balance.coefficient = 0.0
    engine.loss = mw.Loss(whole, per="micro_batch", normalise=False)
    if case == "whitened":
        fields = {"advantage": rl_losses.fields()["advantage"]}
        batch = mw.pack(rl_losses.documents(), trained=rl_losses.masks(), fields=fields)
    else:
        batch = mw.pack(contrast.documents(), labels=last_token_labels(contrast.documents()))
    _, results["grads"] = _grads(engine, [batch])
    return results


NAMES = [*CASES, "whitened"]
# All losses on two data ranks, two on each other axis; in `make matrix` all on all.
FEW = {"fsdp=2": NAMES, **{axis: [ROUTED, "whitened"] for axis in ("tp=2", "cp=2", "pp=2")}}
TRIED = [(mesh, case) for mesh in MESHES for case in (NAMES if parts.ALL else FEW.get(trials.named(mesh), []))]
_expected: dict[str, Any] = {}
_runs: dict[str, dict[str, list[Any]]] = {}


def _both(source: Path, mesh: dict[str, int], case: str) -> tuple[Any, list[Any]]:
    """Return the expected figures and those of each rank: one world for each mesh runs all cases."""
    if not _expected:
        of_hand = worlds.in_turn(1, {name: lambda name=name: by_hand(source, name) for name in NAMES})
        _expected.update({name: ranks[0] for name, ranks in of_hand.items()})
    key = trials.named(mesh)
    if key not in _runs:
        cases = {name: lambda name=name: of_mesh(source, mesh, name) for on, name in TRIED if on == mesh}
        _runs[key] = worlds.in_turn(trials.world_of(mesh), cases)
    return _expected[case], _runs[key][case]


@pytest.mark.parametrize(
    ("mesh", "case"), TRIED, ids=lambda each: each if isinstance(each, str) else trials.named(each)
)
def test_gradients_are_those_by_hand(source: Path, mesh: dict[str, int], case: str) -> None:
    expected, ranks = _both(source, mesh, case)
    parted = not mesh.keys().isdisjoint({"fsdp", "replicate"})  # two data ranks
    for rank, actual in enumerate(ranks):
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-9)
        assert actual["metrics"] == pytest.approx(expected["metrics"], rel=1e-9)
        assert (actual["batches"] == 1) == (case == "one batch" or (case == "two batches" and parted))
        assert actual["load"] == actual["num_tokens"] * 3 * 2, "each of 3 experts in 2 layers counts a token once"
        if not rank:
            assert actual["grads"].keys() == expected["grads"].keys()
            for key, x in expected["grads"].items():
                # Gradients of the aux loss were subtracted, so zeros have noise.
                assert (actual["grads"][key] - x).norm() <= 1e-9 * x.norm() + 1e-12, key


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.directory(tmp_path_factory.mktemp("dense") / "m", "qwen3")


def packed_by_hand(source: Path) -> list[tuple[float, dict[str, Tensor]]]:
    """A step in one batch, and in two with the same numbers of groups in both."""
    engine = trials.build(source, {}, head="none", loss=Embedding().loss)
    documents = contrast.documents()[:8]
    labels, groups = last_token_labels(documents), [0, 0, 0, 1, 1, 2, 2, 2]
    cut = lambda of, numbers: mw.pack(documents[of], labels=labels[of], groups=numbers, length=80)  # noqa: E731 - short
    apart = [cut(slice(5), groups[:5]), cut(slice(5, 8), [1, 1, 1])]
    return [_grads(engine, batches) for batches in ([cut(slice(8), groups)], apart)]


def test_groups_of_two_batches_are_two_groups(dense: Path) -> None:
    """By default the documents of each batch are numbered from 0, so equal numbers say nothing."""
    (loss, grads), (loss_apart, grads_apart) = worlds.run(1, packed_by_hand, dense)[0]
    assert loss_apart == pytest.approx(loss, rel=1e-9)
    assert all((grads_apart[key] - x).norm() <= 1e-9 * x.norm() for key, x in grads.items())


def _step(documents: list[list[int]], groups: list[int] | None, loss: Any = None, **options: Any) -> Any:
    """Step on documents that each data rank packs."""
    options = {"labels": last_token_labels(documents), **options}
    batch = lambda: mw.pack(documents, groups=groups, **options)  # noqa: E731 - short
    return lambda e: _with_loss(e, loss or Embedding().loss).step([batch()])


def _with_loss(engine: mw.Engine, loss: Any) -> mw.Engine:
    return mw.Engine(mw.load(engine.model.directory, engine.model.mesh, head="none"), lr=1.0, loss=loss)


def _fails_on_rank_0(engine: mw.Engine) -> None:
    def loss(scores: Any, fields: Any, docs: Any) -> Tensor:
        if not engine.model.mesh.rank:
            raise ValueError("no such document")
        return docs.group_sum(docs.sum(scores["hidden"]).sum(1))

    _step(DOCUMENTS, [0, 0, 1, 1], mw.Loss(loss, per="step"))(engine)


def _fields_on_rank_1(engine: mw.Engine) -> None:
    fields = {"more": [[0.0] * 3] * 4} if engine.model.mesh.rank else {}
    _step(DOCUMENTS, [0, 0, 1, 1], fields=fields)(engine)


DOCUMENTS = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]
REFUSED: dict[str, tuple[dict[str, int], Any, str]] = {
    "one rank fails": (dict(fsdp=2), _fails_on_rank_0, words("no such document")),
    "the last stage fails": (dict(pp=2), _step(DOCUMENTS, None, mw.Loss(lambda s, f, d: 1 / 0, per="step")),
        words("division by zero")),
    "other fields on a rank": (dict(fsdp=2), _fields_on_rank_1, words("RankError", "fields of the batches", "more")),
    "other fields in a batch": (dict(), lambda e: _with_loss(e, Embedding().loss).step([mw.pack(DOCUMENTS), mw.pack(
        DOCUMENTS).with_fields(more=torch.ones(12))]), words("DataError", "batch 1", "'more'", "batch 0")),
    "a weight": (dict(), _step(DOCUMENTS, [0, 0, 1, 1], fields={"weight": [[1.0] * 3] * 4}),
        words("DataError", "'weight'", "per step")),
    "detached": (dict(), _step(DOCUMENTS, [0, 0, 1, 1], mw.Loss(lambda s, f, d: torch.ones(2), per="step")),
        words("StateError", "detached")),
    "no groups": (dict(), _step(DOCUMENTS, None), words("DataError", "document 0", "alone", "4 of 4", "groups=")),
    "several labels": (dict(), _step(DOCUMENTS, [0, 0, 1, 1], labels=None), words("DataError", "document 0", "2 tokens",
        "last_token_labels")),
    "another head": (dict(), lambda e: mw.Engine(e.model, lr=1.0, loss=Embedding().loss).step([mw.pack(DOCUMENTS,
        groups=[0, 0, 1, 1])]), words("DataError", "hidden states", 'head="none"')),
    "wide prefixes": (dict(), _step(DOCUMENTS, [0, 0, 1, 1], Embedding(dims=(64, 3)).loss), words("ConfigError", "64",
        "36 numbers")),
    "temperature": (dict(), lambda e: Embedding(temperature=0), words("ConfigError", "temperature=0", "above")),
    "an empty document": (dict(), lambda e: last_token_labels([[1], []]), words("DataError", "document 1", "empty")),
    "files for a language model": (dict(), lambda e: add_embedding_files(e.model), words("ConfigError", 'head="none"')),
}  # fmt: skip


@pytest.fixture(scope="module")
def messages(dense: Path) -> Any:
    return trials.said_by_all(dense, {name: (mesh, act) for name, (mesh, act, _) in REFUSED.items()})


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_on_all_ranks(messages: Any, name: str) -> None:
    for text in messages(name):
        assert re.search(REFUSED[name][2], text), text


# sentence-transformers 6.2.0 in float64: MultipleNegativesRankingLoss with the directions of the objective, alone or in
# MatryoshkaLoss, whose sum is divided by the number of prefixes. (loss, norm of the gradient, gradient of the first
# number). `test_numbers_of_sentence_transformers` computes them anew where it is installed.
SHAPES = {"pairs": (6, 2), "hard negatives": (5, 4)}  # groups, documents of each
OBJECTIVES = {
    "plain": Embedding(),
    "symmetric": Embedding(temperature=0.1, symmetric=True),
    "matryoshka": Embedding(temperature=0.02, dims=(16, 8, 3)),
}
STORED = {
    ("plain", "pairs"): (0.6793214095513177, 1.9568139269216214, 0.46884201393948294),
    ("plain", "hard negatives"): (4.274470346335304, 3.28193882154914, 0.11251317953741741),
    ("symmetric", "pairs"): (0.3723574495397604, 0.6896065318274132, 0.15407347000729749),
    ("symmetric", "hard negatives"): (1.318841062894286, 0.9095043498304792, 0.07356786099069929),
    ("matryoshka", "pairs"): (7.220298181494922, 20.542419737187398, 2.9659333511655745),
    ("matryoshka", "hard negatives"): (14.557758248394435, 12.388736589390673, 1.7886009820271944),
}


def hidden_of(shape: str) -> Tensor:
    """Embeddings `[documents, 16]`, those of a group alike, from arithmetic that every machine does in the same way."""
    groups, size = SHAPES[shape]
    n = torch.arange(groups * size, dtype=torch.float64)[:, None]
    d = torch.arange(16, dtype=torch.float64)
    return torch.sin(1.7 * (n // size) * (d + 1)) + 0.8 * torch.cos(2.3 * n * (d + 1.5)) + 0.1


def ours(shape: str, objective: Embedding) -> tuple[float, float, float]:
    groups, size = SHAPES[shape]
    hidden = hidden_of(shape).requires_grad_()
    numbers = [number for number in range(groups) for _ in range(size)]
    docs = LossDocuments([1] * len(numbers), numbers, torch.ones(len(numbers), dtype=torch.bool))
    terms, _ = objective({"hidden": hidden}, {}, docs)
    return _summary(terms.mean(), hidden)


def _summary(loss: Tensor, hidden: Tensor) -> tuple[float, float, float]:
    (gradient,) = torch.autograd.grad(loss, hidden)
    return float(loss.detach()), float(gradient.norm()), float(gradient[0, 0])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_are_those_of_sentence_transformers(name: str, shape: str) -> None:
    assert ours(shape, OBJECTIVES[name]) == pytest.approx(STORED[name, shape], rel=1e-9)
    with shrunk_part_sizes():  # in parts of a few queries
        assert ours(shape, OBJECTIVES[name]) == pytest.approx(STORED[name, shape], rel=1e-9)


def theirs(shape: str, objective: Embedding) -> tuple[float, float, float]:
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    groups, size = SHAPES[shape]
    hidden = hidden_of(shape).requires_grad_()
    both = objective.symmetric
    directions: Any = ("query_to_doc", "doc_to_query") if both else ("query_to_doc",)
    mode = "per_direction" if both else "joint"
    loss = MultipleNegativesRankingLoss(
        torch.nn.Identity(), scale=1 / objective.temperature, directions=directions, partition_mode=mode
    )
    columns = hidden.view(groups, size, -1).unbind(1)
    dims = objective.dims or (hidden.shape[1],)
    each = [loss.compute_loss_from_embeddings([x[:, :dim] for x in columns], None) for dim in dims]
    return _summary(torch.stack(each).mean(), hidden)


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip without sentence-transformers, whose scikit-learn sets variables for good."""
    for name in ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"):
        monkeypatch.setenv(name, os.environ.get(name, "TRUE" if "DUPLICATE" in name else "FALSE"))
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")


@pytest.mark.usefixtures("peer")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_numbers_of_sentence_transformers(name: str, shape: str) -> None:
    assert theirs(shape, OBJECTIVES[name]) == pytest.approx(STORED[name, shape], rel=1e-9)


def embedding_model(at: Path) -> Path:
    """An embedding model in the form of Qwen3-Embedding: files of sentence-transformers, keys without `model.`"""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    tiny.reference("qwen3_tied").model.float().save_pretrained(at)
    words_only = Tokenizer(models.WordLevel({f"w{n}": n for n in range(131)}, unk_token="w0"))
    words_only.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment] # its stub has no setter
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words_only, pad_token="w0", unk_token="w0")
    tokenizer.save_pretrained(at)

    def add(base: Path) -> None:
        model = mw.load(base, mw.Mesh(), dtype=torch.float32, head="none")
        add_embedding_files(model, query_prompt="w3 w4 ")
        mw.export(model, at)

    base = at.rename(at.with_name("base"))
    worlds.run(1, add, base)
    return at


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedding_model(tmp_path_factory.mktemp("embedder") / "m")


FILES = ("modules.json", "1_Pooling/config.json", "config_sentence_transformers.json")


def test_exports_and_checkpoints_keep_the_files_of_embedding_models(embedder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(embedder, own)
    (own / "1_Pooling/config.json").write_bytes(b'{"word_embedding_dimension": 36, "of": "the user"}')
    (own / "2_Dense").mkdir()
    (own / "2_Dense/model.safetensors").write_bytes(b"any bytes")
    (own / "3_Unnamed").mkdir()
    (own / "3_Unnamed/config.json").write_bytes(b"{}")
    modules = json.loads((own / "modules.json").read_bytes())
    modules[2]["path"] = "2_Dense"
    (own / "modules.json").write_text(json.dumps([*modules, {"path": "../base"}, {"path": 3}, "no module"]))

    def write() -> None:
        model = mw.load(own, mw.Mesh(), dtype=torch.float32, head="none")
        add_embedding_files(model)  # keeps what is there
        mw.export(model, tmp_path / "out")
        saved = mw.save(mw.Engine(model, lr=0.0, loss=Embedding().loss), tmp_path / "run")
        mw.export(mw.load(saved, mw.Mesh(), head="none"), tmp_path / "again")

    worlds.run(1, write)
    for folder in ("out", "again"):
        for name in (*FILES, "2_Dense/model.safetensors"):
            assert (tmp_path / folder / name).read_bytes() == (own / name).read_bytes(), (folder, name)
        assert not (tmp_path / folder / "3_Unnamed").exists()


def test_prompts_of_a_model_are_replaced_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    """A prompt that is not given stays, and a warning names it, because training does not use it."""
    content = json.dumps({"prompts": {"query": "q: ", "document": "d: ", "sts": "s: "}, "of": "the user"}).encode()
    made = _with_prompts(content, {"query": "new: ", "document": ""})
    assert json.loads(made["config_sentence_transformers.json"]) == {
        "prompts": {"query": "new: ", "document": "d: ", "sts": "s: "}, "of": "the user"
    }  # fmt: skip
    assert [record.getMessage() for record in caplog.records] == [
        "the model's own prompt of a document, 'd: ', is not used in training; set document_prompt"
    ]
    assert _with_prompts(content, {"query": "", "document": ""}) == {}
    assert len(caplog.records) == 3
    assert json.loads(_with_prompts(None, {"query": "a", "document": ""})["config_sentence_transformers.json"]) == {
        "prompts": {"query": "a"}
    }


def _trained(source: Path, loss: Any) -> tuple[float, dict[str, Tensor], Tensor]:
    given = contrast.documents()[:10]
    engine = mw.Engine(mw.load(source, mw.Mesh(), dtype=torch.float32, head="none"), lr=1.0, loss=loss)
    groups = [number // 2 for number in range(10)]
    batches = mw.batches(given, engine.model.mesh, length=40, labels=last_token_labels(given), groups=groups)
    assert len(batches) > 1
    return *_grads(engine, batches), mw.embeddings(engine.model, mw.pack(given))


@pytest.mark.usefixtures("peer")
@pytest.mark.parametrize("dims", [(), (36, 12)], ids=["whole", "matryoshka"])
def test_a_model_trains_as_in_sentence_transformers(embedder: Path, dims: tuple[int, ...]) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss, MultipleNegativesRankingLoss

    loss, grads, embeddings = worlds.run(1, _trained, embedder, Embedding(dims=dims).loss)[0]
    model = SentenceTransformer(str(embedder), device="cpu")
    given = contrast.documents()[:10]
    texts = [" ".join(f"w{n}" for n in document) for document in given]
    encoded = model.encode(texts, convert_to_tensor=True)
    assert (encoded - torch.nn.functional.normalize(embeddings)).abs().max() < 1e-5
    assert model.prompts["query"] == "w3 w4 "
    theirs: Any = MultipleNegativesRankingLoss(model)
    if dims:
        theirs = MatryoshkaLoss(model, theirs, dims)  # a sum over prefixes
    value = theirs([model.preprocess(texts[at::2]) for at in (0, 1)], None) / max(len(dims), 1)
    value.backward()
    assert loss == pytest.approx(float(value.detach()), rel=1e-5)
    for name, parameter in model[0].auto_model.named_parameters():
        assert parameter.grad is not None
        assert (grads[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name


def test_groups_of_one_row_are_no_negatives_of_each_other() -> None:
    """Documents are a query and a positive three times; the first two groups are of one row. One group alone has the
    loss 0, as the last step of an epoch may have it."""
    unit = torch.nn.functional.normalize(torch.randn(6, 8, dtype=torch.float64), dim=-1)
    docs = LossDocuments([1] * 6, [0, 0, 1, 1, 2, 2], torch.ones(6, dtype=torch.bool))
    objective = Embedding(temperature=0.5)
    row = torch.tensor([7.0, 7.0, 7.0, 7.0, 8.0, 8.0])
    terms, metrics = objective({"hidden": 3 * unit}, {"row": row}, docs)
    cosines = unit[::2] @ unit[1::2].T
    kept = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 1]], dtype=torch.bool)
    by_hand = -(cosines / 0.5).masked_fill(~kept, -torch.inf).log_softmax(-1).diagonal()
    assert torch.allclose(terms, by_hand)
    others = cosines.masked_fill(~kept | torch.eye(3, dtype=torch.bool), -1).amax(1)
    assert torch.allclose(metrics["negative_cosine"], others)
    alone, metrics = objective({"hidden": unit[:2]}, {}, LossDocuments([1, 1], [0, 0], torch.ones(2, dtype=torch.bool)))
    assert alone.tolist() == [0.0]
    assert metrics["negative_cosine"].tolist() == [-1.0]


def test_metrics_are_those_of_the_longest_prefix() -> None:
    hidden = torch.randn(4, 8, dtype=torch.float64)
    docs = LossDocuments([1] * 4, [0, 0, 1, 1], torch.ones(4, dtype=torch.bool))
    expected = Embedding()({"hidden": hidden}, {}, docs)[1]
    for dims in ((8, 3), (3, 8)):
        actual = Embedding(dims=dims)({"hidden": hidden}, {}, docs)[1]
        assert {name: x.tolist() for name, x in actual.items()} == {name: x.tolist() for name, x in expected.items()}


def _groups_of_step() -> list[int]:
    """Return the groups of a step in which data rank 0 has four documents and rank 1 two, each in its own group."""
    mesh = trials.mesh_of(dict(fsdp=2))
    groups = range(4) if mesh.rank == 0 else range(2)
    batch = mw.pack([[5, 6, 7]] * len(groups), length=16, groups=groups)
    return list(StepRows(mesh, [batch, batch]).docs.group_numbers)


def test_groups_of_data_ranks_with_unequal_documents_stay_apart() -> None:
    for groups in worlds.run(2, _groups_of_step):
        assert groups == [*range(12)]
