"""Verify a model on a mesh: run it on one process and on the mesh, and compare everything."""

from .inspection import FULL, SHRUNK, WEIGHTS, Options, Plan, RunResult, inspect, plan
from .oracles import ORACLES, Finding, examine
from .ranks import run_ranks
from .recorder import Recorder, Seen
from .shrink import shrink
from .trial import Reference, Trial, refer
from .weights import Difference, WeightCheck, check_weights
