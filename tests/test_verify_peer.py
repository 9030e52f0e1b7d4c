"""M1 and R1 of `meshwright verify`: one process against transformers' model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright import ops
from meshwright.axes import Axes
from meshwright.engine.router import Router
from meshwright.ops import chosen_blocks, norms
from meshwright.ops.ngrams import NgramHash
from meshwright.verify import Options, RunResult, plan, report, session, transformers_oracles
from tests import parts, tiny
from tests.words import words

FOLDER = Path(__file__).parent


def first_step_alone(patch: pytest.MonkeyPatch) -> None:
    """Leave out M1's step of few tokens and that of a long document, in `make test`."""
    real = session.steps_of
    if not parts.ALL:
        patch.setattr(session, "steps_of", lambda *args: dict([*real(*args).items()][:1]))


def compared_with_transformers(at: Path, model: str = "tiny-qwen3", seed: int = 0, *, whole: bool = False) -> RunResult:
    """Compare the first step alone, which is that of R1, or all."""
    tried = plan(model, Axes(fsdp=2), Options(seed=seed), say=lambda _: None)
    with pytest.MonkeyPatch.context() as patch:
        if not whole:
            first_step_alone(patch)
        return session._run_transformers(tried, at, lambda _: None)


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


def later_of_equal_blocks_in_float32(patch: pytest.MonkeyPatch) -> None:
    real = chosen_blocks._order

    def order(score_TB: Tensor) -> Tensor:
        num = score_TB.shape[-1]
        return real(score_TB) if score_TB.dtype == torch.float64 else real(score_TB) + 2 * torch.arange(num) - num

    patch.setattr(chosen_blocks, "_order", order)


def first_table_again(patch: pytest.MonkeyPatch) -> None:
    """The second table has the number of rows of the first, in files too."""
    real = NgramHash.__dict__["rows_of_heads"].func
    patch.setattr(NgramHash, "rows_of_heads", property(lambda self: real(replace(self, number=0))))


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
    "of equal blocks the later, in float32": (later_of_equal_blocks_in_float32, str(FOLDER / "qwen4_exp.json"),
        r"M1 logits in float32: .* off ours in float64, in two micro-batches"),
    "two tables of one size": (first_table_again, str(FOLDER / "qwen4_exp.json"),
        r"M1 \S*ngram_embedding\.weight: its shape is \[195, 3\] in our files, \[273, 3\] there"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTS if parts.ALL else [*PLANTS][1:6:2])
def test_the_first_that_is_wrong_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plant, model, message = PLANTS[name]
    plant(monkeypatch)
    first, *_ = compared_with_transformers(tmp_path, model, whole="long" in message).findings
    assert re.match(message, str(first)), first


def test_a_block_that_rounding_exchanges_is_no_finding(tmp_path: Path) -> None:
    """In float64 R1 takes the blocks that bfloat16 chose: one other block changes gradients by some percent."""
    part = compared_with_transformers(tmp_path, str(FOLDER / "qwen4_exp.json"), seed=6)
    assert (list(part.findings), part.oracles) == ([], ("M1", "R1"))


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


def test_a_padding_token_is_like_any_other(tmp_path: Path) -> None:
    """transformers gives its embedding no gradient, which is no mistake of ours."""
    recipe = tmp_path / "recipe"
    recipe.mkdir()
    (recipe / "config.json").write_text(json.dumps(tiny.of("qwen3", pad_token_id=0)))
    part = compared_with_transformers(tmp_path, str(recipe))
    assert (list(part.findings), part.oracles) == ([], ("M1", "R1"))
