"""Codes of one matrix that FSDP gathers in FP8, without ranks: those of its shards, and what they refuse."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.ops import Quantised, fp8_matmul
from meshwright.parallel import fp8_gather
from tests.words import words

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5, 48, 300])
@pytest.mark.parametrize("compute", [BF16, F32, F64])
def test_codes_of_shards_equal_those_of_the_matrix(
    num_shards: int, compute: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix may have fewer rows than shards."""
    monkeypatch.setattr(fp8_gather, "_PART", 128 * 128)
    wide = torch.promote_types(compute, F32)
    whole = torch.randn(256, 384, generator=torch.Generator().manual_seed(3), dtype=wide).exp()
    whole[:128, 128:256] = 0  # a block of zeros
    chunks = whole.chunk(num_shards)
    chunks = (*chunks, *[whole[:0]] * (num_shards - len(chunks)))
    bounds = [0, *itertools.accumulate(map(len, chunks))]
    scales = [torch.zeros(2, 3, dtype=wide) for _ in chunks]
    made = [
        fp8_gather._Matrix(SimpleNamespace(rows=rows, first=first), compute, each)  # type: ignore[arg-type] # a stand-in
        for rows, first, each in zip(chunks, bounds, scales, strict=False)
    ]
    for each in made:
        each.find_amax()
    shared = fp8_matmul.scales_of(torch.stack(scales).amax(0))
    sent = []
    for each in made:
        each.scales.copy_(shared)
        ((codes,), _) = each.send(SimpleNamespace(size=lambda: num_shards), whole.shape, None, None, None)
        sent.append(codes)
    assert {tuple(codes.shape) for codes in sent} == {(-(-256 // num_shards), 384)}
    got = made[0].receive((torch.cat(sent),), None, compute)
    assert got is not None
    expected = whole.to(compute)
    assert (got[0].shape, got[0].dtype) == (expected.shape, compute)
    assert torch.equal(fp8_matmul.rounded_matrix(got[0]), fp8_matmul.rounded_matrix(expected))
    x = torch.randn(5, 384, generator=torch.Generator().manual_seed(4)).to(compute)
    assert torch.equal(fp8_matmul.fp8_linear(x, got[0]), fp8_matmul.fp8_linear(x, expected))
    assert torch.equal(fp8_matmul.fp8_linear(x[:, :256], got[0].mT), fp8_matmul.fp8_linear(x[:, :256], expected.mT))
    assert torch.equal(
        fp8_matmul.rounded_matrix(fp8_matmul.concat_weights([expected[:128], got[0]])),
        fp8_matmul.rounded_matrix(torch.cat([expected[:128], expected])),
    )


def test_gathered_codes_refuse_other_operations() -> None:
    codes, scales = torch.zeros(256, 128, dtype=torch.uint8), torch.ones(2, 1)
    weight = torch.nn.Parameter(Quantised(codes, scales, BF16))
    experts = weight.unflatten(0, (2, -1))
    assert [type(each) for each in (*experts, weight.mT, weight.detach())] == [Quantised] * 4
    assert type(torch.empty_like(weight)) is Tensor
    for wrong in (
        lambda: F.linear(torch.ones(1, 128, dtype=BF16), weight),
        lambda: weight.to(F32),
        lambda: weight + 1,
        lambda: torch.ones(256, 128, dtype=BF16).copy_(weight),
        lambda: torch.cat([weight, weight]),
        lambda: weight[:128],
    ):
        with pytest.raises(ValueError, match=words("FP8", "fp8_skip")):
            wrong()
    for cut in (lambda: weight.view(4, 64, 128), lambda: weight.view(128, 256)):
        with pytest.raises(ValueError, match="blocks"):
            cut()
