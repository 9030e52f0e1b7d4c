"""What options of the command line ask for: a mesh, a pipeline, ways of cp, savings, numbers of 8 bits."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any

import torch

from ..axes import Axes
from ..blueprint import Blueprint
from ..engine.validation import in_fp8
from ..errors import ConfigError
from ..optim import AdamW, Optimizer
from ..parallel import KINDS, Savings
from ..sharding import Context, Pipeline, hops
from .devices import Cluster, cluster_of, device_bytes
from .figures import TOKENS
from .search import Asked, Size

_AXES = tuple(asdict(Axes()))


def mesh_of(text: str) -> dict[str, int]:
    """`fsdp=2,tp=2` as sizes."""
    sizes: dict[str, int] = {}
    for part in filter(None, text.replace(" ", ",").split(",")):
        axis, equals, size = part.partition("=")
        valid = bool(equals) and size.isdecimal() and len(size) <= 9
        if axis not in _AXES or not valid:
            raise ConfigError(f"--mesh {text!r:.200}: {part!r:.200} is not AXIS=N with AXIS of {', '.join(_AXES)}")
        if axis in sizes:
            raise ConfigError(f"--mesh {text!r} gives {axis} twice")
        sizes[axis] = int(size)
    return sizes


def ways_of(options: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[Pipeline, Context]:
    """How a model is laid onto a mesh of these sizes."""
    return _pipeline_of(options, sizes), _context_of(options["context"], sizes)


def fp8_of(options: Mapping[str, Any]) -> tuple[str | None, list[str]]:
    """`fp8` and `fp8_skip` of `mw.load`."""
    return "block" if options["fp8"] else None, [*filter(None, options["fp8_skip"].split(","))]


def laid_out(options: Mapping[str, Any], sizes: Mapping[str, int]) -> Callable[[Blueprint], Blueprint]:
    """What lays a model onto a mesh of these sizes."""
    (pipeline, context), asked = ways_of(options, sizes), fp8_of(options)
    return lambda found: found.run_by(pipeline).in_context(context).in_fp8(in_fp8(*asked, found.table))


def savings_of(options: Mapping[str, Any]) -> Savings:
    """An option for each field that a plan asks for; None where it was not given."""
    names = ("recompute", "offload", "gather_once", "sum_once", "narrow_grads", "token_once")
    given = {name: options[name] for name in names if options[name] is not None}
    if options["token_once_a_node"] is not None:
        given["token_once"] = options["token_once_a_node"]
    return Savings(**given)


def undivided(savings: Savings, sizes: Mapping[str, int]) -> list[str]:
    """What speaks against the nodes of `token_once` on a mesh."""
    axes = Axes(**sizes)
    try:
        hops("", axes.ep, axes, savings.token_once)
    except ConfigError as error:
        return [str(error)]
    return []


def optimizer_of(options: Mapping[str, Any]) -> Optimizer:
    """Return the optimizer that is planned for."""
    return AdamW(state_dtype=None if options["state_dtype"] is None else getattr(torch, options["state_dtype"]))


def cluster_in(options: Mapping[str, Any]) -> Cluster:
    """Where a step would run."""
    given = {name: options[name] for name in ("inside", "between", "flops")}
    return cluster_of(options["device"], options["gpus_per_node"], given)


def asked_of(options: Mapping[str, Any]) -> Asked:
    """What `--search` is to look for."""
    if not options["device"]:
        raise ConfigError("--search needs a --device, such as H100 or 80GB: it says what fits")
    instead = {"mesh": "tries all of them", "micro_batches": "takes as many as --global-tokens asks for",
               "html": "writes no page; give it with the --mesh that was found",
               "ends": "tries pipelines of several lengths"}  # fmt: skip
    for name, why in instead.items():
        if options[name]:
            raise ConfigError(f"--{name.replace('_', '-')} does not go with --search, which {why}")
    num, tokens, savings = options["search"], options["tokens"] or TOKENS, savings_of(options)
    size = Size(num, options["gpus_per_node"], tokens, options["global_tokens"] or num * tokens)
    kinds = KINDS if options["recompute"] is None else (savings.recompute,)
    return Asked(
        options["model"], size, options["device"], device_bytes(options["device"]), cluster_in(options), savings, kinds,
        optimizer_of(options), options["head"], options["top"], tuple(_kept(shlex.split(options["command"]))),
    )  # fmt: skip


def _kept(words: list[str]) -> Iterator[str]:
    """Of a command, what holds for the mesh that was found too. An option may be cut short, as argparse takes it."""
    with_value, alone = ("--search", "--global-tokens", "--top", "--tokens", "--recompute"), ("--json", "--offload")
    left = iter(words)
    for word in left:
        name, equals, _ = word.partition("=")
        is_option = name.startswith("--") and len(name) > len("--")
        if is_option and any(each.startswith(name) for each in with_value):
            next(left) if not equals else None
        elif not (is_option and any(each.startswith(name) for each in alone)):
            yield word


def _pipeline_of(options: Mapping[str, Any], sizes: Mapping[str, int]) -> Pipeline:
    """An option for each field, None where it was not given."""
    given = {field.name: options[field.name] for field in fields(Pipeline) if options[field.name] is not None}
    if given and sizes.get("pp", 1) == 1:
        raise ConfigError(f"--{next(iter(given))} is of a pipeline, and --mesh has none; give it pp=2 or more")
    return Pipeline(**given)


def _context_of(text: str, sizes: Mapping[str, int]) -> Context:
    """`attention=1,delta=2` as the fields of `mw.Context`."""
    names, given = [field.name for field in fields(Context)], dict[str, int]()
    for part in filter(None, text.split(",")):
        mixer, equals, size = part.partition("=")
        if mixer not in names or not equals or not size.isdecimal() or len(size) > 9:
            raise ConfigError(f"--context {text!r:.200}: {part!r:.200} is not MIXER=N with MIXER of {', '.join(names)}")
        if mixer in given:
            raise ConfigError(f"--context {text!r:.200} gives {mixer} twice")
        given[mixer] = int(size)
    if given and sizes.get("cp", 1) == 1:
        raise ConfigError(f"--context {text!r:.200} is of an axis that --mesh lacks; give it cp=2 or more")
    return Context(**given)
