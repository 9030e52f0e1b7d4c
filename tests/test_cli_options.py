"""Arguments of all commands: flags, names, defaults, types, choices and help, against a literal table.

Options of a recipe are generated from its fields, which tests/test_recipe.py checks.
"""

from __future__ import annotations

import argparse
import functools
import re
from typing import Any

import pytest

from meshwright.cli.main import _parser
from meshwright.cli.options import add_recipe, amount, names, numbers, positive

# A line is: flags, how many values (+ one or more, ? at most one, 0 none), type or choices, default, metavar.
DECODING = """
--top-p 1 float None P
--temperature 1 float None X
--seed 1 int 0
"""
CONFIG = """
config! 1 str None
--set + str [] FIELD=VALUE extend
"""
COMMANDS = {
    "chat": f"""
model! 1 str None
--system 1 str '' TEXT
--thinking 1 on|off None
--tokens 1 positive 512 N
{DECODING}""",
    "convert": """
source! 1 str None
target! 1 str None
--to! 1 hf|dcp|meshwright None
--like 1 str None DIR
--dtype 1 float32|bfloat16|float16 None
""",
    "copy": """
source! 1 str None
target! 1 str None
""",
    "data": f"""
{CONFIG}
--show 1 positive 0 N
""",
    "inspect": """
checkpoint! 1 str None
--verify 0 store_true False
--diff 1 str None OTHER
--json 0 store_true False
""",
    "plan": """
model! 1 str None
--device 1 str None SIZE
--tokens 1 positive None N
--micro-batches 1 positive None N
--gpus-per-node 1 positive 8 N
--inside 1 amount None GB/s
--between 1 amount None GB/s
--flops 1 amount None TFLOP/s
--search 1 positive None N
--global-tokens 1 positive None N
--top 1 positive 5 N
--json 0 store_true False
--html 1 str None FILE
""",
    "report": """
runs! + str None OUT
--html 1 str None FILE
""",
    "sample": f"""
model! 1 str None
--prompt! 1 str None TEXT append
--text 0 store_true False
--tokens 1 positive 64 N
{DECODING}
--json 0 store_true False
""",
    "train": f"""
{CONFIG}
--nproc 1 positive None N
--plain 0 store_true False
--dry-run 0 store_true False
""",
    "verify": """
model ? str None
--dtypes 1 str 'float64,float32,bfloat16' NAME,...
--full:kind 0 store_const:full 'shrunk'
--weights:kind 0 store_const:weights 'shrunk'
--device 1 str 'cpu'
--ranks-per-device 1 positive 1 N
--seconds 1 float 600.0
--against 1 transformers|none 'transformers'
--seed 1 int 0
--plant 1 str '' BUG
--json 0 store_true False
--html 1 str None FILE
--list 0 store_true False
""",
}


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command."""
    (commands,) = (each for each in _parser()._actions if isinstance(each, argparse._SubParsersAction))
    return dict(commands.choices)


@functools.cache
def generated() -> set[str]:
    """Return the names of the options that are made of the fields of a recipe."""
    parser = argparse.ArgumentParser(add_help=False)
    add_recipe(parser)
    return {each.dest for each in parser._actions}


def line_of(action: argparse.Action) -> str:
    """Describe an argument as the table does."""
    flags = "/".join(action.option_strings) or action.dest
    usual = action.option_strings[0].removeprefix("--").replace("-", "_") if action.option_strings else action.dest
    num = 1 if action.nargs is None else action.nargs
    how = {"_ExtendAction": ["extend"], "_AppendAction": ["append"]}.get(type(action).__name__, [])
    parts = [
        flags + ("" if action.dest == usual else f":{action.dest}") + "!" * (action.required and num != "?"),
        str(num),
        _kind(action),
        repr(action.default),
        *([str(action.metavar)] if action.metavar else []),
        *how,
    ]
    return " ".join(parts)


def _kind(action: argparse.Action) -> str:
    """Name what an argument takes: one of some words, a value of a type, or nothing."""
    if action.choices:
        return "|".join(map(str, action.choices))
    if isinstance(action, argparse.BooleanOptionalAction):
        return "bool"
    if action.nargs == 0:
        return "store_true" if action.const is True else f"store_const:{action.const}"
    kind: Any = action.type or str
    return str(kind.__name__)


@pytest.mark.parametrize("command", COMMANDS)
def test_arguments_of_a_command(command: str) -> None:
    actions = [each for each in parsers()[command]._actions if each.dest != "help"]
    written = [line_of(each) for each in actions if each.dest not in generated()]
    assert written == [line for line in COMMANDS[command].splitlines() if line]
    for each in actions:
        assert each.help, each.dest
        stated = re.search(r"\(default (\d+)\)", each.help)
        if stated and each.default is not None:  # None is the default of the fields of a recipe
            assert int(stated[1]) == each.default, each.dest


def test_every_command_has_its_table() -> None:
    assert [*parsers()] == [*COMMANDS]


@pytest.mark.parametrize("argument", ["--full --weights", "--weights --full"])
def test_kinds_of_verification_exclude_each_other(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args(["verify", "tiny-qwen3", *argument.split()])
    assert "not allowed with argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("parse", "good", "bad"),
    [
        (positive, {"1": 1, "1000000000": 10**9}, ["0", "-1", "", "1.0", "1000000001", "9" * 4301, "1e3", "x"]),
        (amount, {"0.5": 0.5, "1e-9": 1e-9, "999999999": 999999999.0}, ["0", "-1", "1e9", "nan", "inf", "x", ""]),
        (numbers, {"3": (3,), "1,20": (1, 20)}, ["", "1,", "1,0", "1;2"]),
    ],
)
def test_parsers_of_values(parse: Any, good: dict[str, Any], bad: list[str]) -> None:
    assert {text: parse(text) for text in good} == good
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match="is not a number above 0"):
            parse(text)


def test_names_are_split_at_commas() -> None:
    assert [names(text) for text in ("q_proj", "q_proj,", "a,,b", "")] == [("q_proj",), ("q_proj",), ("a", "b"), ()]
