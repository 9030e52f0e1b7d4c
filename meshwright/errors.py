"""The exceptions of Meshwright.

MeshwrightError
  x ConfigError (also a ValueError)
  x MeshError
  x LayoutError
  x LoadError
    + MissingKey
    + UnknownKey
    + MismatchedKey
    + BrokenFile
  x ExportError
  x CheckpointError
    + BrokenCheckpointError
  x DataError
  x StateError
  x RankError
  x NonFiniteError

A message names the thing, the numbers and the fix; each docstring below shows one.
"""

from collections.abc import Callable


def counted(num: int, noun: str, many: str = "") -> str:
    """Format a count with its noun: `1 document`, `2 documents`; `2 batches`."""
    return f"{num:,} {noun if num == 1 else many or noun + 's'}"


class MeshwrightError(Exception):
    """The root: `except MeshwrightError` catches every refusal of Meshwright, but no programming error."""


class ConfigError(MeshwrightError, ValueError):
    """A bad configuration or argument: `lr=-1e-5 of [optim] is negative; choose lr > 0`."""


class MeshError(MeshwrightError):
    """A mesh that is impossible: `fsdp=2 x tp=4 needs 8 ranks, torchrun started 6; start 8, or choose fsdp=3, tp=2`."""


class LayoutError(MeshwrightError):
    """Declarations that do not fit: `blocks of layers.3.mixer.q.weight cover rows 0-511 of 768; declare all`."""


class LoadError(MeshwrightError):
    """A source that cannot be loaded: `runs/7 holds no config.json; name a Hugging Face directory or hub id`."""


class MissingKey(LoadError):
    """A key not in the source: `model.norm.weight is in none of 4 files of runs/7; fetch the missing shard again`."""


class UnknownKey(LoadError):
    """A key that no parameter declares: `model.layers.28.mlp.gate.weight of runs/7: config.json has 28 layers; correct
    either`.
    """


class MismatchedKey(LoadError):
    """A key of another shape or dtype: `lm_head.weight is [151936, 896], config.json says [32000, 896]; correct it`."""


class BrokenFile(LoadError):
    """Bytes that differ from what was written: `extent 17 of model-2.safetensors fails its checksum; copy the file
    again`.
    """


class ExportError(MeshwrightError):
    """A directory that could not be written: `nothing was exported to out: it is not empty; choose another`."""


class CheckpointError(MeshwrightError):
    """A checkpoint that could not be saved or resumed: `step-000200 trained 290 parameters, this engine 12; give the
    same train=`."""


class BrokenCheckpointError(CheckpointError):
    """A checkpoint that changed after it was saved: `step-000200 is broken (step-000100 has all its files: take that):
    bytes 0 to 96 of model.safetensors fail their checksum`.
    """


class DataError(MeshwrightError):
    """Data that cannot be trained on: `document 12 has token 151999 of a vocabulary of 151936; check the tokenizer`."""


class StateError(MeshwrightError):
    """A call at the wrong time: `update() of step 3 has no gradients; call backward(batches) first`."""


class RankError(MeshwrightError):
    """Ranks that disagree or are lost: `rank 3 has 7 micro-batches, ranks 0-2 have 8; give every data rank as many`."""


class NonFiniteError(MeshwrightError):
    """A loss or a norm that is NaN or infinite: `the gradient norm of step 3 is nan; no parameter was changed`."""


def failure_in(act: Callable[[], object], kind: type[MeshwrightError], what: str) -> BaseException | None:
    """Run `act` on this rank, and return its failure instead of raising it.

    The other ranks must learn of it first (`Mesh.all_or_none`); then all raise. Raising at once would leave them
    waiting in their next collective until the timeout.
    """
    try:
        act()
    except KeyboardInterrupt as error:
        return error
    except Exception as error:  # noqa: BLE001 - every rank raises it later
        failure = kind(f"{what}: {error}")
        failure.__cause__ = error
        return failure
    return None
