"""Resolve a model id of the Hugging Face hub to a local directory: one process per node downloads, the others read its
cache.

A local directory is used directly, without any communication.
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

_SMALL_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja")  # config, index, tokenizer, templates
# All folders except those of sentence-transformers' modules: 1_Pooling, 2_Normalize.
_IGNORED = ["[!0-9]*/*", "*/*/*"]
_WEIGHT_PATTERNS = ("*.safetensors",)
# Seconds that the hub may take to answer before the cache is used, with weights and without.
_SECONDS = {True: 10.0, False: 4.0}
_LETTERS = frozenset(string.ascii_letters + string.digits + "-_.")


def local_directory(source: str | os.PathLike[str], mesh: Mesh | None, *, weights: bool = True) -> Path:
    """Return the local directory of a source. `weights`: whether safetensors files are needed too.

    An existing directory comes first, then an error for a file, then the form of a hub id. A typo in a path is reported
    as one, unless it looks like `org/name`.
    """
    if not isinstance(source, str | os.PathLike):
        raise LoadError(f"{source!r} is not a path; give a Hugging Face model directory, or a hub id (org/name)")
    path = path_of(source)
    if exists(path, Path.is_dir):
        # Make the path absolute and free of links: an export reads the directory again, maybe after a chdir or a change
        # of the link.
        return path.resolve()
    if exists(path, Path.is_file):
        raise LoadError(f"{path} is a file; give the directory that holds it")
    if not is_hub_id(os.fspath(source)):
        raise LoadError(f"{path} is neither a directory nor a hub id (org/name); give a Hugging Face model directory")
    return _fetch(os.fspath(source), mesh or Mesh(), weights)


def is_hub_id(source: str) -> bool:
    """Return whether a string has the form `org/name`."""
    parts = source.split("/")
    return len(parts) == 2 and all(p and set(p) <= _LETTERS and p[0] not in "-." for p in parts)


def _fetch(hub_id: str, mesh: Mesh, weights: bool) -> Path:
    """Download on the first rank of each machine, then on its other ranks, which find everything in the cache.

    All ranks learn of a failure, so none waits for files that will not come.
    """
    first, fetch = mesh.rank == mesh.node[0], functools.partial(download, hub_id, weights)
    # Two rounds: the first rank downloads, then the other ranks call the same function and hit the cache.
    paths = [
        mesh.together(fetch if is_turn else Path, f"the download of {hub_id}", LoadError, "nothing was loaded")
        for is_turn in (first, not first)
    ]
    return paths[not first]


def download(hub_id: str, weights: bool) -> Path:
    """Download with huggingface_hub, in this process only.

    Weights are large and change rarely. So the hub has 10 seconds to answer whether there is a newer revision; after
    that the cache is used.
    """
    patterns = [*_SMALL_PATTERNS, *(_WEIGHT_PATTERNS if weights else ())]
    try:
        path = huggingface_hub.snapshot_download(
            hub_id, allow_patterns=patterns, ignore_patterns=_IGNORED, etag_timeout=_SECONDS[weights]
        )
        return Path(path)
    except (
        OSError,
        RuntimeError,
        ValueError,
        hub.HFValidationError,
        hub.HTTPError,
    ) as error:  # plain ones too
        raise LoadError(f"{hub_id} is not a local directory, and fetching it failed: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """Return why a download failed, with the fix."""
    if isinstance(error, hub.GatedRepoError):
        return "it is gated; ask for access on its hub page, then log in with `hf auth login`"
    if isinstance(error, hub.RepositoryNotFoundError):
        return "the hub has no such model, or it is private; check the name, or log in with `hf auth login`"
    if isinstance(error, (hub.OfflineModeIsEnabled, hub.LocalEntryNotFoundError)):
        return "the hub cannot be reached and the cache lacks it; go online (unset HF_HUB_OFFLINE), or give a directory"
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line}; check network and disk and try again, or give a directory"
