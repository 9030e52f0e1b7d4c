"""What stands below a result, so that it can be made again: versions, date, command."""

from __future__ import annotations

from datetime import UTC, datetime

from ..versions import versions


def origin(command: str, seed: int | None = None) -> dict[str, str]:
    """What made a result, when, and by which command. The seed is that of weights and data that were drawn."""
    drawn = {} if seed is None else {"seed": str(seed)}
    return {"command": command, "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), **drawn, **versions()}
