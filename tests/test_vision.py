"""The tower, positions and images of documents, against transformers; and refusals."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import meshwright as mw
from meshwright.blueprint import Blueprint
from meshwright.cli import main
from meshwright.data.images import turns_of
from meshwright.errors import CheckpointError, ConfigError, DataError, MeshError
from meshwright.models.vision_tower import LayerNorm
from meshwright.recipe import Pipeline, Recipe
from meshwright.sharding.vision_balance import balance_frames, route
from tests import parts, seeing, tiny, trials, worlds
from tests.seeing import DOCUMENTS, END, IMAGE, START, VIDEO, Made
from tests.test_checkpoint import bytes_of

FAMILIES = tuple(seeing.ODD)
SEES = Recipe(tower=True)
DOCS = ("one place", "wide, then high", "two of a size", "beyond the table", "a video", "a short video", "touching")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    at = tmp_path_factory.mktemp("seeing")
    return functools.cache(lambda name: seeing.directory(at / name, name))


def inputs(made: Made) -> dict[str, Any]:
    """A document as transformers takes it. It cannot find the positions of images that touch, so it gets ours:
    those of all other documents are compared with its own."""
    tokens, images = made
    ids, batch = torch.tensor([tokens]), seeing.packed_of([made])
    kinds = (ids == IMAGE).long() + 2 * (ids == VIDEO).long()
    out = {"input_ids": ids, "mm_token_type_ids": kinds, "use_cache": False}
    out["position_ids"] = turns_of(batch.bounds, batch.frames).T[:, None]
    names = {True: ("pixel_values", "image_grid_thw"), False: ("pixel_values_videos", "video_grid_thw")}
    for still, (pixels, grids) in names.items():
        of_kind = [(each, grid) for each, grid in images if (grid[0] == 1) == still]
        if of_kind:
            out[pixels] = torch.cat([each for each, _ in of_kind])
            out[grids] = torch.tensor([grid for _, grid in of_kind])
    return out


APART = tuple(name for name in DOCUMENTS if name != "touching")


@functools.cache
def reference_positions() -> dict[str, Tensor]:
    """Return the positions of each document for which transformers finds them."""
    model, out = _reference("qwen3_vl").model, dict[str, Tensor]()
    for case in APART:
        made = inputs(DOCUMENTS[case])
        grids = made.get("image_grid_thw"), made.get("video_grid_thw")
        out[case] = model.get_rope_index(made["input_ids"], made["mm_token_type_ids"], *grids)[0][:, 0].T
    return out


def misplaced() -> dict[str, int]:
    """Count the positions of each document, and of all of them packed, that differ from transformers'."""
    expected = {
        **{(case,): reference for case, reference in reference_positions().items()},
        APART: torch.cat([*reference_positions().values()]),
    }
    result = {names: seeing.packed(names).docs for names in expected}
    turns = {
        names: docs.positions_T[:, None] if docs.turns_T3 is None else docs.turns_T3 for names, docs in result.items()
    }
    return {", ".join(names): int((turns[names] != reference).sum()) for names, reference in expected.items()}


def test_positions_are_those_of_transformers() -> None:
    assert misplaced() == dict.fromkeys([*APART, ", ".join(APART)], 0)


def test_positions_as_the_rule_says() -> None:
    """Three text tokens and a start, an image of 4 x 6 patches, a video of 2 slices of 4 x 4, text; then a second
    document, which begins at 0."""
    first = [1, 2, 3, START, *[IMAGE] * 6, END, 4, 5, 6, START, *[VIDEO] * 4, END, 7, START, *[VIDEO] * 4, END, 8, 9]
    images = [(torch.zeros(24, 96), (1, 4, 6)), (torch.zeros(32, 96), (2, 4, 4))]
    batch = mw.pack([first, [1, 2]], images=[images, []], placeholders=(IMAGE, VIDEO))
    time, height, width = batch.docs.turns_T3.T.tolist()
    assert time == [*range(4), *[4] * 6, *range(7, 12), *[12] * 4, *range(14, 17), *[17] * 4, *range(19, 22), 0, 1]
    assert height[4:10] == [4, 4, 4, 5, 5, 5]
    assert width[4:10] == [4, 5, 6, 4, 5, 6]
    assert height[15:19] == [12, 12, 13, 13]
    assert width[15:19] == [12, 13, 12, 13]
    assert height[:4] == width[:4] == time[:4]
    assert height[-4:] == width[-4:] == time[-4:]


@functools.cache
def _reference(name: str) -> Any:
    return seeing.reference(name)


def _reference_logits(name: str, made: Made, seen: list[list[Tensor]]) -> Tensor:
    """Logits; `seen` gets what the tower gave: rows for the places, and those for the first layers."""

    def note(_module: Any, _args: Any, out: Any) -> None:
        seen.append([out.pooler_output, *out.deepstack_features] if "vl" in name else [out.pooler_output])

    model = _reference(name)
    hook = model.model.visual.register_forward_hook(note)
    try:
        return model(**inputs(made)).logits[0]
    finally:
        hook.remove()


class Outputs(NamedTuple):
    """Outputs for all documents: rows of the tower, norms of small numbers, logits, loss and gradients."""

    rows: list[Tensor]
    norms: list[Tensor]
    logits: Tensor
    loss: float
    grads: dict[str, Tensor]


def _of_small_numbers(tower: nn.Module, kind: type[nn.Module]) -> list[Tensor]:
    """Return the output of each norm for numbers whose variance is near its epsilon: elsewhere the epsilon does not
    show."""
    norms = [module for module in tower.modules() if isinstance(module, kind)]
    widths = [len(norm.get_parameter("weight")) for norm in norms]
    with torch.no_grad():
        return [norm(torch.linspace(-2e-3, 2e-3, width)[None]) for norm, width in zip(norms, widths, strict=True)]


def ours(source: Path) -> Outputs:
    """Return the outputs of the packed documents."""
    model, batch = mw.load(source, mw.Mesh(device="cpu"), dtype=torch.float32, tower=True), seeing.packed(DOCS)
    rows: list[Tensor] = []
    tower = model.parts[0].tower
    assert tower is not None
    hook = tower.register_forward_hook(lambda _module, _args, out: rows.extend(each.detach() for each in out))
    logits = mw.logits(model, batch)
    hook.remove()
    loss = mw.Engine(model, lr=1e-3).backward([batch])
    return Outputs(rows, _of_small_numbers(tower, LayerNorm), logits, loss, mw.gather(model, "grad"))


def reference_outputs(name: str) -> Outputs:
    """Return transformers' outputs, document by document, with rows in the order of ours."""
    model, batch, seen = _reference(name), seeing.packed(DOCS), list[list[Tensor]]()
    model.zero_grad()
    logits = [_reference_logits(name, DOCUMENTS[doc], seen) for doc in DOCS]
    terms = [F.cross_entropy(each, labels, reduction="sum") for each, labels in zip(logits, batch.split(batch.labels),
             strict=True)]  # fmt: skip
    loss = torch.stack(terms).sum() / batch.num_targets
    loss.backward()
    every = {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in model.named_parameters()}
    grads = tiny.in_parts(every)
    rows = [torch.cat(each).detach()[_images_first().argsort()] for each in zip(*seen, strict=True)]
    norms = _of_small_numbers(model.model.visual, nn.LayerNorm)
    return Outputs(rows, norms, torch.cat(logits).detach(), loss.item(), grads)


def _images_first() -> Tensor:
    """The numbers of our rows as transformers has them: of each document those of images, then those of videos."""
    batch = seeing.packed(DOCS)
    of_document = torch.arange(len(DOCS)).repeat_interleave(torch.tensor(batch.docs.lengths))
    is_place = (batch.tokens == IMAGE) | (batch.tokens == VIDEO)
    order = 2 * of_document + (batch.tokens == VIDEO)
    return order[is_place].argsort(stable=True)


def shares(local: Outputs, peer: Outputs) -> dict[str, float]:
    """Return each error as a share of its bound: above 1 it is wrong."""
    out = {f"rows {number}": _off(*both) / 2e-6 for number, both in enumerate(zip(local.rows, peer.rows, strict=True))}
    out["norms"] = max(_off(*both) for both in zip(local.norms, peer.norms, strict=True)) / 1e-5
    logits, their_logits = local.logits.double(), peer.logits.double()
    out["logits"] = float((logits - their_logits).abs().max()) / 1e-5
    mass, their_mass = logits.log_softmax(-1), their_logits.log_softmax(-1)
    out["divergence"] = float((their_mass.exp() * (their_mass - mass)).sum(-1).max()) / 3e-7
    out["loss"] = abs(local.loss - peer.loss) / 1e-5
    whole = float(torch.stack([peer.grads[key].norm() for key in local.grads]).norm())
    bound = {key: 1e-5 * max(float(peer.grads[key].norm()), 1e-2 * whole) for key in local.grads}
    off = {key: float((grad - peer.grads[key]).norm()) / bound[key] for key, grad in local.grads.items()}
    out["gradients"] = max(off.values())
    trained = local.grads["model.language_model.embed_tokens.weight"][[IMAGE, VIDEO]].any()
    out["the rows of places"] = float("inf") if trained else 0.0
    return out


def _off(local: Tensor, peer: Tensor) -> float:
    return float((local - peer).norm() / peer.norm())


@pytest.mark.parametrize("name", FAMILIES)
def test_numbers_are_those_of_transformers(source: Callable[[str], Path], name: str) -> None:
    (local,), peer = worlds.run(1, ours, source(name)), reference_outputs(name)
    assert len(local.rows) == len(peer.rows) == (3 if "vl" in name else 1)
    assert not {what: share for what, share in shares(local, peer).items() if not share <= 1}
    top, their_top = local.logits.double().topk(6), peer.logits.double().topk(6)
    clear = (their_top.values[:, :-1] - their_top.values[:, 1:]).min(-1).values > 1e-4
    assert clear.sum() > 5
    assert torch.equal(top.indices[clear, :5], their_top.indices[clear, :5])
    assert len(local.grads) > 80
    assert not peer.grads["model.language_model.embed_tokens.weight"][IMAGE].any()


SPELLINGS: dict[str, dict[str, Any]] = {
    "fused": {},
    "turned": dict(turned=True),
    "fused, 2F = D": dict(moe_intermediate_size=18),  # gate_up is square: its shape alone is ambiguous
    "turned, 2F = D": dict(moe_intermediate_size=18, turned=True),
    "turned, F = D": dict(moe_intermediate_size=36, turned=True),  # and so is down
}
SPELLED_ON: list[dict[str, int]] = [dict(), dict(fsdp=2), dict(tp=2), dict(fsdp=2, ep=2), dict(pp=2), dict(fsdp=4)]


def there_and_back(source: Path, mesh: dict[str, int], out: Path, *, trains: bool) -> dict[str, Any]:
    """Return the tensors that a mesh loads, and those of stream, export, checkpoint and state dict."""
    model = mw.load(source, trials.mesh_of(mesh), dtype=torch.float32, tower=True)
    engine = mw.Engine(model, lr=1e-2)
    mw.export(model, out / "export")
    state = {key: part for key, part in engine.state_dict()["weights"].items() if "experts" in key}
    held = {key: [(part.start, part.values.clone()) for part in tensor.held()] for key, tensor in state.items()}
    if not trains:
        return {"held": held}
    engine.step([seeing.packed(["one place", "text"], length=48)])
    saved = mw.save(engine, out / "runs")
    after = {key: tensor.clone() for key, tensor in mw.gather(model).items()}
    other = mw.Engine(mw.load(source, model.mesh, dtype=torch.float32, tower=True), lr=1e-2)
    mw.resume(other, saved)
    same = all(torch.equal(a, b) for a, b in zip(mw.gather(other.model).values(), after.values(), strict=True))
    return {"held": held, "after": after, "same": same}


@pytest.mark.parametrize("mesh", parts.every(6, SPELLED_ON), ids=trials.named)
def test_both_spellings_of_experts(tmp_path: Path, mesh: dict[str, int]) -> None:
    cases, sources = {}, {}
    for name, changes in SPELLINGS.items():
        sources[name] = seeing.directory(tmp_path / name, "qwen3_vl_moe", dtype=torch.bfloat16, **changes)
        act = functools.partial(there_and_back, trains=parts.ALL or name == "turned, 2F = D")
        cases[name] = functools.partial(act, sources[name], mesh, tmp_path / f"{name}, out")
    for name, answers in worlds.in_turn(trials.world_of(mesh), cases).items():
        original, out = load_file(sources[name] / "model.safetensors"), tmp_path / f"{name}, out"
        written = (out / "export" / "model.safetensors").read_bytes()
        assert written == (sources[name] / "model.safetensors").read_bytes(), name
        for answer in answers:
            for key, held in answer["held"].items():
                for start, values in held:
                    at = tuple(slice(a, a + n) for a, n in zip(start, values.shape, strict=True))
                    assert torch.equal(values.to(torch.bfloat16), original[key][at]), (name, key)
        if "after" not in answers[0]:
            continue
        after, saved = answers[0]["after"], load_file(out / "runs" / "step-000001" / "model.safetensors")
        assert saved.keys() == after.keys(), name
        assert all(torch.equal(saved[key], after[key]) for key in saved), name
        assert all(answer["same"] for answer in answers), name


def test_an_unloaded_tower_is_exported(source: Callable[[str], Path], tmp_path: Path) -> None:
    def export() -> list[str]:
        model = mw.load(source("qwen3_5"), mw.Mesh(device="cpu"), dtype=torch.float32)
        mw.export(model, tmp_path / "out")
        return [name for name in model.table.params if "tower" in name]

    assert worlds.run(1, export) == [[]]
    there = source("qwen3_5") / "model.safetensors"
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == there.read_bytes()


def image(height: int, width: int, time: int = 1) -> tuple[Tensor, seeing.Grid]:
    return torch.zeros(time * height * width, seeing.PATCH), (time, height, width)


RUN = [START, *[IMAGE] * 4, END]
REFUSED: dict[str, tuple[Any, Any, str]] = {  # documents, images, message
    "a place without an image": ([RUN], [[]], "document 0 has 4 placeholders at token 1, but its 0 frames"),
    "an image without a place": ([[1, 2]], [[image(2, 4)]], "0 has 1 frame, but placeholders for 0 of them"),
    "of another size": ([RUN], [[image(4, 6)]], "4 x 6 patches and takes 6 placeholders, but 4 are left of the 4"),
    "exchanged": (
        [[*RUN, START, IMAGE, IMAGE, END]], [[image(2, 4), image(4, 4)]], "before token|4 x 4 patches and takes",
    ),
    "an odd size": ([RUN], [[image(3, 4)]], "1 x 3 x 4 patches; height and width must be even"),
    "pixels of another size": ([RUN], [[(torch.zeros(9, 96), (1, 4, 4))]], r"the shape \(9, 96\) for 1 x 4 x 4"),
    "no grid": ([RUN], [[torch.zeros(16, 96)]], r"must be \(pixels, \(time, height, width\)\)"),
    "a list too few": ([RUN, [1]], [[image(4, 4)]], "1 list for 2 documents"),
    "whole numbers": ([RUN], [[(torch.zeros(16, 96).int(), (1, 4, 4))]], "give floating point numbers, or uint8"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_images_that_do_not_fit_are_refused(name: str) -> None:
    documents, images, message = REFUSED[name]
    with pytest.raises(DataError, match=message):
        mw.pack(documents, images=images, placeholders=(IMAGE, VIDEO))


def test_nothing_is_learnt_at_or_of_a_place() -> None:
    document, images = [1, *RUN, 2], [[image(4, 4)]]
    batch = mw.pack([document], images=images, placeholders=(IMAGE, VIDEO))
    assert batch.labels.tolist() == [START, -100, -100, -100, -100, -100, 2, -100]
    masked = mw.pack([document], images=images, placeholders=(IMAGE, VIDEO), trained=[[1] * len(document)])
    assert torch.equal(masked.labels, batch.labels)
    with pytest.raises(DataError, match=f"the label at token 1 is {IMAGE}, which stands for an image"):
        mw.pack([document], images=images, placeholders=(IMAGE, VIDEO), labels=[[*document[1:], -100]])


def test_what_a_processor_makes() -> None:
    """Images and videos come in tensors of their own; their places say in which order."""
    made = []
    for tokens, images in DOCUMENTS.values():
        kinds = [1 if t == IMAGE else 2 if t == VIDEO else 0 for t in tokens]
        of = {"input_ids": [tokens], "attention_mask": [[1] * len(tokens)], "mm_token_type_ids": [kinds]}
        for still, (pixels, grids) in enumerate((("pixel_values_videos", "video_grid_thw"),
                                                 ("pixel_values", "image_grid_thw"))):  # fmt: skip
            local = [each for each in images if (each[1][0] == 1) == bool(still)]
            if local:
                of[pixels], of[grids] = torch.cat([p for p, _ in local]), torch.tensor([g for _, g in local])
        made.append(of)
    batch, expected = mw.pack(made, length=200), seeing.packed(length=200)
    assert batch.frames == expected.frames
    assert torch.equal(batch.labels, expected.labels)
    assert batch.images is not None
    assert expected.images is not None
    assert torch.equal(batch.images.patches_PC, expected.images.patches_PC)
    with pytest.raises(DataError, match=r"document 0 has images, but no mm_token_type_ids"):
        mw.pack([{name: value for name, value in made[1].items() if name != "mm_token_type_ids"}])
    with pytest.raises(DataError, match="document 0 is padded"):
        mw.pack([{**made[1], "attention_mask": [[0] + [1] * (len(made[1]["input_ids"][0]) - 1)]}])


def test_other_models_have_no_tower() -> None:
    with pytest.raises(ConfigError, match="tower=True, but model_type=qwen3 has no vision tower"):
        Blueprint.of(tiny.of("qwen3"), None, SEES)


def test_the_first_layers_stay_together() -> None:
    """The tower adds to the first two what it sees, and features do not travel."""
    blueprint = Blueprint.of(seeing.of("qwen3_vl", num_hidden_layers=5), None, SEES)
    assert blueprint.with_options(pipeline=Pipeline()).spec.line(2).ends[0] >= 2
    with pytest.raises(MeshError, match=r"the first 2 layers take what the tower sees.*choose ends="):
        blueprint.with_options(pipeline=Pipeline(ends=(1, 5))).spec.line(2)


def messages_of_engine(source: Path) -> dict[str, str]:
    blind = trials.said(source, {}, lambda engine: engine.step([seeing.packed(["one place"], length=16)]))
    model = mw.load(source, mw.Mesh(device="cpu"), dtype=torch.float32, tower=True)
    wrong = {
        "stray": mw.pack([[1, 2, IMAGE, 3]]),
        "text": mw.pack([[1, 2, 3, 4]], images=[[image(2, 2)]], placeholders=(3,)),
        "patches": mw.pack([[1, IMAGE]], images=[[(torch.zeros(4, 90), (1, 2, 2))]], placeholders=(IMAGE,)),
    }
    out = {"without a tower": blind}
    for name, batch in wrong.items():
        try:
            mw.logits(model, batch)
        except DataError as error:
            out[name] = str(error)
    return out


def test_a_model_refuses_images_that_are_not_its_own(source: Callable[[str], Path]) -> None:
    (message,) = worlds.run(1, messages_of_engine, source("qwen3_vl"))
    assert "a batch has 1 frame of images, but the model was loaded without its tower" in message["without a tower"]
    assert message["stray"].startswith(f"token {IMAGE} at position 2 stands for an image that the batch lacks")
    assert message["text"].startswith("token 3 at position 2 is in the place of an image")
    assert "has 90 values, but the vision tower takes 96" in message["patches"]


def saved_with_a_tower(source: Path, at: Path) -> str:
    model = mw.load(source, trials.mesh_of(dict(fsdp=2)), dtype=torch.float32, tower=True)
    engine = mw.Engine(model, lr=1e-2)
    engine.step([seeing.packed(["one place", "text"], length=48)])
    mw.save(engine, at / "ours")
    mw.export(model, at / "hf")
    dcp.save(engine.state_dict(), checkpoint_id=at / "dcp")
    without = mw.Engine(mw.load(source, model.mesh, dtype=torch.float32), lr=1e-2)
    with pytest.raises(CheckpointError) as caught:
        mw.resume(without, at / "ours")
    return str(caught.value)


def test_a_tower_in_checkpoints(tmp_path: Path) -> None:
    """Moments of the tower go with it through every kind; and a model without one does not take half of them."""
    source = seeing.directory(tmp_path / "source", "qwen3_vl", dtype=torch.bfloat16)
    message = worlds.run(2, saved_with_a_tower, source, tmp_path)
    assert all("was saved with tower=True, and the engine's model has tower=False" in each for each in message)
    convert = lambda *args: main(["convert", *map(str, args)])  # noqa: E731 - one line reads better
    assert convert(tmp_path / "dcp", tmp_path / "again", "--to", "meshwright", "--like", source) == 0
    assert bytes_of(tmp_path / "again" / "step-000001") == bytes_of(tmp_path / "ours" / "step-000001")
    moments = load_file(tmp_path / "ours" / "step-000001" / "exp_avg" / "model.safetensors")
    assert any("visual" in key and tensor.any() for key, tensor in moments.items())
    assert convert(tmp_path / "dcp", tmp_path / "plain", "--to", "hf", "--like", source) == 0
    assert {p.name: p.read_bytes() for p in (tmp_path / "plain").iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "hf").iterdir()
    }


NOT_OF_A_PROCESSOR: dict[str, tuple[dict[str, Any], str]] = {
    "no grids": ({"image_grid_thw": None}, "image_grid_thw"),
    "a grid of others": ({"image_grid_thw": torch.tensor([[1, 2, 8]])}, "for 8 patches"),
    "a grid alone": ({"image_grid_thw": torch.tensor([1, 2, 4])}, "for 8 patches"),
    "kinds of others": ({"mm_token_type_ids": torch.tensor([[0, 1]])}, "2 mm_token_type_ids for 4 tokens"),
}


@pytest.mark.parametrize("name", NOT_OF_A_PROCESSOR)
def test_what_no_processor_makes(name: str) -> None:
    change, message = NOT_OF_A_PROCESSOR[name]
    made = {
        "input_ids": torch.tensor([[5, IMAGE, IMAGE, 6]]), "mm_token_type_ids": torch.tensor([[0, 1, 1, 0]]),
        "pixel_values": torch.randn(8, 96), "image_grid_thw": torch.tensor([[1, 2, 4]]),
    }  # fmt: skip
    assert mw.pack([made]).frames
    changed = {key: value for key, value in {**made, **change}.items() if value is not None}
    with pytest.raises(DataError, match=message):
        mw.pack([changed])


@pytest.mark.parametrize(
    ("images", "placeholders", "message"),
    [
        ([None], [IMAGE], "list of lists"),
        (5, [IMAGE], "list of lists"),
        ([[(torch.randn(8, 96), (1.9, 2, 4))]], [IMAGE], "must be .pixels"),
        ([[(torch.randn(8, 96), (1, 2, float("inf")))]], [IMAGE], "must be .pixels"),
        ([[(torch.randn(8, 96), (1, 2, 4))]], IMAGE, "must be a list of token ids"),
        ([[(torch.randn(8, 96), (1, 2, 4))]], [IMAGE, 6], "If 6 is an ordinary token of this model"),
    ],
)
def test_images_that_are_none(images: Any, placeholders: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        mw.pack([[5, IMAGE, IMAGE, 6]], images=images, placeholders=placeholders)


def test_placeholders_may_be_a_tensor() -> None:
    images = [[(torch.randn(8, 96), torch.tensor([1, 2, 4]))]]
    batch = mw.pack([[5, IMAGE, IMAGE, 6]], images=images, placeholders=torch.tensor([IMAGE]))
    assert batch.labels.tolist() == [-100, -100, -100, -100]


def no_image_is_written(at: Path) -> None:
    engine = mw.Engine(mw.load(at, mw.Mesh(device="cpu"), tower=True), lr=1e-3)
    with pytest.raises(DataError, match=f"the label {IMAGE} at position 1 stands for an image"):
        engine.evaluate([mw.pack([[5, 6]], labels=[[6, IMAGE]])])
    with pytest.raises(DataError, match=f"prompt 1 has the token {IMAGE}, which stands for an image"):
        mw.sample(engine.model, [[5, 6], [5, IMAGE, 6]], tokens=2)


def test_no_image_is_written(tmp_path: Path) -> None:
    worlds.run(1, no_image_is_written, seeing.directory(tmp_path / "m", "qwen3_vl"))


def test_frames_are_dealt_out_by_cost() -> None:
    """The dearest first, each to the part with the least cost so far, which need not have the fewest patches."""
    assert balance_frames([4, 1, 3, 3, 2], 2, lambda num: num * num) == (0, 1, 1, 1, 0)
    assert balance_frames([4, 1, 3, 3, 2], 2, lambda num: num) == (0, 0, 1, 1, 0)
    assert balance_frames([2, 2, 2], 4, lambda num: num) == (0, 1, 2)


def test_what_parts_send_is_what_parts_get() -> None:
    """Frames of 1 to 7 tokens; some lie in two or three parts of six tokens."""
    starts = [(0, 7), (7, 3), (11, 1), (13, 7), (20, 4)]
    frames = [SimpleNamespace(tokens=range(at, at + num), num_patches=4 * num) for at, num in starts]
    routes = [route(frames, 24, 4, at, lambda num: num) for at in range(4)]
    assert sorted(number for each in routes for number in each.own_frames) == [*range(5)]
    assert [[each.sent[at] for each in routes] for at in range(4)] == [each.got for each in routes]
    for at, each in enumerate(routes):
        arrived = [token for sender in routes for number in sender.own_frames for token in frames[number].tokens]
        assert each.places == [token - 6 * at for token in arrived if 6 * at <= token < 6 * at + 6]
        assert sum(each.got) == len(each.places)
