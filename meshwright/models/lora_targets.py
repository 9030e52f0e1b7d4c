"""Choose which matrices of a model get adapters, by the names that PEFT uses."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterable, Iterator

from torch import nn

from ..errors import ConfigError
from ..recipe import ALL_LINEAR, Lora
from ..sharding import Declared
from .linear import Linear
from .lora import Adapter, ExpertAdapter, modules_of
from .qwen3_moe import Experts


def adapt(model: nn.Module, lora: Lora) -> None:
    """Give every matrix that is targeted its adapter. The model's table must not have been made yet.

    Refuse a target that matches nothing, and one that matches only some of the matrices that one parameter joins: a
    layer that lacks its adapter would train differently, without an error.
    """
    unused, available = set(lora.targets), set[str]()
    for module, attribute, names in _candidates(model):
        available |= {name.rpartition(".")[2] for name in names}
        hits = {name: {target for target in lora.targets if _matches(target, name)} for name in names}
        unused -= {target for targets in hits.values() for target in targets}
        if not _all_or_none(hits):
            missing = [name for name in hits if not hits[name]]
            raise ConfigError(
                f"lora.targets={list(lora.targets)} name {', '.join(set(hits) - set(missing))} without "
                f"{', '.join(missing)}, which is the same matrix in Meshwright; target both or neither"
            )
        if any(hits.values()):
            _attach(module, attribute, lora)
    if unused - {ALL_LINEAR}:
        raise ConfigError(
            f"lora.targets: {', '.join(sorted(unused - {ALL_LINEAR}))} match no linear layer of this model; give "
            f"{ALL_LINEAR!r}, or names or patterns of modules that end in one of: {', '.join(sorted(available))}"
        )


def _candidates(model: nn.Module) -> Iterator[tuple[nn.Module, str, list[str]]]:
    """Yield each matrix that can have an adapter: its module, its attribute, and its names in the files."""
    for module in list(model.modules()):
        if isinstance(module, Linear):
            assert isinstance(module.weight, Declared)
            yield module, "weight", modules_of(module.weight.param)
        elif isinstance(module, Experts):
            yield module, "gate_up", [f"{module.at}.gate_proj", f"{module.at}.up_proj"]
            yield module, "down", [f"{module.at}.down_proj"]


def _matches(target: str, name: str) -> bool:
    """Return whether a target means a module: by its last parts, as in PEFT, or by a pattern of its whole name.

    The experts of a layer are one stack: fused names (`experts.gate_up_proj`) mean both of its halves.
    """
    names = [name]
    if ".experts." in name:
        at, _, last = name.rpartition(".")
        names += [f"{at}.gate_up_proj"] if last != "down_proj" else []
        names += [f"{at}.0.{last}"]  # one key for each expert, in the files of most Qwen3-MoE
    return target == ALL_LINEAR or any(
        each == target or each.endswith(f".{target}") or fnmatch.fnmatchcase(each, target) for each in names
    )


def _all_or_none(hits: dict[str, set[str]]) -> bool:
    return all(hits.values()) or not any(hits.values())


def _attach(module: nn.Module, attribute: str, lora: Lora) -> None:
    """Make an adapter as a submodule, so that it joins the FSDP unit and the pipeline stage of its base."""
    base = module.get_parameter(attribute)
    assert isinstance(base, Declared)
    if isinstance(module, Experts):
        setattr(module, f"{attribute}_lora", ExpertAdapter(base.param, f"{module.at}.{attribute}_proj", lora))
    else:
        assert isinstance(module, Linear)
        module.lora = Adapter(base.param, lora)


@contextlib.contextmanager
def without_adapters(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Switch the adapters of a model off, so that it computes what its base does. Such contexts may be nested."""
    before = [(adapter, adapter.on) for part in parts for adapter in adapters_of(part)]
    for adapter, _ in before:
        adapter.on = False
    try:
        yield
    finally:
        for adapter, was_on in before:
            adapter.on = was_on


def adapters_of(model: nn.Module) -> list[Adapter | ExpertAdapter]:
    """Return the adapters of a model, or of a part of it."""
    return [module for module in model.modules() if isinstance(module, Adapter | ExpertAdapter)]
