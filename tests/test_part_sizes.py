"""Every constant that cuts work into parts is registered, so that `verify` and tests try its bounds on tiny models."""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest
import torch
from safetensors.torch import load_file, save_file

import meshwright
from meshwright.checkpoint import inspect
from meshwright.data import row_files
from meshwright.data.token_cache import TokenizeSpec, prepare
from meshwright.data.tokens import tokens
from meshwright.ops.experts import _LoopedLinear
from meshwright.ops.part_sizes import PartSize, part_sizes, shrunk_part_sizes
from meshwright.verify import session
from meshwright.verify.poisoned_memory import poisoned_memory
from meshwright.verify.reference import part_sizes_of
from meshwright.weights import open_source
from tests import tiny, trials

PACKAGE = Path(meshwright.__file__).parent
# Packages whose parts a trial on a mesh cuts: it loads, trains, updates, gathers, exports. The others have tests below.
TRIED = ("ops", "optim", "sharding", "mesh", "parallel", "weights", "verify")
# Whole numbers of modules that cut nothing in parts, by what they are.
OTHERS = {
    "a format, or a definition of numbers": {
        "ops.fp8_matmul.BLOCK", "optim.int8_state.BLOCK", "optim.int8_state._ONE", "weights.random_init._ROWS",
        "data.packing_plan.WINDOW", "weights.bitsandbytes.NESTED_BLOCK",
        "engine.vision_sync._BITS", "weights.source._LOOKS", "weights.source._LOOK",
        "data.permute._MIX", "verify.weight_checks._ODD", "data.packing_plan._DIGEST_BYTES",
        "ops.ngrams._BITS", "ops.ngrams._GAMMA", "ops.ngrams._TABLE_STEP", "ops.host_memory._ALIGNED",
        "ops.host_memory._WRITABLE",
        "weight_sync.group._HEAD", "weight_sync.group._LEAST", "weight_sync.group._MARK",
        "weight_sync.shared_memory._MARK_BYTES", "data.vision_files._END_BYTES",
    },
    "how far samples are padded, which tests/test_sample.py tries": {"engine.sampling._FIRST_ROOM"},
    "which kernel is taken": {
        "ops.attention._LENGTH_STEP", "ops.attention._LONG_MACS", "ops.experts._TILE", "ops.fused._TRIAL_ROWS",
        "ops.meta_kernels._CHUNK", "optim.muon._SMALL",
    },
    "calls to the system or to others, who cut by themselves": {
        "checkpoint.copy._FILES_AT_ONCE",
        "checkpoint.copy._PART_BYTES", "data.vision_files._ORIENTATION", "mesh.local_sockets._LONGEST_POLL_MS",
    },
    "how many ranks are a group of hosts, which tests/test_hosts.py varies": {"mesh.hosts.MOST"},
    "a limit of what is accepted": {
        "weights.safetensors_header._MAX_JSON_BYTES", "weights.safetensors_header._MAX_DIMS",
        "weights.safetensors_header._MAX_SIZE",
        "weights.quant_formats._WHOLE", "models.hf_config.LARGEST", "models.hf_config._MOST_EXPERTS",
        "data.processor._MOST_OBLONG", "engine.step_rows._EXACT", "memory.budget._MOST",
        "verify.diagnose.forward.RIGHT",
        "data.json_values._MOST_BYTES", "data.packing_plan.MOST_DOCUMENTS", "data.row_files._ARRAY_BYTES",
        "data.template_sandbox._MOST_BITS",
        "data.template_sandbox.MOST_CHARACTERS", "data.template_sandbox._MOST_BYTES", "data.template_sandbox._POLLS",
        "data.template_sandbox._THREADS",
        "objectives.distillation._PADDING_ROWS",
        "data.tokenizer._MOST_TEMPLATE_BYTES", "data.vision_files.MOST_PIXELS", "train.config_checks.MOST_STEPS",
        "train.lock._MOST_BYTES", "train.reference_scores._DIGEST_BYTES",
    },
    "what is shown or said, and how much of it": {
        "data.feed._NAMED", "data.token_cache._NAMED", "checkpoint.inspect._MOST", "verify.weight_checks._MOST",
        "verify.report._MOST_FINDINGS", "train.display._MOST_LOSSES", "train.display._PACE", "train.display._CELL",
        "train.metrics.WIDTH", "train.failure._LINES", "train.loop._EXPERT_LOAD_EVERY", "train.metrics.HISTORY",
        "expert_collapse._FEWEST", "train.thumbnails._NUM", "train.thumbnails._SIDE",
    },
    "what verify and its models are made of": {
        "verify.small_data.LENGTH", "verify.small_data.FEW", "verify.small_data.LONG", "verify.small_data._LEAST",
        "verify.small_model._WIDTH",
        "verify.small_model.ODD", "verify.transformers_oracles._NOISE", "engine.gradient_start._TOKENS",
        "verify.rounding._LEAST",
        "verify.weight_checks._LOOKED_AT", "verify.session._TINY",
    },
    "how much a program of a Triton kernel takes; tests/test_kernels_* cut across it": {
        "ops.kernels.delta_rule.BLOCK", "ops.kernels.delta_rule.CHUNK",
        "ops.kernels.logits._BLOCK", "ops.kernels.logits._NUM_WARPS", "ops.kernels.fp8_blocks._SIDE",
        "ops.kernels.fp8_blocks._ROWS", "ops.kernels.fp8_blocks._MATRIX_WARPS",
        "ops.kernels.unused_experts._BLOCK", "ops.kernels.row_sums._BLOCK", "ops.kernels.adamw._BLOCK",
        "ops.kernels.grouped_matmul._ROWS", "ops.kernels.grouped_matmul._COLUMNS",
        "ops.kernels.grouped_matmul._STEP_BYTES", "ops.kernels.grouped_matmul._LEAST",
        "ops.kernels.grouped_matmul._SEARCHED",
        "ops.kernels.launch._ALIGNED", "ops.kernels.block_attention._KEYS", "ops.kernels.block_attention._ROWS",
        "ops.kernels.block_attention._LEAST",
    },
    "which small files are copied from where they lie (tests/test_export_places.py)": {
        "weights.small_files._KEPT_BYTES",
    },
}  # fmt: skip
NO_TENSORS = ("plan", "report")  # packages that estimate and draw
LEAST = 8  # a smaller number counts things, such as tries


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def numbers(path: Path) -> Iterator[str]:
    """The constants of a module that are whole numbers, written as such."""
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.Assign):
            continue
        target = node.targets[0]
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        values = node.value.elts if isinstance(node.value, ast.Tuple) and len(names) > 1 else [node.value]
        for name, value in zip(names, values, strict=False):
            if isinstance(name, ast.Name) and name.id.isupper() and _size(value) >= LEAST:
                yield f"{module_of(path)}.{name.id}"


def _size(node: ast.expr) -> int:
    """The whole number that an expression of numbers alone gives, else 0."""
    plain = (ast.Constant, ast.BinOp, ast.operator)
    if not all(isinstance(each, plain) for each in ast.walk(node)):
        return 0
    value = eval(compile(ast.Expression(node), "", "eval"))
    return value if type(value) is int else 0


MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] not in NO_TENSORS]


def test_every_constant_that_cuts_is_registered() -> None:
    """A new whole number in a module is a part size, or this file lists it as something else."""
    known = set().union(*OTHERS.values())
    actual = {name for path in MODULES for name in numbers(path)}
    assert actual - known == set(), "declare it with ops.part_sizes.part_size, or add it to OTHERS"
    assert {name for name in known if name not in actual} - {"data.permute._MIX"} == set(), "it is not there any more"


def registered() -> list[PartSize]:
    for path in MODULES:
        if "part_size(" in path.read_text() and path.name != "__main__.py":
            importlib.import_module(f"meshwright.{module_of(path)}")
    return list(part_sizes())


def test_every_part_size_is_shrunk_for_as_long_as_a_trial_takes() -> None:
    actual = registered()
    assert len({(each.module, each.name) for each in actual}) == len(actual)
    whole = [vars(importlib.import_module(each.module))[each.name] for each in actual]
    assert whole == [each.size for each in actual], "a name is not that of the constant"
    with part_sizes_of(trials.trial(Path(), {})):
        small = [vars(importlib.import_module(each.module))[each.name] for each in actual]
    assert small == [each.small for each in actual]
    assert [each for each in actual if each.small >= each.size and each.name != "CHUNK"] == []
    assert whole == [vars(importlib.import_module(each.module))[each.name] for each in actual]
    packages = {each.module.split(".")[1] for each in actual}
    assert packages - {*TRIED} == {"data", "checkpoint", "weight_sync", "objectives", "train"}, (
        "add a test that cuts them"
    )


def test_verify_shrinks_them_but_for_one_run() -> None:
    """On the ranks of the mesh; one process, and float32, keep the sizes of real runs."""
    plan = session.plan("tiny-qwen3", trials.Axes(), session.Options())
    tried = {dtype: session.trial_of(plan, dtype, Path()) for dtype in session.DTYPES}
    assert {dtype: trial.small_parts for dtype, trial in tried.items()} == {
        "float64": 1, "float32": 0, "bfloat16": 1
    }  # fmt: skip


def test_no_part_size_is_read_through_another_name() -> None:
    """`from module import CHUNK`, or `def f(chunk=CHUNK)`, would keep the whole size."""
    names = {each.name for each in registered()}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                taken = {alias.name for alias in node.names} & names
                assert not taken, f"{path}: read {taken} as an attribute of its module"
            if isinstance(node, ast.arguments):
                defaults = [*node.defaults, *node.kw_defaults]
                taken = {each.id for each in defaults if isinstance(each, ast.Name)} & names
                assert not taken, f"{path}: {taken} is read once, where the function is made"


def test_data_are_read_and_kept_in_parts(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": f"w{n} " * (n % 5 + 1)}) + "\n" for n in range(40)))
    recipe = TokenizeSpec(
        name="it", files=(file,), make=lambda row: [tokens([*row["text"].encode()], [(0, 2)])], settings_key="it"
    )
    with shrunk_part_sizes():
        assert len(row_files.shards_of([file])) > 1
        parts = prepare(recipe, tmp_path / "parts")
        places = [parts.place(at) for at in range(len(parts))]
    whole = prepare(recipe, tmp_path / "whole")
    assert len(parts) == len(whole) == 40
    assert all(parts.tokens(at).ids.tolist() == whole.tokens(at).ids.tolist() for at in range(40))
    assert places == [f"{file}:{n + 1}" for n in range(40)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoints_are_compared_in_parts(tmp_path: Path, dtype: torch.dtype) -> None:
    source = open_source(tiny.directory(tmp_path / "m", "qwen3", dtype=dtype))
    entry = source.entries["model.embed_tokens.weight"]
    (whole,) = inspect._parts(source, entry)
    with shrunk_part_sizes():
        parts = list(inspect._parts(source, entry))
    assert len(parts) > 1
    assert torch.equal(torch.cat(parts), whole)


def test_a_nan_differs_from_a_number_and_not_from_a_nan(tmp_path: Path) -> None:
    sources = []
    for name, value in {"number": 1.0, "nan": float("nan"), "again": float("nan")}.items():
        at = tiny.directory(tmp_path / name, "qwen3")
        tensors = load_file(at / "model.safetensors")
        tensors["model.norm.weight"][3] = value
        save_file(tensors, at / "model.safetensors")
        sources.append(open_source(at))
    number, nan, again = ((each, each.entries["model.norm.weight"]) for each in sources)
    assert [*inspect._of_values("weights", nan, again)] == []
    for pair in ((number, nan), (nan, number)):
        [difference] = inspect._of_values("weights", *pair)
        assert (difference.largest, difference.num) == (float("inf"), 1)


def test_memory_that_no_code_writes_shows() -> None:
    """In backward too, where a mode of torch would not be active."""
    x, weight_EOI = (torch.ones(*shape, requires_grad=True) for shape in ((2, 5), (3, 4, 5)))
    with poisoned_memory():
        x.register_hook(torch.empty_like)
        _LoopedLinear.apply(x, weight_EOI, [2, 0, 0], False).sum().backward()
        assert torch.empty(3, dtype=torch.int64).shape == (3,)
    assert bool(x.grad.isnan().all())
    assert not weight_EOI.grad[1:].any(), "experts without rows"
    assert not isinstance(torch.empty, FunctionType), "it is torch's own again"


def test_sizes_come_back_as_they_were_before_a_context_in_another_one() -> None:
    each = registered()[0]
    module = importlib.import_module(each.module)
    with shrunk_part_sizes():
        with shrunk_part_sizes(2):
            assert vars(module)[each.name] == min(each.size, 2 * each.small)
        assert vars(module)[each.name] == each.small
