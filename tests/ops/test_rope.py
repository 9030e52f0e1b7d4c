import logging
import math
from dataclasses import replace

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb as qwen3_apply
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import apply_rotary_pos_emb as qwen3_5_apply

from meshwright.ops import LinearScaling, Llama3Scaling, Rotary, YarnScaling, documents, rope_tables, rotate
from meshwright.ops.rope import rope_frequencies
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
    tables = rope_tables(positions, Rotary(dim, 1e4), torch.float64)
    assert tables[0].shape == (44, dim // 2)
    compare(lambda x: rotate(x, *tables), lambda x: reference(x, positions.tolist(), 1e4, dim), [rand(44, 2, head_dim)])


def test_as_qwen3():
    config = Qwen3Config(head_dim=16, hidden_size=32, num_attention_heads=2)
    positions, q, k = torch.arange(50), rand(50, 2, 16, dtype=torch.float32), rand(50, 1, 16, dtype=torch.float32)
    cos, sin = Qwen3RotaryEmbedding(config)(q, positions[None])
    ours = rope_tables(positions, Rotary(16, config.rope_parameters["rope_theta"]))
    assert torch.equal(ours[0], cos[0, :, :8])
    assert torch.equal(ours[1], sin[0, :, :8])
    want = qwen3_apply(q[None], k[None], cos, sin, unsqueeze_dim=2)
    assert torch.allclose(rotate(q, *ours), want[0][0], atol=1e-6)
    assert torch.allclose(rotate(k, *ours), want[1][0], atol=1e-6)


@pytest.mark.parametrize("sections", [(11, 11, 10), (20, 9, 3), (20, 3, 9), (10, 4, 18)])
def test_interleaved_mrope_as_qwen3_5(sections):
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": list(sections)}
    config = Qwen3_5TextConfig(head_dim=256, rope_parameters=rope)
    positions = torch.randint(0, 500, (20, 3), generator=torch.Generator().manual_seed(0))
    x = rand(20, 3, 256, dtype=torch.float32)
    cos, sin = Qwen3_5TextRotaryEmbedding(config)(x, positions.T[:, None])
    ours = rope_tables(positions, Rotary(64, 1e7), sections=sections)
    assert torch.equal(ours[0], cos[0, :, :32])
    assert torch.equal(ours[1], sin[0, :, :32])
    assert torch.allclose(rotate(x, *ours), qwen3_5_apply(x[None], x[None], cos, sin, unsqueeze_dim=2)[0][0], atol=1e-6)


def test_text_tokens_carry_one_number_three_times():
    positions = torch.arange(9)
    rotary = Rotary(64, 1e7, YarnScaling(4.0, 262144), attention=1.1)
    three = rope_tables(positions[:, None].expand(9, 3), rotary, sections=(11, 11, 10))
    assert all(torch.equal(a, b) for a, b in zip(three, rope_tables(positions, rotary), strict=True))


def turns_over_context(scaling, rotary, r):
    """Return how often frequency r turns over the context before scaling; r need not be whole."""
    return scaling.context * rotary.theta ** (-2 * r / rotary.dim) / (2 * math.pi)


def where_it_turns(scaling, rotary, turns):
    """Find the frequency of that many turns by bisection."""
    lower, upper = -1000.0, 1000.0
    for _ in range(100):
        middle = (lower + upper) / 2
        lower, upper = (middle, upper) if turns_over_context(scaling, rotary, middle) > turns else (lower, middle)
    return middle


def scaled_share(rotary, r):
    """Return the share of frequency r that is divided by the factor."""
    scaling = rotary.scaling
    if isinstance(scaling, LinearScaling):
        return 1.0
    if isinstance(scaling, Llama3Scaling):
        turns = turns_over_context(scaling, rotary, r)
        begin, end, at = scaling.high, scaling.low, turns
    else:
        begin, end = (where_it_turns(scaling, rotary, turns) for turns in (scaling.high, scaling.low))
        begin, end = (math.floor(begin), math.ceil(end)) if scaling.truncate else (begin, end)
        begin, end, at = max(begin, 0), min(end, rotary.dim - 1), r
    return min(max((at - begin) / (end - begin), 0.0), 1.0)


def frequency(rotary, r):
    """The angle of one position: a mix of the plain angle and of that of a position `factor` times closer."""
    plain, share = rotary.theta ** (-2 * r / rotary.dim), scaled_share(rotary, r)
    return (1 - share) * plain + share * plain / rotary.scaling.factor


SCALED = [
    Rotary(10, 1e4, LinearScaling(2.5)),
    Rotary(128, 5e5, Llama3Scaling(8.0, 8192, 1.0, 4.0)),
    Rotary(6, 1e2, Llama3Scaling(1.5, 16, 0.5, 2.0)),
    Rotary(128, 1e6, YarnScaling(4.0, 32768), attention=0.1 * math.log(4) + 1),
    Rotary(64, 1e7, YarnScaling(4.0, 262144), attention=0.1 * math.log(4) + 1),
    Rotary(10, 1e3, YarnScaling(4.0, 16, low=0.1, high=2.0, truncate=False), attention=1.3),
    Rotary(64, 1e2, YarnScaling(4.0, 5000, low=8.0, high=16.0), attention=0.7),
]
# As far as they go: contexts shorter than a turn of the fastest frequency, or too long for a turn of none.
ODD_SCALED = [
    Rotary(8, 1e4, YarnScaling(4.0, 4), attention=1.0),
    Rotary(8, 1e4, YarnScaling(4.0, 1, truncate=False), attention=1.0),
    Rotary(8, 1.5, YarnScaling(4.0, 100_000), attention=1.0),
    Rotary(2, 1e6, YarnScaling(1.0, 262144), attention=1.0),
    Rotary(2, 1e4, Llama3Scaling(2.0, 1, 1.0, 1.5)),
]


@pytest.mark.parametrize("rotary", SCALED, ids=str)
def test_scaled_frequencies_against_reference(rotary):
    result = rope_frequencies(rotary, torch.float64, torch.device("cpu"))
    expected = torch.tensor([frequency(rotary, r) for r in range(rotary.dim // 2)], dtype=torch.float64)
    assert torch.allclose(result, expected, rtol=1e-12, atol=0)
    plain = rope_frequencies(replace(rotary, scaling=None), torch.float64, torch.device("cpu"))
    assert not torch.allclose(result, plain, rtol=1e-2, atol=0)


def fields_of(rotary):
    scaling = rotary.scaling
    both = {"rope_theta": rotary.theta, "factor": scaling.factor}
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", **both}
    both["original_max_position_embeddings"] = scaling.context
    if isinstance(scaling, Llama3Scaling):
        return {"rope_type": "llama3", "low_freq_factor": scaling.low, "high_freq_factor": scaling.high, **both}
    betas = {"beta_slow": scaling.low, "beta_fast": scaling.high, "truncate": scaling.truncate}
    return {"rope_type": "yarn", "attention_factor": rotary.attention, **betas, **both}


@pytest.mark.parametrize("rotary", [*SCALED, *ODD_SCALED], ids=str)
def test_scaled_as_transformers(rotary, caplog):
    caplog.set_level(logging.ERROR)  # it warns of odd contexts
    fields = fields_of(rotary)
    config = Qwen3Config(head_dim=rotary.dim, rope_parameters=dict(fields), max_position_embeddings=40960)
    expected, attention = ROPE_INIT_FUNCTIONS[fields["rope_type"]](config)
    assert torch.allclose(rope_frequencies(rotary, torch.float32, torch.device("cpu")), expected, rtol=5e-7, atol=0)
    assert attention == rotary.attention
    positions, x = torch.arange(50), rand(50, 2, rotary.dim, dtype=torch.float32)
    tables = Qwen3RotaryEmbedding(config)(x, positions[None])
    for ours, peer in zip(rope_tables(positions, rotary), tables, strict=True):
        assert torch.allclose(ours, peer[0, :, : rotary.dim // 2], atol=1e-5)


def test_tables_are_at_least_float32():
    args = (torch.bfloat16, torch.float32, torch.float64)
    dtypes = [rope_tables(torch.arange(3), Rotary(4, 1e4), dtype)[0].dtype for dtype in args]
    assert dtypes == [torch.float32, torch.float32, torch.float64]


@pytest.mark.parametrize("sections", [None, (1, 1, 1)])
def test_refuses_sections_that_do_not_fit(sections):
    with pytest.raises(ValueError, match="dim/2=4"):
        rope_tables(torch.zeros(3, 5, dtype=torch.int64), Rotary(8, 1e4), sections=sections)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_smoke(dtype, tolerance):
    smoke(
        lambda x: rotate(x, *rope_tables(torch.arange(7), Rotary(4, 1e4), x.dtype)), [rand(7, 2, 8)], dtype, tolerance
    )
