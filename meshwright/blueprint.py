"""A model before it is placed on a mesh: its config, its module on the meta device, and the key map of its files.

It is built from only `config.json` and the headers of the files, in milliseconds, and refuses whatever does not fit.
Loading, the bill, plans and `verify` all read the same blueprint, so they cannot disagree about a model.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from .axes import Axes
from .errors import ConfigError, LayoutError
from .models import Balance, Decoder, describe, prefix_of, text_config, with_labels
from .ops.codings import FOUR_BITS, Coding
from .recipe import Recipe, matching, patterns_of
from .sharding import ALWAYS, IF_NAMED, MTP, NEVER, Param, Rules, ShardingSpec, Table, consecutive_columns, tp_sizes
from .weights import KeyMap, Source, check_keys, choose, of_source, of_table


@dataclass(frozen=True, eq=False)
class Blueprint:
    """Everything about a model that does not depend on a mesh. `module` is unsharded, and on the meta device until
    placed."""

    config: Mapping[str, Any]
    module: Decoder
    spec: ShardingSpec
    keymap: KeyMap
    directory: Path | None = None  # with config.json and the tokenizer; a built-in model has none
    origin: str = ""  # identity of the weights, compared between ranks: a seed, or a checksum of the files

    @classmethod
    def of(
        cls, config: Mapping[str, Any], source: Source | None = None, recipe: Recipe = Recipe(), *,
        directory: Path | None = None, origin: str = "", stored: torch.dtype = torch.float32,
    ) -> Blueprint:  # fmt: skip
        """Build the blueprint of a config.

        `source`: the files, or an index that names their keys; without one, weights are new. `stored`: the dtype in
        which parameters are kept.
        """
        config = with_labels(config, recipe.labels)
        source = source.scaled_by(config) if source is not None else None
        keys = source.entries if source is not None else {}
        prefix = prefix_of(config, keys or None)
        module, table = describe(config, prefix, recipe, keys)
        spec = ShardingSpec(table, Rules(), module, recipe, _in_fp8(recipe, table))
        blueprint = cls(config, module, spec, _keymap(table, config, source, stored), directory, origin)
        _check_frozen(blueprint)
        return blueprint

    def with_options(self, **fields: Any) -> Blueprint:
        """Return the blueprint with other fields of its recipe; `head`, `tower`, `mtp`, `fp8` and `fp8_skip` cannot
        change."""
        return replace(self, spec=replace(self.spec, recipe=replace(self.recipe, **fields)))

    @property
    def recipe(self) -> Recipe:
        return self.spec.recipe

    @property
    def head(self) -> str:
        return self.recipe.head

    @property
    def tower(self) -> bool:
        """Return whether a vision tower is built; else its keys are copied unchanged."""
        return self.recipe.tower

    @property
    def compute(self) -> torch.dtype:
        """Return the compute dtype."""
        return self.recipe.dtype or torch.bfloat16

    @property
    def table(self) -> Table:
        return self.spec.table

    @property
    def balance(self) -> Balance:
        return self.module.balance

    @property
    def scores(self) -> tuple[str, ...]:
        """Return what the head can compute for a token; the first is what a loss gets."""
        return self.module.scores

    @property
    def vocab(self) -> int:
        return self.module.shape.vocab

    def trained(self) -> list[str]:
        """Return the names of the parameters that are trained. Refuse a pattern that names none.

        With adapters these are the adapters, a new head, and the other parameters that `train` names.
        """
        patterns = patterns_of(self.recipe.train)
        if self.recipe.lora is None:
            trained = self._trained_by(patterns)
            able = {param.name for param in self.table if param.name.startswith(MTP) and param.trains == ALWAYS}
            if trained and not able <= {*trained}:
                raise ConfigError(
                    f"mtp={self.recipe.mtp!r} trains the MTP head, and train={patterns} leaves out "
                    f"{min(able.difference(trained))}; add '{MTP}.*', or leave mtp out"
                )
            return trained
        named = [pattern for pattern in patterns if pattern != "**"]
        more = self._trained_by(named) if named else []
        new = {p.name for p in self.table if p.optional} if self.keymap.source is None else self.keymap.fresh
        whole = {*new, *more, *(p.name for p in self.table if p.name.startswith(MTP) and p.trains == ALWAYS)}
        return [p.name for p in self.table if p.adapter or (p.name in whole and p.trains != NEVER)]

    def _trained_by(self, patterns: Sequence[str]) -> list[str]:
        """Return the parameters that patterns train: none without a gradient, and a table only if a pattern names
        it."""
        able = {param.name: param for param in self.table if param.trains != NEVER}
        for pattern in patterns:
            matched = [param.name for param in self.table if fnmatchcase(param.name, pattern)]
            if matched and able.keys().isdisjoint(matched):
                raise ConfigError(f"train={pattern!r} names {matched[0]}, which has no gradient; leave it out")
        named = {*matching([pattern for pattern in patterns if pattern != "**"], able, "train")}
        every = "**" in patterns
        return [name for name, param in able.items() if name in named or (every and param.trains == ALWAYS)]

    def left_out(self, trained: Container[str]) -> str:
        """Describe the parameters that the default of `train` leaves out; "" if it leaves out none."""
        left = [param for param in self.table if param.trains != ALWAYS and param.name not in trained]
        tables = [param for param in left if param.trains == IF_NAMED and not self.recipe.lora]
        texts = [
            f"{param.name} ({param.numel:,} elements) is frozen; name it in train= to train it" for param in tables
        ]
        without = [param.name for param in left if param.trains == NEVER]
        if without:
            texts.append(f"{without[0]} has no gradient and stays as it is ({len(without)} such parameters)")
        return "; ".join(texts)

    def mark(self, trained: Container[str]) -> None:
        """Set `requires_grad` on the meta parameters, from which placed and simulated ones inherit it."""
        for name in self.table.params:
            self.module.get_parameter(name).requires_grad_(name in trained)

    def stored_dtypes(self, compute: torch.dtype, trained: Set[str]) -> dict[str, torch.dtype]:
        """Return the dtype in which each parameter is stored (mixed precision).

        Parameters that are trained, drawn, or never rounded are float32: AdamW updates in bfloat16 would lose steps
        below half a unit in the last place. Frozen parameters keep the dtype of their files, since widening would take
        memory and change no number.

        A parameter that takes part in no training, unless it is named, keeps the dtype of its files even when drawn.

        The vocabulary of the head is an exception while anything is trained: a large vocabulary is cast for a matmul in
        slices (ops/loss.py), which would sum the gradients that pass through it in another order.
        """
        wide, keymap = torch.promote_types(compute, torch.float32), self.keymap
        is_base = keymap.source is not None or self.recipe.lora is not None  # else drawn, in order to be trained
        stays_wide = {*trained, *keymap.fresh, *([self.module.vocabulary] if trained else [])}

        def stored(param: Param) -> torch.dtype:
            if param.trains != ALWAYS and param.name not in trained:
                return keymap.file_dtype(param)
            if not is_base or param.name in stays_wide or param.float32:
                return wide
            # A code times its scale needs float32.
            return torch.float32 if self.made is not None and self.coding(param) else keymap.file_dtype(param)

        return {param.name: stored(param) for param in self.table}

    def coding(self, param: Param) -> Coding | None:
        """Return the coding of a matrix if it is frozen: that of the recipe, or that of its files. None if its values
        are stored.
        """
        made = self.made
        if made is None:
            return self.keymap.coding(param)
        return made if param.low and param.cols and param.matrix[1] % made.block == 0 else None

    @property
    def made(self) -> Coding | None:
        """Return the coding to which loading quantises frozen matrices, if the recipe has one."""
        return FOUR_BITS[self.recipe.frozen] if self.recipe.frozen else None

    def codings(self, trained: Container[str], axes: Axes) -> dict[str, Coding]:
        """Return the frozen matrices that are stored as codes, by name.

        tp may cut the columns of FP8 codes anywhere. It may cut columns of 4-bit codes only between blocks. Otherwise
        matrices of 4-bit files are stored as values, and a matrix that loading should quantise is refused, because its
        values would depend on the mesh.
        """
        frozen = (param for param in self.table if param.name not in trained)
        wanted = {param.name: coding for param in frozen if (coding := self.coding(param)) is not None}
        misfits = self._misfits(wanted, axes)
        if misfits and self.made is not None:
            raise LayoutError(self._refusal(wanted, misfits[0], axes))
        return {name: coding for name, coding in wanted.items() if name not in misfits}

    def _misfits(self, wanted: Mapping[str, Coding], axes: Axes) -> list[str]:
        """Return the matrices whose columns tp cuts within a block."""
        rules, table = self.spec.rules, self.table
        return [n for n, coding in wanted.items() if consecutive_columns(table[n], rules, axes) % coding.block]

    def _refusal(self, wanted: Mapping[str, Coding], name: str, axes: Axes) -> str:
        sizes = [size for size in tp_sizes(self.spec) if not self._misfits(wanted, Axes(tp=size))]
        run, made = consecutive_columns(self.table[name], self.spec.rules, axes), wanted[name]
        return (
            f"frozen={made.name!r} has blocks of {made.block} columns, but with tp={axes.tp} a rank has {run} of "
            f"{name}; choose tp from {', '.join(map(str, sizes))}"
        )

    def left_wide(self, trained: Container[str], axes: Axes) -> list[str]:
        """Return the frozen matrices that are stored as values although other frozen matrices are in 4 bits."""
        codings = self.codings(trained, axes)
        if not any(coding.scale is not None for coding in codings.values()):
            return []
        frozen = (param for param in self.table if param.low and param.cols and param.name not in trained)
        return [param.name for param in frozen if param.name not in codings]


def _check_frozen(blueprint: Blueprint) -> None:
    """Refuse `frozen` if there is nothing to quantise, or if the files are already quantised."""
    made, source = blueprint.made, blueprint.keymap.source
    if made is None:
        return
    if source is not None and source.scales:
        raise ConfigError(
            f"frozen={made.name!r} quantises weights, but the files hold {next(iter(source.scales))} quantised "
            "already, and frozen matrices stay as the files have them; leave frozen out"
        )
    if blueprint.config.get("quantization_config"):
        raise ConfigError(
            f"frozen={made.name!r} quantises weights, but config.json has a quantization_config: the files are "
            "quantised already; leave frozen out"
        )
    trained, able = {*blueprint.trained()}, [param.name for param in blueprint.table if blueprint.coding(param)]
    if not able:
        raise ConfigError(
            f"frozen={made.name!r} finds nothing to quantise: no matrix has a multiple of {made.block} columns; leave "
            "frozen out"
        )
    if trained.issuperset(able):
        what = f"all matrices of {made.block} columns and multiples are trained, and trained weights are float32"
        raise ConfigError(f"frozen={made.name!r} finds nothing to quantise: {what}; give lora=mw.Lora(), or train=")


def _in_fp8(recipe: Recipe, table: Table) -> frozenset[str]:
    """Return the parameters whose matmuls are in FP8."""
    if recipe.fp8 is None:
        return frozenset()
    low, patterns = {param.name for param in table if param.low}, patterns_of(recipe.fp8_skip, "fp8_skip")
    for pattern in patterns:
        if low.isdisjoint(matching([pattern], table.params, "fp8_skip")):
            raise ConfigError(
                f"fp8_skip={pattern!r} matches only parameters whose matmuls are not in FP8; leave it out"
            )
    names = low.difference(matching(patterns, table.params, "fp8_skip"))
    if not names:
        raise ConfigError(f"fp8_skip={patterns} leaves no matmul in FP8; leave fp8='block' out instead")
    return frozenset(names)


def _keymap(table: Table, config: Mapping[str, Any], source: Source | None, stored: torch.dtype) -> KeyMap:
    """Return the mapping from parameters to file keys. Refuse a source that lacks keys, or has unknown ones."""
    if source is None:
        return of_table(table, file_dtype(config))
    choice = choose(table, source)
    new = (p for p in table if p.adapter or p.optional)
    fresh = [p.name for p in new if not any(k in source.entries for k in p.layouts[0].keys)]
    if not source.has_headers:  # an index names keys, but no shapes or dtypes to check
        return replace(of_table(table, file_dtype(config), choice), fresh=frozenset(fresh))
    check_keys(table, source, choice, fresh, stored)
    return of_source(table, source, choice, fresh, file_dtype(config))


def file_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype in which `config.json` says that weights are written."""
    text = text_config(config)
    name = next((c[n] for c in (config, text) for n in ("dtype", "torch_dtype") if c.get(n)), "float32")
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
    if not isinstance(name, str) or name not in dtypes:
        raise ConfigError(f"config.json: dtype={name!r:.200} is unknown; choose from {', '.join(dtypes)}")
    return dtypes[name]
