"""The command line: declares every command, and runs the one that was called.

Exit codes: 0 success, 1 a check failed or files differ, 2 refused or impossible, 130 Ctrl-C, 128 + N after signal N.

Each `_add_X` declares the options of a command and each `_X` runs it. The work is done by other packages, which a
command imports only when it runs: `--help`, `--version` and a mistyped command must not wait seconds for torch.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

from ..errors import ConfigError, MeshwrightError
from ..log import Clock
from .chat_command import add_chat
from .options import (
    CHECKPOINT,
    MODEL,
    add_command,
    add_config,
    add_json,
    add_recipe,
    check_axes,
    positive,
    print_json,
    recipe_of,
)
from .plan_command import add_plan
from .sample_command import add_sample

VERIFY_EXAMPLES = """examples:
  meshwright verify tiny-qwen3.5-moe --mesh fsdp=2,tp=2,ep=2
  meshwright verify path/to/Qwen3-30B-A3B --mesh fsdp=4,tp=2,ep=8      shrunk: same layers, heads and experts
  meshwright verify Qwen/Qwen3-0.6B --mesh fsdp=2 --html proof.html    from the hub; writes a page
  meshwright verify path/to/Qwen3-0.6B --mesh tp=2 --full --dtypes float32,bfloat16
  meshwright verify path/to/Qwen3-0.6B --mesh fsdp=2,tp=2 --weights    compare loaded weights with the files
  meshwright verify path/to/Qwen3-8B --mesh pp=2 --schedule v          a pipeline, with its schedule
  meshwright verify path/to/Qwen3.5-9B --mesh cp=4 --context delta=1   passes delta net states along cp
  meshwright verify path/to/Qwen3-VL-4B --mesh fsdp=2,tp=2 --tower     the vision encoder too
  meshwright verify path/to/Qwen3-8B --mesh fsdp=2,tp=2 --fp8          FP8 matmuls
  meshwright verify tiny-qwen3-moe-fp8 --mesh fsdp=2,ep=2 --fp8        the same, without a model at hand
  meshwright verify tiny-qwen3-moe --mesh fsdp=2,ep=2 --recompute full --token-once    memory options
  meshwright verify my-critic --mesh fsdp=2 --head value --json
  meshwright verify tiny-qwen3 --mesh fsdp=2 --device cuda --ranks-per-device 2    both ranks on one GPU, over NCCL
  meshwright verify tiny-qwen3-moe --mesh tp=2 --plant sum-left-out    see an oracle fail
  meshwright verify --list
"""
VERIFY_ABOUT = """Prove that a model on a mesh computes what one process computes: every gradient in float64, and more.

Without --full or --weights, the model is shrunk (same kinds of layers, head counts, experts and file layout, but narrow
and shallow, in odd sizes) and gets random weights. The ranks of the mesh run as processes on this machine.

Exit codes: 0 no check failed, 1 a check failed or a rank stopped, 2 the run was refused.
"""
INSPECT_EXAMPLES = """examples:
  meshwright inspect runs/first                                    the newest complete checkpoint of a run
  meshwright inspect runs/first/best --verify                      check every byte of the best one
  meshwright inspect runs/first/checkpoints/step-000200 --diff runs/second    compare two
  meshwright inspect runs/first --json
"""
INSPECT_ABOUT = """Show what a checkpoint holds: step, mesh, state sets with dtypes and sizes, and your own state.

Exit codes: 0 intact, 1 damaged bytes or the two checkpoints differ, 2 not a complete checkpoint.
"""
COPY_EXAMPLES = """examples:
  meshwright copy runs/first s3://bucket/first                        the newest complete one (pip install s3fs)
  meshwright copy runs/first/checkpoints/step-000200 gs://bucket/first    a specific one (pip install gcsfs)
  meshwright copy s3://bucket/first runs/again                        back, to resume from it
  meshwright copy /local/runs/first /shared/runs/first                from one disk to another
"""
COPY_ABOUT = """Copy a checkpoint to an object store, to another disk, or back. TARGET is a folder of checkpoints.

Every byte is checked against its checksum on the way. The manifest is copied last, so an interrupted copy is not a
checkpoint; the same command starts it again. A different checkpoint of the same step is never replaced.
"""
CONVERT_EXAMPLES = """examples:
  meshwright convert runs/first/best weights --to hf     a Hugging Face directory, with tokenizer
  meshwright convert runs/first weights --to hf --dtype float32       float32 masters of the newest checkpoint
  meshwright convert runs/first torch --to dcp                        for torch.distributed.checkpoint.load
  meshwright convert torch runs/again --to meshwright --like Qwen3-8B
"""
CONVERT_ABOUT = """Convert a checkpoint to another format, in one process, tensor by tensor, without a device or a mesh.

Formats: meshwright (what mw.save writes), hf (a Hugging Face directory), dcp (what torch.distributed.checkpoint.save
writes for engine.state_dict()). No code in a pickle of the source is run. The output is complete or absent.
"""
REPORT_EXAMPLES = """examples:
  meshwright report runs/first                                     writes runs/first/report.html
  meshwright report runs/first runs/second --html compared.html    both in the same charts
"""
REPORT_ABOUT = """Write a page about one or more runs: curves, held-out data, experts, samples, checkpoints, placement.

The page is one file and needs no network. It can be written while a run is going on. OUT is `out` of the run file.
"""
TRAIN_EXAMPLES = """examples:
  meshwright train run.toml
  meshwright train run.toml --set mesh.fsdp=4 optim.lr=1e-5 data.0.path=chats.jsonl
  meshwright train run.toml --dry-run                                  prepare the data, print what would run
  torchrun --nnodes 4 --nproc-per-node 8 -m meshwright train run.toml  the same file on several machines
"""
DATA_EXAMPLES = """examples:
  meshwright data run.toml                      read, tokenise and check the data of a run; needs no device
  meshwright data run.toml --show 3             and show 3 documents of each source
  meshwright data run.toml --set data.0.path=other.jsonl
"""
DATA_ABOUT = """Prepare the data of a run: read and tokenise every row, and report unusable ones with their lines.

The result is cached, and `meshwright train` uses it. Exit codes: 0 the data can be trained on, 2 it cannot.
"""
TRAIN_ABOUT = """Train as a run file says (fields: docs/train-config.md). The same command resumes an interrupted run.

The ranks of the mesh run as processes on this machine, unless torchrun started this one. Ctrl-C finishes the step,
saves and exits; a second Ctrl-C exits at once. Exit codes: 0 trained, 2 refused or failed, 130 or 143 after a signal.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. `arguments`: those after the name of the program, else `sys.argv`.

    An error of our own prints one line, because its message names the fix. Any other exception is a bug, and keeps its
    traceback.
    """
    try:
        parser = _parser()
        options = parser.parse_args(arguments)
        if options.name is None:
            parser.print_help(sys.stderr)
            return 2
        # Pages and JSON name the command that wrote them.
        options.command = shlex.join(["meshwright", *(sys.argv[1:] if arguments is None else arguments)])
        return int(options.run(options))
    except MeshwrightError as error:
        print(f"meshwright: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("meshwright: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="meshwright", description="Train Qwen models on any mesh, proven right.")
    parser.add_argument(
        "--version",
        action=_Version,
        nargs=0,
        help="print the versions of meshwright and of the packages that it computes with",
    )
    commands = parser.add_subparsers(dest="name", metavar="COMMAND")
    add_chat(commands)
    _add_convert(commands)
    _add_copy(commands)
    _add_data(commands)
    _add_inspect(commands)
    add_plan(commands)
    _add_report(commands)
    add_sample(commands)
    _add_train(commands)
    _add_verify(commands)
    return parser


def _add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    inspect = add_command(
        commands, "inspect", _inspect, "show what a checkpoint holds, and verify its bytes",
        about=INSPECT_ABOUT, examples=INSPECT_EXAMPLES,
    )  # fmt: skip
    inspect.add_argument("checkpoint", help=CHECKPOINT)
    inspect.add_argument("--verify", action="store_true", help="read every file and compare its checksums")
    inspect.add_argument(
        "--diff", metavar="OTHER", help="list the tensors that differ from another checkpoint, and by how much"
    )
    add_json(inspect, "everything")


def _add_convert(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    convert = add_command(
        commands, "convert", _convert, "convert a checkpoint to another format",
        about=CONVERT_ABOUT, examples=CONVERT_EXAMPLES,
    )  # fmt: skip
    convert.add_argument("source", help="a run, a checkpoint in any format, or a folder of checkpoints (RUN/best)")
    convert.add_argument("target", help="a new directory; with --to meshwright, a folder of checkpoints")
    convert.add_argument("--to", required=True, choices=["hf", "dcp", "meshwright"], help="the format to write")
    convert.add_argument(
        "--like", metavar="DIR", help="a Hugging Face directory of the same model; needed for a dcp source"
    )
    convert.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="dtype of the weights (default: that of the source)"
    )


def _add_copy(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    copy = add_command(
        commands, "copy", _copy, "copy a checkpoint to an object store or another disk, or back",
        about=COPY_ABOUT, examples=COPY_EXAMPLES,
    )  # fmt: skip
    copy.add_argument("source", help=CHECKPOINT)
    copy.add_argument("target", help="the folder to copy it into: a directory, or a URL that fsspec knows")


def _add_data(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    data = add_command(
        commands, "data", _data, "prepare and inspect the data of a run",
        about=DATA_ABOUT, examples=DATA_EXAMPLES,
    )  # fmt: skip
    add_config(data, "data.0.path=... ...")
    data.add_argument(
        "--show",
        type=positive,
        default=0,
        metavar="N",
        help="print N documents of each source, with trained tokens in green",
    )


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    report = add_command(
        commands, "report", _report, "write a page about runs, and compare them",
        about=REPORT_ABOUT, examples=REPORT_EXAMPLES,
    )  # fmt: skip
    report.add_argument("runs", nargs="+", metavar="OUT", help="the directory of a run")
    report.add_argument("--html", metavar="FILE", help="write the page to FILE (default: report.html in the first run)")


def _add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    train = add_command(
        commands, "train", _train, "fine-tune or pre-train as a run file says",
        about=TRAIN_ABOUT, examples=TRAIN_EXAMPLES,
    )  # fmt: skip
    add_config(train, "mesh.tp=2 ...")
    train.add_argument(
        "--nproc", type=positive, metavar="N", help="number of ranks on this machine (default: that of the mesh)"
    )
    train.add_argument("--plain", action="store_true", help="print lines instead of a live view, as without a terminal")
    train.add_argument("--dry-run", action="store_true", help="prepare the data, print what would be trained, and exit")


def _add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verify = add_command(
        commands, "verify", _verify, "prove that a mesh computes what one process computes",
        about=VERIFY_ABOUT, examples=VERIFY_EXAMPLES,
    )  # fmt: skip
    verify.add_argument("model", nargs="?", help=MODEL)
    add_recipe(verify)
    verify.add_argument(
        "--dtypes", default="float64,float32,bfloat16", metavar="NAME,...",
        help="dtypes to try: float64 is the proof, the others show that they work too (default: all three)",
    )  # fmt: skip
    kind = verify.add_mutually_exclusive_group()
    kind.set_defaults(kind="shrunk")
    kind.add_argument(
        "--full", dest="kind", action="store_const", const="full", help="use the model and its weights unchanged"
    )
    kind.add_argument(
        "--weights", dest="kind", action="store_const", const="weights",
        help="only load the real weights, and compare the bytes on every rank with the files",
    )  # fmt: skip
    verify.add_argument("--device", default="cpu", help="cpu (default), or a device type with one device for each rank")
    verify.add_argument(
        "--ranks-per-device", type=positive, default=1, metavar="N",
        help="with --device cuda: up to N ranks share a GPU, over NCCL (default 1)",
    )  # fmt: skip
    verify.add_argument("--seconds", type=float, default=600.0, help="time limit of one run (default 600)")
    verify.add_argument(
        "--against", default="transformers", choices=["transformers", "none"],
        help="the peer to compare one process with; without --tower on text only (default transformers)",
    )  # fmt: skip
    verify.add_argument("--seed", type=int, default=0, help="seed of random weights and data (default 0)")
    verify.add_argument(
        "--plant", default="", metavar="BUG", help="plant a bug in the ranks, to see an oracle catch it"
    )
    add_json(verify, "the result")
    verify.add_argument("--html", metavar="FILE", help="write a page: mesh, placement, bill and findings")
    verify.add_argument("--list", action="store_true", help="list what each oracle checks, and exit")


class _Version(argparse.Action):
    """Print the versions and exit. argparse's own action takes a finished text, and reading versions takes a while."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        from ..provenance import versions

        print(", ".join(f"{name} {number}" for name, number in versions().items()))
        parser.exit()


def _inspect(options: argparse.Namespace) -> int:
    """Show a checkpoint, and return 1 if bytes are damaged or a second checkpoint differs.

    Bytes of tensors are read only for --verify and --diff, so a plain look is quick.
    """
    from pathlib import Path

    from .. import checkpoint as disk  # imports torch: --help should not wait for it
    from ..checkpoint import inspect

    checkpoint = disk.opened_at(Path(options.checkpoint))
    other = disk.opened_at(Path(options.diff)) if options.diff else None
    # None means not requested, an empty list that nothing is wrong: the output distinguishes them.
    wrong = disk.check_bytes(checkpoint) if options.verify else None
    apart = list(disk.differences(checkpoint, other)) if other else None
    if options.json:
        print_json(inspect.as_json(checkpoint, wrong, apart))
    else:
        inspect.print_checkpoint(checkpoint, wrong, apart)
    return int(bool(wrong or apart))


def _copy(options: argparse.Namespace) -> int:
    """Copy a checkpoint and print where it is now: the name of its step is added to the target."""
    from ..checkpoint import copy_checkpoint  # imports torch: --help should not wait for it

    print(copy_checkpoint(options.source, options.target))
    return 0


def _data(options: argparse.Namespace) -> int:
    """Prepare the data of a run without starting it, and print documents with their trained tokens in colour.

    `train` does the same preparation. On its own it needs no accelerator, so it can run before one is rented, and a
    chat template that trains on the wrong tokens is seen before it costs a run.
    """
    from rich.console import Console

    from ..train import (  # imports torch: --help should not wait for it
        config_file,
        data_sources,
        dry_run,
        launch,
        preflight,
    )
    from ..weights import path_of

    # All mistakes of the file, the model and its mesh are reported before any row is read.
    config = config_file.read(options.config, options.set, preflight.mistakes)
    prepared = launch.prepared(config)
    print(dry_run.dry_run(config, prepared.data, prepared.held_out))
    directory = data_sources.model_directory(config.model)
    names = data_sources.RowReader.of(config, directory, path_of(config.cache)).names_of_classes
    for document in dry_run.shown(prepared.data, directory, options.show, names):
        Console(soft_wrap=True, highlight=False).print(document)
    return 0


def _train(options: argparse.Namespace) -> int:
    """Train, or with --dry-run print what would be trained.

    The launcher, a rank that it started, and a rank that torchrun started all come through this function. The
    environment tells them apart: only a rank has WORLD_SIZE.
    """
    from ..plan.terminal import print_plan  # imports torch: --help should not wait for it
    from ..report import last_words
    from ..train import config_file, dry_run, launch, preflight
    from ..train.config_model import layout_of
    from ..train.resume_point import check_position
    from ..weights import path_of

    replaced = [*options.set, *(["log.plain=true"] if options.plain else [])]
    # A rank skips the checks before the start: its launcher has made them. Under torchrun none were made, and a mistake
    # raises where the rank first reads the model or the data.
    if "WORLD_SIZE" in os.environ:
        config = config_file.read(options.config, replaced)
    else:
        config = config_file.read(options.config, replaced, preflight.mistakes)
    launch.refuse_other_world(config, options.nproc)
    if options.dry_run:
        prepared = launch.prepared(config)
        check_position(config, prepared.data)
        print_plan(layout_of(config))
        print(dry_run.dry_run(config, prepared.data, prepared.held_out))
        return 0
    # The launcher starts this same command once for each rank, so all ranks read the same file with the same --set.
    sets = ["--set", *replaced] if replaced else []
    why = launch.start(config, ["train", options.config, *sets])
    if launch.ends_at_the_terminal():
        print("\n".join(last_words(path_of(config.out), config.out)), flush=True)
    if why and "WORLD_SIZE" not in os.environ:
        print(f"meshwright: ended by {why}; {launch.what_next(config)}", file=sys.stderr)
    # As a shell does: 130 after SIGINT, 143 after SIGTERM. A scheduler tells an interrupted run from a finished one.
    return 128 + int(why.split()[1]) if why.startswith("signal") else 0


def _report(options: argparse.Namespace) -> int:
    """Write a page about runs, and print its path. The page goes into the first run unless --html names a file."""
    from pathlib import Path

    from ..plan import check_page, origin  # imports torch: --help should not wait for it
    from ..report import write_report

    folders = [Path(run) for run in options.runs]
    if not folders[0].is_dir():
        raise ConfigError(f"{folders[0]} is not a directory; give the `out` of a run file")
    # A page that cannot be written is refused before the runs are read.
    target = check_page(options.html or str(folders[0] / "report.html"))
    write_report(folders, target, origin(options.command))
    print(target)
    return 0


def _convert(options: argparse.Namespace) -> int:
    """Convert a checkpoint, and print the path of the result."""
    from pathlib import Path

    import torch  # --help should not wait for it

    from ..engine.convert import convert

    like = Path(options.like) if options.like else None
    dtype = getattr(torch, options.dtype) if options.dtype else None
    print(convert(Path(options.source), Path(options.target), options.to, like=like, dtype=dtype))
    return 0


def _verify(options: argparse.Namespace) -> int:
    """Run all oracles, and return 1 if one of them has a finding.

    A page is written for a failed run too, because readers want its findings.
    """
    from .. import plan as planning  # imports torch: --help should not wait for it
    from .. import verify
    from ..axes import Axes
    from ..verify import report

    if options.list:
        report.print_oracles()
        return 0
    if options.model is None:
        raise ConfigError("verify needs a model: a directory, or one of " + ", ".join(planning.TINY))
    target = planning.check_page(options.html) if options.html else None
    # All options are read, and impossible ones refused, before a process starts.
    say, sizes = Clock(), planning.mesh_of(options.mesh)
    recipe, optimizer = recipe_of(vars(options)), planning.optimizer_of(vars(options))
    check_axes(vars(options), sizes)
    asked = verify.Options(
        recipe, options.dtypes.split(","), options.kind, options.device, options.seconds, options.against, options.seed,
        options.plant, optimizer, options.ranks_per_device,
    )  # fmt: skip
    plan = verify.plan(options.model, Axes(**sizes), asked, say)
    parts = verify.inspect(plan, say)
    origin = planning.origin(options.command, options.seed)
    if options.json:
        print_json(report.report_json(options.model, plan, parts, origin))
    else:
        report.print_table(options.model, plan, parts)
    if target:
        planning.write_page(target, report.verify_page(plan, parts, origin))
    return int(any(part.findings for part in parts))
