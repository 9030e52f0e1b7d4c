"""Failures of one rank that all ranks raise later, and counts in messages."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest

from meshwright import errors
from meshwright.errors import DataError, ExportError, counted, failure_in


def test_exceptions_are_related_as_the_docs_say() -> None:
    """`x` is a MeshwrightError, and `+` is of the kind above it."""
    at: type[Exception] = errors.MeshwrightError
    listed = []
    for sign, name in re.findall(r"^ +([x+]) (\w+)", errors.__doc__ or "", re.MULTILINE):
        kind = getattr(errors, name)
        assert kind.__bases__[0] is (errors.MeshwrightError if sign == "x" else at), name
        at = kind if sign == "x" else at
        listed.append(kind)
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and kind.__module__ == errors.__name__]
    assert [errors.MeshwrightError, *listed] == kinds
    assert issubclass(errors.ConfigError, ValueError)


def fail(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize("error", [ValueError("row 3"), DataError("row 3"), OSError("row 3")])
def test_a_failure_keeps_its_cause(error: Exception) -> None:
    failure = failure_in(lambda: fail(error), ExportError, "nothing was written")
    assert type(failure) is ExportError
    assert str(failure) == "nothing was written: row 3"
    assert failure.__cause__ is error


def test_an_interrupt_stays_an_interrupt() -> None:
    pressed, returned = KeyboardInterrupt(), None
    with contextlib.suppress(KeyboardInterrupt):  # it would end the tests
        returned = failure_in(lambda: fail(pressed), ExportError, "x")
    assert returned is pressed
    assert failure_in(lambda: "well", ExportError, "x") is None
    with pytest.raises(SystemExit):
        failure_in(lambda: fail(SystemExit(3)), ExportError, "x")


def test_counts_have_a_noun_of_their_number() -> None:
    assert [counted(num, "row") for num in (0, 1, 2, 1234)] == ["0 rows", "1 row", "2 rows", "1,234 rows"]
    assert [counted(num, "batch", "batches") for num in (0, 1, 2)] == ["0 batches", "1 batch", "2 batches"]
