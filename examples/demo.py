"""Train a tiny mixture of experts on two processes, see what it learnt, and prove that two compute what one computes.

Tokenizer, model and data are made here, from the text beside this file: nothing is downloaded. Read it from `main`
at the bottom: prepare a directory, train from it under torchrun, look at what training exported, prove the mesh.
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
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import meshwright as mw
from meshwright.engine.bill import step_bill
from meshwright.errors import counted
from meshwright.log import quiet

TEXT = Path(__file__).with_name("text") / "lighthouse.txt"  # short, so that a minute is enough to learn it by heart
BEGINNING = "The third keeper was learning"  # of a paragraph that the trained model goes on with
END, PAD = "<|endoftext|>", "<|pad|>"
LENGTH = 192  # tokens of a micro-batch; no paragraph of the text is longer
MICRO_BATCHES = 2  # per step and data rank
MESH = {"fsdp": 2, "ep": 2}
ROOT = Path(__file__).parents[1]
CONFIG = {  # the fields of any Qwen3-MoE config.json, small; the tokenizer adds the rest
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "dtype": "bfloat16",  # of the files; training keeps its parameters in float32
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
    return TEXT.read_text("utf-8").strip().split("\n\n")


def make_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    every_byte = pre_tokenizers.ByteLevel.alphabet()  # so that no text is unknown
    special = {"special_tokens": [END, PAD], "initial_alphabet": every_byte}
    bpe.train_from_iterator(paragraphs(), trainers.BpeTrainer(vocab_size=768, show_progress=False, **special))
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


def documents(directory: Path) -> list[list[int]]:
    """Token ids of the paragraphs."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return [tokenizer(text + END)["input_ids"] for text in paragraphs()]


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
    mesh = mw.Mesh(**MESH, device="cpu")  # with two GPUs, leave `device` out
    model = mw.load(out / "start", mesh, dtype=torch.float32)  # what older CPUs are fast in; left out, it is bfloat16
    engine = mw.Engine(model, lr=warmup_cosine(num_steps))
    console = Console(highlight=False, quiet=mesh.rank > 0)
    rank, num_ranks = mesh.data_rank, mesh.num_data_ranks
    mine = itertools.islice(streams(documents(out / "start")), rank, None, num_ranks)  # every second batch

    print_halves(console, model)
    record = fit(console, engine, mine, num_steps)
    print_experts(console, record, mesh)
    mw.export(model, out / "trained")  # both processes call it, as they call step: they work together
    torch.distributed.destroy_process_group()  # a process that just ends can abort when its network threads still run


def print_halves(console: Console, model: mw.Model) -> None:
    """What this process stores and sends: the bill is known before a step runs."""
    stored = sum(tensor.numel() for tensor in model.stored().values())
    charges = step_bill(model, LENGTH, MICRO_BATCHES)
    count, sent = sum(c.count for c in charges), sum(c.count * c.num_bytes for c in charges)
    console.print(f"{model}")
    console.print(
        f"each process stores {stored:,} of them, and computes {CONFIG['num_experts'] // 2} experts of a layer"
    )
    console.print(f"the bill of a step: {counted(count, 'collective')}, {decimal(sent)} for each process")
    console.print(f"loading sent nothing: {counted(len(model.load_bill), 'collective')}\n")


def fit(console: Console, engine: mw.Engine, batches: Iterator[mw.Batch], num_steps: int) -> mw.StepRecord:
    """Every step shows in a status line, if this is a terminal; every tenth leaves a line behind, also in a file."""
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
    return record


def print_experts(console: Console, record: mw.StepRecord, mesh: mw.Mesh) -> None:
    """How many tokens went to each expert. A router that sends all to one would show here."""
    assert record.expert_load is not None  # there are experts
    load_E = record.expert_load.sum(0).tolist()
    mark = "#" if console.options.ascii_only else "\u2588"
    each = len(load_E) // mesh.axes.ep
    console.print("\ntokens that each expert got in the last step, all layers together")
    for expert, num in enumerate(load_E):
        bar = mark * round(40 * num / max(load_E))
        console.print(f"  process {expert // each}, expert {expert}  {num:5,.0f}  [cyan]{bar}[/]")


def launch(out: Path, num_steps: int) -> None:
    """torchrun starts two processes, as it would on a cluster. They print for themselves, what went wrong included."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "examples.demo", "--worker", str(out), "--steps", str(num_steps)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # two processes share the cores; each would take them all
    code = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
    if code:
        sys.exit(f"demo: training failed (exit code {code}); the message of the process that failed stands above")


@torch.no_grad()
def compare(out: Path, mesh: mw.Mesh, console: Console) -> None:
    """transformers loads what training exported, and goes on with a paragraph: it takes the likeliest token each time.
    Our logits of documents packed into one stream are those that transformers gives of each document alone."""
    tokenizer, docs = AutoTokenizer.from_pretrained(out / "trained"), documents(out / "trained")
    begun = tokenizer(BEGINNING)["input_ids"]
    original = next(doc for doc in docs if doc[: len(begun)] == begun)
    how = {"do_sample": False, "max_new_tokens": len(original) - len(begun)}
    said = {}
    for name in ("start", "trained"):
        theirs = AutoModelForCausalLM.from_pretrained(out / name, dtype=torch.float32)
        said[name] = theirs.generate(torch.tensor([begun]), **how)[0].tolist()
    print_sample(console, tokenizer, begun, original, said)

    ours = mw.load(out / "trained", mesh, dtype=torch.float32)
    alone = torch.cat([theirs(torch.tensor([doc])).logits[0] for doc in docs[:3]])
    worst = (mw.logits(ours, mw.pack(docs[:3])) - alone).abs().max().item()
    console.print(f"largest difference to the logits of transformers (float32): {worst:.1e}")
    if not worst < 1e-4:  # also when it is nan
        sys.exit(f"demo: {out / 'trained'} means one thing to meshwright and another to transformers")


def print_sample(
    console: Console,
    tokenizer: PreTrainedTokenizerFast,
    begun: list[int],
    original: list[int],
    said: dict[str, list[int]],
) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 1, 0))
    for name, ids in {
        "the text": original,
        "before training": said["start"],
        "after training": said["trained"],
    }.items():
        text = tokenizer.decode(ids[len(begun) :], skip_special_tokens=True)
        shown = "".join(c if c.isprintable() and c != "\ufffd" else "?" for c in text)  # half of a letter, at random
        style = "green" if ids == original else ""
        table.add_row(Text(name, style="bold"), Text.assemble((BEGINNING, "bold"), (shown, style)))
    console.print(table)
    pairs = zip(original[len(begun) :], said["trained"][len(begun) :], strict=False)
    same, num = sum(a == b for a, b in pairs), len(original) - len(begun)
    how = "learnt by heart, nothing more" if same == num else "it is not learnt yet; --steps 50 are enough"
    console.print(f"after training, {same} of {num} tokens are those of the text: {how}")


def prove(start: Path, console: Console) -> None:
    """`meshwright verify` for this model on this mesh; then once more with a bug in the two processes."""
    console.print("verify trains a small model of the same kind on two processes and on one, and compares all they do.")
    mesh = ",".join(f"{axis}={size}" for axis, size in MESH.items())
    well = ["verify", str(start), "--mesh", mesh, "--dtypes", "float64", "--against", "none"]
    planted = [*well, "--plant", "mean-of-means"]
    runs = [run_beside(command) for command in (well, planted)]  # both at once: a part of each is one process
    print_run(console, well, runs[0], 0, ("G1", "K1", "all is"))
    console.print(
        "\nNow with a common bug: the loss is a mean of the means of micro-batches, which are not equally long."
    )
    print_run(console, planted, runs[1], 1, ("S1", "G1", "float64 S1 loss", "begin"))
    console.print("\nThe loss is so nearly right that no curve would have shown it. The gradients are not.")


def run_beside(command: list[str]) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}  # wide, so that no line is cut
    pipe = subprocess.PIPE
    whole = [sys.executable, "-m", "meshwright", *command]
    return subprocess.Popen(whole, cwd=ROOT, env=env, text=True, stdout=pipe, stderr=pipe)


def print_run(
    console: Console, command: list[str], run: subprocess.Popen[str], code: int, begins: tuple[str, ...]
) -> None:
    """Of what it says the lines that begin so. It must end with this exit code."""
    said, errors = run.communicate()
    if run.returncode != code:
        sys.exit(f"demo: meshwright {' '.join(command)} ended with exit code {run.returncode}\n{said}{errors}")
    console.print(Text(f"$ meshwright {' '.join(command)}", style="bold"), soft_wrap=True)
    for line in said.splitlines():
        if line.startswith(begins):
            style = "red" if "FAILS" in line else "green" if "all is well" in line else ""
            console.print(Text(f"  {line.rstrip()}", style=style), soft_wrap=True)


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
    with quiet():  # of loading and exporting: the demo tells of its own
        if args.worker:
            work(args.worker, args.steps)
        else:
            show(args)


def show(args: argparse.Namespace) -> None:
    began, console = time.monotonic(), Console(highlight=False)
    out = (args.out or Path(tempfile.mkdtemp(prefix="meshwright-demo-"))).resolve()
    mesh = mw.Mesh(device="cpu")  # one process: this one
    console.rule("[bold]1. Two processes train one mixture of experts", align="left")
    console.print("Each has half of the parameters (fsdp=2), half of the experts (ep=2), and data of its own.\n")
    make_model(out / "recipe", out / "start", mesh)  # a directory to start from: in real life you download it
    launch(out, args.steps)  # train from it: two processes run `work`
    console.print()
    console.rule("[bold]2. What came out: a Hugging Face directory", align="left")
    console.print(f"{out / 'trained'}, loaded by transformers\n", soft_wrap=True)
    compare(out, mesh, console)
    console.print()
    console.rule("[bold]3. The proof: two processes compute what one computes", align="left")
    prove(out / "start", console)
    console.rule(align="left")
    console.print(f"{time.monotonic() - began:.0f} s. Read on: docs/train.md (training), docs/verify.md (the proof),")
    console.print("docs/README.md (all pages); this program is examples/demo.py")


if __name__ == "__main__":
    main()
