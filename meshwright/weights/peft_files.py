"""Read and write PEFT's adapter directories (`adapter_config.json`, `adapter_model.safetensors`), from and to
Meshwright's factors.

The factors of linear layers are the same tensors under the same keys. The factors of routed experts come in two
layouts:

  fused        one A `[E r, in]` and one B `[out, r E]` for all experts of a layer: rows of A are expert-major, columns
               of B rank-major (column `i E + e`). Up to peft 0.19.0, `in` and `out` were exchanged.
  per-expert   `experts.K.gate_proj.lora_A.weight` and so on, as inference engines read them.

Meshwright has A `[E r, in]` and B `[E out, r]`, both expert-major, so that ep cuts both by rows.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from ..errors import LoadError
from ..recipe import Lora
from ..sharding import Param, Piece
from .keymap import ADAPTERS
from .source import CONFIG

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_FUSED = (".experts", ".experts.base_layer")  # PEFT's names of the modules of fused experts
_EXPERTS = r".*\.experts(\..*)?"  # PEFT's pattern for the ranks of experts
_EXPERT = re.compile(r"\.experts\.\d+\.")
_SWAPPED_UNTIL = (0, 19, 0)  # the last peft version that mistook `[E, out, in]` for `[E, in, out]`

# Fields of adapter_config.json that change the numbers, with the values that Meshwright computes.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "use_dora": (False, None), "fan_in_fan_out": (False, None), "bias": ("none", None),
    "lora_bias": (False, None), "trainable_token_indices": (None,),
    "modules_to_save": (None, []), "layer_replication": (None,), "megatron_config": (None,),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None,), "use_bdlora": (None, False), "arrow_config": (None,),
    "ensure_weight_tying": (False, None),
    # PiSSA, OLoRA, CorDA and LoftQ change the base weights at the start, so their B A does not fit the original base.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva", None),
}  # fmt: skip


def check_has_base(directory: Path) -> None:
    """Refuse to load a directory with only adapters as a model: a checkpoint of a run with LoRA, or PEFT's files."""
    of_run, is_peft = (directory / ADAPTERS).is_file(), (directory / CONFIG_FILE).is_file()
    if not of_run and (not is_peft or (directory / CONFIG).is_file()):
        return
    what = "a checkpoint of adapters (LoRA)" if of_run else "a directory of adapters (PEFT)"
    files = directory if is_peft else "OUT/adapter of its run"
    resumed = (
        "; mw.resume(engine, directory) of that base with the same lora= resumes, and mw.export_adapter(engine.model, "
        "another) then writes PEFT's files of this step"
    )
    raise LoadError(
        f"{directory} is {what} and holds no base; to train on, give the base as the model and lora.path={files}; for "
        "a whole model, merge first: OUT/export of a run with merged = true in [save], or mw.export(merge=True)"
        f"{resumed if of_run else ''}"
    )


@dataclass(frozen=True)
class AdapterFiles:
    """A PEFT directory: its config, and the shapes of its tensors by key without PEFT's prefix."""

    directory: Path
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def swapped(self) -> bool | None:
        """Return whether fused experts have `in` and `out` exchanged; None if the version is unknown."""
        version = self.config.get("peft_version")
        if not isinstance(version, str):
            return None
        numbers = [part for part in version.partition("@")[0].split(".")[:3] if part.isdecimal()]
        return tuple(int(part) for part in numbers) <= _SWAPPED_UNTIL if len(numbers) == 3 else None


def open_adapter(directory: str | Path) -> AdapterFiles:
    """Read the config and the header of an adapter. Refuse unsupported options that would change its result."""
    path = Path(directory)
    try:
        config = json.loads((path / CONFIG_FILE).read_text("utf-8"))
        with safe_open(path / WEIGHTS_FILE, "pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, ValueError, UnicodeDecodeError) as error:
        raise LoadError(
            f"{path} is not a PEFT adapter that can be read ({CONFIG_FILE} and {WEIGHTS_FILE}): {error}"
        ) from error
    except Exception as error:  # safetensors' own error derives directly from Exception
        raise LoadError(f"{path / WEIGHTS_FILE} cannot be read: {error}; fetch it again") from error
    if not isinstance(config, dict):
        raise LoadError(f"{path / CONFIG_FILE} is not an object; fetch it again")
    for name, values in _PLAIN.items():
        if config.get(name) not in values and name in config:
            raise LoadError(
                f"{path / CONFIG_FILE}: {name}={config[name]!r:.80} is not supported, and leaving it out would change "
                f"what the adapter computes; merge it into its base with peft, or train one with {name}={values[0]!r}"
            )
    foreign = [key for key in shapes if not key.startswith(PREFIX)]
    if foreign:
        raise LoadError(f"{path / WEIGHTS_FILE} holds {foreign[0]}, which does not begin with {PREFIX}; is it PEFT's?")
    return AdapterFiles(path.resolve(), config, {key.removeprefix(PREFIX): shape for key, shape in shapes.items()})


def base_of(directory: str | Path) -> str:
    """Return the base that an adapter names. Refuse an adapter that names none."""
    base = open_adapter(directory).config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise LoadError(f"{Path(directory) / CONFIG_FILE} names no base_model_name_or_path; add the base's directory")
    return base


def recipe_of(lora: Lora, stated: Container[str] = ()) -> Lora:
    """Return the options of the adapter in `lora.path`. Refuse options of the caller that contradict the files.

    A default counts as left out, unless the caller `stated` the option by name, as a run file does.
    """
    if lora.path is None:
        return lora
    files = open_adapter(lora.path)
    config, usual = files.config, Lora()
    of_files = replace(
        usual, rank=config.get("r", 8), alpha=config.get("lora_alpha", 8), rslora=bool(config.get("use_rslora")),
        targets=_targets(files), expert_rank=_expert_rank(files), path=str(files.directory),
    )  # fmt: skip
    for name in ("rank", "alpha", "expert_rank", "rslora", "targets"):
        given, read = vars(lora)[name], vars(of_files)[name]
        if name in ("alpha", "rslora") and math.isclose(lora.scale, of_files.scale):  # our files put rsLoRA into alpha
            continue
        if given != read and (given != vars(usual)[name] or name in stated):
            raise LoadError(
                f"lora.{name}={given!r}, but {files.directory} has {read!r:.200}; leave it out, the files say it"
            )
    return of_files


def _targets(files: AdapterFiles) -> tuple[str, ...]:
    """Return the modules that the tensors belong to, as targets. For fused experts, only the config says which matrix
    it is.
    """
    modules = dict.fromkeys(key.partition(".lora_")[0] for key in files.shapes)
    targets = [_EXPERT.sub(".experts.", module) for module in modules if not module.endswith(_FUSED)]
    return tuple(dict.fromkeys([*targets, *(files.config.get("target_parameters") or [])]))


def _expert_rank(files: AdapterFiles) -> int | None:
    """Return the rank of the adapters of experts, if it differs. Refuse any other rank by pattern."""
    config, rank = files.config, files.config.get("r", 8)
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    of_experts, alpha = set(ranks.values()), config.get("lora_alpha", 8)
    ratio = next(iter(of_experts), rank) / rank
    expected = alpha * (ratio**0.5 if config.get("use_rslora") else ratio)
    if (
        len(of_experts) > 1
        or any("experts" not in name for name in (*ranks, *alphas))
        or ((ranks or alphas) and not (alphas and all(_is_close(each, expected) for each in alphas.values())))
    ):
        raise LoadError(
            f"{files.directory / CONFIG_FILE}: rank_pattern={ranks!r:.200} and alpha_pattern={alphas!r:.200} give "
            "modules scales of their own; only another rank for all routed experts is supported, at the same scale"
        )
    return next(iter(of_experts), None)


def _is_close(given: object, expected: float) -> bool:
    """Compare a number of a config. Under rsLoRA, alphas of the same scale differ by a root."""
    return isinstance(given, int | float) and math.isclose(given, expected, rel_tol=1e-6)


class Pair(NamedTuple):
    """The two factors of a module, in the names of the files."""

    module: str
    a: Param
    b: Param

    @property
    def experts(self) -> int:
        """Return the number of stacked experts; 0 for a linear layer."""
        return self.a.rows.get("expert", 0)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return rank, input width and output width of one matrix."""
        num = max(self.experts, 1)
        return self.a.rows["rank"], self.a.matrix[1], self.b.matrix[0] // num


def pairs_of(params: Iterable[Param]) -> list[Pair]:
    """Pair the factors of each adapter. Joined matrices (gate and up) have one pair."""
    by_base: dict[str, dict[str, Param]] = {}
    for param in params:
        base, _, factor = param.name.rpartition(".")
        by_base.setdefault(base, {})[factor] = param
    return [
        Pair(next(iter(each["a"].layouts[0].keys)).removeprefix(PREFIX).partition(".lora_")[0], each["a"], each["b"])
        for each in by_base.values()
    ]


def read_factors(files: AdapterFiles, params: Iterable[Param]) -> Iterator[tuple[Param, Tensor]]:
    """Yield each factor of a model with its whole tensor, read from an adapter.

    Refuse missing or extra keys: a model with part of an adapter would run, but as a different model.
    """
    used = set[str]()

    def take(key: str, shape: Sequence[int]) -> Tensor:
        if files.shapes.get(key) != tuple(shape):
            has = list(files.shapes[key]) if key in files.shapes else "not there"
            raise LoadError(
                f"{files.directory / WEIGHTS_FILE}: {key} is {has}, and the model takes {list(shape)}; base, rank and "
                "targets must be those that the adapter was trained with"
            )
        used.add(key)
        tensor: Tensor = file.get_tensor(PREFIX + key)
        return tensor.float()

    with safe_open(files.directory / WEIGHTS_FILE, "pt") as file:
        for pair in pairs_of(params):
            a, b = _read_experts(files, pair, take) if pair.experts else _read_linear(pair, take)
            yield from ((pair.a, a), (pair.b, b))
    left = sorted(set(files.shapes) - used)
    if left:
        raise LoadError(
            f"{files.directory / WEIGHTS_FILE} holds {left[0]} ({len(left)} such keys), which no adapter of this model "
            "takes; is it an adapter of another base?"
        )


def fill_factors(path: str, table: Iterable[Param], pieces: Mapping[str, Piece], stored: Mapping[str, Tensor]) -> None:
    """Fill the factors of this rank from a PEFT directory: read whole factors one by one, and keep this rank's part."""
    with torch.no_grad():
        for param, whole in read_factors(open_adapter(path), [param for param in table if param.adapter]):
            if param.name in pieces:
                for box, view in pieces[param.name].views(stored[param.name]):
                    view.copy_(whole[box.slices])


def checksum(lora: Lora) -> str:
    """Return a checksum of the PEFT files, for the comparison between ranks; "" without files."""
    return "" if lora.path is None else f" ({zlib.crc32((Path(lora.path) / WEIGHTS_FILE).read_bytes()):08x})"


Take = Callable[[str, Sequence[int]], Tensor]


def _read_linear(pair: Pair, take: Take) -> tuple[Tensor, Tensor]:
    """Read the factors of a linear layer: the blocks of their layouts."""
    wholes = []
    for param in (pair.a, pair.b):
        blocks, whole = param.layouts[0].blocks, torch.empty(param.shape, dtype=torch.float32, device="cpu")
        tensors = {block.key: take(block.key.removeprefix(PREFIX), block.shape).contiguous() for block in blocks}
        for block in blocks:
            whole[block.ours.slices] = block.view(tensors[block.key])
        wholes.append(whole)
    return wholes[0], wholes[1]


def _read_experts(files: AdapterFiles, pair: Pair, take: Take) -> tuple[Tensor, Tensor]:
    """Read the factors of all experts: from one tensor, or from one tensor per expert."""
    at = pair.module.rpartition(".")[0]
    one_by_one = any(key.startswith(f"{at}.0.") for key in files.shapes)
    a, b = _read_each(files, pair, at, take) if one_by_one else _read_fused(files, pair, at, take)
    return a.reshape(pair.a.shape), b.reshape(pair.b.shape)


def _read_fused(files: AdapterFiles, pair: Pair, at: str, take: Take) -> tuple[Tensor, Tensor]:
    """Read `[E r, in]` and `[out, r E]`, or the exchanged form of peft up to 0.19.0.

    PEFT wraps one parameter around another, so the name does not say which matrix an adapter belongs to (`base_layer`
    is whichever was wrapped first). The shapes do.
    """
    num, (rank, width, height) = pair.experts, pair.sizes
    shapes = {False: ((num * rank, width), (height, rank * num)), True: ((num * rank, height), (width, rank * num))}
    fitting = [
        (name, swapped)
        for name in (f"{at}.base_layer", at)
        for swapped, expected in shapes.items()
        if tuple(files.shapes.get(f"{name}.lora_{factor}.weight") for factor in "AB") == expected
        and files.swapped in (None, swapped)
    ]
    if len(fitting) != 1:
        stated = files.config.get("peft_version")
        raise LoadError(
            f"{files.directory / WEIGHTS_FILE}: {len(fitting)} adapters fit {pair.module} ({num} experts of "
            f"[{height}, {width}], rank {rank}; peft_version={stated!r}). "
            + (f"peft changed what such files mean after 0.19.0: add the peft_version that wrote it to {CONFIG_FILE}"
               if fitting else "Base, rank and targets must be those that the adapter was trained with")
        )  # fmt: skip
    ((name, swapped),) = fitting
    a, b = (take(f"{name}.lora_{factor}.weight", shape) for factor, shape in zip("AB", shapes[swapped], strict=True))
    if swapped:  # the transpose of B A is A.T B.T, so the factors swap
        return b.view(width, rank, num).permute(2, 1, 0), a.view(num, rank, height).transpose(1, 2)
    return a.view(num, rank, width), b.view(height, rank, num).permute(2, 0, 1)


def _read_each(files: AdapterFiles, pair: Pair, at: str, take: Take) -> tuple[Tensor, Tensor]:
    """Read an A and a B for each expert and matrix. Gate and up must have the same A, since one A serves both."""
    names, (rank, width, height) = _halves(pair), pair.sizes
    a_shape, b_shape = (rank, width), (height // len(names), rank)
    all_a, all_b = [], []
    for expert in range(pair.experts):
        each = [f"{at}.{expert}.{name}" for name in names]
        first, *others = [take(f"{name}.lora_A.weight", a_shape) for name in each]
        if not all(other.equal(first) for other in others):
            raise LoadError(
                f"{files.directory / WEIGHTS_FILE}: {each[0]} and {each[1]} have different A. In Meshwright one A "
                f"serves gate and up, as in PEFT's fused experts; this one would need rank {2 * rank}. Merge it first"
            )
        all_a.append(first)
        all_b.append(torch.cat([take(f"{name}.lora_B.weight", b_shape) for name in each]))
    return torch.stack(all_a), torch.stack(all_b)


def _halves(pair: Pair) -> tuple[str, ...]:
    """Return the per-expert names of the matrices that a stack holds."""
    name = pair.module.rpartition(".")[2]
    return ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)


def written(pair: Pair, tensors: Mapping[str, Tensor], layout: str, nested: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the keys and tensors of a PEFT file for the factors of a module.

    `tensors`: those of this module by our keys. `layout`: "fused" or "per-expert". `nested`: PEFT wraps gate_up first
    where down has an adapter too, and then calls it `base_layer`.
    """
    if not pair.experts:
        yield from tensors.items()
        return
    (rank, width, height), num = pair.sizes, pair.experts
    a, b = (next(tensors[key] for key in param.layouts[0].keys) for param in (pair.a, pair.b))
    at, names = PREFIX + pair.module.rpartition(".")[0], _halves(pair)
    if layout == "fused":
        name = f"{at}.base_layer" if nested and len(names) > 1 else at
        yield f"{name}.lora_A.weight", a
        yield f"{name}.lora_B.weight", b.view(num, height, rank).permute(1, 2, 0).reshape(height, rank * num)
        return
    for expert, (a_rI, b_Or) in enumerate(zip(a.view(num, rank, width), b.view(num, height, rank), strict=True)):
        for name, half in zip(names, b_Or.chunk(len(names)), strict=True):
            yield f"{at}.{expert}.{name}.lora_A.weight", a_rI
            yield f"{at}.{expert}.{name}.lora_B.weight", half


def config_of(
    lora: Lora, pairs: Sequence[Pair], layout: str, base: str, saved: Sequence[str] = (), plain: Iterable[str] = ()
) -> dict[str, Any]:
    """Return adapter_config.json, with the names of the modules that have adapters.

    `saved`: modules that are trained as a whole and are in the file (`modules_to_save`). `plain`: modules without
    adapters.
    """
    linear = [module for pair in pairs if not pair.experts for module in _modules(pair)]
    stacks = [pair.module for pair in pairs if pair.experts]
    if layout == "per-expert":
        linear += _expert_targets(pairs, plain)
    expert_rank = lora.expert_rank if stacks and lora.expert_rank not in (None, lora.rank) else None
    # SGLang ignores use_rslora, and so does peft 0.21 for experts that it fuses. So alpha contains the factor instead.
    alpha = lora.alpha * lora.rank**0.5 if lora.rslora else lora.alpha
    experts_alpha = alpha if expert_rank is None else alpha * (expert_rank / lora.rank)  # so that all have one scale
    return {
        "peft_type": "LORA", "task_type": None if saved else "CAUSAL_LM", "base_model_name_or_path": base,
        "peft_version": "0.21.2", "inference_mode": True, "r": lora.rank, "lora_alpha": alpha,
        "use_rslora": False, "lora_dropout": 0.0, "bias": "none", "use_dora": False, "fan_in_fan_out": False,
        "init_lora_weights": True, "target_modules": linear,
        "target_parameters": stacks if stacks and layout == "fused" else None,
        "rank_pattern": {} if expert_rank is None else {_EXPERTS: expert_rank},
        "alpha_pattern": {} if expert_rank is None else {_EXPERTS: experts_alpha},
        "modules_to_save": list(saved) or None,
    }  # fmt: skip


def _expert_targets(pairs: Iterable[Pair], plain: Iterable[str]) -> list[str]:
    """Return the matrices of experts as targets: by their last names, or in full where a module of that name is plain.

    SGLang goes through the list for each tensor: with 18,432 names, those of Qwen3-30B-A3B, that takes minutes.
    """
    taken, targets = {module.rpartition(".")[2] for module in plain}, dict[str, None]()
    for pair in pairs:
        at = pair.module.rpartition(".")[0]
        for name in _halves(pair):
            each = [f"{at}.{expert}.{name}" for expert in range(pair.experts)]
            targets |= dict.fromkeys(each if name in taken else [name])
    return list(targets)


def _modules(pair: Pair) -> list[str]:
    """Return the modules of a linear layer: gate and up are two."""
    return [key.removeprefix(PREFIX).partition(".lora_")[0] for key in pair.a.layouts[0].keys]
