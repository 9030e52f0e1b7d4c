"""Verify a model on a mesh: run it on one process and on the mesh, and compare everything."""

from .local_ranks import run_ranks
from .recorder import RecordedCollective, Recorder
from .reference import Reference, ReferenceStep, Run, Trial, run_reference
from .results import Finding, Margin, Notes, read_notes
from .run_oracles import ORACLES, examine
from .session import FULL, SHRUNK, WEIGHTS, Options, Plan, RunResult, inspect, plan
from .small_data import Data
from .small_model import shrink
from .weight_checks import Difference, WeightCheck, check_weights
