"""Train a tiny model by GRPO on two processes, with a rollout that takes turns with the trainer on the same device.

    python -m examples.grpo                   # a minute on 2 cores: no GPU, no download
    torchrun --nproc-per-node 2 -m examples.grpo --rows train.jsonl --model DIR --device cuda

Rows are verl's: `prompt` (messages), `reward_model.ground_truth`, `data_source`. The task of this example: repeat a
digit. You would bring rows, a reward and an inference engine; here transformers samples, one token after the other.

A round: every rank takes the weights (`mw.stream(ranks="all")`), the trainer sleeps, the rank samples answers to its
own prompts, the trainer wakes, and all ranks train on all answers. Read it from `train` on.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing needs the network

import torch
import transformers

import meshwright as mw
from meshwright.verify import run_ranks

ANSWERS, LONGEST, TEMPERATURE = 8, 3, 1.0  # a prompt has so many answers, of at most so many tokens
VOCAB = [*"0123456789", "repeat ", "?", "<end>"]
END = VOCAB.index("<end>")
Row = dict[str, Any]


def rows_of_example() -> list[Row]:
    """Make rows in verl's format, such as a parquet file has."""
    return [
        {"data_source": "repeat", "prompt": [{"role": "user", "content": f"repeat {digit}?"}],
         "reward_model": {"style": "rule", "ground_truth": str(digit)}}
        for digit in range(10)
    ]  # fmt: skip


def model_of_example(at: Path) -> None:
    """Write a tiny Qwen3 with random weights."""
    config = transformers.Qwen3Config(
        vocab_size=len(VOCAB), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(at)


def tokens_of(row: Row) -> list[int]:
    """Stand for a tokenizer with its chat template."""
    text, ids = "".join(message["content"] for message in row["prompt"]), []
    while text:
        piece = next(piece for piece in VOCAB if text.startswith(piece))
        ids.append(VOCAB.index(piece))
        text = text[len(piece) :]
    return ids


def reward_of(row: Row, answer: list[int]) -> float:
    """Return 1 for the right digit, and half a point more for an end right after it."""
    right = [VOCAB[token] for token in answer[:1]] == [row["reward_model"]["ground_truth"]]
    return float(right) + 0.5 * (right and answer[1:] == [END])


@torch.no_grad()
def sample(rollout: Any, prompt: list[int], draw: torch.Generator) -> list[int]:
    """Sample an answer: what vLLM or SGLang would do faster."""
    answer: list[int] = []
    while len(answer) < LONGEST and answer[-1:] != [END]:
        ids = torch.tensor([[*prompt, *answer]], device=rollout.device)
        probs = (rollout(input_ids=ids, use_cache=False).logits[0, -1].float() / TEMPERATURE).softmax(-1)
        answer.append(int(torch.multinomial(probs.cpu(), 1, generator=draw)))
    return answer


def grpo(scores: Any, fields: Any, docs: Any) -> Any:
    """Clip the ratio, and take advantages relative to the answers of the same prompt (arXiv 2402.03300)."""
    reward = docs.mean(fields["reward"])
    mean = docs.group_spread(docs.group_mean(reward))
    std = docs.group_spread(docs.group_mean((reward - mean).square())).sqrt()
    advantage = docs.spread((reward - mean) / (std + 1e-4))
    ratio = (scores["logprobs"] - fields["old"]).exp()
    terms = docs.mean(-(ratio * advantage).minimum(ratio.clamp(0.8, 1.2) * advantage))
    figures = {"reward": docs.group_mean(reward), "entropy": docs.group_mean(docs.mean(scores["entropy"]))}
    return docs.group_mean(terms), figures


def train(model: Path, rows: list[Row], rounds: int, device: str) -> list[float]:
    """Run the loop on this rank, and return the mean reward of each round."""
    mesh = mw.Mesh(fsdp=int(os.environ.get("WORLD_SIZE", "1")), device=device)
    policy = mw.load(model, mesh)
    loss = mw.Loss(grpo, per="group", metrics=("reward", "entropy"))
    engine = mw.Engine(
        policy, lr=3e-3, loss=loss, entropy=True, temperature=TEMPERATURE, optimizer=mw.AdamW(weight_decay=0.0),
        on_nonfinite="skip",
    )  # fmt: skip
    rollout = transformers.AutoModelForCausalLM.from_pretrained(model).to(mesh.device).eval()
    weights, rewards = rollout.state_dict(), []
    draw = torch.Generator().manual_seed(mesh.rank)
    for number in range(rounds):
        for name, tensor in mw.stream(policy, ranks="all"):
            weights[name].copy_(tensor)
        engine.sleep()  # frees the device for the rollout; the weights have been handed over
        own = [(n, sample(rollout, tokens_of(rows[n]), draw)) for n in range(mesh.rank, len(rows), mesh.axes.world)
               for _ in range(ANSWERS)]  # fmt: skip
        engine.wake()
        answers = [each for of_rank in mesh.gather_objects(own, ("fsdp",)) for each in of_rank]
        record = engine.step(batches_of(policy, rows, answers))
        rewards.append(record.metrics["reward"])
        if not mesh.rank and number % 5 == 0:
            print(f"round {number:3}: reward {rewards[-1]:.2f} of 1.5, entropy {record.metrics['entropy']:.2f}")
    return rewards


def batches_of(policy: mw.Model, rows: list[Row], answers: list[tuple[int, list[int]]]) -> list[mw.Batch]:
    """Pack all answers, with those to one prompt in one micro-batch, and add the log-probabilities of this policy."""
    prompts = [tokens_of(rows[n]) for n, _ in answers]
    documents = [prompt + answer for prompt, (_, answer) in zip(prompts, answers, strict=True)]
    masks = [[0] * len(prompt) + [1] * len(answer) for prompt, (_, answer) in zip(prompts, answers, strict=True)]
    rewards = [[reward_of(rows[n], answer)] * len(d) for d, (n, answer) in zip(documents, answers, strict=True)]
    batches = mw.batches(
        documents, policy.mesh, max_tokens=256, trained=masks, fields={"reward": mw.over_tokens(rewards)},
        groups=[n for n, _ in answers],
    )  # fmt: skip
    old = mw.logprobs(policy, batches, temperature=TEMPERATURE)
    return [batch.with_fields(old=each) for batch, each in zip(batches, old, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model directory; by default a tiny one is made")
    parser.add_argument("--rows", type=Path, help="a JSON Lines file of rows in verl's format")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.rows.open()] if options.rows else rows_of_example()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or Path(folder) / "model"
        if "WORLD_SIZE" in os.environ:
            if not options.model:
                parser.error("with torchrun give --model: its ranks share no folder")
            train(model, rows, options.rounds, options.device)
            return
        if not options.model:
            model_of_example(model)
        rewards = run_ranks(2, train, model, rows, options.rounds, options.device, seconds=600.0)[0]
    print(f"reward {sum(rewards[:3]) / 3:.2f} in the first rounds, {sum(rewards[-3:]) / 3:.2f} in the last")


if __name__ == "__main__":
    main()
