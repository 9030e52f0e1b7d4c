"""Options that several commands share, the parsers of their values, and JSON output.

The module must not import torch, because `--help` would wait for it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import Field, fields
from typing import Any

from ..errors import ConfigError
from ..recipe import ContextParallel, Lora, MemoryOptions, Pipeline, Recipe

# Written out, because `plan.TINY` imports torch. A test compares the two.
TINY = "tiny-qwen2, tiny-qwen3, tiny-qwen3-moe, tiny-qwen3.5, tiny-qwen3.5-moe or tiny-qwen3-moe-fp8"
MODEL = f"a Hugging Face directory, a config (*.json), a hub id, {TINY}"
CHECKPOINT = "a run, a checkpoint, or a folder of checkpoints, of which the newest complete one is used"


def add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    *,
    about: str,
    examples: str,
) -> argparse.ArgumentParser:
    """Add a command and return its parser. `run` takes the parsed options and returns the exit code.

    `summary` is the line of `meshwright --help`. `about` and `examples` are the text above and below the options.
    """
    command = commands.add_parser(
        name, help=summary, description=about, epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,  # the examples keep their line breaks
    )  # fmt: skip
    command.set_defaults(run=run)
    return command


def add_config(command: argparse.ArgumentParser, example: str) -> None:
    """Add the file of a run, and `--set`, which replaces single fields of it."""
    command.add_argument("config", help="the run file (*.toml)")
    command.add_argument("--set", nargs="+", action="extend", default=[], metavar="FIELD=VALUE", help=example)


def add_trained(command: argparse.ArgumentParser) -> None:
    """Add the model that texts are generated with."""
    command.add_argument(
        "model",
        help="a run, a checkpoint, a folder of checkpoints, a Hugging Face directory, a hub id or a PEFT adapter",
    )


def add_decoding(command: argparse.ArgumentParser, tokens: int, what: str) -> None:
    """Add the options of generation. `tokens`: the default number of tokens. `what`: the text that it limits, in the
    help."""
    command.add_argument(
        "--tokens", type=positive, default=tokens, metavar="N", help=f"at most N tokens per {what} (default {tokens})"
    )
    command.add_argument(
        "--top-p", type=float, metavar="P", help="sample from the top P of the probability (default: greedy)"
    )
    command.add_argument(
        "--temperature", type=float, metavar="X", help="sample, with logits divided by X (default: greedy, or 1 with P)"
    )
    command.add_argument("--seed", type=int, default=0, help="seed of the sampling (default 0)")


def add_json(command: argparse.ArgumentParser, content: str, how: str = "") -> None:
    """Add `--json`. Progress goes to standard error, so that standard output is valid JSON."""
    command.add_argument("--json", action="store_true", help=f"{content} as JSON on standard output{how}")


def add_recipe(command: argparse.ArgumentParser) -> None:
    """Add `--mesh`, a flag for each field of a `Recipe`, `--optimizer` and `--state-dtype`.

    The flags come from the fields themselves: a new field of the recipe needs no edit in this file.
    """
    command.add_argument("--mesh", default="", metavar="AXIS=N,...", help="sizes of pp, replicate, fsdp, cp, tp, ep")
    add_fields(command, Recipe, {"memory", "pipeline", "context", "lora"})
    command.add_argument(
        "--context", default="", metavar="MIXER=N,...",
        help="for cp: N neighbours swap tokens for heads, in mixers of kind attention or delta (default: by heads)",
    )  # fmt: skip
    add_fields(command.add_argument_group("pipeline options, for a --mesh with pp"), Pipeline)
    group = command.add_argument_group("adapter options (LoRA)")
    group.add_argument("--lora", action="store_true", help="train adapters; implied by the options below")
    add_fields(group, Lora, prefix="lora_")
    group = command.add_argument_group("memory and speed options")
    add_fields(group, MemoryOptions)
    group.add_argument("--optimizer", choices=["adamw", "muon"], help="the optimizer (default adamw)")
    group.add_argument(
        "--state-dtype",
        choices=["float32", "bfloat16", "uint8"],
        help="dtype of its optimizer state (default float32; muon has no uint8)",
    )


def add_fields(
    group: argparse._ActionsContainer, options: type[Any], but: Container[str] = (), prefix: str = ""
) -> None:
    """Add a flag for each field of a dataclass, except those named in `but`. `prefix`: the prefix of the names of
    flags.

    An absent flag is None, not the field's default. So `recipe_of` can leave it out, and `check_axes` can tell a flag
    with the value of the default from an absent one.
    """
    for each in fields(options):
        if each.metadata["command"] and each.name not in but:
            default = "" if each.default in (None, False, ()) else f" (default {each.default})"
            # The docs show the whole text of an option, --help its first sentence.
            first = re.split(r"(?<=\.) ", each.metadata["text"])[0].removesuffix(".")
            text = first[0].lower() + first[1:] + default
            name = prefix + each.name
            group.add_argument(flag_of(name), dest=name, default=None, help=text, **_parser_arguments(each))
            # A field that is True, False or a number has two flags, which argparse stores under one name.
            if number := each.metadata["number"]:
                text = f"{flag_of(each.name)}, but once to each node of N consecutive ranks"
                group.add_argument(flag_of(number), dest=each.name, type=positive, metavar="N", help=text)


def _parser_arguments(option: Field[Any]) -> dict[str, Any]:
    """Return the arguments of `add_argument` that a field's type and choices call for."""
    choices, kind = option.metadata["choices"], option.type
    if len(choices) == 1:  # on or off: `--fp8` stands for fp8="block"
        return {"action": "store_const", "const": choices[0]}
    if choices:
        return {"choices": choices}
    if option.default is False:
        return {"action": "store_true"}
    if kind == bool | None:  # None leaves it to the schedule, so both answers need a flag
        return {"action": argparse.BooleanOptionalAction}
    if kind == str | Sequence[str]:
        return {"type": names, "metavar": "NAME,..."}
    if kind is float:
        return {"type": amount, "metavar": "X"}
    if kind == str | None:
        return {"metavar": "PATH"}
    return {"type": positive, "metavar": "N"} if kind in (int, int | None) else {"type": numbers, "metavar": "N,..."}


def flag_of(name: str) -> str:
    """Return the flag of a field: `--sum-once` of `sum_once`."""
    return f"--{name.replace('_', '-')}"


def recipe_of(options: Mapping[str, Any]) -> Recipe:
    """Make the `Recipe` that the options of `add_recipe` describe."""
    pipeline, memory = Pipeline(**_passed(Pipeline, options)), MemoryOptions(**_passed(MemoryOptions, options))
    own = {name: value for name, value in _passed(Recipe, options).items() if name not in ("context", "lora")}
    adapters = _passed(Lora, options, "lora_")
    lora = Lora(**adapters) if adapters or options.get("lora") else None
    return Recipe(**own, pipeline=pipeline, memory=memory, context=_context_of(options["context"]), lora=lora)


def _passed(kind: type[Any], options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the fields of a dataclass for which a flag was passed."""
    names = (each.name for each in fields(kind))
    return {name: options[prefix + name] for name in names if options.get(prefix + name) is not None}


def check_axes(options: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Refuse flags for an axis that the mesh lacks: they would have no effect, and the user expects one."""
    passed = _passed(Pipeline, options)
    if passed and sizes.get("pp", 1) == 1:
        raise ConfigError(
            f"{flag_of(next(iter(passed)))} is a pipeline option, but --mesh has no pp axis; give it pp=2 or more"
        )
    text = options["context"]
    if text and sizes.get("cp", 1) == 1:
        raise ConfigError(f"--context {text!r:.200} needs a cp axis, which --mesh lacks; give it cp=2 or more")


def _context_of(text: str) -> ContextParallel:
    """Parse `attention=1,delta=2` into `mw.ContextParallel`."""
    mixers, sizes, option = (
        [each.name for each in fields(ContextParallel)],
        dict[str, int](),
        f"--context {text!r:.200}",
    )
    for part in filter(None, text.split(",")):
        mixer, equals, size = part.partition("=")
        if mixer not in mixers or not equals or not size.isdecimal() or len(size) > 9:
            raise ConfigError(f"{option}: {part!r:.200} is not MIXER=N, where MIXER is one of {', '.join(mixers)}")
        if mixer in sizes:
            raise ConfigError(f"{option} sets {mixer} twice")
        sizes[mixer] = int(size)
    return ContextParallel(**sizes)


def positive(text: str) -> int:
    """Parse a positive integer, for argparse."""
    # int() takes quadratic time in the digits and refuses more than 4,300: 12 are enough to exceed the bound.
    if not text.isdecimal() or not 0 < int(text[:12]) <= 10**9:
        raise argparse.ArgumentTypeError(f"{text!r:.50} is not a number above 0")
    return int(text)


def amount(text: str) -> float:
    """Parse a positive number, for argparse. NaN and infinity are refused too."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 10**9:
        raise argparse.ArgumentTypeError(f"{text!r:.50} is not a number above 0")
    return number


def numbers(text: str) -> tuple[int, ...]:
    """Parse positive integers that are separated by commas, for argparse."""
    return tuple(map(positive, text.split(",")))


def names(text: str) -> tuple[str, ...]:
    """Parse names that are separated by commas, for argparse. Empty ones are dropped, as after a trailing comma."""
    return tuple(filter(None, text.split(",")))


def print_json(result: Mapping[str, object]) -> None:
    """Print a result as JSON. A reader that stops early, as `head` does, changes neither output nor exit code."""
    try:
        print(json.dumps(result, indent=2), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
