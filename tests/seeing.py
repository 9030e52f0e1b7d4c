"""Tiny models with a tower, of odd sizes, and documents with images for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers

import meshwright as mw
from tests import tiny

IMAGE, VIDEO, START, END = 120, 121, 122, 123
_TOWER: dict[str, Any] = dict(
    depth=3, hidden_size=36, num_heads=3, intermediate_size=20, patch_size=4, temporal_patch_size=2, in_channels=3,
    spatial_merge_size=2, out_hidden_size=36, num_position_embeddings=25,
)  # fmt: skip
_IDS = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END)
_VL_ROPE = dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 2, 2], mrope_interleaved=True)
_ROPE = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25, mrope_section=[1, 1, 1])


def _of(kind: str, text: dict[str, Any], **tower: Any) -> dict[str, Any]:
    vision = {"model_type": f"{kind}_vision", **_TOWER, **tower}
    return dict(model_type=kind, text_config=text, vision_config=vision, tie_word_embeddings=False, **_IDS)


ODD: dict[str, dict[str, Any]] = {
    "qwen3_vl": _of("qwen3_vl", {**tiny.ODD["qwen3"], "model_type": "qwen3_vl_text", "head_dim": 12,
        "num_hidden_layers": 3, "rope_parameters": _VL_ROPE}, deepstack_visual_indexes=[0, 2]),
    "qwen3_vl_moe": _of("qwen3_vl_moe", {**tiny.ODD["qwen3_moe"], "model_type": "qwen3_vl_moe_text", "head_dim": 12,
        "rope_parameters": _VL_ROPE}, deepstack_visual_indexes=[0, 2]),
    "qwen3_5": _of("qwen3_5", {**tiny.ODD["qwen3_5"], "head_dim": 24, "rope_parameters": _ROPE}),
    "qwen3_5_moe": _of("qwen3_5_moe", {**tiny.ODD["qwen3_5_moe"], "head_dim": 24, "rope_parameters": _ROPE}),
    "qwen4_exp": _of("qwen4_exp", {**tiny.ODD["qwen4_exp"], "hidden_size": 36}),
}  # fmt: skip
_CLASSES = {
    "qwen3_vl": (transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration),
    "qwen3_vl_moe": (transformers.Qwen3VLMoeConfig, transformers.Qwen3VLMoeForConditionalGeneration),
    "qwen3_5": (transformers.Qwen3_5Config, transformers.Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe": (transformers.Qwen3_5MoeConfig, transformers.Qwen3_5MoeForConditionalGeneration),
    "qwen4_exp": (transformers.Qwen4ExpConfig, transformers.Qwen4ExpForConditionalGeneration),
}


def of(name: str, *, tied: bool = False, **text: Any) -> dict[str, Any]:
    """The config, with some fields of its text changed."""
    config = deepcopy(ODD[name])
    config["text_config"].update(text)
    return {**config, "tie_word_embeddings": tied}


def reference(name: str, **changes: Any) -> Any:
    """transformers' model, every parameter away from its special initial value."""
    config = of(name, **changes)
    make_config, make_model = _CLASSES[name]
    torch.manual_seed(7)
    made = make_config(**{k: v for k, v in config.items() if k != "model_type"})
    plain = dict(attn_implementation="eager", experts_implementation="eager")  # the fast ones want widths of 16 bytes
    model = make_model._from_config(made, **plain).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def directory(at: Path, name: str, *, dtype: torch.dtype = torch.float32, turned: bool = False, **changes: Any) -> Path:
    """Write a model like those of the hub. `turned` transposes the matrices of experts."""
    from safetensors.torch import save_file

    model, tensors = reference(name, **changes), {}
    for key, value in model.state_dict().items():
        stored = value.transpose(-1, -2) if turned and ".experts." in key else value
        tensors[key] = stored.detach().to(tiny.stored_dtype(key, value, dtype)).contiguous().clone()
    tensors = tiny.in_parts(tensors)
    if of(name, **changes)["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    at.mkdir(parents=True, exist_ok=True)
    save_file(tensors, at / "model.safetensors", metadata={"format": "pt"})
    message = {"dtype": str(dtype).removeprefix("torch."), "architectures": [type(model).__name__]}
    (at / "config.json").write_text(json.dumps({**of(name, **changes), **message}))
    return at


Grid = tuple[int, int, int]
Made = tuple[list[int], list[tuple[torch.Tensor, Grid]]]  # tokens of a document, and its images
PATCH = 3 * 2 * 4 * 4  # numbers of a patch


def document(*parts: int | Grid, seed: int = 0, touching: bool = False) -> Made:
    """Text tokens (their number) and images (time, height, width in patches). A video has a run for each slice, text
    between.
    `touching`: no token stands between images, nor around them."""
    g = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, int):
            tokens += torch.randint(IMAGE, (part,), generator=g).tolist()
            continue
        time, height, width = part
        run = [IMAGE if time == 1 else VIDEO] * (height * width // 4)
        for _ in range(time):
            text = torch.randint(IMAGE, (2 * (time > 1),), generator=g).tolist()  # what would be a time
            tokens += [*text, *run] if touching else [*text, START, *run, END]
        images.append((torch.randn(time * height * width, PATCH, generator=g), part))
    return tokens, images


DOCUMENTS: dict[str, Made] = {
    "text": document(9, seed=1),
    "one place": document(3, (1, 2, 2), 4, seed=2),
    "wide, then high": document(3, (1, 2, 6), 2, (1, 6, 2), 4, seed=3),
    "two of a size": document(2, (1, 4, 6), 1, (1, 4, 6), 3, seed=4),
    "beyond the table": document(2, (1, 6, 14), 3, seed=5),
    "a video": document(4, (3, 4, 2), 5, (1, 4, 4), 2, seed=6),
    "a short video": document(4, (2, 2, 4), 5, seed=7),
    "first and last": document((1, 4, 4), 3, (1, 2, 4), seed=8, touching=True),
    "touching": document(3, (1, 2, 4), (1, 4, 2), (1, 2, 2), 4, seed=9, touching=True),
}


def packed(names: Sequence[str] = tuple(DOCUMENTS), **options: Any) -> mw.Batch:
    return packed_of([DOCUMENTS[name] for name in names], **options)


def packed_of(made: Sequence[Made], **options: Any) -> mw.Batch:
    return mw.pack([d for d, _ in made], images=[p for _, p in made], placeholders=(IMAGE, VIDEO), **options)
