"""Train a tiny mixture-of-experts model on two processes, and prove that what comes out is a Hugging Face model.

Tokenizer, model and data are made here, from the text beside this file: nothing is downloaded. Read it from `main`
at the bottom: prepare a directory, train from it under torchrun, check what training exported.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: everything is here, nothing is to be asked for
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # its bar for 2 million parameters is gone before it can be read

import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import meshwright as mw

TEXT = Path(__file__).with_name("text")
END, PAD = "<|endoftext|>", "<|pad|>"
LENGTH = 192  # tokens of a micro-batch; no paragraph of the text is longer
MICRO_BATCHES = 2  # per step and data rank
CONFIG = {  # the fields of any Qwen3-MoE config.json, small; the tokenizer adds the rest
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "dtype": "bfloat16",  # of the files; training computes in bfloat16 too, and keeps its parameters in float32
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "initializer_range": 0.05,  # the usual 0.02 is for models that are wider
    "tie_word_embeddings": False,
}


def paragraphs() -> list[str]:
    """The documents: unequal, as real ones are."""
    return [p for path in sorted(TEXT.glob("*.txt")) for p in path.read_text("utf-8").strip().split("\n\n")]


def make_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    every_byte = pre_tokenizers.ByteLevel.alphabet()  # so that no text is unknown
    special = {"special_tokens": [END, PAD], "initial_alphabet": every_byte}
    bpe.train_from_iterator(paragraphs(), trainers.BpeTrainer(vocab_size=1024, show_progress=False, **special))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=PAD)
    tokenizer.save_pretrained(directory)
    return tokenizer


def make_model(recipe: Path, start: Path, mesh: mw.Mesh) -> None:
    """`recipe` holds a config and a tokenizer; `start` gets these and random weights."""
    tokenizer = make_tokenizer(recipe)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (recipe / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": len(tokenizer), **ids}, indent=2))
    model = mw.init(recipe, mesh, seed=0)
    mw.export(model, start)
    print(f"{start}: {model}")


def documents(directory: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of the paragraphs to train on, and of every twelfth, held out."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = [tokenizer(text + END)["input_ids"] for text in paragraphs()]
    return [d for i, d in enumerate(ids) if i % 12], ids[::12]


def streams(docs: list[list[int]]) -> Iterator[mw.Batch]:
    """Whole documents, packed into batches of equal length; every round in a new order, which all processes share."""
    order, waiting = random.Random(0), []
    while True:
        for doc in order.sample(docs, len(docs)):
            if waiting and sum(map(len, waiting)) + len(doc) > LENGTH:
                yield mw.pack(waiting, length=LENGTH)
                waiting = []
            waiting.append(doc)


def warmup_cosine(num_steps: int, peak: float = 4e-3) -> Callable[[int], float]:
    warmup = max(1, num_steps // 10)
    return lambda step: peak * min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / num_steps))


def work(out: Path, num_steps: int) -> None:
    """What both processes run. Each has half of every parameter (fsdp), half of the experts (ep), data of its own."""
    mesh = mw.Mesh(fsdp=2, ep=2, device="cpu")  # with two GPUs, leave `device` out
    model = mw.load(out / "start", mesh)
    engine = mw.Engine(model, lr=warmup_cosine(num_steps))
    rank, num_ranks = mesh.data_rank, mesh.num_data_ranks
    train, held_out = documents(out / "start")
    held = [mw.pack(held_out[rank::num_ranks], length=4 * LENGTH)]
    mine = itertools.islice(streams(train), rank, None, num_ranks)  # of two processes, each takes every second batch

    before = engine.evaluate(held)  # all processes call it, as they call step and export: they work together
    fit(engine, mine, num_steps)
    after = engine.evaluate(held)
    if mesh.rank == 0:
        print(f"held-out loss: {before:.3f} before training, {after:.3f} after {num_steps} steps")
    mw.export(model, out / "trained")
    torch.distributed.destroy_process_group()  # a process that just ends can abort when its network threads still run


def fit(engine: mw.Engine, batches: Iterator[mw.Batch], num_steps: int) -> None:
    """Every step shows in a status line, if this is a terminal; every tenth leaves a line behind, also in a file."""
    console = Console(highlight=False, quiet=engine.model.mesh.rank > 0)
    with console.status("training") as status:
        for step in range(1, num_steps + 1):
            began = time.perf_counter()
            record = engine.step(list(itertools.islice(batches, MICRO_BATCHES)))
            rate = record.num_tokens / (time.perf_counter() - began)
            line = f"step {step:3}/{num_steps}  loss {record.loss:.3f}  grad norm {record.grad_norm:.2f}"
            line += f"  lr {record.lr:.1e}  {rate:,.0f} tokens/s"
            status.update(line)
            if step in (1, num_steps) or step % 10 == 0:
                console.print(line)


def launch(out: Path, num_steps: int) -> None:
    """torchrun starts two processes, as it would on a cluster. They print for themselves, what went wrong included."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "examples.demo", "--worker", str(out), "--steps", str(num_steps)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # two processes share the cores; each would take them all
    code = subprocess.run(command, cwd=TEXT.parents[1], env=env, check=False).returncode
    if code:
        sys.exit(f"demo: training failed (exit code {code}); the message of the process that failed stands above")


@torch.no_grad()
def compare(trained: Path, mesh: mw.Mesh) -> None:
    """Our logits of three documents packed into one stream against transformers' logits of each document alone."""
    theirs = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32)
    ours = mw.load(trained, mesh, dtype=torch.float32)
    docs = documents(trained)[1][:3]
    alone = [theirs(torch.tensor([doc])).logits[0] for doc in docs]
    worst = (mw.logits(ours, mw.pack(docs)) - torch.cat(alone)).abs().max().item()
    print(f"largest difference to the logits of transformers (float32): {worst:.1e}")
    if not worst < 1e-4:  # also when it is nan
        sys.exit(f"demo: {trained} means one thing to meshwright and another to transformers")
    tokenizer = AutoTokenizer.from_pretrained(trained)
    torch.manual_seed(0)
    how = {"do_sample": True, "temperature": 0.5, "min_new_tokens": 40, "max_new_tokens": 40}
    ids = theirs.generate(**tokenizer("When the river", return_tensors="pt"), **how)
    print(f"transformers continues: {tokenizer.decode(ids[0])!r}")  # a minute of training buys words, not sense


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description=__doc__.split("\n")[0],
        epilog="example: python -m examples.demo --out runs/demo --steps 200",
    )
    parser.add_argument("--out", type=Path, help="directory to fill, new or empty (default: a new temporary one)")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # how `launch` starts the processes
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: choose 1 or more")
    if args.out and args.out.exists() and not (args.out.is_dir() and not any(args.out.iterdir())):
        parser.error(f"--out {args.out} exists and is not an empty directory; choose another or remove it")
    return args


def main() -> None:
    args = arguments()
    sys.stdout.reconfigure(line_buffering=True)  # else, in a file, our lines would come after those of the processes
    if args.worker:
        work(args.worker, args.steps)
        return
    out = (args.out or Path(tempfile.mkdtemp(prefix="meshwright-demo-"))).resolve()
    mesh = mw.Mesh(device="cpu")  # one process: this one
    make_model(out / "recipe", out / "start", mesh)  # a directory to start from: in real life you download it
    launch(out, args.steps)  # train from it: two processes run `work`
    compare(out / "trained", mesh)  # is it the same model to everybody else?
    print(f"the trained model, a Hugging Face directory: {out / 'trained'}")


if __name__ == "__main__":
    main()
