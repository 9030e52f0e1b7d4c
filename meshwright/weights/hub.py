"""A hub id becomes a directory: one process of each node downloads, the others then find it in the cache.

A directory of this machine is taken as it is, and no rank talks to another.
"""

from __future__ import annotations

import os
import string
from pathlib import Path

import huggingface_hub
import torch
from huggingface_hub.errors import (  # type: ignore[attr-defined] # HTTPError is its HTTP library's: lost connections
    GatedRepoError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from ..errors import LoadError
from ..mesh import Mesh
from .source import looked_at, path_of

_SMALL = ("*.json", "*.txt", "*.model", "*.jinja")  # config, index, tokenizer, templates
_WEIGHTS = ("*.safetensors",)
_SECONDS = {True: 10.0, False: 4.0}  # that the hub may take to answer before the cache is taken; with weights or not
_LETTERS = frozenset(string.ascii_letters + string.digits + "-_.")


def local_directory(source: str | os.PathLike[str], mesh: Mesh | None, *, weights: bool = True) -> Path:
    """Where a source lies on this machine. `weights`: whether its safetensors files are wanted too."""
    if not isinstance(source, str | os.PathLike):
        raise LoadError(f"{source!r} is no path; give a Hugging Face model directory, or a hub id (org/name)")
    path = path_of(source)
    if looked_at(path, Path.is_dir):
        return path.resolve()  # looked at again at export, wherever the process is then, and a link may point elsewhere
    if looked_at(path, Path.is_file):
        raise LoadError(f"{path} is a file; give the directory that holds it")
    if not is_hub_id(os.fspath(source)):
        raise LoadError(f"{path} is no directory and no hub id (org/name); give a Hugging Face model directory")
    return _fetch(os.fspath(source), mesh or Mesh(), weights)


def is_hub_id(source: str) -> bool:
    parts = source.split("/")
    return len(parts) == 2 and all(p and set(p) <= _LETTERS and p[0] not in "-." for p in parts)


def _fetch(hub_id: str, mesh: Mesh, weights: bool) -> Path:
    first, path = os.environ.get("LOCAL_RANK", "0") == "0", Path()
    for mine in (first, not first):
        failure = None
        if mine:
            try:
                path = download(hub_id, weights)
            except LoadError as error:
                failure = error
        _agree(hub_id, mesh, failure)
    return path


def _agree(hub_id: str, mesh: Mesh, failure: LoadError | None) -> None:
    """All ranks go on, or none: this is the barrier too."""
    failed = torch.tensor(0 if failure is None else 1, device=mesh.device)
    mesh.sum_(failed, ("pp", "replicate", "fsdp", "cp", "tp"), "the download")
    if failed.item():
        raise failure or LoadError(f"{hub_id} could not be fetched by {failed.item()} processes; see their errors")


def download(hub_id: str, weights: bool) -> Path:
    """For one process by itself: it speaks to the hub and to no other rank."""
    patterns = [*_SMALL, *(_WEIGHTS if weights else ())]
    try:
        at = huggingface_hub.snapshot_download(
            hub_id, allow_patterns=patterns, ignore_patterns=["*/*"], etag_timeout=_SECONDS[weights]
        )
        return Path(at)
    except (OSError, RuntimeError, ValueError, HFValidationError, HTTPError) as error:  # its transfer raises plain ones
        raise LoadError(f"{hub_id} is no directory here, and could not be fetched: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, GatedRepoError):
        return "it is gated; ask for access on its hub page, then log in with `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        return "the hub has no such model, or it is private; check the name, or log in with `hf auth login`"
    if isinstance(error, (OfflineModeIsEnabled, LocalEntryNotFoundError)):
        return "the hub cannot be reached and the cache lacks it; go online (unset HF_HUB_OFFLINE), or give a directory"
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line}; check network and disk and try again, or give a directory"
