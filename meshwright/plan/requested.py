"""Parse the options of `meshwright plan`: a mesh, an optimizer, a cluster, a search."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch

from ..axes import Axes
from ..errors import ConfigError
from ..optim import AdamW, Muon, Optimizer
from ..recipe import RECOMPUTE
from .devices import Cluster, cluster_of, device_bytes
from .figures import TOKENS
from .search import SearchRequest, Size

_AXES = tuple(asdict(Axes()))


def mesh_of(text: str) -> dict[str, int]:
    """Parse `--mesh`: `fsdp=2,tp=2`, separated by commas or spaces. Axes without a size are left out."""
    sizes: dict[str, int] = {}
    for part in filter(None, text.replace(" ", ",").split(",")):
        axis, equals, size = part.partition("=")
        valid = bool(equals) and size.isdecimal() and len(size) <= 9  # no mesh needs a longer number
        if axis not in _AXES or not valid:
            raise ConfigError(f"--mesh {text!r:.200}: {part!r:.200} is not AXIS=N with AXIS of {', '.join(_AXES)}")
        if axis in sizes:
            raise ConfigError(f"--mesh {text!r} gives {axis} twice")
        sizes[axis] = int(size)
    return sizes


def optimizer_of(options: Mapping[str, Any]) -> Optimizer:
    """Return the optimizer that is planned, with the dtype of `--state-dtype`."""
    dtype = None if options["state_dtype"] is None else getattr(torch, options["state_dtype"])
    return Muon(state_dtype=dtype) if options["optimizer"] == "muon" else AdamW(state_dtype=dtype)


def cluster_in(options: Mapping[str, Any]) -> Cluster:
    """Return the devices and links on which a step would run: vendors' figures, unless options override them."""
    overrides = {name: options[name] for name in ("inside", "between", "flops")}
    return cluster_of(options["device"], options["gpus_per_node"], overrides)


def search_request(options: Mapping[str, Any]) -> SearchRequest:
    """Return the request of `--search`. Refuse options that a search chooses itself."""
    if not options["device"]:
        raise ConfigError("--search needs a --device, such as H100 or 80GB, to know what fits")
    # To ignore one of these silently would answer a different question than the user's.
    instead = {"mesh": "tries all of them", "micro_batches": "uses as many as --global-tokens needs",
               "html": "writes no page; use it with the --mesh that a search prints",
               "ends": "tries pipelines of several lengths"}  # fmt: skip
    for name, why in instead.items():
        if options[name]:
            raise ConfigError(f"--{name.replace('_', '-')} does not go with --search, which {why}")
    num, tokens = options["search"], options["tokens"] or TOKENS
    size = Size(num, options["gpus_per_node"], tokens, options["global_tokens"] or num * tokens)
    # With --recompute every mesh uses that mode; without it a search picks the mode that each mesh needs.
    kinds = RECOMPUTE if options["recompute"] is None else (options["recompute"],)
    return SearchRequest(
        options["model"], size, options["device"], device_bytes(options["device"]), cluster_in(options), kinds,
        optimizer_of(options), options["top"], tuple(_words_to_repeat(shlex.split(options["command"]))),
    )  # fmt: skip


def _words_to_repeat(words: list[str]) -> Iterator[str]:
    """Yield the words of the command that apply to every mesh of the search. A search prints them with its choices.

    argparse accepts abbreviated options (`--sea` for `--search`), so a prefix counts as the option.
    """
    with_value, alone = ("--search", "--global-tokens", "--top", "--tokens", "--recompute"), ("--json", "--offload")
    left = iter(words)
    for word in left:
        name, equals, _ = word.partition("=")
        is_option = name.startswith("--") and len(name) > len("--")
        if is_option and any(each.startswith(name) for each in with_value):
            next(left) if not equals else None
        elif not (is_option and any(each.startswith(name) for each in alone)):
            yield word
