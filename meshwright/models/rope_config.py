"""Read RoPE from config.json: which dims of a head rotate, how fast, and how that scales to longer contexts.

transformers guesses, skips or warns about fields that it does not understand; this module refuses them. A wrong RoPE
trains without any visible error and fails at long contexts only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import ops
from ..errors import ConfigError
from .hf_config import Json, group, listed, take

Scaling = ops.LinearScaling | ops.Llama3Scaling | ops.YarnScaling

GROUPS = ("rope_scaling", "rope_parameters")  # if a config has both, transformers reads only the first
BASE, PARTIAL, CONTEXT = "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"
THETA = 10000.0  # RoPE's original base, if neither the config nor the family has another
# Fields that every rope_type may have.
OF_ALL = ("rope_type", "type", BASE, PARTIAL, "mrope_section", "mrope_interleaved")
# Types whose frequencies change with the length of the input.
BY_LENGTH = ("dynamic", "longrope")
LEAST, MOST = 1e-6, 1e6  # bounds of a factor: no model exceeds them, and arithmetic stays far from infinity


@dataclass(frozen=True)
class RopeType:
    """A `rope_type`: its own fields, and the function that turns them into a scaling and an attention factor
    (`ops.Rotary`).
    """

    read: Callable[[Json], tuple[Scaling | None, float]]
    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


def rotary_of(
    config: Json, head: int, *, partial: float | None = None, scaled: bool = True, theta: float = THETA
) -> ops.Rotary:
    """Return how a family rotates heads of `head` dims.

    `partial`: the fraction of dims that rotate where the config does not say so; None if the family rotates all.
    `scaled`: whether the family supports scaled types.
    """
    fields = rope_fields(config)
    name, kind = fields["rope_type"], KINDS[fields["rope_type"]]
    if kind.needed and not scaled:
        raise ConfigError(f"config.json: rope_type={name!r} is not supported for this family; it must be 'default'")
    _refuse_missing(fields, kind)
    base = take(fields, BASE, float, theta)
    if base <= 1:
        raise ConfigError(f"config.json: {BASE}={base}; it must be above 1")
    return ops.Rotary(_rotated(fields, head, partial), base, *kind.read(fields))


def sections_of(config: Json, num: int, default: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return how many of `num` frequencies turn with time, height and width (M-RoPE)."""
    sections = tuple(listed(rope_fields(config), "mrope_section", int)) or default
    if len(sections) != 3 or sum(sections) != num or min(sections) < 0:
        raise ConfigError(
            f"config.json: mrope_section={list(sections)} must be 3 numbers whose sum is {num}, half of the dims of a "
            "head that are rotated"
        )
    if rope_fields(config).get("mrope_interleaved") is False:
        raise ConfigError("config.json: mrope_interleaved=False is not supported; this family interleaves them")
    return sections


def rope_fields(config: Json) -> dict[str, Any]:
    """Collect all that the config says of RoPE. The top level fills in what the group leaves out, as in older files."""
    first, second = (_fields_of_group(config, where) for where in GROUPS)
    top = {name: config[name] for name in (BASE, PARTIAL, CONTEXT) if config.get(name) is not None}
    fields = {"rope_type": "default", **top, **(first or second)}
    lost = sorted(set(second) - set(fields))
    if lost:
        raise ConfigError(
            f"config.json: {lost[0]}={second[lost[0]]!r:.200} of {GROUPS[1]} would be lost, because transformers reads "
            f"only {GROUPS[0]} if both are there; write all fields into one of them, and remove the other"
        )
    if CONTEXT in top and fields[CONTEXT] != top[CONTEXT]:  # transformers would take the one at the top
        raise ConfigError(
            f"config.json: {CONTEXT}={top[CONTEXT]!r:.200} at the top, but {fields[CONTEXT]!r:.200} next to the rope "
            "type; correct either"
        )
    return fields


def _fields_of_group(config: Json, where: str) -> dict[str, Any]:
    """Return the fields of a group, its type as "rope_type"; empty where it is absent.

    Refuse fields that the type lacks.
    """
    fields = group(config, where)
    if not fields:
        return {}
    name = _type_of(fields, where)
    known = (*OF_ALL, *KINDS[name].needed, *KINDS[name].optional)
    unread = sorted(set(fields) - set(known))
    if unread:  # such as a group per kind of layer: ignoring it would compute another model
        raise ConfigError(
            f"config.json: {unread[0]!r} of {where} is not supported for rope_type={name!r}, which has "
            f"{', '.join(known)}; remove it, or choose another rope_type from {', '.join(KINDS)}"
        )
    if fields.get("truncate", True) is None:  # transformers reads null as false, but a missing field as true
        raise ConfigError(f"config.json: truncate=None of {where} must be of type bool; correct it")
    return {key: value for key, value in fields.items() if value is not None and key != "type"} | {"rope_type": name}


def _type_of(fields: Json, where: str) -> str:
    """Return `rope_type`, or `type` as older files spell it."""
    types = [_checked_type(fields[name], where) for name in ("rope_type", "type") if name in fields] or ["default"]
    if len(set(types)) > 1:
        raise ConfigError(f"config.json: rope_type={types[0]!r}, but type={types[1]!r} in {where}; remove either")
    return types[0]


def _checked_type(name: object, where: str) -> str:
    """Return the name of a supported type. "mrope" is the default one: for text, all three positions are equal."""
    if name in BY_LENGTH:
        raise ConfigError(
            f"config.json: rope_type={name!r} of {where} is not supported: its frequencies depend on the length of the "
            "sequence, and packed documents differ in length; choose 'yarn', whose frequencies are the same for every "
            f"length, or remove {where} and keep documents within the original context"
        )
    if not isinstance(name, str) or name not in (*KINDS, "mrope"):
        choices = ", ".join(repr(known) for known in KINDS)
        raise ConfigError(f"config.json: rope_type={name!r:.200} of {where} is not supported; choose from {choices}")
    return "default" if name == "mrope" else name


def _refuse_missing(fields: Json, kind: RopeType) -> None:
    """Refuse a type without its fields.

    For the original context, transformers would fall back to `max_position_embeddings`, which may be the scaled one.
    """
    missing = [name for name in kind.needed if name not in fields]
    if missing:
        needed = ", ".join(kind.needed)
        raise ConfigError(
            f"config.json: no {missing[0]!r} next to rope_type={fields['rope_type']!r}, which needs {needed}; add it"
        )


def _rotated(fields: Json, head: int, partial: float | None) -> int:
    """Return how many dims of a head rotate."""
    fraction = take(fields, PARTIAL, float, partial or 1.0)
    if partial is None and fraction != 1:
        raise ConfigError(f"config.json: {PARTIAL}={fraction}, but this family rotates whole heads; remove it")
    if not 0 < fraction <= 1:
        raise ConfigError(f"config.json: {PARTIAL}={fraction}; it must be above 0 and at most 1")
    dim = int(head * fraction)
    if dim % 2 or dim < 2:
        raise ConfigError(f"config.json: {dim} dims of each head would be rotated; it must be an even number")
    return dim


def _number(fields: Json, name: str, default: float | None = None, least: float = LEAST) -> float:
    """Read a factor within sane bounds."""
    value: float = take(fields, name, float, default)
    if not least <= value <= MOST:
        raise ConfigError(f"config.json: {name}={value}; it must be at least {least:g} and at most {MOST:g}")
    return value


def _factor(fields: Json) -> float:
    return _number(fields, "factor", least=1.0)


def _context(fields: Json) -> int:
    return int(take(fields, CONTEXT, int))


def _default(_: Json) -> tuple[None, float]:
    return None, 1.0


def _linear(fields: Json) -> tuple[Scaling, float]:
    return ops.LinearScaling(_factor(fields)), 1.0


def _llama3(fields: Json) -> tuple[Scaling, float]:
    low, high = _number(fields, "low_freq_factor"), _number(fields, "high_freq_factor")
    if high <= low:
        raise ConfigError(f"config.json: high_freq_factor={high} must be above low_freq_factor={low}; correct either")
    return ops.Llama3Scaling(_factor(fields), _context(fields), low, high), 1.0


def _yarn(fields: Json) -> tuple[Scaling, float]:
    """Read YaRN (arXiv 2309.00071): fast frequencies stay, slow ones are divided by the factor, those between are
    mixed.
    """
    slow, fast = _number(fields, "beta_slow", 1.0), _number(fields, "beta_fast", 32.0)
    if fast <= slow:
        raise ConfigError(f"config.json: beta_fast={fast} must be above beta_slow={slow}; correct either")
    truncate = take(fields, "truncate", bool, True)
    return ops.YarnScaling(_factor(fields), _context(fields), slow, fast, truncate), _yarn_attention(fields)


def _yarn_attention(fields: Json) -> float:
    """Return YaRN's factor of the attention logits' temperature: stated, or 0.1 ln(factor) + 1 as the paper fits it.

    Over more tokens softmax becomes flatter; the factor keeps it as sharp as before.
    """
    stated = {name: fields[name] for name in ("attention_factor", "mscale", "mscale_all_dim") if name in fields}
    if not stated:
        return _yarn_mscale(fields, 1.0)
    if set(stated) == {"attention_factor"}:
        return _number(fields, "attention_factor")
    if set(stated) == {"mscale", "mscale_all_dim"}:
        return _yarn_mscale(fields, _number(fields, "mscale")) / _yarn_mscale(fields, _number(fields, "mscale_all_dim"))
    raise ConfigError(
        f"config.json: {stated} of rope_type='yarn', but transformers would read only some of them; "
        "give attention_factor alone, or mscale and mscale_all_dim, or none of them"
    )


def _yarn_mscale(fields: Json, mscale: float) -> float:
    return 0.1 * mscale * math.log(_factor(fields)) + 1.0


KINDS = {
    "default": RopeType(_default),
    "linear": RopeType(_linear, needed=("factor",)),
    "llama3": RopeType(_llama3, needed=("factor", CONTEXT, "low_freq_factor", "high_freq_factor")),
    "yarn": RopeType(
        _yarn, needed=("factor", CONTEXT),
        optional=("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}  # fmt: skip
