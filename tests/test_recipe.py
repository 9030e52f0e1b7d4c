"""An option is declared once: in Python, in a run file, on the command line and in the docs it is the same field."""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.cli.options import add_fields, add_recipe, check_axes, flag_of, recipe_of
from meshwright.errors import ConfigError
from meshwright.recipe import (
    SCHEDULES,
    ContextParallel,
    Lora,
    MemoryOptions,
    Pipeline,
    Recipe,
    RecipeFields,
    matching,
    option,
)
from meshwright.sharding import ORDERS
from meshwright.train.config import Config, TrainSection, section_from
from meshwright.train.config_docs import options_table

PACKAGE = Path(mw.__file__).parent
WORK = ("sharding", "parallel", "memory", "plan", "ops")  # packages that implement an option, or estimate it


@dataclass(frozen=True)
class More(MemoryOptions):
    double_buffer: bool = option(False, "Keep two buffers. It hides copies.", costs="a buffer")


def test_one_declaration_makes_the_rest() -> None:
    """A boolean is added in one file, and its work in another: the docs follow by a command."""
    parser = argparse.ArgumentParser()
    add_fields(parser, More)
    assert vars(parser.parse_args(["--double-buffer"]))["double_buffer"] is True
    assert vars(parser.parse_args([]))["double_buffer"] is None
    assert "keep two buffers\n" in parser.format_help()
    section = section_from(More)(double_buffer=True)
    assert More(**section.model_dump()) == More(double_buffer=True)
    assert (
        section.model_json_schema()["properties"]["double_buffer"]["description"]
        == "Keep two buffers. It hides copies."
    )
    assert "| `double_buffer` | `False` | Keep two buffers. It hides copies. | a buffer |" in options_table(More)
    assert Recipe(memory=More(double_buffer=True)).memory != Recipe(memory=More()).memory


def test_no_second_list() -> None:
    """At most three other modules name an option: checks and advice about it. A backend of another framework may too,
    because it says what that framework's options mean here."""
    named = defaultdict[str, set[str]](set)
    names = {each.name for each in fields(MemoryOptions)}
    for path in PACKAGE.rglob("*.py"):
        at = path.relative_to(PACKAGE)
        for node in (
            ast.walk(ast.parse(path.read_text())) if at.parts[0] not in (*WORK, "recipe.py", "integrations") else ()
        ):
            for name in names & words_of(node):
                named[name].add(str(at))
    assert all(len(modules) <= 3 for modules in named.values()), dict(named)


def words_of(node: ast.AST) -> set[Any]:
    """Return the names that a node spells: an attribute, an argument, a text."""
    words = {value for name, value in ast.iter_fields(node) if name in ("id", "attr", "arg")}
    return words | {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else words


def test_lists_that_a_type_checker_or_a_lower_room_needs_agree() -> None:
    assert [*RecipeFields.__annotations__] == [each.name for each in fields(Recipe)]
    assert tuple(ORDERS) == SCHEDULES


FIELDS_SET = {
    "": Recipe(),
    "--head value --tower --fp8 --fp8-skip *.q.weight,head.*": Recipe(
        head="value", tower=True, fp8="block", fp8_skip=("*.q.weight", "head.*")
    ),
    "--recompute full --offload --token-once": Recipe(memory=MemoryOptions("full", offload=True, token_once=True)),
    "--token-once-a-node 8 --narrow-grads": Recipe(memory=MemoryOptions(token_once=8, narrow_grads=True)),
    "--schedule v --ends 3,7 --no-hold": Recipe(pipeline=Pipeline("v", 2, (3, 7), hold=False)),
    "--context attention=1,delta=2": Recipe(context=ContextParallel(1, 2)),
    "--lora": Recipe(lora=Lora()),
    "--lora-rank 3 --lora-rslora": Recipe(lora=Lora(rank=3, rslora=True)),
}


@pytest.mark.parametrize("line", FIELDS_SET)
def test_the_command_line_makes_a_recipe(line: str) -> None:
    parser = argparse.ArgumentParser()
    add_recipe(parser)
    assert recipe_of(vars(parser.parse_args(line.split()))) == FIELDS_SET[line]


@pytest.mark.parametrize(
    ("line", "axis"), [("--stages 1", "pp=2"), ("--no-hold", "pp=2"), ("--context delta=1", "cp=2")]
)
def test_an_option_of_an_axis_that_is_missing_is_refused(line: str, axis: str) -> None:
    parser = argparse.ArgumentParser()
    add_recipe(parser)
    options = vars(parser.parse_args(line.split()))
    check_axes(options, {"pp": 2, "cp": 2})
    for sizes in ({"fsdp": 2}, {"fsdp": 2, "pp": 1, "cp": 1}):
        with pytest.raises(ConfigError, match=f"{line.split()[0].replace('no-', '')}.*{axis} or more"):
            check_axes(options, sizes)


@pytest.mark.parametrize(
    "text", ["attention", "attention=", "attention=-1", "attention=1e1", "mixer=1", "delta=1000000000"]
)
def test_a_context_that_is_no_mixer_with_a_size_is_refused(text: str) -> None:
    parser = argparse.ArgumentParser()
    add_recipe(parser)
    recipe_of(vars(parser.parse_args(["--context", "delta=999999999,"])))
    with pytest.raises(ConfigError, match=f"'{text}' is not MIXER=N"):
        recipe_of(vars(parser.parse_args(["--context", f"delta=1,{text}"])))


def test_a_run_file_makes_a_recipe(tmp_path: Path) -> None:
    def recipe(**sections: Any) -> Recipe:
        args = {"model": "it", "out": str(tmp_path), "data": [{"path": "a.jsonl"}], **sections}
        return Config.model_validate(args).recipe

    assert recipe() == Recipe(dtype=mw.engine.validation.COMPUTE[0], fp8_skip=[])
    result = recipe(
        train={"recompute": "full", "token_once": 8, "train": ["head.*"], "fp8": "block"},
        pipeline={"ends": [2, 5]}, context={"attention": 1},
    )  # fmt: skip
    assert (result.memory, result.train, result.fp8) == (MemoryOptions("full", token_once=8), ["head.*"], "block")
    assert (result.pipeline, result.context) == (Pipeline(ends=(2, 5)), ContextParallel(attention=1))


def test_every_option_is_in_a_file_and_where_it_says_so_a_flag() -> None:
    parser = argparse.ArgumentParser()
    add_recipe(parser)
    for kind in (MemoryOptions, Pipeline):
        flags = {flag_of(each.name) for each in fields(kind) if each.metadata["command"]}
        assert flags <= {flag for action in parser._actions for flag in action.option_strings}
    assert {each.name for each in fields(MemoryOptions)} <= TrainSection.model_fields.keys()


@pytest.mark.parametrize(
    ("patterns", "names"), [(["b*", "a*"], "b1 a1 b0"), (["*"], "b1 a1 c b0"), (["c", "?1"], "b1 a1 c"), ([], "")]
)
def test_names_that_match_stay_in_their_order(patterns: Iterable[str], names: str) -> None:
    assert matching(patterns, iter(["b1", "a1", "c", "b0"]), "train") == names.split()


def test_a_plain_recipe_is_of_the_same_model_and_layout() -> None:
    kept = Recipe(head="value", tower=True, mtp="all", pipeline=Pipeline(stages=2), context=ContextParallel(1))
    fast = replace(kept, memory=MemoryOptions("full", offload=True, token_once=4), fp8="block", fp8_skip="head.*")
    assert fast.plain(train="a") == replace(kept, memory=MemoryOptions(compiled=False), train="a")


@pytest.mark.parametrize(
    ("schedule", "given", "stages"), [("v", 1, 2), ("v", 3, 3), ("zero-bubble", 1, 1), ("1f1b", 1, 1)]
)
def test_a_schedule_in_a_v_has_two_stages(schedule: str, given: int, stages: int) -> None:
    assert Pipeline(schedule, given).stages == stages


@pytest.mark.parametrize(
    ("options", "wide"),
    [({}, False), (dict(offload=True), True), (dict(compiled=True), True), (dict(compiled=False), False),
     (dict(gather_once=True, narrow_grads=True), False)],
)  # fmt: skip
def test_values_are_gathered_where_hooks_are_lost(options: dict[str, bool], wide: bool) -> None:
    assert MemoryOptions(**options).gathers_wide is wide
