"""Reading `config.json`: every field that a family uses is asked for by name, and what it cannot do is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import ConfigError

Json = Mapping[str, Any]
Item = TypeVar("Item")
CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")
# The fields that `labels_of` reads.
LABELS = ("architectures", "id2label", "num_labels", "token_classification_bias", "classifier_dropout")


# No model has more, and a broken file must not keep us busy for hours, or make sizes that no number of torch holds.
MOST = {
    "num_hidden_layers": 1024, "num_experts": 4096, "vocab_size": 2**24, "hidden_size": 2**20,
    "intermediate_size": 2**22, "moe_intermediate_size": 2**22, "shared_expert_intermediate_size": 2**22,
}  # fmt: skip
LARGEST = 2**31 - 1
_MOST_EXPERTS = 2**16  # of all layers


@dataclass(frozen=True)
class Labels:
    """What a value head gives of each token."""

    num: int = 1
    bias: bool = False
    new: bool = True  # a source may lack the head


def take(config: Json, name: str, kind: type, default: Any = None) -> Any:
    """The field `name`, `default` where it is absent or null; an error says what is missing or of the wrong type."""
    value = config.get(name)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"config.json has no {name!r}; a {config.get('model_type')} model needs it")
    if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST:
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"config.json: {name}={value!r:.200} is no {kind.__name__}; correct it")
    if isinstance(value, int) and kind is int and value < 1:
        raise ConfigError(f"config.json: {name}={value}; it must be at least 1")
    if isinstance(value, int) and value > MOST.get(name, LARGEST):
        raise ConfigError(f"config.json: {name}={value}; it can be at most {MOST.get(name, LARGEST)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"config.json: {name}={value}; it must be a finite number")
    return value


def refuse(config: Json, supported: Mapping[str, tuple[Any, ...]]) -> None:
    """Options that would change the numbers and that this family does not compute."""
    for name, allowed in supported.items():
        value = config.get(name)
        if value is not None and value not in allowed:
            choices = " or ".join(repr(a) for a in allowed)
            raise ConfigError(f"config.json: {name}={value!r} is not supported; it must be {choices} or absent")


def group(config: Json, name: str) -> Json:
    """A field that holds fields; empty where it is absent."""
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"config.json: {name}={value!r} must hold fields")
    return value


def listed(config: Json, name: str, kind: type[Item]) -> list[Item]:
    """A field that holds a list; empty where it is absent."""
    value = config.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise ConfigError(f"config.json: {name}={value!r:.200} must be a list of {kind.__name__}")
    return value


def refuse_endless(layers: int, experts: int) -> None:
    if layers * experts > _MOST_EXPERTS:
        raise ConfigError(f"config.json: {layers} layers of {experts} experts; they can be at most {_MOST_EXPERTS}")


def divides(small: str, a: int, large: str, b: int) -> int:
    """How many times `a` goes into `b`, which must be whole."""
    if b % a:
        raise ConfigError(f"config.json: {small}={a} does not divide {large}={b}")
    return b // a


def labels_of(config: Json) -> Labels:
    """A classifier's file leaves `num_labels` out if it is 2, transformers' default. Any other model has one label."""
    names = listed(config, "architectures", str)
    refuse(config, {"classifier_dropout": (0,)})
    sequence, token = (any(name.endswith(kind) for name in names) for kind in CLASSIFIERS)
    named = len(group(config, "id2label"))
    num = take(config, "num_labels", int, named or (2 if sequence or token else 1))
    if named not in (0, num):
        raise ConfigError(f"config.json: num_labels={num}, but id2label names {named} labels; correct either")
    bias = take(config, "token_classification_bias", bool, token)
    return Labels(num, bias, new=not (sequence or token or bias))
