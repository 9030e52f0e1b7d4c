"""Options that several commands share, and how they print. --help should not wait for torch: nothing here needs it."""

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
from ..recipe import ContextParallel, MemoryOptions, Pipeline, Recipe

TINY = "tiny-qwen2, tiny-qwen3, tiny-qwen3-moe, tiny-qwen3.5, tiny-qwen3.5-moe or tiny-qwen3-moe-fp8"

CHECKPOINT = "a run, a checkpoint, or a folder of them: the newest whole one is taken"


def add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    *,
    about: str,
    examples: str,
) -> argparse.ArgumentParser:
    """Add a command, and return its parser. `run` carries it out and returns the exit code."""
    command = commands.add_parser(
        name, help=summary, description=about, epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,  # the examples keep their line breaks
    )  # fmt: skip
    command.set_defaults(run=run)
    return command


def add_config(command: argparse.ArgumentParser, example: str) -> None:
    """Add the file of a run, and `--set`, which replaces single fields of it."""
    command.add_argument("config", help="a .toml file")
    command.add_argument("--set", nargs="+", action="extend", default=[], metavar="FIELD=VALUE", help=example)


def add_json(command: argparse.ArgumentParser, content: str, how: str = "") -> None:
    command.add_argument("--json", action="store_true", help=f"{content} as JSON on standard output{how}")


def add_recipe(command: argparse.ArgumentParser) -> None:
    """Add the mesh, an option for each field of a `Recipe`, and `state_dtype` of `mw.Engine`."""
    command.add_argument("--mesh", default="", metavar="AXIS=N,...", help="sizes of pp, replicate, fsdp, cp, tp, ep")
    add_fields(command, Recipe, {"memory", "pipeline", "context"})
    command.add_argument(
        "--context", default="", metavar="MIXER=N,...",
        help="where --mesh has cp: so many neighbours swap tokens for heads, of attention or delta (default: by heads)",
    )  # fmt: skip
    add_fields(command.add_argument_group("how a pipeline runs, where --mesh has pp"), Pipeline)
    group = command.add_argument_group("what saves memory or time")
    add_fields(group, MemoryOptions)
    group.add_argument(
        "--state-dtype", choices=["float32", "bfloat16", "uint8"], help="of the moments of AdamW (default float32)"
    )


def add_fields(group: argparse._ActionsContainer, options: type[Any], but: Container[str] = ()) -> None:
    """Add a flag for each field of a dataclass. Its value is None unless it was given."""
    for each in fields(options):
        if each.metadata["command"] and each.name not in but:
            default = "" if each.default in (None, False, ()) else f" (default {each.default})"
            first = re.split(r"(?<=\.) ", each.metadata["text"])[0].removesuffix(".")
            text = first[0].lower() + first[1:] + default
            group.add_argument(flag_of(each.name), dest=each.name, default=None, help=text, **_reading(each))
            if number := each.metadata["number"]:
                text = f"{flag_of(each.name)}, but once to each node of N consecutive ranks"
                group.add_argument(flag_of(number), dest=each.name, type=positive, metavar="N", help=text)


def _reading(option: Field[Any]) -> dict[str, Any]:
    """Return how argparse reads the flag of an option."""
    choices, kind = option.metadata["choices"], option.type
    if len(choices) == 1:
        return {"action": "store_const", "const": choices[0]}
    if choices:
        return {"choices": choices}
    if option.default is False:
        return {"action": "store_true"}
    if kind == bool | None:
        return {"action": argparse.BooleanOptionalAction}
    if kind == str | Sequence[str]:
        return {"type": names, "metavar": "NAME,..."}
    return {"type": positive, "metavar": "N"} if kind in (int, int | None) else {"type": numbers, "metavar": "N,..."}


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def recipe_of(options: Mapping[str, Any]) -> Recipe:
    """Return what the options of `add_recipe` ask for."""
    pipeline, memory = Pipeline(**_given(Pipeline, options)), MemoryOptions(**_given(MemoryOptions, options))
    own = {name: value for name, value in _given(Recipe, options).items() if name != "context"}
    return Recipe(**own, pipeline=pipeline, memory=memory, context=_context_of(options["context"]))


def _given(kind: type[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    names = (each.name for each in fields(kind))
    return {name: options[name] for name in names if options.get(name) is not None}


def check_axes(options: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Refuse options of an axis that the mesh lacks."""
    given = _given(Pipeline, options)
    if given and sizes.get("pp", 1) == 1:
        raise ConfigError(f"{flag_of(next(iter(given)))} is of a pipeline, and --mesh has none; give it pp=2 or more")
    text = options["context"]
    if text and sizes.get("cp", 1) == 1:
        raise ConfigError(f"--context {text!r:.200} is of an axis that --mesh lacks; give it cp=2 or more")


def _context_of(text: str) -> ContextParallel:
    """Read `attention=1,delta=2` as the fields of `mw.ContextParallel`."""
    mixers, given, said = [each.name for each in fields(ContextParallel)], dict[str, int](), f"--context {text!r:.200}"
    for part in filter(None, text.split(",")):
        mixer, equals, size = part.partition("=")
        if mixer not in mixers or not equals or not size.isdecimal() or len(size) > 9:
            raise ConfigError(f"{said}: {part!r:.200} is not MIXER=N with MIXER of {', '.join(mixers)}")
        if mixer in given:
            raise ConfigError(f"{said} gives {mixer} twice")
        given[mixer] = int(size)
    return ContextParallel(**given)


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


def names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def print_json(found: Mapping[str, object]) -> None:
    """A reader may stop early, as `head` does. That is no error, and the exit code stays that of the result."""
    try:
        print(json.dumps(found, indent=2), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
