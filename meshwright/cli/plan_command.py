"""The command `meshwright plan`: its options, and what it does with them."""

from __future__ import annotations

import argparse

from ..errors import MeshError
from ..log import Clock
from .options import TINY, add_recipe, amount, check_axes, positive, print_json, recipe_of

EXAMPLES = """examples:
  meshwright plan path/to/Qwen3-30B-A3B --mesh fsdp=64,ep=8 --device 80GB
  meshwright plan Qwen/Qwen3-8B --mesh fsdp=8 --device H100 --tokens 16384     from the hub: only the config
  meshwright plan path/to/config.json --mesh fsdp=32,tp=8,ep=64 --html plan.html    a page with a picture of the mesh
  meshwright plan Qwen/Qwen3-8B --mesh pp=4,fsdp=2 --micro-batches 16 --schedule zero-bubble    how long ranks wait
  meshwright plan Qwen/Qwen3-8B --mesh fsdp=8 --device 40GB --recompute full --state-dtype bfloat16    to save memory
  meshwright plan path/to/Qwen3-30B-A3B --search 64 --device H100    the quickest meshes of 64 ranks
  meshwright plan my-critic --mesh fsdp=4 --head value --json
  meshwright plan tiny-qwen3.5-moe --mesh fsdp=2,tp=2,ep=2
"""
ABOUT = """What a model needs on a mesh: bytes of every rank, every collective of a step, and whether it fits.

It reads config.json (and the headers of the weights, where they are), starts no process and needs no device.
Buffers of collectives, of the update and of the allocator are not counted: leave a few GB.
How long a step takes is estimated from the figures of makers: docs/plan.md says how.
Exit codes: 0 it can be, 1 it does not fit the --device, 2 the mesh is impossible, and why.
"""


def add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = commands.add_parser(
        "plan", help="what a model needs on a mesh, with no process and no device", description=ABOUT,
        epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    plan.set_defaults(run=_plan)
    plan.add_argument("model", help=f"a Hugging Face directory, a config (*.json), a hub id, {TINY}")
    plan.add_argument("--device", metavar="SIZE", help="memory of a device, as 80GB or H100: does a rank fit into it?")
    plan.add_argument("--tokens", type=positive, metavar="N", help="in a micro-batch of a data rank (default 8192)")
    plan.add_argument("--micro-batches", type=positive, metavar="N", help="in a step (default 1)")
    add_recipe(plan)
    _add_cluster(plan)
    _add_search(plan)
    plan.add_argument("--json", action="store_true", help="everything as JSON on standard output, in exact numbers")
    plan.add_argument("--html", metavar="FILE", help="write a page: picture of the mesh, memory, traffic, placement")


def _add_cluster(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("where it would run, to estimate how long a step takes")
    group.add_argument(
        "--gpus-per-node", type=positive, default=8, metavar="N", help="neighbouring ranks of one node (default 8)"
    )
    group.add_argument(
        "--inside", type=amount, metavar="GB/s", help="of a rank each way inside a node (default: --device)"
    )
    group.add_argument("--between", type=amount, metavar="GB/s", help="of a rank each way between nodes")
    group.add_argument("--flops", type=amount, metavar="TFLOP/s", help="dense bfloat16 of a device, as its maker says")


def _add_search(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("instead of --mesh: the quickest meshes on which a rank fits the --device")
    group.add_argument("--search", type=positive, metavar="N", help="try the meshes of N ranks")
    group.add_argument("--global-tokens", type=positive, metavar="N", help="of a step (default: N x --tokens)")
    group.add_argument("--top", type=positive, default=5, metavar="N", help="how many are told (default 5)")


def _search(options: argparse.Namespace) -> int:
    from .. import plan  # imports torch: --help should not wait for it
    from ..plan.terminal import print_search, search_as_json

    given, origin, say = vars(options), plan.origin(options.command), Clock()
    request = plan.search_request(given)
    blueprint = plan.find(options.model, recipe_of(given), weights=False, say=say)
    found = plan.Search(blueprint, request, say).run()
    if options.json:
        print_json(search_as_json(found, request, origin))
    else:
        print_search(found, request)
    return int(not found.best)


def _plan(options: argparse.Namespace) -> int:
    if options.search:
        return _search(options)
    from .. import plan  # imports torch: --help should not wait for it
    from ..axes import Axes
    from ..plan.terminal import plan_json, print_plan

    target = plan.check_page(options.html) if options.html else None
    device = plan.device_bytes(options.device) if options.device else None
    sizes, origin = plan.mesh_of(options.mesh), plan.origin(options.command)
    recipe, optimizer = recipe_of(vars(options)), plan.optimizer_of(vars(options))
    check_axes(vars(options), sizes)
    blueprint = plan.find(options.model, recipe, weights=False, say=Clock())
    num_batches = options.micro_batches or 1
    refused = plan.objections(blueprint, sizes, num_batches, optimizer)
    if refused:
        if options.json:
            print_json({**origin, "model": options.model, "mesh": sizes, "refused": refused})
        raise MeshError(plan.reasons(refused))
    axes = Axes(**sizes)
    work = plan.work_of(axes, options.tokens, num_batches)
    cluster = plan.cluster_in(vars(options))
    figures = plan.Figures(options.model, blueprint, axes, work, device, optimizer, cluster)
    if options.json:
        print_json(plan_json(figures, origin))
    else:
        print_plan(figures)
    if target:
        plan.write_page(target, plan.plan_page(figures, origin))
    return int(figures.fits is False)
