"""Load, step, look, export: what a user calls."""

from ..recipe import ContextParallel, MemoryOptions, Pipeline, Recipe
from . import losses
from .batching import batches
from .checkpoint import Resumed, resume, save
from .engine import Engine, StepRecord
from .export import check_export, export, gather, stream
from .inference import logits, logprobs, sample
from .model import Model, init, load
from .validation import check_no_places, check_prompts
