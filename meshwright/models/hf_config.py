"""Read Hugging Face's config.json: each field that a family uses, by name and type; refuse what it cannot compute.

A field that is silently ignored (a sliding window, a dropout, another activation) would train another model than the
user thinks. So a family lists which values it supports, and everything else raises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import ConfigError

Json = Mapping[str, Any]
Item = TypeVar("Item")
CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")
# The fields that `labels_of` reads.
LABELS = ("architectures", "id2label", "num_labels", "token_classification_bias", "classifier_dropout")


# Bounds that no model reaches. A broken file must not keep us busy for hours, or ask for sizes beyond torch's int64.
MOST = {
    "num_hidden_layers": 1024, "num_experts": 4096, "vocab_size": 2**24, "hidden_size": 2**20,
    "intermediate_size": 2**22, "moe_intermediate_size": 2**22, "shared_expert_intermediate_size": 2**22,
}  # fmt: skip
LARGEST = 2**31 - 1
_MOST_EXPERTS = 2**16  # in all layers together


@dataclass(frozen=True)
class Labels:
    """The outputs of a value head."""

    num: int = 1
    bias: bool = False
    new: bool = True  # whether a source may lack the head, which is then initialised


def take(config: Json, name: str, kind: type, default: Any = None) -> Any:
    """Return the field `name`, or `default` where it is absent or null.

    Raise if it is missing, or of the wrong type or size.
    """
    value = config.get(name)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"config.json has no {name!r}; a {config.get('model_type')} model needs it")
    if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST:
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"config.json: {name}={value!r:.200} must be of type {kind.__name__}; correct it")
    if isinstance(value, int) and kind is int and value < 1:
        raise ConfigError(f"config.json: {name}={value}; it must be at least 1")
    if isinstance(value, int) and value > MOST.get(name, LARGEST):
        raise ConfigError(f"config.json: {name}={value}; it can be at most {MOST.get(name, LARGEST)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"config.json: {name}={value}; it must be a finite number")
    return value


def refuse(config: Json, supported: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse options that would change the result and that this family does not compute."""
    for name, allowed in supported.items():
        value = config.get(name)
        if value is not None and value not in allowed:
            choices = " or ".join(repr(a) for a in allowed)
            raise ConfigError(f"config.json: {name}={value!r} is not supported; it must be {choices} or absent")


def group(config: Json, name: str) -> Json:
    """Return a field that holds fields; empty where it is absent."""
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"config.json: {name}={value!r} must hold fields")
    return value


def listed(config: Json, name: str, kind: type[Item]) -> list[Item]:
    """Return a field that holds a list; empty where it is absent."""
    value = config.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise ConfigError(f"config.json: {name}={value!r:.200} must be a list of {kind.__name__}")
    return value


def refuse_endless(layers: int, experts: int) -> None:
    """Refuse more experts than can be declared in reasonable time."""
    if layers * experts > _MOST_EXPERTS:
        raise ConfigError(f"config.json: {layers} layers of {experts} experts; they can be at most {_MOST_EXPERTS}")


def divides(small: str, a: int, large: str, b: int) -> int:
    """Return how many times `a` goes into `b`, or raise if it does not divide."""
    if b % a:
        raise ConfigError(f"config.json: {small}={a} does not divide {large}={b}")
    return b // a


def labels_of(config: Json) -> Labels:
    """Return the labels of a value head.

    transformers leaves `num_labels` out of a classifier's config if it is 2, its default. Any other model gets one
    label: a critic's value.
    """
    names = listed(config, "architectures", str)
    refuse(config, {"classifier_dropout": (0,)})
    sequence, token = (any(name.endswith(kind) for name in names) for kind in CLASSIFIERS)
    named = len(group(config, "id2label"))
    num = take(config, "num_labels", int, named or (2 if sequence or token else 1))
    if named not in (0, num):
        raise ConfigError(f"config.json: num_labels={num}, but id2label names {named} labels; correct either")
    bias = take(config, "token_classification_bias", bool, token)
    return Labels(num, bias, new=not (sequence or token or bias))


def with_labels(config: Json, names: Sequence[str]) -> Json:
    """Return a config with the names of a classifier's labels. Refuse other names than it has."""
    if not names:
        return config
    known, own = group(config, "id2label"), {str(number): name for number, name in enumerate(names)}
    if labels_of(config) != Labels() and {str(k): v for k, v in known.items()} != own:
        raise ConfigError(
            f"labels={[*names]!r:.200}, but config.json is of a classifier with id2label={dict(known)!r:.200}; leave "
            "labels out, or give a language model"
        )
    return {**config, "id2label": own, "label2id": {name: int(n) for n, name in own.items()}, "num_labels": len(names)}


def label_names(config: Json) -> list[str]:
    """Return the names of a value head's labels, as transformers names them where config.json does not."""
    known = group(config, "id2label")
    return [str(known.get(str(number), f"LABEL_{number}")) for number in range(labels_of(config).num)]
