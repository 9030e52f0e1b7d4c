"""Bugs of Qwen4-Exp on a mesh, each planted on the ranks and seen by an oracle. One process stays right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwright import ops
from meshwright.ops import chosen_blocks, delta
from meshwright.parallel import lookup
from meshwright.verify import Finding
from tests import parts, tiny, trials, worlds
from tests.plants import Patch, Plant, around, planted
from tests.test_qwen4_indexer import chosen_again
from tests.test_qwen4_meshes import TIES, TRAINED, Case, Short, trial_of

CASE = Case(dict(cp=2, tp=2) if parts.ALL else dict(cp=2), "full", TRAINED, Short())


@around(ops, "blocks_of")
def blocks_of_the_stream(real: Any, positions_S: Tensor, size: int) -> Any:
    return real(torch.arange(len(positions_S)), size)


@around(ops, "choose_blocks")
def other_blocks_by_tp_rank(real: Any, q: Tensor, *more: Any) -> Tensor:
    chosen: Tensor = real(-q if dist.get_rank() % 2 else q, *more)
    return chosen


@around(chosen_blocks, "_order")
def later_of_equals(real: Any, score_TB: Tensor) -> Tensor:
    order: Tensor = real(score_TB.flip(-1)).flip(-1)
    return order


@around(ops, "ngram_rows")
def ngrams_across_documents(real: Any, tokens_T: Tensor, at_T: Tensor, hash_: Any) -> Tensor:
    rows: Tensor = real(tokens_T, torch.arange(len(at_T)), hash_)
    return rows


@around(ops, "causal_conv")
def convolution_across_documents(real: Any, x: Tensor, weight: Tensor, docs: Any, halo: Any, step: int = 1) -> Tensor:
    whole = ops.documents([len(docs.positions_T)], "cpu") if step > 1 else docs
    out: Tensor = real(x, weight, whole, halo, step)
    return out


def halo_of_one_rank(patch: Patch) -> None:
    """Take what a part needs of the tokens before it from the rank before it alone."""

    def before(x_TC: Tensor, num: int, halo: Any) -> Tensor:
        own = min(num, len(x_TC))
        tails_NC = F.pad(halo(x_TC[len(x_TC) - own :]), (0, 0, own, 0))
        return F.pad(tails_NC[halo.part * own :][:own], (0, 0, num - own, 0))

    patch.setattr(delta, "_before", before)


class _LastGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table_RW: Tensor, row_N: Tensor) -> Tensor:
        ctx.save_for_backward(row_N)
        ctx.shape = table_RW.shape
        return table_RW[row_N]

    @staticmethod
    def backward(ctx: Any, *d: Tensor) -> tuple[Tensor, None]:
        (row_N,) = ctx.saved_tensors
        grad_RW = d[0].new_zeros(ctx.shape)
        grad_RW[row_N] = d[0]
        return grad_RW, None


@around(lookup, "look_up")
def gradient_of_a_row_overwritten(real: Any, table_RW: Tensor, row_M: Tensor, dtype: torch.dtype) -> Tensor:
    rows: Tensor = _LastGradient.apply(table_RW, row_M)
    return rows.to(dtype)


@around(lookup, "_from_owners")
def gradient_without_one_rank(real: Any, *args: Any, **names: Any) -> Tensor:
    rows: Tensor = real(*args, **names)
    if dist.get_rank() == 1 and rows.requires_grad:
        rows.register_hook(torch.zeros_like)
    return rows


@around(lookup, "_from_owners")
def rows_of_another_token(real: Any, table_RW: Tensor, row_N: Tensor, *more: Any, **names: Any) -> Tensor:
    rows: Tensor = real(table_RW, row_N.sort().values if dist.get_rank() == 1 else row_N, *more, **names)
    return rows


@around(ops, "write_streams")
def output_to_the_first_stream(real: Any, x_TC: Tensor, out_TD: Tensor, inject_Tn: Tensor) -> Tensor:
    out: Tensor = real(x_TC, out_TD, inject_Tn * (torch.arange(inject_Tn.shape[1]) < 1))
    return out


# Which oracle sees a bug, and the part or the key that it names.
PLANTS: dict[str, tuple[Plant, set[str], str]] = {
    "blocks of the stream": (blocks_of_the_stream, {"D1"}, "layers.2.mixer"),
    "other blocks on a rank of tp": (other_blocks_by_tp_rank, {"D1"}, "layers.2.mixer"),
    "later of equal blocks": (later_of_equals, {"D1"}, "layers.2.mixer"),
    "blocks chosen again in backward": (chosen_again, {"G1"}, ""),
    "n-grams across documents": (ngrams_across_documents, {"D1"}, "layers.1.grams"),
    "convolution across documents": (convolution_across_documents, {"D1"}, "layers.1.grams"),
    "halo of one rank": (halo_of_one_rank, {"D1"}, "layers.1.grams"),
    "rows of another token": (rows_of_another_token, {"D1"}, "layers.1.grams"),
    "gradient of a row overwritten": (gradient_of_a_row_overwritten, {"G1"}, "ngram_embedding"),
    "gradient of a table without one rank": (gradient_without_one_rank, {"G1"}, "ngram_embedding"),
    "output to the first stream alone": (output_to_the_first_stream, {"D1"}, "layers.0"),
}
TRIED = parts.every(11, PLANTS, 8)


@pytest.fixture(scope="module")
def findings_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Finding]]:
    source = tiny.directory(tmp_path_factory.mktemp("m") / "m", "qwen4_exp", dtype=torch.bfloat16, **TIES)

    def findings(group: Sequence[str]) -> dict[str, list[Finding]]:
        tried = trials.changed(trial_of(source, CASE), steps=1)
        return trials.findings_in_turn(dict.fromkeys(group, tried), lambda name: planted(PLANTS[name][0]))

    return worlds.shared(dict.fromkeys(TRIED, "one world"), findings)


@pytest.mark.parametrize("name", TRIED)
def test_an_oracle_sees(findings_of: Callable[[str], list[Finding]], name: str) -> None:
    _, oracles, part = PLANTS[name]
    findings = findings_of(name)
    assert {finding.oracle for finding in findings} >= oracles
    assert any(part in finding.name or part in finding.what for finding in findings if finding.oracle in oracles)
