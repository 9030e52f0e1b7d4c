"""Compare log-probabilities between transformers, one process and every mesh, in float32 and bfloat16.

    python -m bench.agreement                               # two models, six meshes
    python -m bench.agreement --models qwen3_moe --meshes fsdp=2,tp=2 --append
    python -m bench.agreement --source DIR --device cuda    # a model of yours; one process against transformers

In RL the trainer scores tokens that a rollout engine sampled. What the two disagree about is in every ratio, so a
trainer should add nothing of its own: its numbers should not depend on the mesh. The table has, for the labels of a few
documents, how far log-probabilities are from those of one process in float64: the largest and the mean distance, and
the KL divergence as RL loops estimate it (k3: the mean of ratio - 1 - log ratio). "of one
process" is the same distance to one process in the same dtype: what the mesh alone adds.

The models are those of bench/step.py. Their vocabulary matrix is multiplied by 8, so that predictions have an entropy
of some 4 nats, like those of a trained model; with the weights as drawn they would be nearly uniform, and agree.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import tempfile
from math import prod
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import meshwright as mw
from bench.step import MODELS, make
from meshwright.verify import run_ranks

SIZES = [37, 301, 5, 128, 76, 230]
MESHES = ["fsdp=2", "tp=2", "cp=2", "pp=2", "tp=4", "fsdp=2,tp=2"]
OF_EXPERTS = ["ep=2,fsdp=2", "fsdp=2,tp=2,ep=4"]
SHARPER = 8.0
Scores = list[Tensor]  # log-probabilities by document


def documents(vocab: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(2)
    return [torch.randint(min(vocab, 32000), (size,), generator=draw).tolist() for size in SIZES]


def ours(directory: Path, dtype: torch.dtype, device: str, **axes: int) -> Scores:
    """Score all documents on a mesh, as micro-batches of the same call."""
    mesh = mw.Mesh(**axes, device=device)
    model = mw.load(directory, mesh, dtype=dtype, train=[])
    batches = mw.batches(documents(model.blueprint.vocab), mesh, max_tokens=384)
    return [each.cpu().double() for each in mw.by_document(mesh, batches, mw.logprobs(model, batches))]


@torch.no_grad()
def peer(directory: Path, dtype: torch.dtype, device: str) -> Scores:
    """Score each document alone by transformers; a softmax of its logits in float32, as its Trainer takes it."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device)
    scores = []
    for tokens in documents(model.config.get_text_config().vocab_size):
        ids = torch.tensor([tokens], device=device)
        wide = torch.promote_types(dtype, torch.float32)
        logs = model(input_ids=ids, use_cache=False).logits[0, :-1].to(wide).log_softmax(-1)
        of_label = logs.gather(1, ids[0, 1:, None])[:, 0]
        scores.append(torch.cat([of_label, of_label.new_zeros(1)]).cpu().double())
    return scores


def flat(scores: Scores) -> Tensor:
    """Join the scores of all labels: the last token of a document has none."""
    return torch.cat([each[:-1] for each in scores])


def distance(scores: Scores, exact: Scores) -> tuple[float, float, float]:
    """Return the largest and the mean distance, and the KL estimate of the exact policy from these scores."""
    log_ratio = flat(scores) - flat(exact)
    return float(log_ratio.abs().max()), float(log_ratio.abs().mean()), float((log_ratio.expm1() - log_ratio).mean())


def sharpened(recipe: Path) -> None:
    """Write a model with random weights, and multiply its vocabulary matrix."""
    run_ranks(1, make, recipe, seconds=600.0)
    at = recipe / "m" / "model.safetensors"
    tensors = load_file(at)
    tensors["lm_head.weight"] *= SHARPER
    save_file(tensors, at, metadata={"format": "pt"})


def rows(name: str, directory: Path, meshes: list[str], device: str) -> list[str]:
    """Return the rows of a model."""
    alone = functools.partial(run_ranks, 1, seconds=1200.0)
    (exact,) = alone(ours, directory, torch.float64, device)
    lines = []
    for dtype in (torch.float32, torch.bfloat16):
        (one,) = alone(ours, directory, dtype, device)
        cases: dict[str, Scores] = {"transformers": alone(peer, directory, dtype, device)[0], "one process": one}
        for mesh in meshes:
            axes = {key: int(size) for key, size in (part.split("=") for part in mesh.split(","))}
            world = prod(size for axis, size in axes.items() if axis != "ep")
            case = functools.partial(ours, **axes)
            cases[mesh] = run_ranks(world, case, directory, dtype, device, seconds=1200.0)[0]
        for case_name, scores in cases.items():
            most, mean, kl = distance(scores, exact)
            of_one = distance(scores, one)[0] if case_name not in ("transformers", "one process") else None
            added = "" if of_one is None else f"{of_one:.1e}"
            kind = str(dtype).removeprefix("torch.")
            lines.append(f"| {name} | {kind} | {case_name} | {most:.1e} | {mean:.1e} | {kl:.1e} | {added} |")
            print(lines[-1], flush=True)
    return lines


def heading() -> str:
    stamp = datetime.datetime.now().strftime("%Y-%m-%d")
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}"
    return (
        f"\n## Agreement of log-probabilities, {stamp}\n\n{versions}, one thread a rank. Distances to one process in "
        f"float64, over {sum(SIZES) - len(SIZES)} labels.\n\n"
        "| model | dtype | scored by | largest | mean | KL (k3) | largest, to one process in this dtype |\n"
        "|---|---|---|---|---|---|---|"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["qwen3", "qwen3_moe"])
    parser.add_argument("--meshes", nargs="*", help='such as "fsdp=2,tp=2"')
    parser.add_argument("--source", type=Path, help="a model directory, instead of the small models")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--append", action="store_true", help="add the table to bench/results.md")
    options = parser.parse_args()
    lines = [heading()]
    print(lines[0], flush=True)
    if options.source:
        lines += rows(options.source.name, options.source, options.meshes or [], options.device)
    for name in [] if options.source else options.models:
        with tempfile.TemporaryDirectory() as folder:
            recipe = Path(folder)
            (recipe / "config.json").write_text(json.dumps({**MODELS[name], "dtype": "float32"}))
            sharpened(recipe)
            of_experts = OF_EXPERTS if "num_experts" in MODELS[name] else []
            meshes = [*MESHES, *of_experts] if options.meshes is None else options.meshes
            lines += rows(name, recipe / "m", meshes, options.device)
    if options.append:
        with (Path(__file__).parent / "results.md").open("a") as out:
            out.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
