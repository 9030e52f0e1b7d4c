"""Patterns for words that a message must contain, in whatever sentence."""

from __future__ import annotations


def words(*patterns: str) -> str:
    """A pattern for texts in which all of these stand, in whatever order and with whatever between them."""
    return "".join(rf"(?=[\s\S]*(?:{pattern}))" for pattern in patterns)
