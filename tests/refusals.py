"""A refusal with its words, and the nearest values that pass: a condition moved by one fails one of the two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.words import words


class Refusal(NamedTuple):
    act: Callable[[Any], Any]
    bad: Any  # an argument of `act` that is refused
    error: type[Exception]
    message: str  # a pattern, with words that a reader needs
    good: tuple[Any, ...] = ()  # arguments near to `bad` that pass

    def check(self) -> None:
        """Try all arguments."""
        with pytest.raises(self.error, match=words(*self.message.split(" & "))):
            self.act(self.bad)
        for each in self.good:
            self.act(each)
