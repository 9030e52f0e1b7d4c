"""Chats that show images and videos: which tokens they become, and the trainer on them, on one process and more."""

from __future__ import annotations

import base64
import functools
import io
import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import meshwright as mw
from meshwright.data import Chat, Feed, ImageLimits, Placeholders, Processor, token_cache
from meshwright.data.vision_files import Grid
from meshwright.engine import Decoding, sampling
from meshwright.report.run_files import read_run
from meshwright.report.run_page import report_page
from meshwright.train import config_file, data_sources, dry_run
from meshwright.train.chat_session import open_chat
from meshwright.train.config import DataSection
from meshwright.train.launch import prepared
from meshwright.train.resume_point import check_position
from meshwright.train.thumbnails import write_thumbnails
from tests import parts, runs, seeing, shown, worlds
from tests.fake_runs import fake_run
from tests.test_rl import worst
from tests.trials import named

IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
LAYERS = 4 if parts.ALL else 2  # two stages need four


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    at = tmp_path_factory.mktemp("models")
    return functools.cache(lambda name: shown.source(at / name, name, num_hidden_layers=LAYERS, **_layers(name)))


def _layers(name: str) -> dict[str, Any]:
    return {"layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2)} if name.startswith("qwen3_5") else {}


def chat(directory: Path, root: Path) -> Chat:
    words = shown.words()
    ids = (words.convert_tokens_to_ids(IMAGE), words.convert_tokens_to_ids(VIDEO))
    return Chat(words, None, (), Processor(directory, Placeholders(IMAGE, VIDEO, ids), shown.PATCH, ImageLimits(root)))


def row(content: Any, **more: Any) -> dict[str, Any]:
    """A chat of two questions; the first shows something."""
    return {
        "messages": [
            {"role": "user", "content": content},
            {"role": "assistant", "content": "red"},
            {"role": "user", "content": "sure?"},
            {"role": "assistant", "content": "yes"},
        ],
        **more,
    }


LAYOUTS: dict[str, dict[str, Any]] = {
    "parts": row([{"type": "image", "image": "a.png"}, {"type": "text", "text": "colour?"}]),
    "a path": row([{"type": "image", "path": "a.png"}, {"type": "text", "text": "colour?"}]),
    "of OpenAI": row([{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "text", "text": "colour?"}]),
    "next to the messages": row([{"type": "image"}, {"type": "text", "text": "colour?"}], images=["a.png"]),
    "a mark in the text": row("<image>colour?", images=["a.png"]),
    "a table": row([{"type": "image", "text": None}, {"type": "text", "text": "colour?"}], images=[{"path": "a.png"}]),
    "one": row("<image>colour?", image="a.png"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(model: Callable[[str], Path], tmp_path: Path, layout: str) -> None:
    """An image of 24 x 16 pixels, which are 6 places; both turns are one document, which shows it once."""
    shown.drawn(tmp_path / "a.png", "red")
    (document,) = chat(model("qwen3_vl"), tmp_path).documents(LAYOUTS[layout])
    places = f"<|vision_start|>{IMAGE * 6}<|vision_end|>"
    expected = (
        f"<|im_start|>user\n{places}colour?<|im_end|>\n<|im_start|>assistant\nred<|im_end|>\n<|im_start|>user\nsure?"
    )
    text = shown.words().decode(document.ids)
    assert text.startswith(expected), text
    assert [view.grid for view in document.views] == [(1, 4, 6)]
    learnt = [shown.words().decode(document.ids[a:b]) for a, b in document.spans]
    assert learnt == ["red<|im_end|>", "yes<|im_end|>"]


def test_a_video_and_an_image(model: Callable[[str], Path], tmp_path: Path) -> None:
    names = [shown.drawn(tmp_path / f"{at}.png", "blue", 16, 8).name for at in range(3)]
    content = [
        {"type": "video", "video": names, "fps": 2}, {"type": "image", "image": "0.png"},
        {"type": "text", "text": "colour?"},
    ]  # fmt: skip
    (document,) = chat(model("qwen3_vl"), tmp_path).documents(row(content))
    run = f"<|vision_start|>{VIDEO * 2}<|vision_end|>"
    text = shown.words().decode(document.ids)
    assert f"<|vision_start|><0.2 seconds>{run}<1.0 seconds>{run}<|vision_end|><|vision_start|>{IMAGE * 2}" in text
    assert [view.grid for view in document.views] == [(2, 2, 4), (1, 2, 4)]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a mark of the model": (row("what is <|image_pad|>?"), "message 0 of the user holds the special token"),
    "of the assistant": ({"messages": [{"role": "user", "content": "draw"},
        {"role": "assistant", "content": [{"type": "image", "image": "a.png"}]}]}, "the assistant shows images"),
    "bytes": (row([{"type": "image", "image": {"bytes": "..."}}]), "not a path"),
    "a sound": (row([{"type": "audio", "audio": "a.wav"}]), "holds 'audio'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(model: Callable[[str], Path], tmp_path: Path, case: str) -> None:
    shown.drawn(tmp_path / "a.png", "red")
    args, what = REFUSED[case]
    with pytest.raises(mw.DataError, match=what):
        chat(model("qwen3_vl"), tmp_path).documents(args)


def file_of(at: Path, model: Path, **train: Any) -> Path:
    shown.chats(at)
    return runs.file_of(at, model, train={"tower": True, "length": 64, "tokens_per_step": 256, "steps": 4, **train})


def test_images_without_the_tower_are_refused(model: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(mw.DataError, match=r"set train\.tower = true"):
        prepared(config_file.read(file_of(tmp_path, model("qwen3_vl"), tower=False)))


def test_a_chat_that_is_too_long(model: Callable[[str], Path], tmp_path: Path) -> None:
    """It is not cut, which might go through an image."""
    config = config_file.read(file_of(tmp_path, model("qwen3_vl"), length=32, tokens_per_step=128))
    with pytest.raises(mw.DataError, match=r"have more than 32 tokens.*could go through an image"):
        prepared(config.model_copy(update={"data": [config.data[0].model_copy(update={"too_long": "cut"})]}))


MESHES: list[tuple[str, Mapping[str, int]]] = [
    ("qwen3_vl", dict(fsdp=2)),
    ("qwen3_5_moe", dict(tp=2)),
    ("qwen3_5", dict(pp=2)),
    ("qwen3_vl_moe", dict(cp=2)),
    ("qwen3_vl_moe", dict(fsdp=2, tp=2, ep=2)),
    ("qwen3_5", dict(replicate=2, fsdp=2)),
]


@pytest.mark.parametrize(
    ("name", "mesh"), parts.every(6, MESHES), ids=lambda it: it if isinstance(it, str) else named(it)
)
def test_losses_are_equal_on_every_mesh(
    model: Callable[[str], Path], tmp_path: Path, name: str, mesh: dict[str, int]
) -> None:
    """Some streams have images, others none."""
    for at, where in (("one", {}), ("mesh", mesh)):
        (tmp_path / at).mkdir()
        runs.on_mesh(file_of(tmp_path / at, model(name)), where, "save.export=false", "train.steps=3")
    one, there = runs.losses(tmp_path / "one"), runs.losses(tmp_path / "mesh")
    assert there == pytest.approx(one, rel=1e-9)
    assert one[-1] < one[0]


def test_an_interrupted_run_goes_on(
    model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It continues with the next images, also where they have been moved, and not with others."""
    moved = tmp_path / "moved"
    for name, several in (("whole", (2,)), ("parts", (1, 2))):
        (tmp_path / name).mkdir()
        file = file_of(tmp_path / name, model("qwen3_vl"))
        with min((tmp_path / name / "drawn").iterdir()).open("ab") as image:
            image.write(b"a")  # readers ignore what comes after the end
        for steps in several:
            root = [f"data.0.images.root={moved}"] if moved.exists() else []
            on_this = ("save.export=false", f"train.steps={steps}", "optim.schedule=constant", *root)
            runs.on_mesh(file, {}, *on_this)
            if name == "parts" and not root:
                moved.mkdir()
                (tmp_path / name / "drawn").rename(moved / "drawn")
    assert runs.losses(tmp_path / "parts") == runs.losses(tmp_path / "whole")
    first = min((moved / "drawn").iterdir())
    first.write_bytes(first.read_bytes()[:-1] + b"b")
    config = config_file.read(file, on_this)
    monkeypatch.setattr(token_cache, "BEGAN", time.time())  # another run
    data = prepared(config).data
    assert f"{first} has other bytes than when the data were read" in caplog.text
    with pytest.raises(mw.CheckpointError, match="was trained on other data: files, images"):
        check_position(config, data)


def test_images_that_are_gone(model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was there before is missed at the next start, with its row; during a run, by the step that shows it."""
    config = config_file.read(file_of(tmp_path, model("qwen3_vl")))
    data = prepared(config).data
    [documents] = data.documents
    in_stream = ((n, piece.document) for n in range(data.plan.num_streams) for piece in data.plan.stream(n))
    stream, shows = next((n, document) for n, document in in_stream if documents.num_views[document])
    lost, place = Path(documents.tokens(shows).views[0].files[0]), documents.place(shows)
    lost.rename(tmp_path / "elsewhere.png")
    feed = Feed([documents], data.plan, micro_batches=1, rank=0, num_ranks=1, processor=data.processor)
    with pytest.raises(mw.DataError, match=re.escape(f"{place}: there is no file {lost} any more")):
        feed.step(stream)
    feed.close()
    monkeypatch.setattr(token_cache, "BEGAN", time.time())  # another run
    with pytest.raises(mw.DataError, match=rf"1 row, the first {re.escape(place)}: there is no file"):
        prepared(config)
    skips = config.model_copy(update={"data": [config.data[0].model_copy(update={"on_bad": "skip"})]})
    assert len(prepared(skips).data.documents[0]) == len(documents) - 1


def test_images_are_named_and_shown(model: Callable[[str], Path], tmp_path: Path) -> None:
    """`meshwright data --show` names those of a document, and what they take; the report shows some."""
    directory = model("qwen3_vl")
    data = prepared(config_file.read(file_of(tmp_path, directory))).data
    [documents] = data.documents
    text = "\n".join(map(str, dry_run.shown(data, directory, len(documents))))
    views = [view for number in range(len(documents)) for view in documents.tokens(number).views]
    assert text.count(".png: ") == len(views) > 20
    for view in views:
        _, height, width = view.grid
        size = f"{width * shown.PATCH} x {height * shown.PATCH} pixels"
        assert f"  {view.files[0]}: {size}, {height * width // 4} token" in text
    run = fake_run(tmp_path / "run", steps=3)
    write_thumbnails(run, data)
    shutil.rmtree(tmp_path / "drawn")
    page = report_page([read_run(run)], {"command": "x", "date": "today"})
    jpegs = re.findall(r'<img alt="" src="data:image/jpeg;base64,([^"]+)">', page)
    assert len(jpegs) == page.count("<img") == 8
    with Image.open(io.BytesIO(base64.b64decode(jpegs[0]))) as image:
        assert max(image.size) <= 160
    assert len("".join(jpegs)) < 8 * 8192


def test_transformers_sees_the_same_in_the_export(model: Callable[[str], Path], tmp_path: Path) -> None:
    """Two processes train; examples/colours.py lets transformers answer."""
    file = file_of(tmp_path, model("qwen3_vl"), dtype="float32")
    runs.on_mesh(file, dict(fsdp=2), "train.steps=1")
    export = tmp_path / "out" / "export"
    shown.drawn(tmp_path / "new.png", "green")
    question = [{"type": "image", "image": "new.png"}, {"type": "text", "text": "colour?"}]
    (document,) = chat(export, tmp_path).documents(row(question))
    result = chat(export, tmp_path).processor
    assert result is not None
    pixels, grid = (result.pixels(document.views[0]).float() - 127.5) / 127.5, document.views[0].grid
    ids = document.ids.tolist()
    expected = _reference_logits(export, ids, pixels, grid, result.placeholders.ids[0])
    ((local, in_chat),) = worlds.run(1, _ours, tmp_path / "out", ids, pixels, grid, result.placeholders.ids)
    near = 1e-5 * float(expected.abs().max())
    assert float((local - expected).abs().max()) < near
    places = [*result.placeholders.ids]
    expected[:, places] = in_chat[:, places] = 0
    # A chat that shows the same image, and asks the same.
    assert float((in_chat[0] - expected[document.spans[0][0] - 1]).abs().max()) < near


def _reference_logits(export: Path, ids: list[int], pixels: Tensor, grid: Grid, place: int) -> Tensor:
    from transformers import AutoModelForImageTextToText

    it = AutoModelForImageTextToText.from_pretrained(export, dtype=torch.float32, attn_implementation="eager").eval()
    args = torch.tensor([ids])
    kinds = (args == place).long()
    with torch.no_grad():
        return it(
            input_ids=args, pixel_values=pixels, image_grid_thw=torch.tensor([grid]), mm_token_type_ids=kinds,
            use_cache=False,
        ).logits[0]  # fmt: skip


def _ours(out: Path, ids: list[int], pixels: Tensor, grid: Grid, places: tuple[int, int]) -> tuple[Tensor, Tensor]:
    it = mw.load(out / "export", mw.Mesh(device="cpu"), dtype=torch.float32, tower=True)
    logits = mw.logits(it, mw.pack([ids], images=[[(pixels, grid)]], placeholders=places))
    chat, seen = open_chat(str(out), Decoding(1)), list[Tensor]()

    def choose(logits_PV: Tensor, *_: Any) -> Tensor:
        seen.append(logits_PV)
        return logits_PV.argmax(-1)

    chat.show(str(out.parent / "new.png"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_choose", choose)
        list(chat.answers("colour?"))
    assert torch.isinf(seen[0][:, [*places]]).all()
    return logits, seen[0]


def test_rows_that_only_name_an_image(tmp_path: Path) -> None:
    """A text source with tokens that stand for images, or ids beyond the vocabulary, is refused before the run."""
    model = seeing.directory(tmp_path / "m", "qwen3_vl")
    config = json.loads((model / "config.json").read_text())
    place, vocab = config["image_token_id"], config["text_config"]["vocab_size"]
    section = DataSection(path="a.jsonl", kind="tokens")
    make, message, _ = data_sources.maker(section, data_sources.RowReader(model, tmp_path, tower=True))
    assert str(place) in message
    assert len(make({"ids": [5, 6, 7]})) == 1
    with pytest.raises(mw.DataError, match=f"it has the token {place}, which stands for an image"):
        make({"ids": [5, place, 7]})
    with pytest.raises(mw.DataError, match=f"from 0 to {vocab - 1}"):
        make({"ids": [5, vocab]})
    blind, *_ = data_sources.maker(section, data_sources.RowReader(model, tmp_path))
    assert len(blind({"ids": [5, place, 7]})) == 1


def preferences(folder: Path) -> Path:
    """Turn the chats about colours into pairs: the right colours before others."""
    rows = [json.loads(line) for line in shown.chats(folder, 24).read_text().splitlines()]
    pairs = [
        {"prompt": each["messages"][:1], "chosen": each["messages"][1:],
         "rejected": [{"role": "assistant", "content": ("grey sky", "no")[n % 2]}]}
        for n, each in enumerate(rows)
    ]  # fmt: skip
    (folder / "chats.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return folder / "chats.jsonl"


def _check_same_images(batch: mw.Batch) -> None:
    """Check that both documents of each pair have the same patches."""
    if batch.images is None:
        return
    patches = batch.images.patches_PC.split([frame.height * frame.width for frame in batch.frames])
    seen = [
        [patch.sum().item() for patch, frame in zip(patches, batch.frames, strict=True) if a <= frame.start < b]
        for a, b in pairwise(batch.bounds)
    ]
    assert len(batch.groups) == batch.num_documents
    assert seen[0 : batch.num_documents : 2] == seen[1 : batch.num_documents : 2]


def of_pairs(path: Path, mesh: Mapping[str, int]) -> tuple[float, int, dict[str, Tensor]]:
    """Return loss, number of images and gradients of the first step. The model is its own reference."""
    trainer = mw.Trainer(config_file.read(path, [f"mesh.{axis}={n}" for axis, n in mesh.items()]))
    batches = trainer.feed.step(0).batches
    for batch in batches:
        _check_same_images(batch)
    loss = trainer.engine.backward(batches)
    assert abs(trainer.engine.metrics["margins"]) < 1e-12
    return loss, sum(len(batch.frames) for batch in batches), mw.gather(trainer.model, "grad")


def test_pairs_with_images(model: Callable[[str], Path], tmp_path: Path) -> None:
    """Both answers of a pair see the images of the prompt, on every mesh."""
    preferences(tmp_path)
    path = runs.file_of(
        tmp_path, model("qwen3_vl"), dpo={"sft_weight": 0.1}, save={"export": False},
        train={"tower": True, "length": 128, "tokens_per_step": 512, "steps": 2},
    )  # fmt: skip
    path.write_text(f'objective = "dpo"\n{path.read_text()}')
    [(loss, num, grads)] = worlds.run(1, of_pairs, path, {})
    assert num > 4
    assert num % 2 == 0
    meshes: dict[str, dict[str, int]] = {"fsdp": {"fsdp": 2}, "tp": {"tp": 2}}
    on_two = worlds.in_turn(2, {name: functools.partial(of_pairs, path, mesh) for name, mesh in meshes.items()})
    for mesh, there in on_two.items():
        assert there[0][0] == pytest.approx(loss, rel=1e-9)
        assert sum(num for _, num, _ in there) == num * (2 if mesh == "tp" else 1)
        assert worst(there[0][2], grads) < 1e-9
