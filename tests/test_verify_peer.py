"""M1 and R1 of `meshwright verify`: one process against transformers' model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from meshwright import ops
from meshwright.axes import Axes
from meshwright.engine.router import Router
from meshwright.ops import norms
from meshwright.verify import RunResult, plan, report, session, transformers_oracles
from tests import parts, tiny
from tests.words import words


def compared_with_transformers(at: Path, model: str = "tiny-qwen3") -> RunResult:
    return session._run_transformers(plan(model, Axes(fsdp=2), say=lambda _: None), at, lambda _: None)


def rotated_the_other_way(patch: pytest.MonkeyPatch) -> None:
    real = ops.rotate
    patch.setattr(ops, "rotate", lambda x_THK, cos, sin: real(x_THK, cos, -sin))


def positions_rounded(patch: pytest.MonkeyPatch) -> None:
    """bfloat16 has no odd whole numbers above 256."""
    real = ops.rope_tables
    patch.setattr(ops, "rope_tables", lambda at_T, *more, **options: real(at_T.bfloat16(), *more, **options))


def aux_loss_not_averaged(patch: pytest.MonkeyPatch) -> None:
    real = Router.set_slope
    patch.setattr(Router, "set_slope", lambda self, tokens, num_batches: real(self, tokens, 1))


def half_back_through_norms(patch: pytest.MonkeyPatch) -> None:
    real = ops.rms_norm
    patch.setattr(ops, "rms_norm", lambda x, *more, **options: real((x + x.detach()) / 2, *more, **options))


def one_added_in_bfloat16(patch: pytest.MonkeyPatch) -> None:
    """The weight of a zero-centred norm is small compared with the 1."""

    def normed(x: Tensor, weight: Tensor, eps: float, _zero_centred: bool) -> tuple[Tensor, ...]:
        wide = norms.upcast(x)
        rstd = norms._rstd(wide, eps)
        return (wide * rstd * (1 + weight.to(x.dtype))).to(x.dtype), rstd

    patch.setattr(norms, "_rms_norm_forward", normed)


def one_added_in_bfloat16_in_backward(patch: pytest.MonkeyPatch) -> None:
    real = norms._rms_norm_backward

    def gradients(d: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, _zero_centred: bool) -> tuple[Tensor, ...]:
        return real(d, x, norms.upcast(1 + weight.to(x.dtype)), rstd, False)

    patch.setattr(norms, "_rms_norm_backward", gradients)


PLANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = {
    "rotated the other way": (rotated_the_other_way, "tiny-qwen3",
        r"M1 layers\.0\.mixer: .*\btransformers\b.*, in two micro-batches"),
    "positions rounded": (positions_rounded, "tiny-qwen3", "M1 RoPE: .*, in a long document"),
    "the aux loss is not averaged": (aux_loss_not_averaged, "tiny-qwen3-moe",
        "M1 router's aux loss: .*2 micro-batches are summed"),
    "half of it flows back through norms": (half_back_through_norms, "tiny-qwen3",
        r"M1 model\.layers\.1\.mlp\.down_proj\.weight: .*between lm_head\.weight and this key"),
    "1 + w in bfloat16, in backward": (one_added_in_bfloat16_in_backward, "tiny-qwen3.5",
        r"R1 \S*norm: in bfloat16 its (gradients of inputs|scales) .*"),
    "1 + w in bfloat16": (one_added_in_bfloat16, "tiny-qwen3.5", r"R1 \S*norm: in bfloat16 its (outputs|scales) .*"),
}  # fmt: skip


@pytest.mark.parametrize("name", parts.every(2, PLANTS))
def test_the_first_that_is_wrong_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plant, model, message = PLANTS[name]
    plant(monkeypatch)
    first, *_ = compared_with_transformers(tmp_path, model).findings
    assert re.match(message, str(first)), first


def unknown(_source: Path) -> str:
    return "this version has no language model of 'qwen9'"


def failing(*_: object) -> None:
    raise RuntimeError("no kernel")


@pytest.mark.parametrize(
    ("name", "instead", "message"),
    [
        ("unsupported", unknown, words("M1", "'qwen9'")),
        ("run_transformers", failing, words("M1", "transformers fails", "RuntimeError: no kernel")),
    ],
    ids=["an unknown family", "an error of transformers"],
)
def test_models_that_transformers_cannot_run_are_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, instead: Callable[..., object], message: str
) -> None:
    """Terminal, page and JSON name what was not tried, from `untried`: it is not a pass."""
    monkeypatch.setattr(transformers_oracles, name, instead)
    part = compared_with_transformers(tmp_path)
    assert (list(part.findings), list(part.oracles)) == ([], [])
    tried = plan("tiny-qwen3", Axes(fsdp=2), say=lambda _: None)
    assert any(re.search(message, what) for what in report.untried(tried, [part])), part
    assert re.search(message, report.unproven(tried, [part]))


def test_a_padding_token_is_a_word_like_any_other(tmp_path: Path) -> None:
    """transformers gives its embedding no gradient, which is no mistake of ours."""
    recipe = tmp_path / "recipe"
    recipe.mkdir()
    (recipe / "config.json").write_text(json.dumps(tiny.of("qwen3", pad_token_id=0)))
    part = compared_with_transformers(tmp_path, str(recipe))
    assert (list(part.findings), part.oracles) == ([], ("M1", "R1"))
