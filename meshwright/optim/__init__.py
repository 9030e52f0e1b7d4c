"""Optimizers: the base class, AdamW, Muon, 8-bit optimizer state, and updates of a rank's shards."""

from .adamw import AdamW
from .base import Clip, Optimizer, Slices, within
from .gradient_norm import squares
from .int8_state import SCALES, Place, check_blocks, names_of_scales, with_scales, zero_codes
from .local import LocalOptimizer, State
from .muon import Muon
from .whole_matrices import WholeMatrices
