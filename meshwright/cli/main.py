"""The command line. Exit codes: 0 all is well, 1 something was found, 2 it is impossible, 130 Ctrl-C."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence

from ..errors import ConfigError, MeshwrightError
from ..log import Clock
from .options import TINY, add_recipe, check_axes, positive, print_json, recipe_of
from .plan_command import add_plan

EXAMPLES = """examples:
  meshwright verify tiny-qwen3.5-moe --mesh fsdp=2,tp=2,ep=2
  meshwright verify path/to/Qwen3-30B-A3B --mesh fsdp=4,tp=2,ep=8      shrunk: its layers, heads and experts
  meshwright verify Qwen/Qwen3-0.6B --mesh fsdp=2 --html proof.html    from the hub; a page with placement and bill
  meshwright verify path/to/Qwen3-0.6B --mesh tp=2 --full --dtypes float32,bfloat16
  meshwright verify path/to/Qwen3-0.6B --mesh fsdp=2,tp=2 --weights    are the bytes on each rank those of the files?
  meshwright verify path/to/Qwen3-8B --mesh pp=2 --schedule v          a pipeline, with its schedule
  meshwright verify path/to/Qwen3.5-9B --mesh cp=4 --context delta=1   states of the delta net are passed on
  meshwright verify path/to/Qwen3-VL-4B --mesh fsdp=2,tp=2 --tower     its tower too, with pictures on some ranks
  meshwright verify path/to/Qwen3-8B --mesh fsdp=2,tp=2 --fp8          products of 8-bit numbers
  meshwright verify tiny-qwen3-moe-fp8 --mesh fsdp=2,ep=2 --fp8        the same, with no model at hand
  meshwright verify tiny-qwen3-moe --mesh fsdp=2,ep=2 --recompute full --token-once    with what the run will save
  meshwright verify my-critic --mesh fsdp=2 --head value --json
  meshwright verify tiny-qwen3-moe --mesh tp=2 --plant sum-left-out    what it looks like when an oracle fails
  meshwright verify --list
"""
ABOUT = """Prove that a model on a mesh computes what one process computes: every gradient, in float64, and more.

The model is shrunk to odd sizes (the same kinds of layers, head counts, experts and files; narrow and shallow) and
filled with random weights, unless --full or --weights. The ranks of the mesh run as processes on this machine.
"""
INSPECT_EXAMPLES = """examples:
  meshwright inspect runs/first                                    the newest whole checkpoint of a run
  meshwright inspect runs/first/best --verify                      is every byte of the best as it was written?
  meshwright inspect runs/first/checkpoints/step-000200 --diff runs/second
  meshwright inspect runs/first --json
"""
INSPECT_ABOUT = """What a checkpoint holds: its step and mesh, its planes with their dtypes and sizes, your state.

Exit codes: 0 all is well, 1 bytes are not those that were written, or the two differ, 2 it is no whole checkpoint.
"""
COPY_EXAMPLES = """examples:
  meshwright copy runs/first s3://bucket/first                        the newest whole checkpoint (pip install s3fs)
  meshwright copy runs/first/checkpoints/step-000200 gs://bucket/first    this one (pip install gcsfs)
  meshwright copy s3://bucket/first runs/again                        and back, to go on from it
  meshwright copy /local/runs/first /shared/runs/first                from one disk to another
"""
COPY_ABOUT = """Copy a checkpoint to an object store, to another disk, or back. TARGET is a folder of checkpoints.

Every byte is compared with its checksum on the way. The manifest is sent last: if the copy is cut off, what lies there
is no checkpoint, and the same command begins it anew. Another checkpoint of the same step is never replaced.
"""
CONVERT_EXAMPLES = """examples:
  meshwright convert runs/first/best weights --to hf     the best weights as a Hugging Face directory, with tokenizer
  meshwright convert runs/first weights --to hf --dtype float32       of the newest checkpoint the float32 masters
  meshwright convert runs/first torch --to dcp                        for torch.distributed.checkpoint.load
  meshwright convert torch runs/again --to meshwright --like Qwen3-8B
"""
CONVERT_ABOUT = """One kind of checkpoint out of another, by one process and tensor by tensor: no device and no mesh.

The kinds: meshwright (what mw.save writes), hf (a Hugging Face directory), dcp (what torch.distributed.checkpoint.save
writes of engine.state_dict()). Of a pickle in the source nothing is run. What is written is whole or not there.
"""
REPORT_EXAMPLES = """examples:
  meshwright report runs/first                                     writes runs/first/report.html
  meshwright report runs/first runs/second --html compared.html    curves of both in the same charts
"""
REPORT_ABOUT = """One page of what runs did: curves, held-out data, experts, samples, checkpoints, where parameters lie.

The page is one file and needs no network. It can be made while a run goes on. OUT is the `out` of a run's file.
"""
SAMPLE_EXAMPLES = """examples:
  meshwright sample runs/first --prompt "Why is the sky blue?"         the newest checkpoint, asked as it was trained
  meshwright sample runs/first/best --prompt "Why is the sky blue?"    the one with the lowest held-out loss
  meshwright sample Qwen/Qwen3-0.6B --prompt Hello --prompt Bye --tokens 200 --top-p 0.9
  meshwright sample path/to/Qwen3-8B-Base --text --prompt "Once upon a time"
"""
SAMPLE_ABOUT = "What a model writes after prompts, on one process. Each token takes a forward: it is for a look."
TRAIN_EXAMPLES = """examples:
  meshwright train run.toml
  meshwright train run.toml --set mesh.fsdp=4 optim.lr=1e-5 data.0.path=chats.jsonl
  meshwright train run.toml --dry-run                                  read the data, say what will be trained
  torchrun --nnodes 4 --nproc-per-node 8 -m meshwright train run.toml  the same file on several machines
"""
DATA_EXAMPLES = """examples:
  meshwright data run.toml                      read, tokenise and check the data of a run; no device is needed
  meshwright data run.toml --show 3             and show 3 documents of each source, with what is learnt of them
  meshwright data run.toml --set data.0.path=other.jsonl
"""
DATA_ABOUT = """Prepare the data of a run: every row is read and tokenised; what cannot be used is told with its line.

What it made is kept, and `meshwright train` takes it from there. Exit codes: 0 it can be trained on, 2 it cannot.
"""
TRAIN_ABOUT = """Train what a file says: docs/train-config.md has its fields. The same command goes on where it stopped.

The ranks of the mesh run as processes of this machine, unless torchrun has started this one. Ctrl-C ends the step,
saves and exits; a second one exits at once. Exit codes: 0 trained, 2 something is wrong, 130 or 143 after a signal.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        parser = _parser()
        options = parser.parse_args(arguments)
        if options.name is None:
            parser.print_help(sys.stderr)
            return 2
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
    parser.add_argument("--version", action=_Version, nargs=0, help="of meshwright, and of what its numbers depend on")
    commands = parser.add_subparsers(dest="name", metavar="COMMAND")
    _add_convert(commands)
    _add_copy(commands)
    _add_data(commands)
    _add_inspect(commands)
    add_plan(commands)
    _add_report(commands)
    _add_sample(commands)
    _add_train(commands)
    _add_verify(commands)
    return parser


def _add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    inspect = commands.add_parser(
        "inspect", help="what a checkpoint holds, and whether its bytes are right", description=INSPECT_ABOUT,
        epilog=INSPECT_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    inspect.set_defaults(run=_inspect)
    inspect.add_argument("checkpoint", help="a run, a checkpoint, or a folder of them: the newest whole one is taken")
    inspect.add_argument("--verify", action="store_true", help="read all of it, and compare the checksums")
    inspect.add_argument("--diff", metavar="OTHER", help="name the tensors that differ, and by how much")
    inspect.add_argument("--json", action="store_true", help="everything as JSON on standard output")


def _add_convert(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    convert = commands.add_parser(
        "convert", help="one kind of checkpoint out of another", description=CONVERT_ABOUT, epilog=CONVERT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    convert.set_defaults(run=_convert)
    convert.add_argument("source", help="a run, a checkpoint of any kind, or a folder of them (RUN/best)")
    convert.add_argument("target", help="what to write: a directory, which must be new; with --to meshwright a folder")
    convert.add_argument("--to", required=True, choices=["hf", "dcp", "meshwright"], help="the kind to write")
    convert.add_argument(
        "--like", metavar="DIR", help="a Hugging Face directory of the model, for a source of kind dcp"
    )
    convert.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="of the weights (default: those of the source)"
    )


def _add_copy(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    copy = commands.add_parser(
        "copy", help="a checkpoint to an object store or another disk, or back", description=COPY_ABOUT,
        epilog=COPY_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    copy.set_defaults(run=_copy)
    copy.add_argument("source", help="a run, a checkpoint, or a folder of them: the newest whole one is taken")
    copy.add_argument("target", help="the folder for it: a directory, or a URL that fsspec knows")


def _add_data(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    data = commands.add_parser(
        "data", help="prepare and look at the data of a run", description=DATA_ABOUT, epilog=DATA_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    data.set_defaults(run=_data)
    data.add_argument("config", help="a .toml file")
    data.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="FIELD=VALUE", help="data.0.path=... ..."
    )
    data.add_argument(
        "--show", type=positive, default=0, metavar="N", help="documents of each source, learnt parts green"
    )


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    report = commands.add_parser(
        "report", help="one page of what runs did, and how they compare", description=REPORT_ABOUT,
        epilog=REPORT_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    report.set_defaults(run=_report)
    report.add_argument("runs", nargs="+", metavar="OUT", help="the directory of a run")
    report.add_argument("--html", metavar="FILE", help="where the page goes (default: report.html in the first run)")


def _add_sample(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    sample = commands.add_parser(
        "sample", help="what a model writes after a prompt", description=SAMPLE_ABOUT, epilog=SAMPLE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    sample.set_defaults(run=_sample)
    sample.add_argument("model", help="a run, a checkpoint, a folder of them, a Hugging Face directory, a hub id")
    sample.add_argument("--prompt", action="append", required=True, metavar="TEXT", help="what a user says")
    sample.add_argument("--text", action="store_true", help="prompts as they are, without a chat template")
    sample.add_argument("--tokens", type=positive, default=64, metavar="N", help="of each text at most (default 64)")
    sample.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest (default: the likeliest)")
    sample.add_argument("--seed", type=int, default=0, help="of what is drawn (default 0)")
    sample.add_argument("--json", action="store_true", help="prompts and texts as JSON on standard output")


def _add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    train = commands.add_parser(
        "train", help="fine-tune or pre-train by a file", description=TRAIN_ABOUT, epilog=TRAIN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    train.set_defaults(run=_train)
    train.add_argument("config", help="a .toml file")
    train.add_argument("--set", nargs="+", action="extend", default=[], metavar="FIELD=VALUE", help="mesh.tp=2 ...")
    train.add_argument("--nproc", type=positive, metavar="N", help="ranks of this machine (default: those of the mesh)")
    train.add_argument(
        "--plain", action="store_true", help="lines instead of a live view, as where there is no terminal"
    )
    train.add_argument("--dry-run", action="store_true", help="prepare the data, say what will be trained, and end")


def _add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verify = commands.add_parser(
        "verify", help="prove a model on a mesh against one process", description=ABOUT, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    verify.set_defaults(run=_verify)
    verify.add_argument("model", nargs="?", help=f"a Hugging Face directory, a config (*.json), a hub id, {TINY}")
    add_recipe(verify)
    verify.add_argument(
        "--dtypes", default="float64,float32,bfloat16", metavar="NAME,...",
        help="float64 is the proof, the others show that the rest works (default all)",
    )  # fmt: skip
    kind = verify.add_mutually_exclusive_group()
    kind.set_defaults(kind="shrunk")
    kind.add_argument(
        "--full", dest="kind", action="store_const", const="full", help="the model and its weights as they are"
    )
    kind.add_argument(
        "--weights", dest="kind", action="store_const", const="weights",
        help="load the weights as they are, and compare the bytes on every rank with the files; nothing else",
    )  # fmt: skip
    verify.add_argument("--device", default="cpu", help="cpu (default), or a kind of device with one for each rank")
    verify.add_argument("--seconds", type=float, default=600.0, help="how long one run may take (default 600)")
    verify.add_argument(
        "--against", default="transformers", choices=["transformers", "none"],
        help="which peer one process is compared with, text alone without --tower (default transformers)",
    )  # fmt: skip
    verify.add_argument("--seed", type=int, default=0, help="of the weights and data that are drawn (default 0)")
    verify.add_argument("--plant", default="", metavar="BUG", help="plant a bug in the ranks, to see it found")
    verify.add_argument("--json", action="store_true", help="the result as JSON on standard output")
    verify.add_argument("--html", metavar="FILE", help="write a page: mesh, placement, bill and what was found")
    verify.add_argument("--list", action="store_true", help="what each oracle checks, and nothing else")


class _Version(argparse.Action):
    """Print versions only when asked: reading them takes a while."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        from ..provenance import versions

        print(", ".join(f"{name} {number}" for name, number in versions().items()))
        parser.exit()


def _inspect(options: argparse.Namespace) -> int:
    from pathlib import Path

    from .. import checkpoint as disk  # imports torch: --help should not wait for it
    from ..checkpoint import inspect

    found = disk.opened_at(Path(options.checkpoint))
    other = disk.opened_at(Path(options.diff)) if options.diff else None
    wrong = disk.check_bytes(found) if options.verify else None
    apart = list(disk.differences(found, other)) if other else None
    if options.json:
        print_json(inspect.as_json(found, wrong, apart))
    else:
        inspect.print_checkpoint(found, wrong, apart)
    return int(bool(wrong or apart))


def _copy(options: argparse.Namespace) -> int:
    from ..checkpoint import copy_checkpoint  # imports torch: --help should not wait for it

    print(copy_checkpoint(options.source, options.target))
    return 0


def _data(options: argparse.Namespace) -> int:
    from rich.console import Console

    from ..train import (  # imports torch: --help should not wait for it
        config_file,
        data_sources,
        dry_run,
        launch,
        preflight,
    )

    config = config_file.read(options.config, options.set, preflight.mistakes)
    found = launch.prepared(config)
    print(dry_run.dry_run(config, found.data, found.held_out))
    for document in dry_run.shown(found.data, data_sources.model_directory(config.model), options.show):
        Console(soft_wrap=True, highlight=False).print(document)
    return 0


def _train(options: argparse.Namespace) -> int:
    from ..plan.terminal import print_plan  # imports torch: --help should not wait for it
    from ..report import last_words
    from ..train import config_file, dry_run, launch, preflight
    from ..train.config_model import layout_of
    from ..train.resume_point import check_position
    from ..weights import path_of

    given = [*options.set, *(["log.plain=true"] if options.plain else [])]
    if "WORLD_SIZE" in os.environ:  # a rank: its launcher has looked, or under torchrun the first read says it
        config = config_file.read(options.config, given)
    else:
        config = config_file.read(options.config, given, preflight.mistakes)
    launch.refuse_other_world(config, options.nproc)
    if options.dry_run:
        found = launch.prepared(config)
        check_position(config, found.data)
        print_plan(layout_of(config))
        print(dry_run.dry_run(config, found.data, found.held_out))
        return 0
    sets = ["--set", *given] if given else []
    why = launch.start(config, ["train", options.config, *sets])
    if launch.ends_at_the_terminal():
        print("\n".join(last_words(path_of(config.out), config.out)), flush=True)
    if why and "WORLD_SIZE" not in os.environ:
        print(f"meshwright: ended by {why}; {launch.what_next(config)}", file=sys.stderr)
    return 128 + int(why.split()[1]) if why.startswith("signal") else 0


def _sample(options: argparse.Namespace) -> int:
    from ..train.config import SampleSection  # imports torch: --help should not wait for it
    from ..train.samples import sample_at

    section = SampleSection.model_construct(prompts=options.prompt, tokens=options.tokens, top_p=options.top_p)
    said = sample_at(options.model, section, seed=options.seed, text=options.text)
    if options.json:
        print(json.dumps([{"prompt": prompt, "text": text} for prompt, text in said], indent=2))
    else:
        print("\n\n".join(f"> {prompt}\n{text}" for prompt, text in said))
    return 0


def _report(options: argparse.Namespace) -> int:
    from pathlib import Path

    from ..plan import check_page, origin  # imports torch: --help should not wait for it
    from ..report import write_report

    folders = [Path(run) for run in options.runs]
    if not folders[0].is_dir():
        raise ConfigError(f"{folders[0]} is no directory; give the `out` of a run's file")
    target = check_page(options.html or str(folders[0] / "report.html"))
    write_report(folders, target, origin(options.command))
    print(target)
    return 0


def _convert(options: argparse.Namespace) -> int:
    from pathlib import Path

    import torch  # --help should not wait for it

    from ..engine.convert import convert

    like = Path(options.like) if options.like else None
    dtype = getattr(torch, options.dtype) if options.dtype else None
    print(convert(Path(options.source), Path(options.target), options.to, like=like, dtype=dtype))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from .. import plan as planning  # imports torch: --help should not wait for it
    from .. import verify
    from ..axes import Axes
    from ..verify import report
    from ..verify import report as verify_report

    if options.list:
        report.print_oracles()
        return 0
    if options.model is None:
        raise ConfigError("verify needs a model: a directory, or one of " + ", ".join(planning.TINY))
    target = planning.check_page(options.html) if options.html else None
    say, sizes = Clock(), planning.mesh_of(options.mesh)
    recipe, optimizer = recipe_of(vars(options)), planning.optimizer_of(vars(options))
    check_axes(vars(options), sizes)
    asked = verify.Options(
        recipe, options.dtypes.split(","), options.kind, options.device, options.seconds, options.against, options.seed,
        options.plant, optimizer.state_dtype,
    )  # fmt: skip
    plan = verify.plan(options.model, Axes(**sizes), asked, say)
    parts = verify.inspect(plan, say)
    origin = planning.origin(options.command, options.seed)
    if options.json:
        print_json(report.report_json(options.model, plan, parts, origin))
    else:
        report.print_table(options.model, plan, parts)
    if target:
        planning.write_page(target, verify_report.verify_page(plan, parts, origin))
    return int(any(part.findings for part in parts))
