"""Declare parameters where a module creates them: named dims, the keys of its files, initialisation, precision.

    self.q = weight(rows={"heads": H, "head": K}, cols={"embed": D}, key=at + "q_proj.weight")

A parameter is a matrix whose rows and columns are products of named dims (a vector has no columns). That matrix is what
`F.linear` takes, and ranks store rows of it. Sharding rules speak of dims ("heads" are cut by tp), so they need no list
of parameter names. The module tree gives the name; `Table` collects all declarations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import LayoutError
from .boxes import Box, check_tiling


class Block(NamedTuple):  # a large model has 100,000 of them, see Box
    """A box of our parameter and the box of a source tensor with the same elements in the same row-major order.

    With `turned`, the order is that of the source with its last two dims exchanged.
    """

    ours: Box
    key: str
    shape: tuple[int, ...]  # of the whole source tensor
    source: Box
    turned: bool = False

    def view(self, tensor: Tensor) -> Tensor:
        """View the block of a source tensor in the shape of ours.

        Never a copy: a memory-mapped file stays on disk.
        """
        region = tensor[self.source.slices]
        return (region.transpose(-1, -2) if self.turned else region).view(self.ours.shape)


def storage_order(view: Tensor) -> tuple[int, ...]:
    """Return the dims of a view of a source tensor in the order in which the source stores them."""
    return tuple(sorted(range(view.dim()), key=lambda dim: -view.stride()[dim]))


@dataclass(frozen=True)
class Layout:
    """One way in which files spell a parameter. `copies`: keys that hold it once more (a tied head)."""

    name: str
    blocks: tuple[Block, ...]
    copies: tuple[Block, ...] = ()

    @property
    def keys(self) -> dict[str, tuple[int, ...]]:
        """Return the keys with their shapes."""
        return {b.key: b.shape for b in (*self.blocks, *self.copies)}


@dataclass(frozen=True)
class Init:
    """The initial value of a parameter: `normal` (of std `scale`), `uniform` (within +-scale), `zeros`, `ones`,
    `log_uniform` (log of 0..scale).
    """

    kind: str
    scale: float = 0.0


# Whether a parameter is trained: where a pattern of `train` matches it; only where one other than "**" does, because
# its state is as large as that of the rest; or never, because nothing of it has a gradient.
ALWAYS, IF_NAMED, NEVER = "always", "if named", "never"


@dataclass(frozen=True)
class Param:
    """A declared parameter; `weight` makes it, and the model's structure fills in name, layer and ends."""

    rows: Mapping[str, int]
    cols: Mapping[str, int]
    layouts: tuple[Layout, ...]
    group: str = ""  # parameters of one group choose the same layout
    float32: bool = False  # never rounded to the compute dtype
    decay: bool = True
    init: Init = Init("normal", 0.02)
    optional: bool = False  # a source may lack it: it is then new
    low: bool = False  # files may hold it quantised, with a scale for each block
    adapter: bool = False  # a factor of an adapter (LoRA): new, and in files of its own
    by_rows: bool = False  # a table whose rows are spread over the ranks of a stage, and looked up by all-to-alls
    trains: str = ALWAYS
    steep: bool = False  # its gradient comes through a function so steep that rounding moves it far
    # The dims that divide it into several matrices, with the sizes of their parts ({}: it is one), for optimizers such
    # as Muon that update whole matrices. None: it is no matrix (an embedding, a norm, a convolution).
    matrices: Mapping[str, tuple[int, ...]] | None = None
    name: str = ""
    layer: int | None = None  # the layer that it belongs to, which decides its pipeline stage
    first: bool = False  # before the layers, on the first stage; with neither, it is on the last stage
    both_ends: bool = False  # both end stages hold it: a tied embedding, or one in which an MTP head looks up tokens

    @property
    def dims(self) -> dict[str, int]:
        return {**self.rows, **self.cols}

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return (*self.rows.values(), *self.cols.values())

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def in_fsdp(self) -> bool:
        """Return whether FSDP gathers it: not float32 parameters, which it would round, nor tables."""
        return not (self.float32 or self.by_rows)

    @property
    def matrix(self) -> tuple[int, ...]:
        return matrix_shape(self, self.shape)


def matrix_shape(param: Param, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape in which a box of the parameter is stored: rows and columns flattened to one dim each."""
    num_rows = len(param.rows)
    rows, cols = prod(shape[:num_rows]), prod(shape[num_rows:])
    return (rows, cols) if param.cols else (rows,)


class Declared(nn.Parameter):
    """A parameter on the meta device that carries its declaration.

    This rank's piece replaces it when the model is placed.
    """

    param: Param

    def __new__(cls, param: Param) -> Declared:
        parameter = torch.Tensor._make_subclass(cls, torch.empty(param.matrix, device="meta"), True)
        parameter.param = param
        return parameter


def weight(
    rows: Mapping[str, int], cols: Mapping[str, int] | None = None, *, key: str | None = None,
    layouts: Sequence[Layout] = (), group: str = "", float32: bool = False, decay: bool = True,
    init: Init = Init("normal", 0.02), optional: bool = False, low: bool = False, adapter: bool = False,
    by_rows: bool = False, trains: str = ALWAYS, steep: bool = False,
    matrices: Mapping[str, tuple[int, ...]] | None = None,
) -> Declared:  # fmt: skip
    """Declare a parameter.

    With `key`, the source holds our matrix as it is; otherwise `layouts` map keys to blocks of it.
    """
    if set(rows) & set(cols or {}):
        raise LayoutError(
            f"dims {sorted(set(rows) & set(cols or {}))} are used for both rows and columns; rename one of each"
        )
    if key is not None:
        layouts = (plain(key, (*rows.values(), *(cols or {}).values()), len(rows)),)
    return Declared(
        Param(
            dict(rows),
            dict(cols or {}),
            tuple(layouts),
            group,
            float32,
            decay,
            init,
            optional,
            low,
            adapter,
            by_rows,
            trains,
            steep,
            matrices,
        )
    )


def plain(key: str, shape: Sequence[int], num_rows: int, name: str = "plain") -> Layout:
    """Return the layout whose source tensor is our matrix."""
    rows, cols = prod(shape[:num_rows]), prod(shape[num_rows:])
    file_shape = (rows, cols) if len(shape) > num_rows else (rows,)
    return Layout(name, (Block(Box.whole(shape), key, file_shape, Box.whole(file_shape)),))


def segments(key: str, shape: Sequence[int], cuts: Sequence[int], source: Sequence[int]) -> Layout:
    """Return the layout of a source with whole segments one after the other (`[all Q | all K | all V]`).

    Our matrix has them side by side in dim 1, per key head, so one cut of dim 0 gives a tp rank its q, k and v. `cuts`
    are the sizes of the segments in our dim 1; `source` is the shape of the source tensor.
    """
    blocks, at, row = [], 0, 0
    for cut in cuts:
        ours = Box((0, at, *(0 for _ in shape[2:])), (shape[0], at + cut, *shape[2:]))
        rows = shape[0] * cut
        file_box = Box((row, *(0 for _ in source[1:])), (row + rows, *source[1:]))
        blocks.append(Block(ours, key, tuple(source), file_box))
        at, row = at + cut, row + rows
    return Layout("segments", tuple(blocks))


def belongs_to(module: nn.Module, *, layer: int | None = None, first: bool = False) -> None:
    """Mark the parameters of a module as part of a layer, or as before all layers."""
    for parameter in module.parameters():
        if isinstance(parameter, Declared):
            parameter.param = replace(parameter.param, layer=layer, first=first)


@dataclass(frozen=True)
class Constants:
    """Numbers that files hold and a config implies, by key: they are carried along, and compared when loading."""

    values: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Table:
    """All declarations of a model by name, and the undeclared keys of its files that are carried along."""

    params: Mapping[str, Param]
    carried: tuple[str, ...] = ()  # patterns of keys that are copied byte for byte and not trained
    constants: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of carried keys: what the config implies
    num_first_layers: int = 1  # layers that stay with the embedding, because vision features are added to them

    def __iter__(self) -> Iterator[Param]:
        return iter(self.params.values())

    def __getitem__(self, name: str) -> Param:
        if name not in self.params:
            raise LayoutError(f"no parameter is called {name!r}; the table has {', '.join(list(self.params)[:3])} ...")
        return self.params[name]

    @cached_property
    def num_layers(self) -> int:
        """Count the layers."""
        return 1 + max((p.layer for p in self if p.layer is not None), default=0)

    @property
    def groups(self) -> dict[str, list[str]]:
        """Return layout names by group; all parameters of a group must have the same."""
        out: dict[str, list[str]] = {}
        for param in self:
            names = [layout.name for layout in param.layouts]
            if out.setdefault(param.group, names) != names and param.group:
                raise LayoutError(
                    f"{param.name}: layouts {names} differ from {out[param.group]} of its group {param.group!r}"
                )
        return out


def collect(
    model: nn.Module, carried: Sequence[str] = (), both_ends: str | None = None, num_first_layers: int = 1
) -> Table:
    """Build the table of a model on the meta device; check that all is declared and that declarations tile.

    `both_ends` names the embedding that the last stage uses too, if it does.
    """
    params: dict[str, Param] = {}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, Declared):
            raise LayoutError(f"{name} is a bare nn.Parameter; create it with mw.weight(...), which declares it")
        params[name] = replace(parameter.param, name=name, both_ends=name == both_ends)
    for name, buffer in model.named_buffers():
        raise LayoutError(f"{name} {tuple(buffer.shape)} is a buffer; compute it from the config in forward instead")
    declared = (each for module in model.modules() for each in vars(module).values() if isinstance(each, Constants))
    constants = {key: numbers for each in declared for key, numbers in each.values.items()}
    table = Table(params, tuple(carried), constants, num_first_layers)
    check_cover(table)
    return table


def check_cover(table: Table) -> None:
    """Raise unless blocks tile our tensors exactly once, and tile the keys exactly once for every choice of layouts.

    So no element of a file is lost, read twice or invented, which no loss curve would show. Layers of one kind have
    equal boxes; each distinct case is checked once.
    """
    keys: dict[str, list[tuple[str, str, Block]]] = {}  # for each key: group, layout and block of each use
    checked_views: set[tuple[object, ...]] = set()
    checked_tilings: set[tuple[object, ...]] = set()
    for param in table:
        if not param.layouts or (len(param.layouts) > 1 and not param.group):
            raise LayoutError(
                f"{param.name} has {len(param.layouts)} layouts and group {param.group!r}; a choice needs a group"
            )
        for layout in param.layouts:
            boxes = tuple(b.ours for b in layout.blocks)
            if (boxes, param.shape) not in checked_tilings:
                check_tiling(boxes, param.shape, f"{param.name} ({layout.name})")
                checked_tilings.add((boxes, param.shape))
            for block in (*layout.blocks, *layout.copies):
                boxes_of_view = (block.shape, block.source, block.ours)
                if boxes_of_view not in checked_views:
                    _check_view(param, block)
                    checked_views.add(boxes_of_view)
                keys.setdefault(block.key, []).append((param.group, layout.name if param.group else "", block))
    for key, uses in keys.items():
        (_, _, block), *others = uses
        if others or block.source.stop != block.shape or any(block.source.start):  # most keys are one whole block
            _check_key(key, uses)
    _ = table.groups


def _check_view(param: Param, block: Block) -> None:
    """Raise unless a block of the source can be viewed in our shape without a copy."""
    if block.ours.size != block.source.size:
        raise LayoutError(f"{param.name}: {block.ours} of ours and {block.source} of {block.key} differ in size")
    if Box.whole(block.shape).meet(block.source) != block.source:
        return  # it leaves its key, which _check_key reports better
    try:
        block.view(torch.empty(block.shape, device="meta"))
    except RuntimeError as error:
        raise LayoutError(
            f"{param.name}: {block.source} of {block.key} {block.shape} is not a view of our {block.ours}: {error}"
        ) from error


def _check_key(key: str, uses: Sequence[tuple[str, str, Block]]) -> None:
    """Raise unless the blocks of one key tile it, in each layout of its group."""
    by_choice: dict[tuple[str, str], list[Block]] = {}
    for group, layout, block in uses:
        by_choice.setdefault((group, layout), []).append(block)
    groups = {group for group, _ in by_choice}
    if len(groups) > 1:
        raise LayoutError(f"{key} is made of parameters of several groups {sorted(groups)}; put them into one")
    for blocks in by_choice.values():
        shapes = {b.shape for b in blocks}
        if len(shapes) > 1:
            raise LayoutError(f"{key} is declared with several shapes: {sorted(shapes)}")
        check_tiling([b.source for b in blocks], blocks[0].shape, key)
