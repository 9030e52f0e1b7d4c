"""Train Qwen-family models on any mesh of devices, and prove the run right before renting the devices."""

import sys
from typing import TYPE_CHECKING, NoReturn

from . import train
from .checkpoint import copy_checkpoint
from .data import Batch, pack, shift
from .engine import (
    Context,
    Engine,
    Model,
    Pipeline,
    Resumed,
    Savings,
    StepRecord,
    batches,
    check_export,
    export,
    gather,
    init,
    load,
    logits,
    logprobs,
    losses,
    resume,
    sample,
    save,
    stream,
)
from .engine.names import OF_PACKAGE, refuse
from .errors import (
    BrokenCheckpointError,
    BrokenFile,
    CheckpointError,
    ConfigError,
    DataError,
    ExportError,
    LayoutError,
    LoadError,
    MeshError,
    MeshwrightError,
    MismatchedKey,
    MissingKey,
    NonFiniteError,
    RankError,
    StateError,
    UnknownKey,
)
from .mesh import Mesh
from .train import Trainer
from .verify import Difference, WeightCheck, check_weights

__version__ = "0.1.0.dev0"

if not TYPE_CHECKING:  # a type checker would take it for an attribute of any name

    def __getattr__(name: str) -> NoReturn:
        refuse("mw", OF_PACKAGE, name, sys.modules[__name__])


__all__ = [
    "Batch",
    "BrokenCheckpointError",
    "BrokenFile",
    "CheckpointError",
    "ConfigError",
    "Context",
    "DataError",
    "Difference",
    "Engine",
    "ExportError",
    "LayoutError",
    "LoadError",
    "Mesh",
    "MeshError",
    "MeshwrightError",
    "MismatchedKey",
    "MissingKey",
    "Model",
    "NonFiniteError",
    "Pipeline",
    "RankError",
    "Resumed",
    "Savings",
    "StateError",
    "StepRecord",
    "Trainer",
    "UnknownKey",
    "WeightCheck",
    "batches",
    "check_export",
    "check_weights",
    "copy_checkpoint",
    "export",
    "gather",
    "init",
    "load",
    "logits",
    "logprobs",
    "losses",
    "pack",
    "resume",
    "sample",
    "save",
    "shift",
    "stream",
    "train",
]
