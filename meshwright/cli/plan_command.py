"""Run `meshwright plan`: compute what a model needs on a mesh or, with `--search`, find the fastest meshes.

The command reads only `config.json` and declarations, starts no process and needs no device. So a laptop can plan 1,024
ranks.
"""

from __future__ import annotations

import argparse

from ..errors import MeshError
from ..log import Clock
from .options import MODEL, add_command, add_json, add_recipe, amount, check_axes, positive, print_json, recipe_of

EXAMPLES = """examples:
  meshwright plan path/to/Qwen3-30B-A3B --mesh fsdp=64,ep=8 --device 80GB
  meshwright plan Qwen/Qwen3-8B --mesh fsdp=8 --device H100 --tokens 16384     from the hub: only the config
  meshwright plan path/to/config.json --mesh fsdp=32,tp=8,ep=64 --html plan.html    writes a page
  meshwright plan Qwen/Qwen3-8B --mesh pp=4,fsdp=2 --micro-batches 16 --schedule zero-bubble    shows the bubble
  meshwright plan Qwen/Qwen3-8B --mesh fsdp=8 --device 40GB --recompute full --state-dtype bfloat16    saves memory
  meshwright plan path/to/Qwen3-30B-A3B --search 64 --device H100    the fastest meshes of 64 ranks
  meshwright plan my-critic --mesh fsdp=4 --head value --json
  meshwright plan tiny-qwen3.5-moe --mesh fsdp=2,tp=2,ep=2
"""
ABOUT = """Compute what a model needs on a mesh: bytes of every rank, every collective of a step, and whether it fits.

Reads config.json (and the headers of the weights, where they exist), starts no process and needs no device.
Buffers of collectives, of the optimizer update and of the allocator are not counted: leave a few GB free.
The time of a step is an estimate from data sheets; docs/plan.md says how it is made.
Exit codes: 0 the mesh works, 1 it does not fit the --device or the search is empty, 2 the mesh is impossible.
"""


def add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = add_command(
        commands, "plan", _plan, "compute what a model needs on a mesh, without a device",
        about=ABOUT, examples=EXAMPLES,
    )  # fmt: skip
    plan.add_argument("model", help=MODEL)
    plan.add_argument(
        "--device", metavar="SIZE", help="memory that a rank must fit into: a size (80GB) or a device (H100)"
    )
    plan.add_argument(
        "--tokens", type=positive, metavar="N", help="tokens in a micro-batch of a data rank (default 8192)"
    )
    plan.add_argument("--micro-batches", type=positive, metavar="N", help="micro-batches in a step (default 1)")
    add_recipe(plan)
    _add_cluster(plan)
    _add_search(plan)
    add_json(plan, "everything", ", with exact numbers")
    plan.add_argument("--html", metavar="FILE", help="write a page: a diagram of the mesh, memory, traffic, placement")


def _add_cluster(command: argparse.ArgumentParser) -> None:
    """Add the bandwidths and FLOP/s of a cluster.

    A known --device supplies the values that are not given. So a plan for an H100 needs none of these options.
    """
    group = command.add_argument_group("the cluster, to estimate the time of a step")
    group.add_argument(
        "--gpus-per-node", type=positive, default=8, metavar="N", help="consecutive ranks on one node (default 8)"
    )
    group.add_argument(
        "--inside",
        type=amount,
        metavar="GB/s",
        help="bandwidth of a rank inside a node, each way (default: that of --device)",
    )
    group.add_argument("--between", type=amount, metavar="GB/s", help="bandwidth of a rank between nodes, each way")
    group.add_argument(
        "--flops", type=amount, metavar="TFLOP/s", help="dense bfloat16 peak of a device, from its data sheet"
    )


def _add_search(command: argparse.ArgumentParser) -> None:
    """Add the options of a search. Every mesh gets the same --global-tokens, so that their times can be compared."""
    group = command.add_argument_group(
        "search, instead of --mesh: the fastest meshes on which a rank fits the --device"
    )
    group.add_argument("--search", type=positive, metavar="N", help="try the meshes of N ranks")
    group.add_argument("--global-tokens", type=positive, metavar="N", help="tokens in a step (default: N x --tokens)")
    group.add_argument("--top", type=positive, default=5, metavar="N", help="how many meshes to print (default 5)")


def _search(options: argparse.Namespace) -> int:
    """Search for the fastest mesh. Return 1 if none fits, so that a script notices."""
    from .. import plan  # imports torch: --help should not wait for it
    from ..plan.terminal import print_search, search_as_json

    arguments, origin, say = vars(options), plan.origin(options.command), Clock()
    request = plan.search_request(arguments)
    blueprint = plan.find(options.model, recipe_of(arguments), weights=False, say=say)
    request.optimizer.check(blueprint.table, blueprint.trained())
    result = plan.Search(blueprint, request, say).run()
    if options.json:
        print_json(search_as_json(result, request, origin))
    else:
        print_search(result, request)
    return int(not result.best)


def _plan(options: argparse.Namespace) -> int:
    """Plan one mesh. Return 1 if it does not fit the --device.

    Raise MeshError for an impossible mesh. With --json, first print all objections as data, so that a script can choose
    another mesh.
    """
    if options.search:
        return _search(options)
    from .. import plan  # imports torch: --help should not wait for it
    from ..axes import Axes
    from ..plan.terminal import plan_json, print_plan

    # Check all options before fetching a config from the hub, so that a typing mistake is reported at once.
    target = plan.check_page(options.html) if options.html else None
    device = plan.device_bytes(options.device) if options.device else None
    sizes, origin = plan.mesh_of(options.mesh), plan.origin(options.command)
    recipe, optimizer = recipe_of(vars(options)), plan.optimizer_of(vars(options))
    check_axes(vars(options), sizes)
    # weights=False: for a hub id, fetch only config.json and the index.
    blueprint = plan.find(options.model, recipe, weights=False, say=Clock())
    optimizer.check(blueprint.table, blueprint.trained())
    num_batches = options.micro_batches or 1
    # Report all objections to the mesh at once, so that the user does not fix one only to meet the next.
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
    return int(figures.fits is False)  # None without --device
