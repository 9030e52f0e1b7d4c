"""Rules of CONTRIBUTING.md that no linter knows, read from the source. Each finding names file:line and the fix."""

import ast
import functools
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from types import FunctionType

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "meshwright").rglob("*.py"))

MAX_FILE_LINES = 499
MAX_FUNCTION_LINES = 60
# The only packages that import torch.distributed. A contract in .importlinter keeps sharding, ops and models from them.
# weight_sync takes the group of its caller; integrations reads the size of the world that a framework has made.
WITH_PROCESS_GROUP = ("checkpoint", "mesh", "watch", "parallel", "verify", "weight_sync", "integrations")
GROUPED = {
    name
    for name, call in vars(dist).items()
    if type(call) is FunctionType
    and "group" in inspect.signature(call).parameters
    and not name.startswith(("get_", "destroy_", "_"))
}
MAX_ARGUMENTS = 6
PUBLIC = (
    "load",
    "init",
    "save",
    "export",
    "check_export",
    "pack",
    "batches",
    "sample",
    "weight",
    "Engine.__init__",
    "Mesh.__init__",
)  # what users call by keywords may take more
KINDS = {
    "cuda",
    "nccl",
    "gloo",
    "rocm",
    "hip",
    "rccl",
    "xpu",
    "xccl",
    "mps",
    "npu",
    "hccl",
    "hpu",
    "mtia",
    "tpu",
    "xla",
}
ON_THE_DEVICE = ("sharding", "models", "parallel", "optim", "engine")  # others also work on the host, and say so

parsed = functools.cache(ast.parse)


@functools.cache
def walked(tree: ast.Module) -> list[ast.AST]:
    return list(ast.walk(tree))


Finding = tuple[int, str]
Rule = Callable[[str, ast.Module, str], Iterator[Finding]]


def file_length(package: str, tree: ast.Module, text: str) -> Iterator[Finding]:
    num_lines = len(text.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield num_lines, f"the file has {num_lines} lines; split it, {MAX_FILE_LINES} are allowed"


def function_length(package: str, tree: ast.Module, text: str) -> Iterator[Finding]:
    for node in walked(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = node.end_lineno - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                yield (
                    node.lineno,
                    f"{node.name} has {num_lines} lines; name its parts, {MAX_FUNCTION_LINES} are allowed",
                )


def number_of_arguments(package: str, tree: ast.Module, text: str) -> Iterator[Finding]:
    owners = {id(f): f"{c.name}.{f.name}" for c in walked(tree) if isinstance(c, ast.ClassDef)
              for f in c.body if isinstance(f, ast.FunctionDef)}  # fmt: skip
    for node in walked(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            named = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            num = len([name for name in named if name not in ("self", "cls", "ctx")])
            # A Triton kernel takes pointers, numbers and constants one by one: a launch knows nothing else.
            decorators = [each.func if isinstance(each, ast.Call) else each for each in node.decorator_list]
            if any(dotted(each) == "triton.jit" for each in decorators):
                continue
            if num > MAX_ARGUMENTS and owners.get(id(node), node.name) not in PUBLIC:
                yield (
                    node.lineno,
                    f"{node.name} takes {num} arguments, not at most {MAX_ARGUMENTS}; give what goes together an owner",
                )


def probing(package: str, tree: ast.Module, text: str) -> Iterator[Finding]:
    for node in walked(tree):
        if isinstance(node, ast.Call) and dotted(node.func) == "getattr" and len(node.args) == 3:
            yield node.lineno, "getattr with a default hides a missing attribute; declare it, and read it plainly"


def swallowed_exceptions(package: str, tree: ast.Module, text: str) -> Iterator[Finding]:
    for node in walked(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield node.lineno, "a bare except also catches KeyboardInterrupt; name the exceptions that are expected"
        elif isinstance(node, ast.ExceptHandler) and catches_all(node.type) and not any(map(does_something, node.body)):
            yield node.lineno, "an exception of any kind is swallowed; name the expected one, or let it rise"
        elif isinstance(node, ast.Call) and dotted(node.func).endswith("suppress") and any(map(catches_all, node.args)):
            yield node.lineno, "an exception of any kind is suppressed; name the expected one, or let it rise"


def process_groups(package: str, tree: ast.Module, text: str) -> Iterator[Finding]:
    if package not in WITH_PROCESS_GROUP:
        for line, name in used_names(tree):
            if name == "torch.distributed" or name.startswith("torch.distributed."):
                yield line, f"torch.distributed in {package}; communicate in parallel, behind a door that the mesh arms"


def default_group(package: str, tree: ast.Module, text: str) -> Iterator[Finding]:
    """verify has its processes for itself."""
    for node in walked(tree) if package != "verify" else ():
        called = dotted(node.func).partition("dist.")[2] if isinstance(node, ast.Call) else ""
        if called in GROUPED and "group" not in {args.arg for args in node.keywords}:  # type: ignore[attr-defined] # a call
            yield node.lineno, "the default group is the user's: his calls would meet ours; give group="


def reference_library(package: str, tree: ast.Module, text: str) -> Iterator[Finding]:
    if package not in ("data", "verify"):  # of verify one module alone: .importlinter names it
        for line, name in used_names(tree):
            if name.split(".")[0] == "transformers":
                yield line, f"transformers in {package}; only data and the peer of verify may import it"


def device_names(package: str, tree: ast.Module, text: str) -> Iterator[Finding]:
    if package in ("mesh", "watch"):  # which process groups are made of, and how they fail
        return
    for node in walked(tree):
        named = KINDS.intersection(parts_of_name(node))
        if named:
            yield node.lineno, f"{min(named)} outside of mesh; take the device from the mesh or from a tensor"
        elif package in ON_THE_DEVICE and isinstance(node, ast.Constant) and node.value == "cpu":
            yield node.lineno, f'"cpu" in {package}; make it on mesh.device, or on that of a tensor'


def parts_of_name(node: ast.AST) -> list[str]:
    """`torch.cuda.amp`, `x.cuda()` and "cuda:0" all have the part cuda."""
    if isinstance(node, ast.Attribute | ast.alias):
        return (node.attr if isinstance(node, ast.Attribute) else node.name).split(".")
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").split(".")
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [part.partition(":")[0] for part in node.value.split(",")]
    return []


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a chain of attributes, else the empty string."""
    if isinstance(node, ast.Name):
        return node.id
    parent = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{parent}.{node.attr}" if parent else ""


def used_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Modules and names that are imported, and chains of attributes that start at a module."""
    for node in walked(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and dotted(node) == "torch.distributed":
            yield node.lineno, "torch.distributed"


def catches_all(node: ast.expr) -> bool:
    names = node.elts if isinstance(node, ast.Tuple) else [node]
    return any(dotted(name) in ("Exception", "BaseException") for name in names)


def does_something(node: ast.stmt) -> bool:
    return not isinstance(node, ast.Pass | ast.Continue) and not (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )


def findings(rule: Rule, path: str, text: str) -> list[str]:
    """Return the findings of `rule` in the file at `path`, which starts with meshwright/."""
    package = PurePosixPath(path).parts[1].removesuffix(".py")
    return [f"{path}:{line}: {message}" for line, message in rule(package, parsed(text), text)]


RULES = [
    file_length, function_length, number_of_arguments, probing, swallowed_exceptions, process_groups, default_group,
    reference_library, device_names,
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_sources_follow_the_rules(rule: Rule) -> None:
    assert SOURCES, f"no sources under {ROOT / 'meshwright'}; the test looks in the wrong place"
    result = [
        line
        for path in SOURCES
        for line in findings(rule, path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    ]
    assert not result, "\n" + "\n".join(result)


# A rule that has gone blind passes for ever, so each is shown what it must see (line > 0) and must not see (0).
@pytest.mark.parametrize(
    ("rule", "path", "text", "line"),
    [
        (file_length, "engine.py", "x = 1\n" * 500, 500),
        (file_length, "engine.py", "x = 1\n" * 499, 0),
        (function_length, "engine.py", "\ndef f():\n" + "    x = 1\n" * 60, 2),
        (function_length, "engine.py", "\ndef f():\n" + "    x = 1\n" * 59, 0),
        (number_of_arguments, "engine.py", "def f(a, b, c, *, d, e, f, g): ...", 1),
        (number_of_arguments, "engine.py", "class A:\n    def f(self, a, b, c, *, d, e, f): ...", 0),
        (number_of_arguments, "engine.py", "class A:\n    def load(self, a, b, c, d, e, f, g): ...", 2),
        (number_of_arguments, "engine.py", "def load(a, b, c, d, e, f, g): ...", 0),
        (number_of_arguments, "ops/x.py", "@triton.jit\ndef f(a, b, c, d, e, f, g): ...", 0),
        (number_of_arguments, "ops/x.py", "@triton.jit(x=[1])\ndef f(a, b, c, d, e, f, g): ...", 0),
        (probing, "engine.py", "getattr(x, 'y', None)", 1),
        (probing, "engine.py", "getattr(x, y)", 0),
        (swallowed_exceptions, "engine.py", "try:\n    f()\nexcept:\n    raise", 3),
        (swallowed_exceptions, "engine.py", "try:\n    f()\nexcept Exception:\n    pass", 3),
        (swallowed_exceptions, "engine.py", "try:\n    f()\nexcept (OSError, BaseException):\n    ...", 3),
        (swallowed_exceptions, "engine.py", "with contextlib.suppress(Exception):\n    f()", 1),
        (swallowed_exceptions, "engine.py", "try:\n    f()\nexcept OSError:\n    pass", 0),
        (swallowed_exceptions, "engine.py", "try:\n    f()\nexcept Exception:\n    clean()\n    raise", 0),
        (process_groups, "sharding/boxes.py", "import torch.distributed as dist", 1),
        (process_groups, "ops/loss.py", "import torch\nfrom torch import distributed", 2),
        (process_groups, "models/qwen3.py", "from torch.distributed.tensor import DTensor", 1),
        (process_groups, "sharding.py", "import torch\ntorch.distributed.barrier()", 2),
        (process_groups, "engine/model.py", "import torch.distributed as dist", 1),
        (process_groups, "train/run.py", "import torch.distributed as dist", 1),
        (process_groups, "parallel/tensor.py", "import torch.distributed as dist", 0),
        (default_group, "weights/writer.py", "dist.send(x, 0)", 1),
        (default_group, "mesh/__init__.py", "\ndist.all_reduce(x)", 2),
        (default_group, "mesh/__init__.py", "dist.all_reduce(x, group=self.process_group(axes))", 0),
        (default_group, "mesh/__init__.py", "dist.get_rank()", 0),
        (reference_library, "models/qwen3.py", "from transformers import AutoConfig", 1),
        (reference_library, "models/qwen3.py", "def f():\n    import transformers.models", 2),
        (reference_library, "data/chat.py", "from transformers import AutoTokenizer", 0),
        (device_names, "engine.py", "x.to('cuda')", 1),
        (device_names, "engine.py", "x.to(f'cuda:{i}')", 1),
        (device_names, "mesh.py", "x.to('cuda')", 0),
        (device_names, "mesh/__init__.py", "x.to('cuda')", 0),
        (device_names, "ops/kernels.py", "torch.cuda.synchronize()", 1),
        (device_names, "ops/kernels.py", "import torch\nx.cuda()", 2),
        (device_names, "parallel/fsdp.py", "from torch.cuda import amp", 1),
        (device_names, "verify/local_ranks.py", "import torch.xpu", 1),
        (device_names, "verify/local_ranks.py", "dist.init_process_group('cpu:gloo,cuda:nccl')", 1),
        (device_names, "engine/model.py", "torch.accelerator.current_accelerator()", 0),
        (device_names, "engine/model.py", "torch.zeros(3, device='cpu')", 1),
        (device_names, "data/pack.py", "torch.device('cpu')", 0),
    ],
)
def test_each_rule_catches_its_mistake(rule: Rule, path: str, text: str, line: int) -> None:
    result = findings(rule, f"meshwright/{path}", text)
    assert [finding.split(": ")[0] for finding in result] == ([f"meshwright/{path}:{line}"] if line else [])


def test_layers() -> None:
    command = Path(sys.executable).with_name("lint-imports")
    assert command.exists(), "lint-imports is not installed; run `make setup`"
    result = subprocess.run([command, "--no-logo", "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, "\n" + result.stdout + result.stderr
