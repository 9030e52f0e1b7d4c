"""The first steps of TRL's trainers of pairs on a tiny model, as numbers that our tests compare with.

    python -m tests.trl_peer        # writes tests/trl_1_16.json; needs trl 1.16, which `make setup` does not install

TRL's trainers get the rows of `ROWS` in their order, in float32, on one process; so does our engine in test_pairs.py.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from tests import tiny
from tests.templates import tokenizer

STORED = Path(__file__).with_name("trl_1_16.json")
STEPS, PAIRS = 8, 3
OPTIM: dict[str, Any] = dict(lr=3e-3, betas=(0.9, 0.999), eps=1e-8, max_norm=1.0)
DPO: dict[str, dict[str, Any]] = {
    "sigmoid": dict(loss_type=["sigmoid"], beta=0.1),
    "sigmoid_norm": dict(loss_type=["sigmoid_norm"], beta=2.0),
    "ipo": dict(loss_type=["ipo"], beta=0.5),
}


def rows() -> list[dict[str, str]]:
    dice = random.Random(5)
    word = lambda longest: "".join(dice.choice("abcdefgh ") for _ in range(dice.randint(1, longest))) + "."  # noqa: E731 - short
    return [{"prompt": f"{word(12)}:", "chosen": word(30), "rejected": word(9)} for _ in range(STEPS * PAIRS)]


def directory(at: Path, **changes: Any) -> Path:
    """Write the tiny model with its tokenizer. Its tokenizer has fewer tokens than 400."""
    at = tiny.directory(at, "qwen3", vocab_size=400, **changes)
    tokenizer().save_pretrained(at)
    return at


def _arguments(out: Path, **more: Any) -> dict[str, Any]:
    return dict(
        output_dir=str(out), max_steps=STEPS, per_device_train_batch_size=PAIRS, gradient_accumulation_steps=1,
        learning_rate=OPTIM["lr"], adam_beta1=0.9, adam_beta2=0.999, weight_decay=0.0, max_grad_norm=1.0,
        lr_scheduler_type="constant", logging_steps=1, report_to=[], bf16=False, fp16=False, use_cpu=True,
        gradient_checkpointing=False, save_strategy="no", train_sampling_strategy="sequential", **more,
    )  # fmt: skip


def _logs(trainer: Any) -> list[dict[str, float]]:
    trainer.train()
    return [each for each in trainer.state.log_history if "loss" in each][:STEPS]


def dpo(model: Path, out: Path, kind: str) -> list[dict[str, float]]:
    import trl
    from datasets import Dataset

    trainer = trl.DPOTrainer(
        transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=trl.DPOConfig(**_arguments(out), max_length=None, **DPO[kind]),
        processing_class=transformers.AutoTokenizer.from_pretrained(model), train_dataset=Dataset.from_list(rows()),
    )  # fmt: skip
    names = {
        "loss": "loss", "rewards_chosen": "rewards/chosen", "rewards_rejected": "rewards/rejected",
        "margins": "rewards/margins", "accuracy": "rewards/accuracies", "grad_norm": "grad_norm",
    }  # fmt: skip
    return [{ours: float(step[theirs]) for ours, theirs in names.items()} for step in _logs(trainer)]


def reward(model: Path, out: Path) -> list[dict[str, float]]:
    import trl
    from datasets import Dataset

    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32)
    trainer = trl.RewardTrainer(
        classifier,
        args=trl.RewardConfig(**_arguments(out), max_length=None, center_rewards_coefficient=0.01),
        processing_class=transformers.AutoTokenizer.from_pretrained(model), train_dataset=Dataset.from_list(rows()),
    )  # fmt: skip
    names = {"loss": "loss", "margins": "margin", "accuracy": "accuracy", "grad_norm": "grad_norm"}
    return [{ours: float(step[theirs]) for ours, theirs in names.items()} for step in _logs(trainer)]


def classifier(at: Path) -> Path:
    """Write a reward model with one label, whose head is not drawn anew by each library."""
    model = directory(at / "lm")
    config = transformers.AutoConfig.from_pretrained(model, num_labels=1)
    torch.manual_seed(7)
    head = transformers.AutoModelForSequenceClassification.from_pretrained(model, config=config, dtype=torch.float32)
    head.config.pad_token_id = tokenizer().pad_token_id
    head.save_pretrained(at / "reward")
    tokenizer().save_pretrained(at / "reward")
    return at / "reward"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        model = directory(at / "m")
        numbers: dict[str, Any] = {kind: dpo(model, at / "out", kind) for kind in DPO}
        numbers["reward"] = reward(classifier(at / "r"), at / "out")
    STORED.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
