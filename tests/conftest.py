"""One thread a process: tests fork ranks, which is safe only where no thread runs."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# torch asks the name server for `::ffff:127.0.0.1` as a rank joins, and would wait 5 s for an answer that is lost.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor._sharding_prop import ShardingPropagator

torch.set_num_threads(1)


def _shape_of_copy(self: ShardingPropagator, schema: Any) -> Any:
    """Return shape, stride and dtype of a result of `detach` or `empty_like`, which are those of its input.

    A load allocates each parameter and FSDP detaches it, both once. torch then runs the op on fake tensors for 1 ms, in
    every rank of every test.
    """
    ops = torch.ops.aten.detach.default, torch.ops.aten.empty_like.default
    is_copy = schema.op in ops and {*schema.kwargs_schema} <= {"device"}
    return schema.args_schema[0].tensor_meta if is_copy else _propagate(self, schema)


_propagate = ShardingPropagator._propagate_tensor_meta_non_cached
ShardingPropagator._propagate_tensor_meta_non_cached = _shape_of_copy

gc.disable()  # until all test files are imported, which leaves no garbage


def pytest_configure(config: pytest.Config) -> None:
    """Ranks are forked, which CUDA and autograd's threads for it do not outlive: only `-m gpu` sees devices."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["TRITON_INTERPRET"] = "1"  # whoever imports triton first decides it for the process


# Files that take longest, in that order. They start first: a long one that starts last leaves the other workers idle.
LONGEST = (
    "test_train_pairs", "test_hosts", "test_killed", "test_demo", "test_checkpoint_power", "test_wheel",
    "test_kernels_compile", "test_matrix", "test_mtp", "test_checkpoint", "test_fp8_gathers", "test_muon",
    "test_activations", "test_meshes", "test_transformers", "test_state_in_8_bits", "test_fp8", "test_renamed",
    "test_vision_meshes", "test_docs", "test_host_sends", "test_lost_ranks", "test_pipeline", "test_rl",
    "test_outside_worlds", "test_engine", "test_lora_meshes", "test_causes", "test_weights", "test_4_bit_files",
    "test_plan", "test_verify", "test_plan_search", "test_router", "test_token_once", "test_verify_peer_tower",
    "test_fp8_files", "test_stream_ranks", "test_vision", "test_verify_page", "test_export_over", "test_train",
    "test_sleep", "test_savings", "test_four_bits", "test_frozen_fp8", "test_value_heads", "test_checkpoint_broken",
    "test_vision_planted", "test_sample", "test_frozen", "test_rope_scaling", "test_reports", "test_check_weights",
    "test_add_a_model", "test_profile", "test_lora", "test_contrastive",
)  # fmt: skip


def pytest_collection_finish() -> None:
    """Leave imported modules out of garbage collections, which took a tenth of the tests' CPU time."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    turn = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: turn.get(item.path.stem, len(turn)))
    if not torch.accelerator.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="there is no accelerator, or pytest was called without -m gpu"))


@pytest.fixture(autouse=True)
def _leaves_the_process_as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests share a process in any order. Process groups belong into forked worlds: in this process one would leave
    threads and locks to later forks."""
    before = _environment()
    yield
    of_kernels = request.node.get_closest_marker("gpu")  # those who import them find out what they write there
    assert of_kernels or _environment() == before, "this test changed os.environ; use monkeypatch.setenv"
    assert not dist.is_initialized(), "this test made a mesh in the test process; use tests.worlds.run(1, ...)"


@pytest.fixture(autouse=True, scope="module")
def _leaves_what_stays_out_of_garbage_collections() -> None:
    """Freeze what earlier files imported and made. A load collects garbage first, which took 0.5 s of CPU each time in
    a process that had run a few hundred tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 in float32, which tests only read."""
    from tests import tiny

    return tiny.directory(tmp_path_factory.mktemp("qwen3") / "m", "qwen3")


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
