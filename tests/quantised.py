"""Directories in 8-bit numbers and in 4 bits, by writers that share no code with the package."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationStatus,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Quantize

KEPT = ("embed", "lm_head", "norm", "mlp.gate.weight", "in_proj_a", "in_proj_b", "conv1d", "shared_expert_gate", "bias")
BLOCK = (16, 12)  # of sizes that are no multiples of it


def is_kept(key: str, tensor: Tensor) -> bool:
    """Return whether Qwen's files leave the tensor in its dtype."""
    return tensor.dim() < 2 or any(part in key for part in KEPT)


def blocks(shape: torch.Size, block: tuple[int, int]) -> list[list[tuple[slice, slice]]]:
    (rows, columns), (height, width) = shape[-2:], block
    return [
        [(slice(r, min(r + height, rows)), slice(c, min(c + width, columns))) for c in range(0, columns, width)]
        for r in range(0, rows, height)
    ]


def by_two(scale: float) -> float:
    power = 2.0**-127
    while power < scale:
        power *= 2
    return power


def scale_of(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale of one block, `[1]`."""
    most = float(values.double().abs().max()) if values.numel() else 0.0
    wanted = torch.tensor([most / 448 if most else 1.0], dtype=torch.float64).float()
    if dtype in (torch.uint8, torch.float8_e8m0fnu):
        exponent = round(torch.log2(torch.tensor(by_two(float(wanted)), dtype=torch.float64)).item())
        return torch.tensor([exponent + 127], dtype=torch.uint8).view(dtype)
    return wanted.to(dtype)


def read_scale(stored: Tensor) -> float:
    if stored.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return 2.0 ** (int(stored.view(torch.uint8)) - 127)
    return float(stored.double())


def quantise(matrix: Tensor, block: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers and scales of a matrix, or of each of several matrices."""
    if matrix.dim() > 2:
        each = [quantise(part, block, dtype) for part in matrix]
        return torch.stack([q for q, _ in each]), torch.stack([s.view(torch.uint8) for _, s in each]).view(dtype)
    numbers, rows = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn), []
    for line in blocks(matrix.shape, block):
        row = []
        for where in line:
            row.append(scale_of(matrix[where], dtype))
            wide = (matrix[where].float() / torch.tensor(read_scale(row[-1])).float()).clamp(-448, 448)
            numbers[where] = wide.to(torch.float8_e4m3fn)
        rows.append(torch.cat([each.view(torch.uint8) for each in row]))
    return numbers, torch.stack(rows).view(dtype)


def dequantise(numbers: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the values in float64."""
    if numbers.dim() > 2:
        return torch.stack([dequantise(q, s, block) for q, s in zip(numbers, scales, strict=True)])
    out = torch.empty(numbers.shape, dtype=torch.float64)
    for r, line in enumerate(blocks(numbers.shape, block)):
        for c, where in enumerate(line):
            out[where] = numbers[where].double() * read_scale(scales.reshape(-1)[r * len(line) + c])
    return out


@dataclass(frozen=True)
class Format:
    """A layout of 8-bit matrices. `make` returns the numbers and scales of one."""

    block: tuple[int, int]
    make: Callable[[Tensor], tuple[Tensor, Tensor]]
    config: Mapping[str, Any]
    suffix: str = "_scale_inv"
    fits: bool = False  # only what its blocks divide is in 8 bits


def ours(dtype: torch.dtype, block: tuple[int, int] = BLOCK) -> Format:
    return Format(block, lambda matrix: quantise(matrix, block, dtype), fp8(block))


def fp8(block: tuple[int, int] | None) -> dict[str, Any]:
    sizes = list(block) if block else None
    return {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": sizes,
        "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip


def a_scale_a_tensor() -> Format:
    def make(matrix: Tensor) -> tuple[Tensor, Tensor]:
        numbers, scales = quantise(matrix, (1000, 1000), torch.float32)
        return numbers, scales.view(1) if matrix.dim() == 2 else scales

    return Format((1000, 1000), make, fp8(None))


def by_transformers(scale_fmt: str = "float") -> Format:
    """Quantise like `save_pretrained`."""
    config = FineGrainedFP8Config(weight_block_size=(4, 4), scale_fmt=scale_fmt)
    writer = Fp8Quantize(SimpleNamespace(quantization_config=config))

    def make(matrix: Tensor) -> tuple[Tensor, Tensor]:
        made = writer.convert({"a.weight": matrix})
        return made["a.weight"], made["a.weight_scale_inv"]

    return Format((4, 4), make, {**fp8((4, 4)), "scale_fmt": scale_fmt}, fits=True)


def by_compressed_tensors(strategy: str) -> Format:
    block = {"tensor": (1000, 1000), "channel": (1, 1000), "block": (4, 4)}[strategy]
    structure = [4, 4] if strategy == "block" else None
    quantization_config = QuantizationArgs(num_bits=8, type="float", strategy=strategy, block_structure=structure)

    def make(matrix: Tensor) -> tuple[Tensor, Tensor]:
        cut = blocks(matrix.shape, block)
        low, high = (
            torch.stack([torch.stack([most(matrix[w]) for w in line]) for line in cut])
            for most in (torch.min, torch.max)
        )
        scales, zeros = calculate_qparams(low, high, quantization_config)
        scales = scales.view(1) if strategy == "tensor" else scales
        return quantize(
            matrix, scales, zeros.view(scales.shape), quantization_config, dtype=torch.float8_e4m3fn
        ), scales.to(torch.bfloat16).float()

    group = {"targets": ["Linear"], "weights": quantization_config.model_dump(), "input_activations": None}
    config = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "quantization_status": "compressed",
    }  # fmt: skip
    return Format(block, make, config, "_scale", fits=strategy == "block")


FORMATS: dict[str, Format] = {
    "bfloat16": ours(torch.bfloat16),
    "float32": ours(torch.float32),
    "float16": ours(torch.float16, (5, 7)),
    "powers of two": ours(torch.float8_e8m0fnu),
    "powers of two, as bytes": ours(torch.uint8),
    "a scale a tensor": a_scale_a_tensor(),
    "transformers": by_transformers(),
    "transformers, powers of two": by_transformers("ue8m0"),
    "compressed, tensor": by_compressed_tensors("tensor"),
    "compressed, channel": by_compressed_tensors("channel"),
    "compressed, block": by_compressed_tensors("block"),
}


def directory(source: Path, out: Path, form: Format) -> Path:
    """`source`, whose matrices are plain, in 8 bits. One block of the first holds only zeros."""
    out.mkdir(parents=True, exist_ok=True)
    quantization_config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    (out / "config.json").write_text(
        json.dumps(quantization_config | {"quantization_config": form.config}, indent=2) + "\n"
    )
    zero = True
    for file in source.glob("*.safetensors"):
        made: dict[str, Tensor] = {}
        for key, tensor in load_file(file).items():
            fits = all(size % cut == 0 for size, cut in zip(tensor.shape[-2:], form.block, strict=False))
            if is_kept(key, tensor) or (form.fits and not fits):
                made[key] = tensor.to(torch.bfloat16) if tensor.dim() > 1 else tensor
                continue
            if zero:
                tensor[..., : form.block[0] % 100, : form.block[1] % 100], zero = 0.0, False
            made[key], made[key + form.suffix] = form.make(tensor)
        save_file(made, out / file.name, metadata={"format": "pt"})
    return out


def tensors(at: Path) -> dict[str, Tensor]:
    return {key: tensor for file in at.glob("*.safetensors") for key, tensor in load_file(file).items()}


def values(at: Path, form: Format) -> dict[str, Tensor]:
    """Return the values of a directory in float64."""
    result = tensors(at)
    return {
        key: dequantise(tensor, result[key + form.suffix], form.block) if tensor.dtype == torch.float8_e4m3fn
        else tensor.double() for key, tensor in result.items() if not key.endswith(form.suffix)
    }  # fmt: skip


FORMS = {"NVFP4": "nvfp4-pack-quantized", "MXFP4": "mxfp4-pack-quantized", "MXFP8": "mxfp8-quantized"}
GROUP = {"NVFP4": 16, "MXFP4": 32, "MXFP8": 32}
# In groups of 32; but not the columns of the delta net's `out_proj`: 80, which two ranks cut within a group of 16.
SIZES = dict(
    hidden_size=64, intermediate_size=96, head_dim=16, moe_intermediate_size=32, shared_expert_intermediate_size=32,
)  # fmt: skip


def written(key: str, matrix: Tensor, form: str) -> dict[str, Tensor]:
    """Return the tensors that compressed-tensors makes of a matrix, by key."""
    scheme = preset_name_to_scheme(form, ["Linear"])
    groups, least = matrix.unflatten(-1, (-1, GROUP[form])), matrix.abs().max()
    whole = generate_gparam(-least, least) if form == "NVFP4" else None
    grid, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights, whole)
    module = {"weight": matrix, "weight_scale": grid, "weight_zero_point": zeros}
    if whole is not None:
        module |= {"weight_global_scale": whole, "input_global_scale": torch.tensor([3.5])}
    made = BaseCompressor.get_value_from_registry(FORMS[form]).compress(module, scheme)
    return {key.removesuffix("weight") + name: tensor.clone() for name, tensor in made.items()}


def quantization_config(form: str) -> dict[str, Any]:
    result: dict[str, Any] = QuantizationConfig(
        config_groups={"group_0": preset_name_to_scheme(form, ["Linear"])}, format=FORMS[form], ignore=["lm_head"],
        quantization_status=QuantizationStatus.COMPRESSED,
    ).to_dict()  # fmt: skip
    return result


def in_groups(source: Path, out: Path, form: str) -> Path:
    """`source` as compressed-tensors writes it, but for matrices whose columns are no whole groups."""
    out.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    (out / "config.json").write_text(
        json.dumps(config | {"quantization_config": quantization_config(form)}, default=str)
    )
    made: dict[str, Tensor] = {}
    for key, tensor in tensors(source).items():
        if is_kept(key, tensor) or tensor.shape[-1] % GROUP[form]:
            made[key] = tensor.to(torch.bfloat16) if tensor.dim() > 1 else tensor
        else:
            tensor[0] = 0  # a group of zeros
            tensor[1] = -tensor[1].abs() * 1e-3  # some of which become -0
            made |= written(key, tensor, form)
    save_file(made, out / "model.safetensors", metadata={"format": "pt"})
    return out


# The 16 quantiles of a normal distribution as bitsandbytes has them (`create_normal_map`).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def nf4_of(key: str, matrix: Tensor, nested: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors that bitsandbytes makes of a matrix, by key, and their values in float32."""
    table, blocks = torch.tensor(NF4), matrix.float().reshape(-1, 64)
    absmax = blocks.abs().amax(1)
    state: dict[str, Any] = {
        "quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [*matrix.shape],
    }  # fmt: skip
    made = {f"{key}.absmax": absmax, f"{key}.quant_map": table}
    if nested:
        values, offset = torch.linspace(-1, 1, 256) ** 3, absmax.mean().item()
        of_scales = torch.stack([part.abs().max() for part in (absmax - offset).split(256)]).clamp(min=1e-9)
        wide = of_scales.repeat_interleave(256)[: len(absmax)]
        codes = ((absmax - offset) / wide)[:, None].sub(values).abs().argmin(1)
        made |= {f"{key}.absmax": codes.to(torch.uint8), f"{key}.nested_absmax": of_scales}
        made |= {f"{key}.nested_quant_map": values}
        absmax = values[codes] * wide + offset
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    codes = (blocks / absmax[:, None].clamp(min=1e-30))[..., None].sub(table).abs().argmin(-1)
    pairs = codes.view(-1, 2).to(torch.uint8)
    made[key] = (pairs[:, 0] * 16 + pairs[:, 1]).view(-1, 1)
    made[f"{key}.quant_state.bitsandbytes__nf4"] = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
    return made, (table[codes] * absmax[:, None]).view(matrix.shape)


def in_nf4(source: Path, out: Path, nested: bool) -> tuple[Path, dict[str, Tensor]]:
    """Write `source` as transformers does with bitsandbytes, and return its values in float32."""
    out.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    config["quantization_config"] = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": nested, "bnb_4bit_quant_storage": "uint8", "llm_int8_skip_modules": ["lm_head"],
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config))
    made, values = dict[str, Tensor](), dict[str, Tensor]()
    for key, tensor in tensors(source).items():
        if is_kept(key, tensor) or tensor.shape[-1] % 64:
            values[key] = made[key] = tensor
        else:
            of_matrix, values[key] = nf4_of(key, tensor, nested)
            made |= of_matrix
    save_file(made, out / "model.safetensors", metadata={"format": "pt"})
    return out, values
