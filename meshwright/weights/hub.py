"""A hub id becomes a directory: one process of each node downloads it, and the others then find it in the cache.

A directory of this machine is taken as it is, and no rank talks to another.
"""

from __future__ import annotations

import functools
import os
import string
from pathlib import Path

import huggingface_hub
from huggingface_hub import errors as hub

from ..errors import LoadError
from ..mesh import Mesh
from .source import exists, path_of

_SMALL = ("*.json", "*.txt", "*.model", "*.jinja")  # config, index, tokenizer, templates
_WEIGHTS = ("*.safetensors",)
_SECONDS = {True: 10.0, False: 4.0}  # that the hub may take to answer before the cache is taken; with weights or not
_LETTERS = frozenset(string.ascii_letters + string.digits + "-_.")


def local_directory(source: str | os.PathLike[str], mesh: Mesh | None, *, weights: bool = True) -> Path:
    """Where a source lies on this machine. `weights`: whether its safetensors files are wanted too."""
    if not isinstance(source, str | os.PathLike):
        raise LoadError(f"{source!r} is no path; give a Hugging Face model directory, or a hub id (org/name)")
    path = path_of(source)
    if exists(path, Path.is_dir):
        return path.resolve()  # looked at again at export, wherever the process is then, and a link may point elsewhere
    if exists(path, Path.is_file):
        raise LoadError(f"{path} is a file; give the directory that holds it")
    if not is_hub_id(os.fspath(source)):
        raise LoadError(f"{path} is no directory and no hub id (org/name); give a Hugging Face model directory")
    return _fetch(os.fspath(source), mesh or Mesh(), weights)


def is_hub_id(source: str) -> bool:
    parts = source.split("/")
    return len(parts) == 2 and all(p and set(p) <= _LETTERS and p[0] not in "-." for p in parts)


def _fetch(hub_id: str, mesh: Mesh, weights: bool) -> Path:
    first, fetch = os.environ.get("LOCAL_RANK", "0") == "0", functools.partial(download, hub_id, weights)
    paths = [  # the first of each node, then the others, which find it in the cache
        mesh.together(fetch if mine else Path, f"the download of {hub_id}", LoadError, "nothing was loaded")
        for mine in (first, not first)
    ]
    return paths[not first]


def download(hub_id: str, weights: bool) -> Path:
    """For one process by itself: it talks to the hub, and to no other rank."""
    patterns = [*_SMALL, *(_WEIGHTS if weights else ())]
    try:
        at = huggingface_hub.snapshot_download(
            hub_id, allow_patterns=patterns, ignore_patterns=["*/*"], etag_timeout=_SECONDS[weights]
        )
        return Path(at)
    except (
        OSError,
        RuntimeError,
        ValueError,
        hub.HFValidationError,
        hub.HTTPError,
    ) as error:  # plain ones too
        raise LoadError(f"{hub_id} is no directory here, and could not be fetched: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, hub.GatedRepoError):
        return "it is gated; ask for access on its hub page, then log in with `hf auth login`"
    if isinstance(error, hub.RepositoryNotFoundError):
        return "the hub has no such model, or it is private; check the name, or log in with `hf auth login`"
    if isinstance(error, (hub.OfflineModeIsEnabled, hub.LocalEntryNotFoundError)):
        return "the hub cannot be reached and the cache lacks it; go online (unset HF_HUB_OFFLINE), or give a directory"
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line}; check network and disk and try again, or give a directory"
