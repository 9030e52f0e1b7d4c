"""The inspector: walks everywhere, builds nothing."""

from .inspection import FULL, SHRUNK, WEIGHTS, Part, Plan, inspect, plan
from .oracles import ORACLES, Finding, examine
from .ranks import run_ranks
from .recorder import Recorder, Seen
from .shrink import TINY, shrink
from .trial import Reference, Trial, refer
from .weights import Difference, WeightCheck, check_weights

__all__ = [
    "FULL",
    "ORACLES",
    "SHRUNK",
    "TINY",
    "WEIGHTS",
    "Difference",
    "Finding",
    "Part",
    "Plan",
    "Recorder",
    "Reference",
    "Seen",
    "Trial",
    "WeightCheck",
    "check_weights",
    "examine",
    "inspect",
    "plan",
    "refer",
    "run_ranks",
    "shrink",
]
