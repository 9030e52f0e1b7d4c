"""One-line bugs, planted in a copy of the package one at a time, and what `meshwright verify` says of each.

    python -m tests.mutants                  # all of them: 12 minutes on two cores
    python -m tests.mutants 10 12 26         # some, by number; from 27 mutants_chosen.py, from 53 mutants_blind.py
    python -m tests.mutants --write          # the table of docs/mutants.md too

A bug is a text that stands once in a file, and what stands in its place. `place`: the files to which the findings must
lead, by the row of docs/tour.md of the first oracle that fails, or by a name in the first findings. A mutant is caught
if verify ends with findings.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "mutants.md"
MOE, HYBRID, DENSE = "tiny-qwen3-moe", "tiny-qwen3.5-moe", "tiny-qwen3"


@dataclass(frozen=True)
class Mutant:
    number: int
    what: str
    file: str
    old: str
    new: str
    model: str
    mesh: str
    place: str  # a pattern of the first finding that leads to the file
    why: str = ""  # it changes numbers, files or collectives on that model and mesh


@dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    oracles: str  # those that found something, by run
    first: str  # finding
    led: bool
    seconds: float


MUTANTS = [
    Mutant(1, "the owner of an element ignores replicas", "sharding/rules.py",
           "holders(piece.param, spec.rules, axes, rank)[0] == rank",
           "min(r for r in holders(piece.param, spec.rules, axes, rank) "
           "if axes.coords(r)['replicate'] == axes.coords(rank)['replicate']) == rank",
           DENSE, "replicate=2,fsdp=2", r"T1 \S+: |N1 norm"),
    Mutant(2, "float32 parameters are not summed over replicas", "sharding/rules.py",
           "return () if param.float32 else (\"replicate\", *placement.shard)",
           "return (\"replicate\",) if param.float32 else (\"replicate\", *placement.shard)",
           HYBRID, "replicate=2", r"sum over replicate|sums of gradients"),
    Mutant(3, "the last sums run over the first axis alone", "parallel/gradient_sums.py",
           "live = tuple(a for a in axes if mesh.axes.size_of(a) > 1)",
           "live = tuple(a for a in axes if mesh.axes.size_of(a) > 1)[:1]",
           HYBRID, "fsdp=2,tp=2", r"a sum over|sums of gradients"),
    Mutant(4, "replicas are summed after the first micro-batch", "parallel/run_step.py",
           "is_last = step.stage, step.batch == len(self.batches) - 1", "is_last = step.stage, step.batch == 0",
           DENSE, "replicate=2", r"replicate|a sum"),
    Mutant(5, "the way back of a gathering averages", "mesh/collectives.py",
           "return scatter_sum(d, ctx.size, ctx.group), None, None, None",
           "return scatter_sum(d, ctx.size, ctx.group) / ctx.size, None, None, None",
           DENSE, "tp=2", r"tp|way back|averaged"),
    Mutant(6, "rows of experts come back in the wrong order", "parallel/expert.py",
           "return sums(group.exchange(ops.reordered(y_ND, back_N, order_N), sent",
           "return sums(group.exchange(ops.reordered(y_ND, order_N, back_N), sent",
           MOE, "fsdp=2,ep=2", r"D1 layers\.\d+\.mlp"),
    Mutant(7, "pooled counts leave tp out", "engine/router.py",
           "return Sum(\"the router's pooled counts\", TOKENS,",
           "return Sum(\"the router's pooled counts\", TOKENS[:-1],",
           MOE, "tp=2", r"router|aux loss"),
    Mutant(8, "counts of the router go stale", "engine/router.py",
           "self._here_LE = torch.zeros_like(self.load_LE)\n\n    def set_slope",
           "self._here_LE = torch.zeros_like(self.load_LE)\n        self.forget = lambda: None\n\n    def set_slope",
           MOE, "fsdp=2", r"load of experts|router"),
    Mutant(9, "clipping scales the gradients that a rank owns, and no copies", "engine/engine.py",
           "torch._foreach_mul_([*grads.values()],",
           "torch._foreach_mul_([g for n, g in grads.items() if n in self.model.owned],",
           DENSE, "tp=2", r"G2|U1|O1"),
    Mutant(10, "the lr of the next step is taken", "engine/engine.py",
           "lr_of_step(self.lr(self.steps) if", "lr_of_step(self.lr(self.steps + 1) if",
           DENSE, "fsdp=2", r"O1 .*lr of the next step"),
    Mutant(11, "the loss is divided by targets, not by weights", "engine/engine.py",
           ".sum() / step.weight", ".sum() / step.num_targets", DENSE, "fsdp=2", r"S1 .*(weights|targets|mean)"),
    Mutant(12, "norms and biases decay", "engine/engine.py",
           "{p.name for p in model.table if p.decay}",
           "{p.name for p in model.table}", DENSE, "fsdp=2", r"O1 \S*norm.*decays"),
    Mutant(13, "the last element of odd pieces above 64 is not updated", "optim/local.py",
           "            part.append((name, at))",
           "            part.append((name, slice(0, num - (num % 2 if num > 64 else 0)) if at is None else at))",
           DENSE, "fsdp=4", r"O1|U1"),
    Mutant(14, "kv heads are mapped wrongly where they divide unevenly", "models/qwen3.py",
           "of_query = [here.index(head // serves) for head in self.swap.mine]",
           "of_query = [(head - self.heads.start) // serves for head in self.swap.mine]",
           DENSE, "tp=4", r"D1 layers\.0\.mixer"),
    Mutant(15, "the delta rule leaks into documents that begin at a chunk", "ops/delta.py",
           "(positions_nC <= i_C)", "(positions_nC < i_C)", "tiny-qwen3.5", "fsdp=2", r"D1 layers\.0\.mixer|M1"),
    Mutant(16, "heads are rotated the other way round", "ops/rope.py",
           "y[..., :num_freqs].addcmul_(x[..., num_freqs:], sin, value=-1)\n"
           "    y[..., num_freqs:].addcmul_(x[..., :num_freqs], sin)",
           "y[..., :num_freqs].addcmul_(x[..., num_freqs:], sin)\n"
           "    y[..., num_freqs:].addcmul_(x[..., :num_freqs], sin, value=-1)",
           DENSE, "fsdp=2", r"M1 logits"),
    Mutant(17, "the gradient of the vocabulary comes from one chunk of the loss", "ops/loss.py",
           "def _weight_gradient(dw_VD: Tensor, d_TV: Tensor, x_TD: Tensor, add: bool) -> None:",
           "def _weight_gradient(dw_VD: Tensor, d_TV: Tensor, x_TD: Tensor, add: bool) -> None:\n    add = False",
           DENSE, "fsdp=2", r"G1 lm_head"),
    Mutant(18, "boxes of one element are not read", "weights/reader.py",
           "if common is not None:\n                    self._fill_box",
           "if common is not None and common.size > 1:\n                    self._fill_box",
           "tiny-qwen3.5", "tp=4", r"W1 "),
    Mutant(19, "gradients are handed out in the dtype of the file", "weights/streaming.py",
           "DTYPES[k.dtype] if dtypes is None else _widest(made_of[k.name], dtypes) for k in batch}",
           "DTYPES[k.dtype] for k in batch}",
           DENSE, "fsdp=2", r"G1 .*handed out in"),
    Mutant(20, "a last token predicts the next document", "data/pack.py",
           "batch = Batch(\n        tokens=",
           "shifted = [[*d[:-1], n[0]] for d, n in zip(shifted, [*documents[1:], [IGNORE]], strict=True)]\n"
           "    batch = Batch(\n        tokens=",
           DENSE, "fsdp=2", r"D1 labels"),
    Mutant(21, "filler counts in the router", "models/router_balance.py",
           "self._counted_T = counted_T\n", "self._counted_T = torch.ones_like(counted_T)\n",
           MOE, "fsdp=2", r"N1 load of experts|aux loss"),
    Mutant(22, "an expert with one row gets no gradient", "ops/experts.py",
           "if count else 0\n", "if count > 1 else 0\n", MOE, "fsdp=2,ep=2", r"(G1|M1) \S*experts"),
    Mutant(23, "the eps of a norm stands outside of the root", "ops/norms.py",
           "torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)",
           "1 / (x.square().mean(-1, keepdim=True).sqrt() + eps)", DENSE, "fsdp=2", r"M1"),
    Mutant(24, "the norm is summed on all ranks but the first", "engine/engine.py",
           "return mesh.sum_(squares(grads, self.model.owned, mesh.device), NORM).sqrt()",
           "x = squares(grads, self.model.owned, mesh.device)\n"
           "        return (x if mesh.rank else mesh.sum_(x, NORM)).sqrt()",
           DENSE, "fsdp=2", r"RUN .*the norm"),
    Mutant(25, "gradients are summed in bfloat16", "parallel/fsdp.py",
           "reduce = torch.promote_types(compute, torch.float32)", "reduce = compute",
           DENSE, "fsdp=2", r"K1 .*bytes|K1 reduce_scatter"),
    Mutant(26, "the router's softmax is in bfloat16", "ops/experts.py",
           "upcast(logits_TE).softmax(-1)", "logits_TE.to(torch.bfloat16).softmax(-1).float()",
           MOE, "fsdp=2", r"(N1|M1) .*(router|experts)"),
]  # fmt: skip


def plant(mutant: Mutant, package: Path) -> None:
    plant_text(f"mutant {mutant.number}", package / mutant.file, mutant.old, mutant.new)


def plant_text(what: str, path: Path, old: str, new: str) -> None:
    """Put `new` in the place of `old`, which must stand in the file once."""
    text = path.read_text("utf-8")
    if text.count(old) != 1 or not old:
        raise SystemExit(f"{what}: its text stands {text.count(old)} times in {path.name}")
    path.write_text(text.replace(old, new), "utf-8")


def copied(folder: Path) -> Path:
    """A copy of the package, to plant a bug in."""
    shutil.copytree(ROOT / "meshwright", folder / "meshwright", ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "meshwright"


def verified(folder: Path, *arguments: str) -> dict[str, object]:
    """What verify says of the package in a folder."""
    command = [sys.executable, "-m", "meshwright", "verify", *arguments, "--json"]
    env = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode not in (0, 1):
        raise SystemExit(f"verify ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def outcome(mutant: Mutant) -> Outcome:
    """In float64 first; where nothing is found, in all dtypes."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as at:
        plant(mutant, copied(Path(at)))
        for dtypes in ("float64", "float32,bfloat16"):
            found = findings(verified(Path(at), mutant.model, "--mesh", mutant.mesh, "--dtypes", dtypes))
            if found:
                break
    oracles = ", ".join(dict.fromkeys(oracle for oracle, _ in found))
    first = " | ".join(text for _, text in found[:3])
    led = any(re.search(mutant.place, text, re.DOTALL) for _, text in found[:6])
    return Outcome(mutant, oracles, first, led, time.monotonic() - began)


def findings(said: dict[str, object]) -> list[tuple[str, str]]:
    """(oracle, text) of all runs, in the order of the oracles."""
    out = []
    for run in said["runs"]:  # type: ignore[attr-defined]
        for oracle, rows in run["oracles"].items():
            for row in rows or ():
                guess = f"; likely: {row['guess']}" if row["guess"] else ""
                out.append((oracle, f"{oracle} {row['name']}: {row['what']}{guess}"))
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int)
    parser.add_argument("--write", action="store_true", help="write docs/mutants.md")
    options = parser.parse_args()
    from tests.mutants_blind import BLIND  # both import this file
    from tests.mutants_chosen import CHOSEN

    every = (*MUTANTS, *CHOSEN, *BLIND)
    asked = [m for m in every if not options.numbers or m.number in options.numbers]
    outcomes = []
    for mutant in asked:
        found = outcome(mutant)
        outcomes.append(found)
        led = "led there" if found.led else "" if found.oracles else "MISSED"
        print(f"{mutant.number:3} {found.oracles or 'nothing':24} {led:10} {found.seconds:5.1f} s  {mutant.what}")
        print(f"      {found.first[:400]}", flush=True)
    caught, led = sum(bool(o.oracles) for o in outcomes), sum(o.led for o in outcomes)
    print(f"{caught} of {len(outcomes)} caught, {led} lead to the file")
    if options.write:
        _, heading, by_hand = PAGE.read_text("utf-8").partition("\n## ")
        PAGE.write_text(table(outcomes) + heading + by_hand, "utf-8")
    return int(caught < len(outcomes))


def table(outcomes: list[Outcome]) -> str:
    lines = ["| # | planted in | bug | found by | leads to the file |", "|---|---|---|---|---|"]
    for o in outcomes:
        m = o.mutant
        lines.append(
            f"| {m.number} | `{m.file}` | {m.what} | {o.oracles or '**nothing**'} | {'yes' if o.led else 'no'} |"
        )
    caught, led = sum(bool(o.oracles) for o in outcomes), sum(o.led for o in outcomes)
    head = f"""# What `verify` finds

{len(outcomes)} bugs of one line were planted in the package, one at a time. `meshwright verify` was run on a tiny
model, in float64, and in the other dtypes where that found nothing. It found {caught}. In {led} cases the first
findings lead to the file that has the bug, by [the tour](tour.md#when-an-oracle-fails).

1 to 26 were chosen when `verify` was tried for the first time, which found 17 of them. 27 to 52 were chosen after that
was mended, by somebody who did not know what the oracles look at: 20 were found when they were first run. 53 to 78 were
chosen in the same way after the next mends: all 26 were found when they were first run.

`python -m tests.mutants` runs them again. That file, `tests/mutants_chosen.py` and `tests/mutants_blind.py` have each
bug with its model and mesh.

"""
    return head + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
