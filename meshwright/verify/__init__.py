"""The inspector: walks everywhere, builds nothing."""

from .inspection import Part, Plan, inspect, plan
from .oracles import ORACLES, Finding, examine
from .ranks import run_ranks
from .recorder import Recorder, Seen
from .shrink import TINY, shrink
from .trial import Reference, Trial, refer

__all__ = [
    "ORACLES",
    "TINY",
    "Finding",
    "Part",
    "Plan",
    "Recorder",
    "Reference",
    "Seen",
    "Trial",
    "examine",
    "inspect",
    "plan",
    "refer",
    "run_ranks",
    "shrink",
]
