"""A tiny vision-language model with tokenizer, template and processor, and chats with drawn images."""

from __future__ import annotations

import copy
import functools
import json
import random
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw
from tokenizers import AddedToken

from tests import seeing
from tests.templates import GOOD, tokenizer

PATCH = 4
COLOURS = {"red": (220, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 220), "grey": (120, 120, 120)}
IMAGE_SETTINGS = {
    "patch_size": PATCH, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "size": {"shortest_edge": 64, "longest_edge": 1024}, "resample": 3, "do_resize": True,
    "image_processor_type": "Qwen2VLImageProcessor",
}  # fmt: skip
_VIDEO_SETTINGS = {**IMAGE_SETTINGS, "fps": 2, "min_frames": 4, "max_frames": 768}
# The content of a message may be a list of parts, as in the templates of the models that see.
_PARTS = """
{%- macro shown(content) -%}
  {%- if content is string -%}{{- content -}}
  {%- else -%}
    {%- for part in content -%}
      {%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
      {%- elif part.type == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
      {%- else -%}{{- part.text -}}{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
"""
TEMPLATE = _PARTS.strip() + GOOD["plain"].replace("says('user', m.content)", "says('user', shown(m.content))")


@functools.cache
def words() -> Any:
    result = copy.deepcopy(tokenizer())  # which other tests share
    marks = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    result.add_tokens([AddedToken(mark, special=True) for mark in marks])
    result.chat_template = TEMPLATE
    return result


def source(at: Path, name: str = "qwen3_vl", **changes: Any) -> Path:
    """A directory as the hub has it."""
    result = words()
    ids = {
        f"{name}_token_id": result.convert_tokens_to_ids(mark)
        for name, mark in (("image", "<|image_pad|>"), ("video", "<|video_pad|>"), ("vision_start", "<|vision_start|>"),
                           ("vision_end", "<|vision_end|>"))
    }  # fmt: skip
    seeing.directory(at, name, vocab_size=len(result), **changes)
    config = json.loads((at / "config.json").read_text())
    (at / "config.json").write_text(json.dumps({**config, **ids}))
    result.save_pretrained(at)
    (at / "preprocessor_config.json").write_text(json.dumps(IMAGE_SETTINGS))
    (at / "video_preprocessor_config.json").write_text(json.dumps(_VIDEO_SETTINGS))
    return at


def drawn(at: Path, colour: str, width: int = 24, height: int = 16) -> Path:
    """A square of a colour on white."""
    image = Image.new("RGB", (width, height), "white")
    ImageDraw.Draw(image).rectangle((width // 4, height // 4, width // 2, height // 2), fill=COLOURS[colour])
    image.save(at)
    return at


def chats(folder: Path, num: int = 60, seed: int = 0) -> Path:
    """Write chats about colours, without an image, with one or with two."""
    dice, rows = random.Random(seed), []
    (folder / "drawn").mkdir(exist_ok=True)
    for number in range(num):
        shown = [dice.choice(list(COLOURS)) for _ in range(dice.choice((0, 1, 1, 2)))]
        files = [
            drawn(folder / "drawn" / f"{number}-{at}.png", each, dice.randint(9, 40), dice.randint(9, 40))
            for at, each in enumerate(shown)
        ]
        requested = [{"type": "image", "image": str(file.relative_to(folder))} for file in files]
        content = [*requested, {"type": "text", "text": "colour?"}] if requested else "colour?"
        message = " ".join(shown) or "none"
        rows.append({"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": message}]})
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "chats.jsonl"
