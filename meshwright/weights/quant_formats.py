"""Formats of quantised weights: block-scaled FP8 (read and written), and 4-bit and MX formats (read only).

  value[i, j] = code[i, j] * scale[i // 128, j // 128]        scale = amax of the block / 448

as in DeepSeek-V3 (arXiv:2412.19437, section 3.3) and the FP8 checkpoints of Qwen. E4M3 has 3 bits of mantissa and 448
as its largest value; a scale per block keeps an outlier from flushing the whole matrix to zero.

Trained weights are never stored in FP8: they are dequantised at load and quantised at export, so no scale can go stale.
config.json gives the block size. It does not follow from the shape of the scales: 192 rows in two blocks are 128 + 64,
not 96 + 96.

NVFP4, MXFP4 and MXFP8 (arXiv:2310.10537) cannot be trained. An export copies them unchanged. In memory the first two
stay in 4 bits (ops/codings.py).

Example: a block with amax 0.07 gets the scale 0.07 / 448 = 1.5625e-4. The value 0.0123 becomes 78.7, rounded to the
code 80 (E4M3 has 8 steps between 64 and 128), and is read back as 0.0125.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..errors import LoadError, MismatchedKey
from ..ops.codings import FOUR_BITS, NF4, Coding, wide
from ..ops.codings import FP8 as FP8_CODING
from . import bitsandbytes
from .bitsandbytes import State
from .safetensors_header import DTYPES, Entry

FP8 = torch.float8_e4m3fn
BYTES = torch.uint8  # the dtype of codes in memory: FSDP's mixed precision would cast a floating-point dtype
PAYLOAD = "F8_E4M3"
PACKED = "F4"  # 4-bit codes, two in a byte: files store them as U8, under a different key
BLOCK = (128, 128)  # of weights that are exported in FP8: the block of DeepSeek-V3 and Qwen
LARGEST = torch.finfo(FP8).max
_FLOATS, _POWERS = ("F32", "BF16", "F16"), ("F8_E8M0", "U8")  # E8M0 holds powers of two; some files call it U8
_WHOLE = 1 << 62  # the block size of a dim that has one block
ONE_BLOCK = (_WHOLE, _WHOLE)
_PART = re.compile(r"(.*)\.shard_\d+\.weight")  # a part of a table (Qwen4-Exp): all parts share one scale
_SUFFIX = "_packed"  # ends the key of packed codes, which replaces the matrix's own key
_NIBBLES = torch.arange(16, dtype=torch.uint8, device="cpu")
# A table from a byte to its two codes, each in a byte of its own. The low nibble comes first.
_PAIRS = torch.stack([_NIBBLES.repeat(16), _NIBBLES.repeat_interleave(16)], 1).view(torch.int16).view(-1)


@dataclass(frozen=True)
class Scale:
    """The place of a matrix's scales in the files, and the rows and columns of a block."""

    key: str
    block: tuple[int, int]
    form: str = ""  # the name of a read-only format: such a matrix is exported unchanged or not at all
    packed: str = ""  # the key of packed codes, if the files have no key of the matrix itself
    divisor: str = ""  # the key of a global scale, by which all its scales are divided (NVFP4)
    unused: tuple[str, ...] = ()  # keys that belong to the matrix and do not change its values
    nested: tuple[str, ...] = ()  # the keys of the scales and values of its scales, if these are quantised (NF4)
    offset: float = 0.0  # added to such scales

    @property
    def coding(self) -> Coding | None:
        """Return the coding in which the matrix can stay as in its files; None if its values have to be stored."""
        return FOUR_BITS.get(self.form.lower()) if self.form else FP8_CODING

    @property
    def companion_keys(self) -> tuple[str, ...]:
        """Return all keys that belong to the matrix, except its own."""
        return tuple(key for key in (self.key, self.packed, self.divisor, *self.unused) if key)

    @property
    def as_one(self) -> Scale:
        """Return the scale with one block for the whole matrix."""
        return replace(self, block=ONE_BLOCK)

    def grid(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the scales of a matrix, or of a stack of matrices."""
        rows, columns = self.block
        return (*shape[:-2], ceil(shape[-2] / rows), ceil(shape[-1] / columns))


@dataclass(frozen=True)
class Format:
    """The format that `quantization_config` describes: the key suffix of scales, the block, and the dtypes of
    scales."""

    suffix: str
    block: tuple[int, int]
    dtypes: tuple[str, ...] = (*_FLOATS, *_POWERS)
    name: str = ""  # of a read-only format
    packed: bool = False
    divided: bool = False  # whether scales are divided by a global scale of the matrix
    states: Mapping[str, State] = field(default_factory=dict, compare=False)  # of matrices in NF4, by their keys

    def has(self, key: str, entries: Mapping[str, Entry]) -> bool:
        """Return whether a key is stored in this format; codes that are stored in another way have another meaning."""
        return key in self.states or not self.packed or key + _SUFFIX in entries

    def scale(self, key: str, entries: Mapping[str, Entry]) -> Scale:
        """Return the `Scale` of a matrix. Static scales of activations (`X.input_global_scale`) are carried along."""
        if (state := self.states.get(key)) is not None:
            nested = tuple(key + end for end in bitsandbytes.NESTED) if state.nested else ()
            others = bitsandbytes.companions(key, state, entries)
            return Scale(key + self.suffix, self.block, self.name, nested=nested, offset=state.offset, unused=others)
        of_table = _PART.sub(r"\1.weight_scale", key)
        if of_table != key and key + self.suffix not in entries and of_table in entries:
            return Scale(of_table, ONE_BLOCK, "FP8 with one scale for all parts of a table")
        unused = key.removesuffix("weight") + "input_global_scale"
        return Scale(
            key + self.suffix, self.block, self.name, key + _SUFFIX if self.packed else "",
            key + "_global_scale" if self.divided else "", (unused,) if self.name and unused in entries else (),
        )  # fmt: skip


# compressed-tensors formats in groups: the bits, strategy and group size of each, and how it is stored.
_GROUPS = {
    "mxfp8-quantized": (8, "group", 32, Format("_scale", (1, 32), _POWERS, "MXFP8")),
    "mxfp4-pack-quantized": (4, "group", 32, Format("_scale", (1, 32), _POWERS, "MXFP4", packed=True)),
    "nvfp4-pack-quantized": (
        4, "tensor_group", 16, Format("_scale", (1, 16), (PAYLOAD,), "NVFP4", packed=True, divided=True)
    ),
}  # fmt: skip


def states_of(
    config: Mapping[str, Any], entries: Mapping[str, Entry], read: Callable[[Entry], bytes]
) -> dict[str, State]:
    """Return the states of NF4 matrices, which headers do not contain."""
    quantization = config.get("quantization_config")
    is_nf4 = quantization is not None and _format_of(quantization).name == bitsandbytes.FORM
    return bitsandbytes.states_of(entries, read) if is_nf4 else {}


def with_matrices(
    config: Mapping[str, Any], entries: Mapping[str, Entry], states: Mapping[str, State] = MappingProxyType({})
) -> Mapping[str, Entry]:
    """Add an entry for each packed 4-bit matrix, under the key that an unquantised file would have; in NF4 it replaces
    the entry of its codes.

    The rest of the package then sees a matrix with a key, a shape and scales, as for any other format.
    """
    quantization = config.get("quantization_config")
    if quantization is None or not _format_of(quantization).packed:
        return entries
    if states:
        matrices = {key: entries[key]._replace(dtype=PACKED, shape=state.shape) for key, state in states.items()}
        return {**entries, **matrices}
    with_packed: dict[str, Entry] = {}
    for key, entry in entries.items():
        matrix = key.removesuffix(_SUFFIX)
        if matrix != key and matrix in entries:
            raise LoadError(f"{entry.file} holds {key}, and {entries[matrix].file} {matrix}; remove one of them")
        if matrix != key and entry.dtype in ("U8", ""):  # an index has neither dtypes nor shapes
            shape = (*entry.shape[:-1], 2 * entry.shape[-1]) if entry.shape else ()
            with_packed[matrix] = entry._replace(key=matrix, dtype=PACKED, shape=shape)
        with_packed[key] = entry
    return with_packed


def as_in_file(entry: Entry) -> Entry:
    """Return the entry of a matrix that is packed under its own key with the dtype and shape of its file."""
    is_packed = entry.dtype == PACKED
    return entry._replace(dtype="U8", shape=bitsandbytes.packed_shape(entry.shape)) if is_packed else entry


def scales_of(
    config: Mapping[str, Any], entries: Mapping[str, Entry], states: Mapping[str, State] = MappingProxyType({})
) -> dict[str, Scale]:
    """Return the scales of each quantised matrix. Refuse matrices that cannot be read, by name.

    Without a quantization_config there are none, and FP8 tensors can only be carried.

    Every FP8 tensor must have scales in the format that config.json names. A tensor without scales, or with scales of
    another shape, would be read as values that are off by factors of hundreds.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return {}
    weight_format = replace(_format_of(quantization), states=states)
    packed_dtype = PACKED if weight_format.packed else PAYLOAD
    quantised_keys = [
        key for key, entry in entries.items() if entry.dtype == packed_dtype and weight_format.has(key, entries)
    ]
    scales = {key: weight_format.scale(key, entries) for key in quantised_keys}
    for key, scale in scales.items():
        _check_scale(key, scale, weight_format, entries)
    return scales


def config_of(kept: Sequence[str]) -> dict[str, Any]:
    """Return the `quantization_config` of an export in FP8. `kept`: modules that stay unquantised."""
    return {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK),
        "modules_to_not_convert": list(kept),
    }  # fmt: skip


def also_plain(quantization: Mapping[str, Any], modules: Sequence[str]) -> Mapping[str, Any]:
    """Return a quantization_config that lists more modules as unquantised.

    compressed-tensors calls the list `ignore`, fp8 `modules_to_not_convert`, some exporters `ignored_layers`, and
    bitsandbytes `llm_int8_skip_modules`, which replaces transformers' default of the head.
    """
    if not modules:
        return quantization
    if quantization.get("quant_method") == "bitsandbytes":
        kept = quantization.get("llm_int8_skip_modules") or ["lm_head"]
        return {**quantization, "llm_int8_skip_modules": [*kept, *modules]}
    default_field = "ignore" if quantization.get("quant_method") == "compressed-tensors" else "modules_to_not_convert"
    field_name = "ignored_layers" if "ignored_layers" in quantization else default_field
    return {**quantization, field_name: [*(quantization.get(field_name) or []), *modules]}


def _format_of(quantization: Any) -> Format:
    """Return the format that a quantization_config describes, or raise LoadError for one that is not supported.

    Supported: `fp8` (DeepSeek, Qwen) with dynamic activation scales, and compressed-tensors (vLLM's llm-compressor) in
    floating point. Integer formats such as GPTQ and AWQ are not supported: they need a zero point and an order of
    columns.
    """
    if not isinstance(quantization, Mapping):
        raise LoadError(f"config.json: quantization_config is {quantization!r:.200}, not an object of fields")
    method = quantization.get("quant_method")
    if method == "fp8":
        if quantization.get("fmt", "e4m3") != "e4m3" or quantization.get("activation_scheme", "dynamic") != "dynamic":
            raise LoadError(
                f"config.json: fp8 with fmt={quantization.get('fmt')!r:.50}, "
                f"activation_scheme={quantization.get('activation_scheme')!r:.50} "
                "is not supported, only e4m3 with dynamic activation scales; fetch another version of the model"
            )
        return Format("_scale_inv", _block(quantization.get("weight_block_size"), "weight_block_size"))
    if method == "compressed-tensors":
        return _compressed(quantization)
    if method == "bitsandbytes":
        bitsandbytes.check_config(quantization)
        return Format(bitsandbytes.ABSMAX, (1, NF4.block), ("F32", "U8"), bitsandbytes.FORM, packed=True)
    raise LoadError(
        f"config.json: quant_method {method!r:.100} is not supported, only fp8, compressed-tensors in floating "
        "point and bitsandbytes in nf4; fetch the unquantised model, or its fp8 version"
    )


def _block(sizes_given: Any, name: str) -> tuple[int, int]:
    """Return the block size from config.json; a missing one means one block for the matrix."""
    if sizes_given is None:
        return _WHOLE, _WHOLE
    sizes = list(sizes_given) if isinstance(sizes_given, Sequence) and not isinstance(sizes_given, str) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise LoadError(f"config.json: {name}={sizes_given!r:.100} must be rows and columns of a block, or null")
    return sizes[0], sizes[1]


def _compressed(quantization: Mapping[str, Any]) -> Format:
    """Return the format of a compressed-tensors config, which must use the same format for all groups."""
    groups = quantization.get("config_groups")
    group_values = groups.values() if isinstance(groups, Mapping) else []
    group_configs = [group if isinstance(group, Mapping) else {} for group in group_values]
    formats = {
        _compressed_format(group.get("weights"), group.get("format") or quantization.get("format"))
        for group in group_configs
    }
    if len(formats) != 1:
        raise LoadError(
            f"config.json: compressed-tensors with {len(formats)} different formats is not supported, only with one; "
            "fetch the unquantised model, or its fp8 version"
        )
    if quantization.get("transform_config"):
        raise LoadError(
            "config.json: compressed-tensors with a transform_config is not supported; fetch another version"
        )
    return formats.pop()


def _compressed_format(weights: Any, name: Any) -> Format:
    """Return the format of one group of compressed-tensors."""
    fields = weights if isinstance(weights, Mapping) else {}
    strategy, group = fields.get("strategy"), fields.get("group_size")
    is_fp8 = (fields.get("type"), fields.get("num_bits")) == ("float", 8) and strategy in ("tensor", "channel", "block")
    *expected, group_format = _GROUPS.get(name, (None,)) if isinstance(name, str) else (None,)
    if not is_fp8 and (fields.get("type"), [fields.get("num_bits"), strategy, group]) != ("float", expected):
        raise LoadError(
            f"config.json: compressed-tensors in {fields.get('num_bits')} bits of {fields.get('type')!r:.50}, strategy "
            f"{strategy!r:.50}, group_size {group!r:.50}, format {name!r:.50}, is not supported, only 8-bit floating "
            f"point with a scale per tensor, channel or block, and {', '.join(_GROUPS)} with their standard settings; "
            "fetch the unquantised model, or its fp8 version"
        )
    if not fields.get("symmetric", True):
        raise LoadError("config.json: compressed-tensors with symmetric=false is not supported; fetch another version")
    if not is_fp8:
        assert group_format is not None, "its settings are known"
        return group_format
    if strategy == "block":
        return Format("_scale", _block(fields.get("block_structure"), "block_structure"))
    return Format("_scale", (_WHOLE, _WHOLE) if strategy == "tensor" else (1, _WHOLE))


def _check_scale(key: str, scale: Scale, form: Format, entries: Mapping[str, Entry]) -> None:
    """Check presence, shape and dtype of the scales of a matrix."""
    matrix, scales = entries[key], entries.get(scale.key)
    code_entry = entries[scale.packed or key]
    for companion in (scale.key, scale.divisor):
        if companion and companion not in entries:
            raise MismatchedKey(
                f"{code_entry.file}: {code_entry.key} is {code_entry.dtype}, but its {companion} is missing; fetch the "
                "file that holds it"
            )
    assert scales is not None, "it was just looked for"
    if len(matrix.shape) < 2:
        raise MismatchedKey(
            f"{matrix.file}: {key} {matrix.shape} is {code_entry.dtype}, but only matrices can have block scales"
        )
    grid = scale.grid(matrix.shape)
    grid = (prod(grid),) if key in form.states else grid
    if (scales.dtype == "U8") != bool(scale.nested) and key in form.states:
        raise MismatchedKey(
            f"{scales.file}: {scale.key} is {scales.dtype}, and the files hold "
            f"{'' if scale.nested else 'no '}scales of it; fetch them again"
        )
    if scales.shape != grid and not (prod(grid) == 1 and scales.shape in ((), (1,))):
        rows, columns = (min(block, size) for block, size in zip(scale.block, matrix.shape[-2:], strict=True))
        raise MismatchedKey(
            f"{scales.file}: {scale.key} is {scales.shape}, but {key} {matrix.shape} has {grid} blocks of {rows} x "
            f"{columns}, as config.json says; correct its quantization_config, or fetch the file of this model"
        )
    if scales.dtype not in form.dtypes:
        raise MismatchedKey(f"{scales.file}: {scale.key} is {scales.dtype}; scales must be {', '.join(form.dtypes)}")
    divisor = entries[scale.divisor] if scale.divisor else None
    if divisor is not None and (divisor.dtype, prod(divisor.shape)) != ("F32", 1):
        raise MismatchedKey(
            f"{divisor.file}: {scale.divisor} is {divisor.dtype} {divisor.shape}, but must be one number in F32"
        )


def scales_to_float(scales: Tensor) -> Tensor:
    """Return scales of a file in float32."""
    e8m0 = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
    return e8m0.to(torch.float32)


def scales_to_stored(scales: Tensor, dtype: str) -> Tensor:
    """Round scales to the dtype of a file: to nearest, but up for powers of two, and up for F16 where nearest would
    lose over 1%.

    A scale that is rounded down makes the largest value of its block exceed 448 and saturate; rounded up it costs at
    most some resolution.
    """
    if dtype == "F16":
        rounded = scales.to(torch.float16)
        next_up = (rounded.view(torch.int16) + 1).view(torch.float16)
        return torch.where(rounded.float() < 0.99 * scales, next_up, rounded)
    if dtype not in _POWERS:
        return scales.to(DTYPES[dtype])
    mantissa, exponent = torch.frexp(scales)
    exponent_up = torch.where(mantissa == 0.5, exponent - 1, exponent)  # 0.5 * 2**n is already a power of two
    return (exponent_up + 127).clamp(0, 254).to(torch.uint8).view(DTYPES[dtype])


def scales_for_amax(amax: Tensor) -> Tensor:
    """Return amax / 448, with which the largest value of a block becomes the largest code; 1 for a block of zeros."""
    return torch.where(amax > 0, amax / LARGEST, torch.ones_like(amax))


@dataclass(frozen=True)
class Places:
    """The scale of each element of a view: row and column indices that broadcast to the shape of the view.

    A view may be transposed, sliced or stacked; the indices follow its strides. Expanding scales to the size of the
    matrix would need as much memory as the values.

    Example: rows 100 to 300 of a matrix with blocks of 128 have block rows 0 (28 times), 1 (128 times) and 2 (44
    times).
    """

    rows: Tensor
    columns: Tensor

    @staticmethod
    def of(view: Tensor, shape: Sequence[int], scale: Scale) -> Places:
        """Compute the indices of `view`, a strided view of a tensor of `shape`."""
        num_rows, num_columns = shape[-2:]
        first_row, first_column = divmod(int(view.storage_offset()), num_columns)
        ones = [1] * view.dim()
        rows, columns = torch.tensor(first_row).view(ones), torch.tensor(first_column).view(ones)
        # A dim whose stride is a multiple of the row length walks over rows, any other one over columns. That is right
        # for slices, transposes and stacks of matrices; a view that mixes both in one dim does not occur.
        for dim, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
            positions = torch.arange(size).view(-1, *[1] * (view.dim() - dim - 1))
            if stride % num_columns == 0:
                rows = rows + positions * (stride // num_columns)
            else:
                columns = columns + positions * stride
        height, width = (min(block, size) for block, size in zip(scale.block, (num_rows, num_columns), strict=True))
        grid_rows = ceil(num_rows / height)
        return Places(rows // num_rows * grid_rows + rows % num_rows // height, columns // width)

    @property
    def rows_of_blocks(self) -> range:
        """Return the range of block rows that the view touches."""
        return range(int(self.rows.min()), int(self.rows.max()) + 1)

    def below(self, row: int) -> Places:
        """Return the indices into scales that begin at block row `row`."""
        return replace(self, rows=self.rows - row)

    def take(self, scales: Tensor) -> Tensor:
        """Return the scale of each element. Two calls of `index_select` take a tenth of the time of one gather by both
        indices."""
        # `scales[rows, columns]` with broadcast index tensors is one gather for each element. Rows and columns repeat,
        # so selecting rows and then columns moves whole cache lines.
        by_row = scales.view(-1, scales.shape[-1]).index_select(0, self.rows.flatten())
        selected = by_row.index_select(1, self.columns.flatten()).view(*self.rows.shape, *self.columns.shape)
        pairs = [dim for dim_index in range(self.rows.dim()) for dim in (dim_index, dim_index + self.rows.dim())]
        sizes = [a * b for a, b in zip(self.rows.shape, self.columns.shape, strict=True)]  # one of the two is 1
        return selected.permute(pairs).reshape(sizes)

    def into(self, grid: Tensor, values: Tensor) -> None:
        """Update `grid` with the maximum of `values` in each block (a scatter-reduce)."""
        width = grid.shape[-1]
        flat_index = (self.rows * width + self.columns).expand(values.shape).reshape(-1)
        grid.view(-1).scatter_reduce_(0, flat_index, values.reshape(-1), "amax")


def unpacked(packed: Tensor, *, high_first: bool = False) -> Tensor:
    """Unpack bytes of two 4-bit codes into one code per byte."""
    packed = (packed << 4) | (packed >> 4) if high_first else packed
    return _PAIRS.index_select(0, packed.contiguous().view(-1).int()).view(torch.uint8)


def dequantise(codes: Tensor, scales: Tensor, coding: Coding | None = None) -> Tensor:
    """Return code * scale in float32. Exact if scales have 8 significant bits (bfloat16): 4 + 8 bits fit into 24."""
    return wide(codes) * scales if coding is None or coding.scale is None else coding.values_of(codes) * scales


def as_used(values: Tensor, used: torch.dtype) -> Tensor:
    """Round values to the dtype in which matmuls see them; a value that would overflow there is kept.

    An export quantises the values that the forward used. Quantising the float32 master weights would give other codes
    at ties.
    """
    # 2**-7 is half a unit in the last place of bfloat16, relative. A larger difference means overflow to infinity.
    rounded = values.to(used).to(values.dtype)
    return torch.where((rounded - values).abs() <= values.abs() * 2.0**-7, rounded, values)


def quantise(values: Tensor, scales: Tensor) -> Tensor:
    """Return values / scale, saturated to +-448, in E4M3. `scales` must already be in their stored dtype: rounding them
    afterwards would shift all values."""
    scaled = torch.where(scales == 0, torch.zeros_like(scales), values.to(torch.float32) / scales)
    return scaled.clamp(-LARGEST, LARGEST).to(FP8)
