"""What the engine needs of AReaL, read from its sources: `python -m tests.areal.contract SITE-PACKAGES/areal`.

The output is `tests/areal_1_0_4.json`, with which tests without AReaL compare the engine.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

CLASSES = {
    "api/cli_args.py": ["TrainEngineConfig", "OptimizerConfig", "FSDPEngineConfig", "MicroBatchSpec"],
    "api/alloc_mode.py": ["ParallelStrategy"],
    "api/io_struct.py": ["FinetuneSpec", "ParamSpec", "SaveLoadMeta", "WeightUpdateMeta"],
    "utils/data.py": ["MicroBatchList"],
}
FUNCTIONS = {
    "utils/data.py": [
        "allocate_balanced_mbs", "amend_position_ids", "concat_batch", "pack_tensor_dict", "split_batch",
    ],
    "engine/core/train_engine.py": ["reorder_and_pad_outputs"],
    "engine/core/distributed.py": ["init_custom_process_group"],
    "utils/network.py": ["find_free_ports", "format_host_for_url", "gethostip"],
    "utils/names.py": ["update_weights_from_disk"],
    "utils/stats_tracker.py": ["export_all"],
    "utils/perf_tracer.py": ["configure", "is_configured", "save"],
}  # fmt: skip


def arguments(node: ast.FunctionDef) -> list[str]:
    """The arguments of a function, without self and cls."""
    named = [each.arg for each in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
    more = [each.arg for each in (node.args.vararg, node.args.kwarg) if each is not None]
    return [name for name in [*named, *more] if name not in ("self", "cls")]


def decorators(node: ast.FunctionDef) -> set[str]:
    return {ast.unparse(each) for each in node.decorator_list}


def defaults(node: ast.ClassDef) -> dict[str, Any]:
    """The fields of a dataclass. A default that is no plain value is a string of source."""
    actual: dict[str, Any] = {}
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            value = each.value
            if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
                named = {k.arg: k.value for k in value.keywords}
                value = named.get("default", named.get("default_factory"))
            try:
                actual[each.target.id] = None if value is None else ast.literal_eval(value)
            except ValueError:
                actual[each.target.id] = ast.unparse(value)
    return actual


def contract(package: Path) -> dict[str, Any]:
    def nodes(path: str) -> dict[str, Any]:
        body = ast.parse((package / path).read_text()).body
        return {each.name: each for each in body if isinstance(each, ast.FunctionDef | ast.ClassDef)}

    engine = [each for each in nodes("api/engine_api.py")["TrainEngine"].body if isinstance(each, ast.FunctionDef)]
    return {
        "areal": "1.0.4",
        "properties": sorted(each.name for each in engine if "property" in decorators(each)),
        "abstract": {each.name: arguments(each) for each in engine if "abc.abstractmethod" in decorators(each)},
        "inherited": {each.name: arguments(each) for each in engine if "abc.abstractmethod" not in decorators(each)},
        "fields": {name: defaults(nodes(path)[name]) for path, classes in CLASSES.items() for name in classes},
        "functions": {
            f"areal/{path}": {name: arguments(nodes(path)[name]) for name in functions}
            for path, functions in FUNCTIONS.items()
        },
    }


if __name__ == "__main__":
    print(json.dumps(contract(Path(sys.argv[1])), indent=1, sort_keys=True))
