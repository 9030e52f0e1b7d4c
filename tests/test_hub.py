"""A hub id is downloaded once a node. Every failure is an error of the package on every rank."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch.distributed as dist
from huggingface_hub import errors

import meshwright as mw
from meshwright.verify import Recorder
from tests import tiny, worlds
from tests.words import words


def fetched(at: Path, log: Path, mesh: dict[str, int]) -> tuple[int, int]:
    """Load by hub id, with a hub that records its calls; return collectives and bytes read."""

    def snapshot_download(repo_id: str, **options: Any) -> str:
        with log.open("a") as out:
            out.write(f"{os.environ['LOCAL_RANK']} {repo_id} {'*.safetensors' in options['allow_patterns']}\n")
        return str(at)

    huggingface_hub.snapshot_download = snapshot_download
    with Recorder() as recorder:
        model = mw.load("org/tiny", mw.Mesh(**mesh))
    mw.init("org/tiny", mw.Mesh(**mesh))
    return len(recorder.collectives), model.bytes_read


def test_first_process_of_a_node_fetches_first(tmp_path: Path) -> None:
    at = tiny.directory(tmp_path / "m", "qwen3")
    result = worlds.run(2, fetched, at, tmp_path / "log", dict(fsdp=2))
    assert all(num_bytes > 0 for _, num_bytes in result)
    assert (tmp_path / "log").read_text().splitlines() == [
        "0 org/tiny True", "1 org/tiny True", "0 org/tiny False", "1 org/tiny False",
    ]  # fmt: skip


def failing(bad_rank: str) -> str:
    def snapshot_download(repo_id: str, **options: Any) -> str:
        if os.environ["LOCAL_RANK"] == bad_rank:
            raise errors.LocalEntryNotFoundError("no network")
        return "/nowhere"

    huggingface_hub.snapshot_download = snapshot_download
    try:
        mw.load("org/tiny", mw.Mesh(fsdp=2))
    except mw.LoadError as error:
        dist.barrier()
        return str(error)
    return ""


@pytest.mark.parametrize("bad_rank", ["0", "1"])
def test_all_ranks_fail_together(bad_rank: str) -> None:
    result = worlds.run(2, failing, bad_rank, seconds=20)
    assert re.search(words("org/tiny", r"\bhub\b", "HF_HUB_OFFLINE"), result[int(bad_rank)]), result
    assert re.search(words("org/tiny", rf"\brank {bad_rank}\b"), result[1 - int(bad_rank)]), result


def http(kind: type[errors.HfHubHTTPError]) -> errors.HfHubHTTPError:
    return kind.__new__(kind)


def reason_for(error: Exception) -> str:
    def snapshot_download(repo_id: str, **options: Any) -> str:
        raise error

    huggingface_hub.snapshot_download = snapshot_download
    with pytest.raises(mw.LoadError) as caught:
        mw.load("org/tiny")
    return str(caught.value)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: errors.OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE"),
        (lambda: errors.LocalEntryNotFoundError("not cached"), words("HF_HUB_OFFLINE", r"\bdirectory\b")),
        (lambda: http(errors.GatedRepoError), words("gated", "access")),
        (lambda: http(errors.RepositoryNotFoundError), words(r"\bno\b", "private")),
        (lambda: errors.HFValidationError("bad name"), "HFValidationError: bad name"),
        (lambda: OSError(28, "No space left on device"), words("No space left on device", r"\bdisk\b")),
        (lambda: errors.HTTPError("reset by peer"), words("reset by peer", r"\bnetwork\b")),
    ],
)
def test_reasons(make: Any, reason: str) -> None:
    message = worlds.run(1, lambda: reason_for(make()))[0]
    assert re.search(words("org/tiny", r"\bdirectory\b", reason), message), message


@pytest.mark.parametrize(
    "source", ["gone", "/tmp/gone/model", "./org/tiny", "../tiny", "org/", "a/b/c", "org/ti ny", ""]
)
def test_a_path_that_does_not_exist_is_not_looked_for(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None, raising=False)
    monkeypatch.chdir("/proc/self/task")
    with pytest.raises(mw.LoadError, match=r"\bhub id\b|config\.json"):
        mw.load(source)


def test_a_directory_comes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.directory(tmp_path / "org" / "tiny", "qwen3")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None, raising=False)
    monkeypatch.chdir(tmp_path)
    assert worlds.run(1, lambda: mw.load("org/tiny").directory) == [tmp_path / "org" / "tiny"]
