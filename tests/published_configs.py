"""The config.json fields of models on the hub, in their real sizes."""

from __future__ import annotations

from typing import Any

QWEN3_30B_A3B: dict[str, Any] = dict(
    model_type="qwen3_moe", vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48,
    num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
    moe_intermediate_size=768, norm_topk_prob=True, tie_word_embeddings=False, mlp_only_layers=[],
    decoder_sparse_step=1, rope_theta=1000000.0, max_window_layers=48,
)  # fmt: skip
QWEN3_NEXT: dict[str, Any] = dict(  # Qwen3-Next-80B-A3B and Qwen3-Coder-Next
    model_type="qwen3_next", vocab_size=151936, hidden_size=2048, intermediate_size=5120, num_hidden_layers=48,
    num_attention_heads=16, num_key_value_heads=2, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32,
    linear_key_head_dim=128, linear_value_head_dim=128, num_experts=512, num_experts_per_tok=10,
    moe_intermediate_size=512, shared_expert_intermediate_size=512, norm_topk_prob=True, mlp_only_layers=[],
    decoder_sparse_step=1, full_attention_interval=4, rope_theta=1e7, partial_rotary_factor=0.25, rms_norm_eps=1e-6,
    tie_word_embeddings=False,
)  # fmt: skip
QWEN3_5: dict[str, Any] = dict(
    model_type="qwen3_5",
    text_config=dict(
        model_type="qwen3_5_text", vocab_size=248320, hidden_size=4096, intermediate_size=12288,
        num_hidden_layers=32, num_attention_heads=16, num_key_value_heads=4, head_dim=256,
        linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
        full_attention_interval=4,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 8,
        rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25,
                             mrope_section=[11, 11, 10]),
    ),
    vision_config=dict(depth=27), tie_word_embeddings=False,
)  # fmt: skip
QWEN4_EXP: dict[str, Any] = dict(  # Qwen3.8-Flash-Next
    model_type="qwen4_exp", image_token_id=248056, video_token_id=248057, tie_word_embeddings=False,
    text_config=dict(
        model_type="qwen4_exp_text", vocab_size=248320, hidden_size=2560, num_hidden_layers=48, num_attention_heads=24,
        num_key_value_heads=2, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=48,
        linear_key_head_dim=128, linear_value_head_dim=128, num_experts=512, num_experts_per_tok=10,
        moe_intermediate_size=640, shared_expert_intermediate_size=640, hc_count=4, hc_lowrank=320, ple_layer_ids=[2],
        ple_embed_dim=2560, ngram_size=3, heads_per_ngram=8, ngram_vocab_size_base=20_000_000,
        make_ngram_vocab_size_divisible_by=128, split_ngram_parts=128, ple_conv_kernel_size=4, eos_token_id=248044,
        indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=128, indexer_budget=2048, indexer_compress_ratio=4,
        output_gate_type="sigmoid", tie_word_embeddings=False, dtype="bfloat16",
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 12,
        rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25,
                             mrope_section=[11, 11, 10], mrope_interleaved=True),
    ),
    vision_config=dict(depth=27, hidden_size=1152, intermediate_size=4304, num_heads=16, patch_size=16,
                       spatial_merge_size=2, temporal_patch_size=2, num_position_embeddings=2304, in_channels=3,
                       out_hidden_size=2560, deepstack_visual_indexes=[]),
)  # fmt: skip
QWEN2: dict[str, Any] = dict(
    model_type="qwen2", vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
    num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip
