"""The hall where all meet: build, step, train, hand out."""

from . import losses
from .engine import Engine, StepRecord
from .forward import logits, logprobs
from .hand_out import export, gather, stream
from .model import Model, init, load
from .savings import Savings

__all__ = [
    "Engine",
    "Model",
    "Savings",
    "StepRecord",
    "export",
    "gather",
    "init",
    "load",
    "logits",
    "logprobs",
    "losses",
    "stream",
]
