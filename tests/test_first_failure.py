"""The launcher names the rank that failed first, by the records of ranks and by their exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.train import failure


def write_record(folder: Path, rank: int, time: float, *, blames: bool = False, signal: int = 0) -> None:
    details = dict(rank=rank, time=time, blames=blames, signal=signal, final=rank == 1)
    record = {"message": {"message": f"reason {rank}", "extraInfo": {}}, "meshwright": details}
    (folder / f"{rank}.json").write_text(json.dumps(record))


# Records by rank: time and details. Codes by rank: exit code and time.
CASES = {
    "the earlier of two causes": ({1: (7.0, {}), 2: (5.0, {})}, {0: (1, 1.0)}, 0, 2),
    "a cause before an earlier accusation": ({1: (7.0, {}), 2: (5.0, dict(blames=True))}, {}, 0, 1),
    "a cause before an earlier signal": ({1: (7.0, {}), 2: (5.0, dict(signal=15))}, {}, 0, 1),
    "a death before an earlier accusation": ({1: (5.0, dict(blames=True))}, {2: (-9, 8.0)}, 0, 2),
    "a bus error before an earlier exit": ({}, {0: (1, 1.0), 2: (-7, 8.0)}, 0, 2),
    "an accusation before an earlier exit": ({1: (5.0, dict(blames=True))}, {2: (-15, 1.0)}, 0, 1),
    "the record of the last rank": ({2: (5.0, {})}, {}, 0, 2),
    "no failure": ({}, {0: (0, 1.0), 1: (0, 2.0), 2: (0, 3.0)}, 0, None),
    "the signal that was passed on": ({1: (2.0, dict(signal=15))}, {0: (-15, 1.0), 1: (143, 2.0)}, 15, None),
    "another signal than the one passed on": ({}, {0: (-15, 1.0), 1: (-9, 2.0)}, 15, 1),
    "lost peers after a signal": ({1: (2.0, dict(blames=True))}, {0: (-15, 1.0), 1: (1, 2.0), 2: (143, 3.0)}, 15, None),
    "an exit after a signal": ({1: (2.0, dict(blames=True))}, {0: (-15, 1.0), 1: (1, 2.0), 2: (3, 3.0)}, 15, 1),
    "lost peers while a rank lives": ({1: (2.0, dict(blames=True))}, {0: (-15, 1.0), 1: (1, 2.0)}, 15, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_the_first_failure_is_the_likeliest_cause(case: str, tmp_path: Path) -> None:
    records, codes, sent, expected = CASES[case]
    for rank, (time, details) in records.items():
        write_record(tmp_path, rank, time, **details)
    found = failure.first(codes, tmp_path, 3, sent)
    assert (found and found.rank) == expected
    if found:
        assert (found.world, found.log, found.final) == (
            3,
            tmp_path / f"{found.rank}.log",
            expected == 1 and 1 in records,
        )
