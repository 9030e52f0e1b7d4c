"""Train a tiny mixture of experts on chats and a text, through a kill and on two meshes, and prove the meshes right.

The script makes tokenizer and model, and the data are next to it: nothing is downloaded. Read it from `main` at the
bottom. Each part says what it shows, and runs `meshwright` commands that you can run yourself.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing needs the network
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # 2 million parameters load too fast for a progress bar

import torch
from rich.console import Console
from rich.padding import Padding
from rich.text import Text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import meshwright as mw
from meshwright.cli import main as command_line
from meshwright.log import quiet
from meshwright.train import read

ROOT = Path(__file__).parents[1]
FILES = {
    "run.toml": ROOT / "examples" / "demo.toml",
    "chats.jsonl": ROOT / "examples" / "chats.jsonl",
    "lighthouse.txt": ROOT / "examples" / "text" / "lighthouse.txt",
}
QUESTION = "What hurts most in large runs?"  # from the chats
BEGINNING = "The third keeper was learning"  # of a paragraph of the text
TEMPLATE = """
{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
""".strip()
CONFIG = {  # the fields of any Qwen3-MoE config.json, small; the tokenizer adds the rest
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "dtype": "bfloat16",  # of the files; training keeps float32 parameters
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "initializer_range": 0.05,  # the usual 0.02 suits wider models
    "tie_word_embeddings": False,
}
console = Console(highlight=False)


def make_directory(out: Path) -> None:
    """Write what you would bring: a run file, data, and a model with its tokenizer."""
    out.mkdir(exist_ok=True)
    for name, source in FILES.items():
        shutil.copy(source, out / name)
    tokenizer = make_tokenizer(out / "recipe")
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = {**CONFIG, **ids, "vocab_size": len(tokenizer)}
    (out / "recipe" / "config.json").write_text(json.dumps(config, indent=2))
    with quiet():
        mw.export(mw.init(out / "recipe", mw.Mesh(device="cpu"), seed=0), out / "start")  # random weights


def make_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    every_byte = pre_tokenizers.ByteLevel.alphabet()  # so that no text is unknown
    how = {"vocab_size": 1024, "special_tokens": special, "initial_alphabet": every_byte, "show_progress": False}
    bpe.train([str(FILES["chats.jsonl"]), str(FILES["lighthouse.txt"])], trainers.BpeTrainer(**how))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return tokenizer


def show_data(sets: list[str]) -> None:
    rule("1. What is trained on")
    tell(
        "Two sources: chats, of which only the assistant's turns are trained on, and a text. Look before you train: "
        "tokens in brackets are trained on. All rows are read and checked before a process starts."
    )
    say("data", "run.toml", "--show", "1", *set_of(sets))


def train(sets: list[str]) -> None:
    config = read("run.toml", sets)
    rule("2. Training, and what happens when a process dies")
    tell(
        "Two processes share one model: each stores half of the parameters and of the experts, and has its own data. "
        f"After step {config.save.every} this program kills one of them, as a machine out of memory does. All exit, "
        "and the last line names the one that failed first. (With max_restarts the run would restart by itself.)"
    )
    run = begin("train", "run.toml", *set_of(sets))
    wait(run, Path(config.out) / "checkpoints" / f"step-{config.save.every:06}")
    os.kill(ranks_of(run)[1], signal.SIGKILL)
    finish(run, 2)

    rule("3. The same run on another mesh")
    tell(
        "The same command resumes from the newest checkpoint. This time the mesh changes too: with tp=2 each process "
        "computes half of every layer, on the same data. No document is skipped, and none comes twice."
    )
    finish(begin("train", "run.toml", *set_of([*sets, "mesh.fsdp=1", "mesh.tp=2"])))


@torch.no_grad()
def sample() -> None:
    """Generate greedily, before and after the training."""
    rule("4. What came out")
    tell("runs/demo/export is a Hugging Face directory. transformers loads it, asks a question and begins a paragraph:")
    tokenizer = AutoTokenizer.from_pretrained("runs/demo/export")
    messages = [{"role": "user", "content": QUESTION}]
    prompts = {
        QUESTION: tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False),
        f"{BEGINNING} ...": BEGINNING,
    }
    for title, prompt in prompts.items():
        console.print(Text(title, style="bold"))
        for when, directory in {"before": "start", "after": "runs/demo/export"}.items():
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
            ids = tokenizer(prompt, return_tensors="pt")
            output = model.generate(**ids, do_sample=False, max_new_tokens=80)[0, ids.input_ids.shape[1] :]
            text = printable(tokenizer.decode(output, skip_special_tokens=True))
            console.print(Padding(Text.assemble((f"{when}: ", "dim"), (text, "green" * (when == "after"))), (0, 2)))


def printable(text: str) -> str:
    """Replace what cannot be printed: random weights generate parts of UTF-8 characters."""
    return "".join(each if each.isprintable() and each != "\ufffd" else "?" for each in text.strip())


def prove() -> None:
    rule("5. The proof, and a bug that it finds")
    tell(
        "Two processes must compute what one computes. verify trains a small model of the same kind on the mesh and on "
        "one process, and compares all that they do. Then it does the same with a bug in the mesh that others have "
        "shipped: the loss is the mean of the means of micro-batches, which are not equally long."
    )
    well = ["verify", "start", "--mesh", "fsdp=2,ep=2", "--dtypes", "float64", "--against", "none"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    runs = [begin(*well, **pipes), begin(*well, "--plant", "mean-of-means", **pipes)]
    console.print()  # both at once, since a part of each is one process
    print_lines(finish(runs[0]), ("G1", "K1"))
    console.print()
    print_lines(finish(runs[1], 1), ("S1", "G1", "float64 S1 loss", "begin"))
    console.print(
        "\nThe wrong loss is nearly right: no curve would show it. The gradients are wrong, and verify says so."
    )


def print_lines(output: str, begins: tuple[str, ...]) -> None:
    """Print the verdict, which comes first, and the lines that begin with one of `begins`."""
    verdict, *lines = output.splitlines()
    for line in (verdict, *(line for line in lines if line.startswith(begins))):
        style = "red" if re.search(r"\bFAILS\b|\bfails?:", line) else "green" if "all is well" in line else ""
        console.print(Text(f"  {line.rstrip()}", style=style), soft_wrap=True)


def report() -> None:
    rule("6. The report")
    tell("Curves, expert load, checkpoints, settings: one file that needs no network. Open it in a browser.")
    say("report", "runs/demo")


def rule(title: str) -> None:
    console.print()
    console.rule(f"[bold]{title}", align="left")


def tell(text: str) -> None:
    console.print(f"{text}\n")


def set_of(sets: list[str]) -> list[str]:
    return ["--set", *sets] if sets else []


def say(*arguments: str) -> None:
    """Run a meshwright command in this process."""
    announce(arguments)
    if code := command_line(arguments):
        sys.exit(f"demo: that command ended with exit code {code}")


def begin(*arguments: str, **pipes: Any) -> subprocess.Popen[str]:
    """Start a meshwright command in a new process, because it starts processes itself."""
    announce(arguments)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}  # two processes share the cores
    env |= {"COLUMNS": "200"} if pipes else {}  # so that no table line is wrapped, for `print_lines`
    return subprocess.Popen([sys.executable, "-m", "meshwright", *arguments], env=env, text=True, **pipes)


def announce(arguments: Sequence[str]) -> None:
    console.print(Text(f"$ meshwright {' '.join(arguments)}", style="bold"), soft_wrap=True)
    sys.stdout.flush()  # else, in a file, it would come after the output of the command


def finish(command: subprocess.Popen[str], code: int = 0) -> str:
    """Wait for a command, and return its output if it was piped. Exit if its exit code is not `code`."""
    output, errors = command.communicate()
    if command.returncode != code:
        sys.exit(f"demo: that command ended with exit code {command.returncode}\n{output or ''}{errors or ''}")
    return output or ""


def wait(command: subprocess.Popen[str], path: Path) -> None:
    """Wait until a running command has made a path. Exit if the command ends before."""
    while not path.exists():
        if command.poll() is not None:
            sys.exit(f"demo: that command ended with exit code {command.returncode} before it made {path.name}")
        time.sleep(0.05)


def ranks_of(command: subprocess.Popen[str]) -> list[int]:
    children = Path(
        f"/proc/{command.pid}/task/{command.pid}/children"
    )  # minimal Linux images have no pgrep, macOS has no /proc
    if children.is_file():
        return [int(pid) for pid in children.read_text().split()]
    listed = subprocess.run(["pgrep", "-P", str(command.pid)], capture_output=True, text=True, check=True)
    return [int(pid) for pid in listed.stdout.split()]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description=__doc__.split("\n")[0],
        epilog="example: python -m examples.demo --out runs/demo --set train.steps=100",
    )
    parser.add_argument("--out", type=Path, help="directory to fill, new or empty (default: a new temporary one)")
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="as in meshwright train")
    args = parser.parse_args()
    if args.out and args.out.exists() and not (args.out.is_dir() and not any(args.out.iterdir())):
        parser.error(f"--out {args.out} exists and is not an empty directory; choose another or remove it")
    try:
        read(FILES["run.toml"], args.set)
    except mw.ConfigError as error:
        parser.error(str(error))
    return args


def main() -> None:
    args, began = arguments(), time.monotonic()
    out = (args.out or Path(tempfile.mkdtemp(prefix="meshwright-demo-"))).resolve()
    make_directory(out)
    os.chdir(out)
    console.print(f"Everything is written to {out}; its run.toml is the run file.", soft_wrap=True)
    show_data(args.set)
    train(args.set)
    sample()
    prove()
    report()
    console.rule(align="left")
    console.print(f"{time.monotonic() - began:.0f} s. Read on: docs/finetune.md (your own chats), docs/verify.md (the")
    console.print("proof), docs/README.md (all pages). This program is examples/demo.py.")


if __name__ == "__main__":
    main()
