"""Checks of an objective's options."""

from __future__ import annotations

import math

from ..errors import ConfigError


def check_number(name: str, value: object, least: float = 0.0, below: float = math.inf, *, open_: bool = False) -> None:
    """Refuse an option outside of `least <= value < below`; `open_`: `least` itself is refused too."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= float(value) < below or (open_ and value == least):
        least_text = f"above {least:g}" if open_ else f"at least {least:g}"
        raise ConfigError(
            f"{name}={value!r} must be {least_text}" + (f" and below {below:g}" if below < math.inf else "")
        )
