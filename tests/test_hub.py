"""A hub id is downloaded once a node. Every failure is an error of the package on every rank."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch.distributed as dist
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects

import meshwright as mw
from meshwright.verify import Recorder
from meshwright.weights import hub
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


@pytest.mark.parametrize(("rank", "order"), [(0, [True, False]), (2, [True, False]), (1, [False, True])])
def test_each_node_has_a_rank_that_fetches_first(
    rank: int, order: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 0 and 1 share a machine, and so do 2 and 3. All go through two rounds."""
    fetched: list[tuple[Any, ...]] = []
    monkeypatch.setattr(hub, "download", lambda *args: fetched.append(args) or tmp_path)
    turns: list[bool] = []

    def together(act: Any, *_: Any) -> Any:
        before, result = len(fetched), act()
        turns.append(len(fetched) > before)
        return result

    mesh: Any = SimpleNamespace(rank=rank, node=range(rank // 2 * 2, rank // 2 * 2 + 2), together=together)
    assert hub.local_directory("org/it", mesh, weights=False) == tmp_path
    assert (turns, fetched) == (order, [("org/it", False)])


@pytest.mark.parametrize("weights", [True, False])
def test_what_a_model_needs_is_fetched(weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of sentence-transformers are a part of the model, and those of other formats are not."""
    small = ["1_Pooling/config.json", "chat_template.jinja", "config.json", "merges.txt", "tokenizer.model"]
    others = ["onnx/config.json", "original/params.json", "1_A/b/c.json", "pytorch_model.bin", "x/m.safetensors"]
    taken: list[str] = []

    def snapshot_download(_: str, *, etag_timeout: float, **patterns: Any) -> str:
        names = [*small, *others, "2_Dense/model.safetensors", "model.safetensors"]
        taken.extend([*filter_repo_objects(names, **patterns), str(etag_timeout)])
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert hub.download("org/it", weights) == tmp_path
    assert taken == [*small, *(["2_Dense/model.safetensors", "model.safetensors", "10.0"] if weights else ["4.0"])]


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
    (tmp_path / "link").symlink_to("org/tiny")
    assert hub.local_directory("link", None) == tmp_path / "org" / "tiny", "the link may change"
