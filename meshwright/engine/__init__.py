"""Load, step, look, export: what a user calls."""

from ..layout import Context, Pipeline
from ..parallel import Savings
from . import losses
from .arguments import check_no_places, check_prompts
from .batches import batches
from .checkpoint import Resumed, resume, save
from .engine import Engine, StepRecord
from .export import check_export, export, gather, stream
from .forward import logits, logprobs
from .model import Model, init, load
from .sample import sample
