"""Compare the losses of `meshwright train` with those of TRL's SFTTrainer, step by step, in one process in float32.

    pip install trl accelerate -c requirements/constraints.txt
    python -m bench.trl

Both train the same tiny Qwen3 on the same chats in the same order, with AdamW and a constant learning rate. Each stream
holds one chat, so our step is a step of TRL with 2 accumulation steps. With `turns = "joined"` a chat is rendered once,
and the generation marks of its template select the trained tokens, as in TRL: the losses agree. With the default,
"each", the newline after a turn is not trained on, because no server waits for it: the losses differ by that newline.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import torch

import meshwright as mw
from tests import runs

STEPS, LENGTH, RATE = 8, 128, 1e-3
TEMPLATE = """
{%- for m in messages -%}
  {{- '<|im_start|>' + m.role + '\\n' -}}
  {%- if m.role == 'assistant' -%}
    {%- generation -%}{{- m.content + '<|im_end|>\\n' -}}{%- endgeneration -%}
  {%- else -%}{{- m.content + '<|im_end|>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
""".strip()


def chats() -> list[dict[str, Any]]:
    """Make chats that are longer than half a stream, so that no stream holds two."""
    dice = random.Random(0)

    def text(num: int) -> str:
        return "".join(dice.choice("abcdefgh ") for _ in range(num))

    return [
        {"messages": [
            {"role": "user", "content": text(dice.randint(8, 20))}, {"role": "assistant", "content": text(12)},
            {"role": "user", "content": text(dice.randint(8, 20))}, {"role": "assistant", "content": text(30)},
        ]}
        for _ in range(2 * STEPS)
    ]  # fmt: skip


def ours(at: Path, model: Path, turns: str) -> tuple[list[float], list[int]]:
    """Train, and return the losses and the rows in the order of training."""
    config = mw.train.config_of(
        model=str(model), out=str(at / turns), cache=str(at / "cache"),
        data=[{"path": str(at / "chats.jsonl"), "turns": turns}],
        train={"length": LENGTH, "tokens_per_step": 2 * LENGTH, "dtype": "float32"},
        optim={"lr": RATE, "schedule": "constant", "warmup": 0, "betas": [0.9, 0.999], "weight_decay": 0.0},
        save={"export": False},
    )  # fmt: skip
    trainer = mw.Trainer(config)
    streams = [trainer.data.plan.stream(j) for j in range(trainer.data.plan.num_streams)]
    assert all(len(stream) == 1 for stream in streams), "a stream holds more than one chat"
    rows = [stream[0].document for stream in streams]
    return [record.loss for record in trainer.steps() if record is not None], rows


def with_trl(at: Path, model: Path, rows: list[dict[str, Any]]) -> list[float]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        output_dir=str(at / "trl"), per_device_train_batch_size=1, gradient_accumulation_steps=2, max_steps=STEPS,
        learning_rate=RATE, lr_scheduler_type="constant", adam_beta2=0.999, weight_decay=0.0, max_grad_norm=1.0,
        assistant_only_loss=True, max_length=None, bf16=False, gradient_checkpointing=False, logging_steps=1,
        train_sampling_strategy="sequential", report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), args=arguments,
        train_dataset=Dataset.from_list(rows), processing_class=AutoTokenizer.from_pretrained(model),
    )  # fmt: skip
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def compare(at: Path) -> None:
    model = runs.source(at / "model", "qwen3_tied")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    rows = chats()
    (at / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with contextlib.redirect_stdout(io.StringIO()):
        joined, order = ours(at, model, "joined")
        each, same = ours(at, model, "each")
        assert order == same
        peer = with_trl(at, model, [rows[number] for number in order])
    print(f"{'step':>4}  {'TRL':>9}  {'joined':>9}  {'apart':>8}  {'each':>9}  {'apart':>8}")
    for step, (a, b, c) in enumerate(zip(peer, joined, each, strict=True), 1):
        print(f"{step:>4}  {a:9.6f}  {b:9.6f}  {abs(a - b):8.1e}  {c:9.6f}  {abs(a - c):8.1e}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder))
