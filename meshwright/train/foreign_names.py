"""Option names of other trainers, and what to write instead.

People copy options from torchtitan, Megatron-LM, Hugging Face, TRL, Axolotl or LLaMA-Factory. An unknown name alone
would make them search the docs, so the error names the field, or explains why the feature needs none or is missing.
`config_file._suggestion` reads both tables; a test checks that every target exists and that no name is in both.
"""

from __future__ import annotations

# The field with the same meaning, by the foreign name.
ELSEWHERE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("dp", "dp_shard", "dp_size", "data_parallel", "world_size", "num_ranks"), ("mesh", "fsdp")),
    **dict.fromkeys(("ddp", "dp_replicate", "hsdp"), ("mesh", "replicate")),
    **dict.fromkeys(("sp", "tensor_parallel", "tp_size", "model_parallel"), ("mesh", "tp")),
    **dict.fromkeys(("expert_parallel", "ep_size"), ("mesh", "ep")),
    **dict.fromkeys(("tensor_parallel_size", "tensor_model_parallel_size", "tp_degree"), ("mesh", "tp")),
    **dict.fromkeys(("pipeline_parallel", "pipeline_parallel_size", "pp_size", "pp_degree"), ("mesh", "pp")),
    **dict.fromkeys(
        ("context_parallel", "context_parallel_size", "cp_size", "sequence_parallel_size", "sequence_parallel_degree"),
        ("mesh", "cp"),
    ),
    **dict.fromkeys(("nproc_per_node", "num_gpus", "n_gpus", "gpus", "devices"), ("mesh", "fsdp")),
    **dict.fromkeys(("learning_rate", "max_lr", "peak_lr"), ("optim", "lr")),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type", "scheduler"), ("optim", "schedule")),
    **dict.fromkeys(("warmup_ratio", "warmup_steps", "num_warmup_steps", "lr_warmup_steps"), ("optim", "warmup")),
    **dict.fromkeys(("min_lr", "min_lr_ratio", "lr_min"), ("optim", "final")),
    **dict.fromkeys(("max_grad_norm", "clip_grad", "grad_clip", "gradient_clipping"), ("optim", "max_norm")),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "beta1", "beta2"), ("optim", "betas")),
    **dict.fromkeys(("adam_epsilon", "adam_eps", "epsilon"), ("optim", "eps")),
    "wd": ("optim", "weight_decay"),
    **dict.fromkeys(("max_length", "max_seq_length", "seq_len", "sequence_len", "cutoff_len"), ("train", "length")),
    **dict.fromkeys(("batch_size", "global_batch_size"), ("train", "tokens_per_step")),
    **dict.fromkeys(("num_train_epochs", "num_epochs"), ("train", "epochs")),
    **dict.fromkeys(("max_steps", "num_steps"), ("train", "steps")),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing"), ("train", "recompute")),
    **dict.fromkeys(("bf16", "precision", "torch_dtype", "mixed_precision"), ("train", "dtype")),
    **dict.fromkeys(("torch_compile", "use_compile"), ("train", "compiled")),
    **dict.fromkeys(("early_stopping_patience", "patience"), ("train", "early_stopping")),
    **dict.fromkeys(("freeze", "unfreeze", "trainable", "freeze_layers", "unfrozen_parameters"), ("train", "train")),
    **dict.fromkeys(("base_model", "model_name_or_path", "model_name"), ("model",)),
    **dict.fromkeys(("output_dir", "out_dir"), ("out",)),
    **dict.fromkeys(("resume_from_checkpoint", "load_checkpoint"), ("resume",)),
    **dict.fromkeys(("save_steps", "save_interval", "save_strategy"), ("save", "every")),
    "save_total_limit": ("save", "keep"),
    **dict.fromkeys(("eval_steps", "eval_interval", "eval_strategy", "evaluation_strategy"), ("eval", "every")),
    "load_best_model_at_end": ("eval", "best"),
    **dict.fromkeys(("val_set_size", "test_size", "eval_dataset", "val_file", "validation_file"), ("eval", "path")),
    **dict.fromkeys(("dataset", "datasets", "dataset_path", "dataset_name", "train_file"), ("data", "path")),
    **dict.fromkeys(("chat_template", "chat_template_path"), ("data", "template")),
    **dict.fromkeys(("dataset_text_field", "field_messages", "columns"), ("data", "fields")),
    "logging_steps": ("log", "every"),
    **dict.fromkeys(("wandb_project",), ("log", "wandb")),
    "ddp_timeout": ("launch", "timeout_s"),
    **dict.fromkeys(("lora_r", "lora_rank", "r"), ("lora", "rank")),
    "lora_alpha": ("lora", "alpha"),
    **dict.fromkeys(("target_modules", "lora_target_modules", "lora_target", "lora_targets"), ("lora", "targets")),
    "use_rslora": ("lora", "rslora"),
    "adapter_name_or_path": ("lora", "path"),
    **dict.fromkeys(("stage", "rm", "rl_type", "trainer_type"), ("objective",)),
    "pref_beta": ("dpo", "beta"),
    **dict.fromkeys(("pref_loss", "loss_type"), ("dpo", "kind")),
    **dict.fromkeys(("ref_model", "ref_model_name_or_path"), ("dpo", "reference")),
    **dict.fromkeys(("rpo_alpha", "pref_ftx"), ("dpo", "sft_weight")),
    "simpo_gamma": ("simpo", "margin"),
    "center_rewards_coefficient": ("reward", "centre"),
    **dict.fromkeys(("teacher_model", "teacher_model_name_or_path"), ("distill", "teacher")),
    **dict.fromkeys(("num_labels", "id2label", "label_names"), ("classify", "labels")),
    **dict.fromkeys(("matryoshka_dims",), ("embedding", "dims")),
}  # fmt: skip

_LORA = "a section [lora] trains adapters: rank, alpha and targets, which are all linear layers by default"
_DORA = "DoRA is not supported; [lora] trains adapters beside a frozen base"
_QLORA = 'frozen = "nf4" of [train] quantises the frozen base to 4 bits, under adapters: a section [lora]'
_DROPOUT = (
    "dropout of adapters is not supported: its mask would have to be the same on every mesh and in recomputation. Use "
    "fewer epochs or a smaller rank against overfitting"
)
_BATCH = (
    "tokens_per_step of [train] is the batch of a whole step, in tokens over all data ranks. A micro-batch is one "
    "stream of `length` tokens on each data rank, so gradients are accumulated over "
    "tokens_per_step / (length x replicate x fsdp) micro-batches"
)
_SHARDING = (
    "fsdp of [mesh] shards parameters, gradients and optimizer state, as ZeRO-3 does; offload of [train] moves them "
    "to the host"
)
_QUANTISED = (
    'frozen = "nf4" of [train] quantises a frozen base to 4 bits, under adapters: a section [lora]. fp8 = "block" of '
    '[train] computes in 8 bits, state_dtype = "uint8" of [optim] stores the moments in 8 bits'
)
_REWARDS = (
    "meshwright train learns from data that exist (objective = ...). Reinforcement learning and losses of your own "
    "(GRPO, PPO, KTO) run in a Python loop: docs/rl.md and docs/losses.md"
)
_PACKING = (
    "documents are always packed into streams of `length` tokens, and never attend to each other. Only the end of a "
    "stream is padded"
)
_LOSS_MASK = (
    "chats are trained on the assistant's tokens only, as turns of [[data]] selects; "
    'kind = "text" trains on all tokens'
)
_CODE = "code in a model directory is never run; only the model families listed in docs/README.md can be trained"
_KERNELS = "the fastest attention kernel that is installed is used; no option selects it"
_FP16 = 'float16 is not supported: its gradients overflow. dtype of [train] is "bfloat16", "float32" or "float64"'

# What to do instead, by names that no field corresponds to. A longer name (`lora_alpha`) has the meaning of its prefix.
REFUSED = {
    "streaming": "a stream has no exact plan: what is trained on would depend on the number of ranks and on restarts. "
    "The data set is downloaded and tokenised once. If it is too large for the disk, select a part: hf_subset, "
    "hf_split, or some of its files as path",
    **dict.fromkeys(("peft", "use_peft", "use_lora", "adapter", "adapters", "finetuning_type"), _LORA),
    **dict.fromkeys(("dora", "use_dora"), _DORA),
    "qlora": _QLORA,
    **dict.fromkeys(("lora_dropout", "dropout"), _DROPOUT),
    "modules_to_save": "`train = [...]` of [train] names parameters that are trained whole, besides the adapters",
    **dict.fromkeys(
        ("gradient_accumulation", "grad_accum", "accumulate_grad_batches", "per_device_train_batch_size",
         "per_device_batch_size", "micro_batch_size", "micro_batches", "train_batch_size", "local_batch_size"),
        _BATCH,
    ),
    "per_device_eval_batch_size": "held-out data is packed into streams of `length` tokens, one on each data rank",
    **dict.fromkeys(
        ("deepspeed", "zero2", "zero3", "zero_stage", "zero_optimization", "fsdp_config", "fsdp_version", "fsdp2",
         "sharding_strategy", "accelerate"),
        _SHARDING,
    ),
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit", "quantization", "quantization_bit", "bnb", "bitsandbytes"), _QUANTISED
    ),
    **dict.fromkeys(
        ("ppo", "grpo", "kto", "cpo", "rlhf", "rl", "reward_model"),
        _REWARDS,
    ),
    **dict.fromkeys(
        ("packing", "pack", "sample_packing", "neat_packing", "eval_packing", "pad_to_sequence_len", "padding",
         "padding_free", "group_by_length"),
        _PACKING,
    ),
    **dict.fromkeys(("fp16", "half", "float16"), _FP16),
    **dict.fromkeys(
        ("optimizer", "optim", "optimizers"),
        '[optim] has the optimizer: kind = "adamw" or "muon", lr, schedule, betas, eps, weight_decay, momentum',
    ),
    **dict.fromkeys(
        ("completion_only_loss", "assistant_only_loss", "train_on_inputs", "train_on_prompt", "mask_prompt",
         "mask_history", "train_on_responses_only"),
        _LOSS_MASK,
    ),
    **dict.fromkeys(("trust_remote_code", "remote_code"), _CODE),
    **dict.fromkeys(
        ("flash_attn", "flash_attention", "use_flash_attention_2", "attn_implementation", "sdpa_attention",
         "xformers_attention"),
        _KERNELS,
    ),
    "report_to": 'tensorboard = true or wandb = "PROJECT" of [log]; OUT/metrics.jsonl is always written',
    **dict.fromkeys(
        ("push_to_hub", "hub_model_id", "hub_token", "hf_token"),
        "nothing is uploaded: `hf upload ORG/NAME OUT/export` does it; downloads take the token of `hf auth login`",
    ),
    **dict.fromkeys(
        ("dataloader_num_workers", "num_workers", "preprocessing_num_workers", "dataset_num_proc"),
        "data is tokenised once, by one process per core (8 at most), and stored in `cache`",
    ),
    "shuffle": "documents are always shuffled, by `seed`",
    **dict.fromkeys(
        ("overwrite_output_dir",), 'the same command resumes from OUT; resume = "never" refuses an OUT with checkpoints'
    ),
    **dict.fromkeys(
        ("max_samples", "max_train_samples", "max_eval_samples"),
        "a source is read completely; weight of [[data]] selects a part of it for each epoch",
    ),
    **dict.fromkeys(
        ("label_smoothing_factor", "neftune", "liger_kernel", "use_liger_kernel", "ema"), "it is not supported"
    ),
}  # fmt: skip


def refusal_of(name: str) -> str:
    """Return what to do instead of a foreign name that no field corresponds to, "" for any other name."""
    plain = name.lower().replace("-", "_")
    return next((why for known, why in REFUSED.items() if plain == known or plain.startswith(f"{known}_")), "")
