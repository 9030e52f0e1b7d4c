"""Matrices of 8-bit floating point numbers: every block of one has a scale, in a tensor beside it.

    value = number * scale of its block

What is trained is never kept in 8 bits: values are made when a file is read, and numbers and scales again when one is
written. So no scale is state. config.json says how large blocks are. The shape of the scales does not: 192 rows in two
blocks are 128 and 64, not 96 and 96.

Numbers in 4 bits, and groups of 32 (MX), are only read: values are made of them, and files of them are copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from ..errors import LoadError, MismatchedKey
from ..ops.fp8_storage import wide
from .safetensors_header import DTYPES, Entry

NUMBERS = torch.float8_e4m3fn
BYTES = torch.uint8  # in which numbers are kept: FSDP would cast floating point numbers
PAYLOAD = "F8_E4M3"
PACKED = "F4"  # numbers of 4 bits, two in a byte: a file has them as U8, under another key
BLOCK = (128, 128)  # of what is written in 8 bits here first
LARGEST = torch.finfo(NUMBERS).max
_FLOATS, _POWERS = ("F32", "BF16", "F16"), ("F8_E8M0", "U8")  # of two; U8 is how some spell it
_WHOLE = 1 << 62  # of a block without end
_SUFFIX = "_packed"  # of the key of packed numbers, which stands in the place of the matrix's own
_NIBBLES = torch.tensor([sign * size for sign in (1, -1) for size in (0.0, 0.5, 1, 1.5, 2, 3, 4, 6)], device="cpu")
_PAIRS = (  # by byte: its two numbers in 8 bits, which hold all those of 4 bits; the low four bits are the first
    torch.stack([_NIBBLES.repeat(16), _NIBBLES.repeat_interleave(16)], 1).to(NUMBERS).view(torch.int16).view(-1)
)


@dataclass(frozen=True)
class Scale:
    """Where the scales of a matrix are, and the rows and columns of a block."""

    key: str
    block: tuple[int, int]
    form: str = ""  # the name of a format that is only read: the matrix is never written but as its source has it
    packed: str = ""  # the key of its numbers, where its own is in no file
    divisor: str = ""  # the key of one number, by which all its scales are divided
    unused: tuple[str, ...] = ()  # keys that say nothing of its values

    @property
    def beside(self) -> tuple[str, ...]:
        """All keys of the files that belong to the matrix, but its own."""
        return tuple(key for key in (self.key, self.packed, self.divisor, *self.unused) if key)

    @property
    def as_one(self) -> Scale:
        """The same with one block for each matrix."""
        return replace(self, block=(_WHOLE, _WHOLE))

    def grid(self, shape: Sequence[int]) -> tuple[int, ...]:
        """How many blocks a matrix has, or each of several matrices."""
        rows, columns = self.block
        return (*shape[:-2], ceil(shape[-2] / rows), ceil(shape[-1] / columns))


@dataclass(frozen=True)
class Format:
    """What `config.json` tells of matrices: how the key of their scales ends, a block, and what their scales may be."""

    suffix: str
    block: tuple[int, int]
    dtypes: tuple[str, ...] = (*_FLOATS, *_POWERS)
    name: str = ""  # of one that is only read
    packed: bool = False
    divided: bool = False  # by one number for a whole matrix

    def has(self, key: str, entries: Mapping[str, Entry]) -> bool:
        """Numbers that are not stored as this format stores them have another meaning."""
        return not self.packed or key + _SUFFIX in entries

    def scale(self, key: str, entries: Mapping[str, Entry]) -> Scale:
        """Of a matrix. Scales of activations (`X.input_global_scale`) are kept beside it."""
        unused = key.removesuffix("weight") + "input_global_scale"
        return Scale(
            key + self.suffix, self.block, self.name, key + _SUFFIX if self.packed else "",
            key + "_global_scale" if self.divided else "", (unused,) if self.name and unused in entries else (),
        )  # fmt: skip


# Of compressed-tensors, by its `format`: bits, strategy and size of a group, and what they mean.
_GROUPS = {
    "mxfp8-quantized": (8, "group", 32, Format("_scale", (1, 32), _POWERS, "MXFP8")),
    "mxfp4-pack-quantized": (4, "group", 32, Format("_scale", (1, 32), _POWERS, "MXFP4", packed=True)),
    "nvfp4-pack-quantized": (
        4, "tensor_group", 16, Format("_scale", (1, 16), (PAYLOAD,), "NVFP4", packed=True, divided=True)
    ),
}  # fmt: skip


def with_matrices(config: Mapping[str, Any], entries: Mapping[str, Entry]) -> Mapping[str, Entry]:
    """Before each key of packed numbers the matrix that they are, under the key that it has in other files."""
    given = config.get("quantization_config")
    if given is None or not _told(given).packed:
        return entries
    found: dict[str, Entry] = {}
    for key, entry in entries.items():
        matrix = key.removesuffix(_SUFFIX)
        if matrix != key and matrix in entries:
            raise LoadError(f"{entry.file} holds {key}, and {entries[matrix].file} {matrix}; remove one of them")
        if matrix != key and entry.dtype in ("U8", ""):  # an index knows no dtypes, and no shapes
            shape = (*entry.shape[:-1], 2 * entry.shape[-1]) if entry.shape else ()
            found[matrix] = entry._replace(key=matrix, dtype=PACKED, shape=shape)
        found[key] = entry
    return found


def scales_of(config: Mapping[str, Any], entries: Mapping[str, Entry]) -> dict[str, Scale]:
    """By the key of a matrix. What cannot be read is refused by its name. Where the config tells nothing there are
    none, and 8-bit numbers can only be kept as they are."""
    given = config.get("quantization_config")
    if given is None:
        return {}
    form = _told(given)
    kind = PACKED if form.packed else PAYLOAD
    numbers = [key for key, entry in entries.items() if entry.dtype == kind and form.has(key, entries)]
    found = {key: form.scale(key, entries) for key in numbers}
    for key, scale in found.items():
        _check(key, scale, form, entries)
    return found


def config_of(kept: Sequence[str]) -> dict[str, Any]:
    """What `config.json` says of matrices in `BLOCK`s. `kept`: modules whose matrices are not in 8 bits."""
    return {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK),
        "modules_to_not_convert": list(kept),
    }  # fmt: skip


def also_plain(told: Mapping[str, Any], modules: Sequence[str]) -> Mapping[str, Any]:
    """The same, of a model that has more modules whose matrices are not in 8 bits."""
    if not modules:
        return told
    usual = "ignore" if told.get("quant_method") == "compressed-tensors" else "modules_to_not_convert"
    name = "ignored_layers" if "ignored_layers" in told else usual
    return {**told, name: [*(told.get(name) or []), *modules]}


def _told(given: Any) -> Format:
    if not isinstance(given, Mapping):
        raise LoadError(f"config.json: quantization_config is {given!r:.200}, not an object of fields")
    method = given.get("quant_method")
    if method == "fp8":
        if given.get("fmt", "e4m3") != "e4m3" or given.get("activation_scheme", "dynamic") != "dynamic":
            raise LoadError(
                f"config.json: fp8 with fmt={given.get('fmt')!r:.50}, "
                f"activation_scheme={given.get('activation_scheme')!r:.50} "
                "is not read, but e4m3 with dynamic scales of activations; fetch another version of the model"
            )
        return Format("_scale_inv", _block(given.get("weight_block_size"), "weight_block_size"))
    if method == "compressed-tensors":
        return _compressed(given)
    raise LoadError(
        f"config.json: weights that {method!r:.100} quantised are not read, but those of fp8 and of compressed-tensors "
        "in floating point; fetch the model without quantization, or in fp8"
    )


def _block(given: Any, name: str) -> tuple[int, int]:
    if given is None:
        return _WHOLE, _WHOLE
    sizes = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise LoadError(f"config.json: {name}={given!r:.100} must be rows and columns of a block, or null")
    return sizes[0], sizes[1]


def _compressed(given: Mapping[str, Any]) -> Format:
    groups = given.get("config_groups")
    given_groups = groups.values() if isinstance(groups, Mapping) else []
    told = [group if isinstance(group, Mapping) else {} for group in given_groups]
    forms = {_compressed_format(group.get("weights"), group.get("format") or given.get("format")) for group in told}
    if len(forms) != 1:
        raise LoadError(
            f"config.json: compressed-tensors with {len(forms)} kinds of blocks is not read, but with one; fetch the "
            "model without quantization, or in fp8"
        )
    if given.get("transform_config"):
        raise LoadError("config.json: compressed-tensors with a transform_config is not read; fetch another version")
    return forms.pop()


def _compressed_format(kind: Any, form: Any) -> Format:
    told = kind if isinstance(kind, Mapping) else {}
    strategy, group = told.get("strategy"), told.get("group_size")
    in_blocks = (told.get("type"), told.get("num_bits")) == ("float", 8) and strategy in ("tensor", "channel", "block")
    *due, in_groups = _GROUPS.get(form, (None,)) if isinstance(form, str) else (None,)
    if not in_blocks and (told.get("type"), [told.get("num_bits"), strategy, group]) != ("float", due):
        raise LoadError(
            f"config.json: compressed-tensors in {told.get('num_bits')} bits of {told.get('type')!r:.50}, strategy "
            f"{strategy!r:.50}, group_size {group!r:.50}, format {form!r:.50}, is not read, but 8-bit floating point "
            f"with a scale for each tensor, channel or block, and {', '.join(_GROUPS)} as its library writes them; "
            "fetch the model without quantization, or in fp8"
        )
    if not told.get("symmetric", True):
        raise LoadError("config.json: compressed-tensors with symmetric=false is not read; fetch another version")
    if not in_blocks:
        assert in_groups is not None, "its settings are known"
        return in_groups
    if strategy == "block":
        return Format("_scale", _block(told.get("block_structure"), "block_structure"))
    return Format("_scale", (_WHOLE, _WHOLE) if strategy == "tensor" else (1, _WHOLE))


def _check(key: str, scale: Scale, form: Format, entries: Mapping[str, Entry]) -> None:
    matrix, found = entries[key], entries.get(scale.key)
    numbers = entries[scale.packed or key]
    for beside in (scale.key, scale.divisor):
        if beside and beside not in entries:
            raise MismatchedKey(
                f"{numbers.file}: {numbers.key} is {numbers.dtype}, and {beside} is not there; fetch the file with it"
            )
    assert found is not None, "it was just looked for"
    if len(matrix.shape) < 2:
        raise MismatchedKey(
            f"{matrix.file}: {key} {matrix.shape} is {numbers.dtype}, and only matrices have such scales"
        )
    grid = scale.grid(matrix.shape)
    if found.shape != grid and not (prod(grid) == 1 and found.shape in ((), (1,))):
        rows, columns = (min(block, size) for block, size in zip(scale.block, matrix.shape[-2:], strict=True))
        raise MismatchedKey(
            f"{found.file}: {scale.key} is {found.shape}, but {key} {matrix.shape} has {grid} blocks of {rows} x "
            f"{columns}, as config.json says; correct its quantization_config, or fetch the file of this model"
        )
    if found.dtype not in form.dtypes:
        raise MismatchedKey(f"{found.file}: {scale.key} is {found.dtype}; scales must be {', '.join(form.dtypes)}")
    divisor = entries[scale.divisor] if scale.divisor else None
    if divisor is not None and (divisor.dtype, prod(divisor.shape)) != ("F32", 1):
        raise MismatchedKey(
            f"{divisor.file}: {scale.divisor} is {divisor.dtype} {divisor.shape}, but must be one number in F32"
        )


def scales_to_float(scales: Tensor) -> Tensor:
    """Scales of a file, in float32."""
    powers = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
    return powers.to(torch.float32)


def scales_to_stored(scales: Tensor, dtype: str) -> Tensor:
    """Scales in the dtype of a file: rounded; up, where it holds powers of two, or few digits of what is this small."""
    if dtype == "F16":
        found = scales.to(torch.float16)
        above = (found.view(torch.int16) + 1).view(torch.float16)
        return torch.where(found.float() < 0.99 * scales, above, found)
    if dtype not in _POWERS:
        return scales.to(DTYPES[dtype])
    mantissa, exponent = torch.frexp(scales)
    up = torch.where(mantissa == 0.5, exponent - 1, exponent)  # 0.5 * 2**n is a power of two already
    return (up + 127).clamp(0, 254).to(torch.uint8).view(DTYPES[dtype])


def scales_for_amax(most: Tensor) -> Tensor:
    """The scales with which the largest numbers stand for values as large as these; 1 where all are zero."""
    return torch.where(most > 0, most / LARGEST, torch.ones_like(most))


@dataclass(frozen=True)
class Places:
    """Which scale each element of a view has: indices that broadcast to the shape of the view, each along its dims."""

    rows: Tensor
    columns: Tensor

    @staticmethod
    def of(view: Tensor, shape: Sequence[int], scale: Scale) -> Places:
        """`view`: of a tensor of `shape`, in any order; its strides say where its elements lie."""
        num_rows, num_columns = shape[-2:]
        first_row, first_column = divmod(int(view.storage_offset()), num_columns)
        ones = [1] * view.dim()
        rows, columns = torch.tensor(first_row).view(ones), torch.tensor(first_column).view(ones)
        for dim, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
            at = torch.arange(size).view(-1, *[1] * (view.dim() - dim - 1))
            if stride % num_columns == 0:
                rows = rows + at * (stride // num_columns)
            else:
                columns = columns + at * stride
        height, width = (min(block, size) for block, size in zip(scale.block, (num_rows, num_columns), strict=True))
        grid_rows = ceil(num_rows / height)
        return Places(rows // num_rows * grid_rows + rows % num_rows // height, columns // width)

    @property
    def rows_of_blocks(self) -> range:
        """From the first that has an element to the last."""
        return range(int(self.rows.min()), int(self.rows.max()) + 1)

    def below(self, row: int) -> Places:
        """The same in the scales from a row of blocks on."""
        return replace(self, rows=self.rows - row)

    def take(self, scales: Tensor) -> Tensor:
        """The scale of each element. Two selections take a tenth of the time of one by both indices."""
        by_row = scales.view(-1, scales.shape[-1]).index_select(0, self.rows.flatten())
        found = by_row.index_select(1, self.columns.flatten()).view(*self.rows.shape, *self.columns.shape)
        pairs = [dim for at in range(self.rows.dim()) for dim in (at, at + self.rows.dim())]
        sizes = [a * b for a, b in zip(self.rows.shape, self.columns.shape, strict=True)]  # one of the two is 1
        return found.permute(pairs).reshape(sizes)

    def into(self, grid: Tensor, values: Tensor) -> None:
        """The most of the values of each block, and of what the grid has."""
        width = grid.shape[-1]
        where = (self.rows * width + self.columns).expand(values.shape).reshape(-1)
        grid.view(-1).scatter_reduce_(0, where, values.reshape(-1), "amax")


def unpacked(packed: Tensor) -> Tensor:
    """Bytes of two numbers each, as 8-bit numbers one after the other."""
    return _PAIRS.index_select(0, packed.contiguous().view(-1).int()).view(NUMBERS)


def dequantise(numbers: Tensor, scales: Tensor) -> Tensor:
    """In float32: exact where scales are bfloat16."""
    return wide(numbers) * scales


def as_used(values: Tensor, used: torch.dtype) -> Tensor:
    """What products see of values; the values themselves at the ends of the range of `used`, where they would become
    infinite, or something else."""
    rounded = values.to(used).to(values.dtype)
    return torch.where((rounded - values).abs() <= values.abs() * 2.0**-7, rounded, values)


def quantise(values: Tensor, scales: Tensor) -> Tensor:
    """Divided by the scales as they are stored. Of a block whose scale is 0 all numbers are."""
    wide = torch.where(scales == 0, torch.zeros_like(scales), values.to(torch.float32) / scales)
    return wide.clamp(-LARGEST, LARGEST).to(NUMBERS)
