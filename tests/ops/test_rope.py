import math

import pytest
import torch
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb as qwen3_apply
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import apply_rotary_pos_emb as qwen3_5_apply

from meshwright.ops import documents, rope_tables, rotate
from tests.ops.references import compare, rand, smoke


def reference(x, positions, theta, dim):
    """One pair of numbers at a time, turned as a complex number."""
    out = []
    for t, heads in enumerate(x):
        for head in heads:
            y = list(head)
            for r in range(dim // 2):
                angle = positions[t] * theta ** (-2 * r / dim)
                c, s = math.cos(angle), math.sin(angle)
                y[r], y[r + dim // 2] = head[r] * c - head[r + dim // 2] * s, head[r + dim // 2] * c + head[r] * s
            out.append(torch.stack(y))
    return torch.stack(out).view(x.shape)


@pytest.mark.parametrize(("head_dim", "dim"), [(8, 8), (16, 4), (6, 2)])
def test_against_reference(head_dim, dim):
    positions = documents([3, 1, 40], "cpu").positions_T
    tables = rope_tables(positions, dim, 1e4, torch.float64)
    assert tables[0].shape == (44, dim // 2)
    compare(lambda x: rotate(x, *tables), lambda x: reference(x, positions.tolist(), 1e4, dim), [rand(44, 2, head_dim)])


def test_as_qwen3():
    config = Qwen3Config(head_dim=16, hidden_size=32, num_attention_heads=2)
    positions, q, k = torch.arange(50), rand(50, 2, 16, dtype=torch.float32), rand(50, 1, 16, dtype=torch.float32)
    cos, sin = Qwen3RotaryEmbedding(config)(q, positions[None])
    ours = rope_tables(positions, 16, config.rope_parameters["rope_theta"])
    assert torch.equal(ours[0], cos[0, :, :8])
    assert torch.equal(ours[1], sin[0, :, :8])
    want = qwen3_apply(q[None], k[None], cos, sin, unsqueeze_dim=2)
    assert torch.allclose(rotate(q, *ours), want[0][0], atol=1e-6)
    assert torch.allclose(rotate(k, *ours), want[1][0], atol=1e-6)


@pytest.mark.parametrize("sections", [(11, 11, 10), (20, 9, 3), (20, 3, 9), (10, 4, 18)])
def test_interleaved_mrope_as_qwen3_5(sections):
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": list(sections)}
    config = Qwen3_5TextConfig(head_dim=256, rope_parameters=rope)
    positions = torch.randint(0, 500, (3, 20), generator=torch.Generator().manual_seed(0))
    x = rand(20, 3, 256, dtype=torch.float32)
    cos, sin = Qwen3_5TextRotaryEmbedding(config)(x, positions[:, None])
    ours = rope_tables(positions, 64, 1e7, sections=sections)
    assert torch.equal(ours[0], cos[0, :, :32])
    assert torch.equal(ours[1], sin[0, :, :32])
    assert torch.allclose(rotate(x, *ours), qwen3_5_apply(x[None], x[None], cos, sin, unsqueeze_dim=2)[0][0], atol=1e-6)


def test_text_tokens_carry_one_number_three_times():
    positions = torch.arange(9)
    three = rope_tables(positions.expand(3, 9), 64, 1e7, sections=(11, 11, 10))
    assert all(torch.equal(a, b) for a, b in zip(three, rope_tables(positions, 64, 1e7), strict=True))


def test_tables_are_at_least_float32():
    dtypes = [rope_tables(torch.arange(3), 4, 1e4, d)[0].dtype for d in (torch.bfloat16, torch.float32, torch.float64)]
    assert dtypes == [torch.float32, torch.float32, torch.float64]


@pytest.mark.parametrize("sections", [None, (1, 1, 1)])
def test_refuses_sections_that_do_not_fit(sections):
    with pytest.raises(ValueError, match="dim/2=4"):
        rope_tables(torch.zeros(3, 5, dtype=torch.int64), 8, 1e4, sections=sections)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_smoke(dtype, tolerance):
    smoke(lambda x: rotate(x, *rope_tables(torch.arange(7), 4, 1e4, x.dtype)), [rand(7, 2, 8)], dtype, tolerance)
