"""Details of reading data: names of fields, lists of images, limits of sizes, cache keys."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

import meshwright as mw
from meshwright.data import row_files, token_cache
from meshwright.data.chat import Chat, ChatOptions
from meshwright.data.message_parts import Attachments
from meshwright.data.messages import message_of
from meshwright.data.processor import ImageLimits, Placeholders, Processor, fitted
from meshwright.data.token_cache import TokenizeSpec
from tests.templates import tokenizer

IMAGE = 70


@pytest.mark.parametrize("images", [7, "ab", [[], 7], [7, []], [[], None], [[], "a"]])
def test_images_are_a_list_of_lists(images: Any) -> None:
    with pytest.raises(mw.DataError, match=r"images must be a list of lists: of each document"):
        mw.pack([[5, 6], [7]], images=images, placeholders=[IMAGE])
    for good in ([[], []], ([], ()), [(), []]):
        assert mw.pack([[5, 6], [7]], images=cast(Any, good), placeholders=[IMAGE]).images is None


@pytest.mark.parametrize(
    ("row", "images", "videos"),
    [
        (dict(image="a.png"), ["a.png"], []), (dict(images="a.png"), ["a.png"], []),
        (dict(images=["a.png", "b.png"]), ["a.png", "b.png"], []), (dict(images=("a.png",)), ["a.png"], []),
        (dict(images=[], image="a.png"), ["a.png"], []), (dict(images=["b.png"], image="a.png"), ["b.png"], []),
        (dict(video="a.mp4"), [], ["a.mp4"]), (dict(videos=["a.mp4"]), [], ["a.mp4"]), (dict(images=None), [], []),
        (dict(image={"url": "a.png"}), [{"url": "a.png"}], []),
    ],
)  # fmt: skip
def test_attachments_of_a_row(row: dict[str, Any], images: list[Any], videos: list[Any]) -> None:
    made = Attachments(row)
    assert made.left == {"image": images, "video": videos}
    assert made.num == {"image": len(images), "video": len(videos)}


def test_attachments_are_used_in_order_and_counted() -> None:
    made = Attachments(dict(images=["a.png", {"path": "b.png"}], video="c.mp4"))
    assert made.parts("x<image><video> y<image>", 0) == [
        {"type": "text", "text": "x"}, {"type": "image", "image": "a.png"}, {"type": "video", "video": "c.mp4"},
        {"type": "text", "text": " y"}, {"type": "image", "image": "b.png"},
    ]  # fmt: skip
    made.check_all_shown()
    with pytest.raises(mw.DataError, match="message 4 shows one more image than the row has: 2 in 'images'"):
        made.parts("<image>", 4)
    unused = Attachments(dict(images=["a.png", "b.png"]))
    unused.parts("<image>", 0)
    with pytest.raises(mw.DataError, match="the row has 2 images, and its messages show 1"):
        unused.check_all_shown()


SHAREGPT, OPENAI = {"from": "human", "value": "U"}, {"role": "user", "content": "U"}


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        (SHAREGPT, OPENAI), (OPENAI, OPENAI), ({**SHAREGPT, "name": "n", "weight": None}, {**OPENAI, "name": "n"}),
        ({**SHAREGPT, "role": None}, OPENAI), ({**OPENAI, **SHAREGPT}, {**OPENAI, **SHAREGPT}),
        ({**SHAREGPT, "from": "gpt"}, {"role": "assistant", "content": "U"}),
    ],
)  # fmt: skip
def test_names_of_message_fields(raw: dict[str, Any], wanted: dict[str, Any]) -> None:
    """A role is never replaced by `from`."""
    assert message_of(raw, 0, Attachments({})) == wanted


FLAG = (
    "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}"
    "{{ enable_thinking if enable_thinking is defined else 'unset' }}"
)


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        (dict(), "unset"), (dict(thinking=True), "True"), (dict(thinking=False), "False"),
        (dict(thinking=True, template_args={"enable_thinking": False}), "False"),
        (dict(template_args={"enable_thinking": 3}), "3"),
    ],
)  # fmt: skip
def test_thinking_of_a_prompt(options: dict[str, Any], flag: str) -> None:
    """With thinking="auto" the template decides; its arguments override the option."""
    chat = Chat(tokenizer(), ChatOptions(template=FLAG, **options))
    assert tokenizer().decode(chat.prompt("U")) == f"user:U{flag}"


def processor(at: Path, **wishes: Any) -> Processor:
    """Make a processor with settings for images of at most 64 x 64 pixels, and videos of 48 x 48."""
    size = dict(merge_size=2, temporal_patch_size=2, patch_size=4, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    for name, limits in (("preprocessor_config", (256, 4096)), ("video_preprocessor_config", (512, 2304))):
        edges = dict(zip(("shortest_edge", "longest_edge"), limits, strict=True))
        (at / f"{name}.json").write_text(json.dumps({**size, "size": edges}))
    return Processor(at, Placeholders("<i>", "<v>", (1, 2)), 4, ImageLimits(at, **wishes))


@pytest.mark.parametrize(
    ("wishes", "image", "video"),
    [
        ({}, (256, 4096), (512, 2304)), (dict(max_pixels=1024), (256, 1024), (512, 2304)),
        (dict(max_video_pixels=1024), (256, 4096), (512, 1024)),
        (dict(max_pixels=1, max_video_pixels=1), (256, 256), (512, 512)),
        (dict(max_pixels=9999, max_video_pixels=9999), (256, 4096), (512, 2304)),
    ],
)  # fmt: skip
def test_limits_of_images_and_of_videos(tmp_path: Path, wishes: Any, image: Any, video: Any) -> None:
    """A limit of the user is between those of the model, and holds for its own kind."""
    made = processor(tmp_path, **wishes)
    assert made._fitted_size("image", 400, 200) == fitted(400, 200, 8, image)
    assert made._fitted_size("video", 400, 200, 4) == fitted(400, 200, 8, video, 4)


def _make(_row: Any) -> Sequence[Any]:
    return []


def test_whatever_changes_documents_changes_their_cache_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for file in (first, second):
        file.write_text("{}\n")
    made = dict(name="d", files=(first,), make=_make, settings_key="s")
    key = lambda **changes: TokenizeSpec(**{**made, **changes}).fingerprint  # noqa: E731 - short
    same = key()
    assert key(name="e", unused=lambda _: set()) == same
    others = [
        key(settings_key="t"), key(split="line"), key(on_bad="skip"), key(files=(second,)), key(files=(first, second)),
        key(files=(second, first)),
    ]  # fmt: skip
    at = first.stat()
    for text in ("[]\n", "{}  \n"):  # of the same size and time, then of another size
        first.write_text(text)
        os.utime(first, ns=(at.st_atime_ns, at.st_mtime_ns))
        others.append(key())
    os.utime(first, ns=(at.st_atime_ns, at.st_mtime_ns + 1))
    others.append(key())
    with monkeypatch.context() as patched:
        patched.setattr(token_cache, "_VERSION", "another")
        others.append(key())
    assert len({same, *others}) == 1 + len(others)
    assert len(same) == 32


def test_both_ends_of_a_file_are_in_its_stamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "_SAMPLE_BYTES", 2)
    file = tmp_path / "a"

    def ends(text: str) -> bytes:
        file.write_text(text)
        return row_files.stamp(file)[3]

    assert [ends(text) for text in ("abcdef", "abc", "a", "")] == [b"abef", b"abbc", b"aa", b""]
