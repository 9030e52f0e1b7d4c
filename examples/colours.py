"""Fine-tune a tiny vision-language model on generated images, on two processes, and let transformers ask it.

    python -m examples.colours                # a minute on 2 cores: no GPU, no download

Read it from `main` at the bottom. You would bring the run file and the data that it writes: chats with messages that
name an image by its path.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing needs the network

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForImageTextToText, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import meshwright as mw

COLOURS = {"red": (215, 40, 40), "green": (40, 170, 60), "blue": (40, 70, 210), "black": (20, 20, 20)}
SHAPES = ("rectangle", "ellipse")
QUESTION = "Which colour?"
MARKS = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
TEMPLATE = """
{%- for m in messages -%}
  {{- '<|im_start|>' + m.role + '\\n' -}}
  {%- if m.content is string -%}{{- m.content -}}
  {%- else -%}
    {%- for part in m.content -%}
      {%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
      {%- else -%}{{- part.text -}}{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
""".strip()
TEXT = {
    "model_type": "qwen3_vl_text", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.05,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]},
}  # fmt: skip
TOWER = {
    "model_type": "qwen3_vl_vision", "depth": 2, "hidden_size": 48, "num_heads": 4, "intermediate_size": 96,
    "patch_size": 16, "out_hidden_size": 64, "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
}  # fmt: skip
PROCESSOR = {  # Qwen3-VL's, for smaller images
    "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "size": {"shortest_edge": 32 * 32, "longest_edge": 64 * 64},
}  # fmt: skip
RUN = """
model = "start"
out = "run"
[mesh]
fsdp = 2
[[data]]
path = "chats.jsonl"
[train]
tower = true                # trains the vision encoder too; without it, images are refused
length = 256
tokens_per_step = 2048
epochs = 8
dtype = "float32"           # many CPUs have no fast bfloat16
[optim]
lr = 3e-3
""".lstrip()


def make_model(out: Path) -> None:
    """Write what you would take from the hub: config, tokenizer, processor, and (random) weights."""
    tokenizer = make_tokenizer(out)
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(mark)
        for name, mark in zip(("image", "video", "vision_start", "vision_end"), MARKS, strict=True)
    }
    config = {
        "model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"], "dtype": "float32",
        "tie_word_embeddings": False, "text_config": {**TEXT, "vocab_size": len(tokenizer)}, "vision_config": TOWER,
        **ids,
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config, indent=1))
    (out / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=1))
    mw.export(mw.init(out, mw.Mesh(device="cpu"), tower=True, dtype=torch.float32), out.parent / "start")


def make_tokenizer(out: Path) -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token for each byte and for each mark of the chat template."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytewise = Tokenizer(models.BPE(vocab=letters, merges=[]))
    bytewise.pre_tokenizer, bytewise.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_tokens(["<|im_start|>", *MARKS], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(out)
    return tokenizer


def draw(dice: random.Random) -> tuple[Image.Image, str]:
    """Draw a shape at a random place on white, and return it with the name of its colour."""
    colour, size = dice.choice(list(COLOURS)), (dice.randint(40, 90), dice.randint(40, 90))
    image = Image.new("RGB", size, "white")
    left, top = (dice.randint(2, side // 3) for side in size)
    box = (left, top, left + size[0] // 2, top + size[1] // 2)
    getattr(ImageDraw.Draw(image), dice.choice(SHAPES))(box, fill=COLOURS[colour])
    return image, colour


def question(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*content, {"type": "text", "text": QUESTION}]}


def make_chats(folder: Path, num: int) -> None:
    dice, rows = random.Random(1), []
    (folder / "images").mkdir(exist_ok=True)
    for number in range(num):
        image, colour = draw(dice)
        image.save(folder / "images" / f"{number}.png")
        shown = {"type": "image", "image": f"images/{number}.png"}  # relative to the folder of chats.jsonl
        rows.append({"messages": [question(shown), {"role": "assistant", "content": colour}]})
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def answers(export: Path, num: int) -> list[tuple[str, str]]:
    """Let transformers' own model answer about new images. Return each answer with the right one."""
    model = AutoModelForImageTextToText.from_pretrained(export, dtype=torch.float32)
    tokenizer, processor = AutoTokenizer.from_pretrained(export), Qwen2VLImageProcessorPil.from_pretrained(export)
    dice = random.Random(2)
    return [(answer(model, tokenizer, processor, image), colour) for image, colour in (draw(dice) for _ in range(num))]


def answer(model: Any, tokenizer: Any, processor: Any, image: Image.Image) -> str:
    inputs = processor(image, return_tensors="pt")
    places = int(inputs["image_grid_thw"].prod()) // 4
    text = tokenizer.apply_chat_template([question({"type": "image"})], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text.replace(MARKS[0], MARKS[0] * places), return_tensors="pt")["input_ids"]
    kinds = (ids == tokenizer.convert_tokens_to_ids(MARKS[0])).int()
    end = tokenizer.eos_token_id
    output = model.generate(ids, mm_token_type_ids=kinds, max_new_tokens=8, do_sample=False, eos_token_id=end, **inputs)
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


def main(out: Path, num: int) -> float:
    """Train, and return the share of right answers."""
    make_model(out / "recipe")
    make_chats(out, num)
    (out / "run.toml").write_text(RUN)
    subprocess.run([sys.executable, "-m", "meshwright", "train", "run.toml"], cwd=out, check=True)
    results = answers(out / "run" / "export", 20)
    right = sum(given == expected for given, expected in results)
    print("\n".join(f"{expected:6} {given}" for given, expected in results[:5]))
    print(f"{right} of {len(results)} new images are named rightly")
    return right / len(results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, help="where to write everything (default: a temporary folder, removed at the end)"
    )
    parser.add_argument("--num", type=int, default=600, help="images to train on")
    options = parser.parse_args()
    folder = options.out or Path(tempfile.mkdtemp())
    (folder / "recipe").mkdir(parents=True)
    main(folder, options.num)
    if options.out is None:
        shutil.rmtree(folder)
