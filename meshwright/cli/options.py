"""Options that several commands share, and how they print. --help should not wait for torch: nothing here needs it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping

TINY = "tiny-qwen2, tiny-qwen3, tiny-qwen3-moe, tiny-qwen3.5, tiny-qwen3.5-moe or tiny-qwen3-moe-fp8"


def add_mesh(command: argparse.ArgumentParser) -> None:
    """The mesh, and how a model is laid onto it: `mw.Context`, and the fields of `mw.Pipeline`."""
    command.add_argument("--mesh", default="", metavar="AXIS=N,...", help="sizes of pp, replicate, fsdp, cp, tp, ep")
    command.add_argument("--head", default="lm", choices=["lm", "value"], help="which head is trained (default lm)")
    command.add_argument("--tower", action="store_true", help="of a model that sees: its tower is trained too")
    command.add_argument(
        "--context", default="", metavar="MIXER=N,...",
        help="where --mesh has cp: so many neighbours swap tokens for heads, of attention or delta (default: by heads)",
    )  # fmt: skip
    command.add_argument("--fp8", action="store_true", help="products of 8-bit numbers, in blocks of 128 (docs/fp8.md)")
    command.add_argument("--fp8-skip", default="", metavar="NAME,...", help="patterns of parameters it leaves out")
    group = command.add_argument_group("how a pipeline runs, where --mesh has pp")
    group.add_argument("--schedule", choices=["1f1b", "zero-bubble", "v"], help="the order of its work (default 1f1b)")
    group.add_argument("--stages", type=positive, metavar="N", help="of each rank (default 1; of v it is 2)")
    group.add_argument(
        "--ends", type=numbers, metavar="N,...", help="after how many layers each stage ends (default: at equal cost)"
    )
    group.add_argument(
        "--hold", action=argparse.BooleanOptionalAction,
        help="gather parameters and sum gradients once a step (default: where there is room)",
    )  # fmt: skip


def add_savings(command: argparse.ArgumentParser) -> None:
    """Add the options of `mw.Savings`, and `state_dtype` of `mw.Engine`."""
    group = command.add_argument_group("what saves memory or time")
    group.add_argument(
        "--recompute", choices=["none", "selective", "full"],
        help="what backward makes again instead of keeping it (default none)",
    )  # fmt: skip
    group.add_argument("--offload", action="store_true", help="parameters, gradients and moments lie on the host")
    group.add_argument("--gather-once", action="store_true", help="parameters are gathered once a step")
    group.add_argument("--sum-once", action="store_true", help="gradients are summed once a step")
    group.add_argument("--narrow-grads", action="store_true", help="gradients are sent in the dtype of products")
    group.add_argument("--token-once", action="store_true", help="a token goes to its experts once a rank")
    group.add_argument(
        "--token-once-a-node", type=positive, metavar="RANKS",
        help="send each token once to each node (RANKS consecutive ep ranks), then to its experts within the node",
    )  # fmt: skip
    group.add_argument(
        "--state-dtype", choices=["float32", "bfloat16", "uint8"], help="of the moments of AdamW (default float32)"
    )


def positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text[:12]) <= 10**9:
        raise argparse.ArgumentTypeError(f"{text!r:.50} is no number above 0")
    return int(text)


def amount(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 10**9:
        raise argparse.ArgumentTypeError(f"{text!r:.50} is no number above 0")
    return number


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(positive, text.split(",")))


def print_json(found: Mapping[str, object]) -> None:
    """A reader may stop early, as `head` does. That is no error, and the exit code stays that of the result."""
    try:
        print(json.dumps(found, indent=2), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
