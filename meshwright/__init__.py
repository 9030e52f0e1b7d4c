"""Train Qwen-family models on any mesh of devices, and prove the run right before renting the devices."""

from .data import Batch, pack
from .engine import (
    Engine,
    Model,
    Savings,
    StepRecord,
    check_export,
    export,
    gather,
    init,
    load,
    logits,
    logprobs,
    losses,
    stream,
)
from .errors import (
    BrokenFile,
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
from .verify import Difference, WeightCheck, check_weights

__version__ = "0.1.0.dev0"

__all__ = [
    "Batch",
    "BrokenFile",
    "ConfigError",
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
    "RankError",
    "Savings",
    "StateError",
    "StepRecord",
    "UnknownKey",
    "WeightCheck",
    "check_export",
    "check_weights",
    "export",
    "gather",
    "init",
    "load",
    "logits",
    "logprobs",
    "losses",
    "pack",
    "stream",
]
