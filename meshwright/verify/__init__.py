"""Verify a model on a mesh: run it on one process and on the mesh, and compare everything."""

from .data import Data
from .examine import ORACLES, examine
from .findings import Finding, Margin, Notes, read_notes
from .inspection import FULL, SHRUNK, WEIGHTS, Options, Plan, RunResult, inspect, plan
from .ranks import run_ranks
from .recorder import Recorder, Seen
from .run import Run
from .shrink import shrink
from .trial import Reference, StepOf, Trial, refer
from .weights import Difference, WeightCheck, check_weights
