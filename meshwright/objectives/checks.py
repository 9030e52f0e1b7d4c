"""Validate the numeric options of objectives."""

from __future__ import annotations

import math

from ..errors import ConfigError


def check_number(name: str, value: float, *, least: float = 0.0, below: float = math.inf, above: bool = False) -> None:
    """Refuse an option outside of `least <= value < below`. `above`: `value` must exceed `least`."""
    given: object = value
    if (
        isinstance(given, bool)
        or not isinstance(given, int | float)
        or not least <= value < below
        or (above and value == least)
    ):
        bound = f"above {least:g}" if above else f"at least {least:g}"
        raise ConfigError(f"{name}={value!r} must be {bound}" + (f" and below {below:g}" if below < math.inf else ""))
