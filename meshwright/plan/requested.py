"""Parse options of the command line: a mesh, a cluster, a search."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch

from ..axes import Axes
from ..errors import ConfigError
from ..optim import AdamW, Optimizer
from ..recipe import RECOMPUTE
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
    num, tokens = options["search"], options["tokens"] or TOKENS
    size = Size(num, options["gpus_per_node"], tokens, options["global_tokens"] or num * tokens)
    kinds = RECOMPUTE if options["recompute"] is None else (options["recompute"],)
    return Asked(
        options["model"], size, options["device"], device_bytes(options["device"]), cluster_in(options), kinds,
        optimizer_of(options), options["top"], tuple(_kept(shlex.split(options["command"]))),
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
