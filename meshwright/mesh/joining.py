"""Join the process group of a run: the device of this rank, torchrun's environment, the heartbeat, and the orderly
end."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import tempfile

import torch
import torch.distributed as dist

from ..errors import MeshError
from ..log import logger
from ..provenance import untried
from ..watch import RAISED, Watch, position
from .part import agree, is_part, own_store, refuse_eager

# Processes that start together still import from disks of different speed, so they meet later than they will at any
# collective: a `timeout_s` below this holds only from then on.
START = datetime.timedelta(seconds=60)


def device_of(wanted: str | torch.device | None) -> torch.device:
    """Return the device of this rank, by LOCAL_RANK where there are several, or explain why it cannot be used."""
    if wanted is None:
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
        dist.get_default_backend_for_device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise MeshError(f"device={wanted!r} cannot be used: {error}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MeshError(f"device={wanted!r}: torch finds no CUDA device; choose device='cpu', or check nvidia-smi")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", from_torchrun("LOCAL_RANK", 0, least=0))
    if device.type == "cuda":
        if (device.index or 0) >= torch.cuda.device_count():
            raise MeshError(
                f"{device} does not exist: this process sees {torch.cuda.device_count()} devices. LOCAL_RANK chooses "
                "one; if the launcher shows each process a single device, give device='cuda:0'"
            )
        torch.cuda.set_device(device)
    return device


def from_torchrun(name: str, alone: int, least: int = 1) -> int:
    """Return a number that torchrun has set in the environment; `alone` without torchrun."""
    text = os.environ.get(name, str(alone))
    missing = [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
    if name == "WORLD_SIZE" and name in os.environ and missing:
        raise MeshError(f"WORLD_SIZE={text} without {', '.join(missing)}: start with torchrun, or unset WORLD_SIZE")
    if not text.isdecimal() or int(text) < least:
        raise MeshError(f"environment variable {name}={text!r} must be a whole number of at least {least}")
    return int(text)


# Settings of torch's flight recorder, each under its current and its older name; the user's values stay.
RECORDER = {
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "2000",
    ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
    ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"): os.path.join(
        tempfile.gettempdir(), "meshwright_flight_rank_"
    ),
}


def record(device: torch.device) -> str:
    """Turn on torch's flight recorder; return a sentence that tells where its dump will be after a failed
    collective."""
    if device.type == "cpu":
        return ""
    *_, path = [_set_unless_known(names, value) for names, value in RECORDER.items()]
    return f"What the devices did: {path}*, to be read with torchfrtrace."


def _set_unless_known(names: tuple[str, ...], value: str) -> str:
    """Set a variable unless the user did, under any of its names; return the value that torch will read.

    torch takes the first of the names that is set.
    """
    known = [os.environ[name] for name in names if name in os.environ]
    return known[0] if known else os.environ.setdefault(names[0], value)


def join(device: torch.device, timeout: datetime.timedelta, ranks: tuple[int, ...], eager: bool) -> None:
    """Join or start the process group, and start the heartbeat of this rank. `ranks`: the global ranks of the mesh.

    Joining waits for `timeout`, but at least for `START`; all groups of the mesh wait for `timeout`.

    `eager`: make NCCL's communicators at once, each split off the first. Otherwise its first collective makes a
    communicator, within that collective's timeout. Pipelines must not be eager: torch then queues all transfers of a
    rank on one stream, the sends to one neighbour behind the receives from the other, and stages that send both ways
    could wait for each other forever. Lazy communicators have a stream for each pair of ranks.
    """
    recorder_note = record(device)
    if device.type == "cuda":
        # Several communicators are in flight at once (FSDP's prefetch, doors of tp and ep). Without an order between
        # them, two ranks may start them in opposite order and fill their multiprocessors with kernels that wait.
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    if not dist.is_initialized():
        backend = dist.get_default_backend_for_device(device)
        if "WORLD_SIZE" in os.environ:
            device_id = device if eager and device.type == "cuda" else None
            dist.init_process_group(backend, timeout=max(timeout, START), device_id=device_id)
        else:
            alone = torch._C._distributed_c10d.HashStore()
            dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=timeout)
        atexit.register(leave)
        if dist.get_rank() == 0 and (note := untried()):
            logger.warning("%s", note)
    if is_part(ranks):
        refuse_eager(device)
    else:
        refuse_gloo_on(device)
    if position.watch is None and len(ranks) > 1:
        if is_part(ranks):
            agree(ranks, timeout)
        position.watch = Watch(own_store(ranks), dist.get_rank(), ranks, timeout.total_seconds(), recorder_note)
        # Registered after `leave`, so it runs before it, while the store still answers.
        atexit.register(position.watch.leave)


def refuse_gloo_on(device: torch.device) -> None:
    """Refuse a user's process group that would pass device memory to gloo: FSDP2 then ends in a segmentation fault
    (pytorch#132471).
    """
    backends = dist.get_backend_config()
    if device.type == "cuda" and "cuda:nccl" not in backends:
        raise MeshError(
            f"{device} needs NCCL, but the process group that this program started has {backends!r}; start it with "
            "dist.init_process_group('cpu:gloo,cuda:nccl'), or leave that to mw.Mesh"
        )


def leave() -> None:
    """Leave the process group before the interpreter shuts down: gloo's threads would abort a process that exits.

    After an error other ranks may be in the middle of a collective, and NCCL's orderly end would wait for them until
    the timeout. So a rank that raised aborts.
    """
    if not dist.is_initialized():
        return
    if position.now[0] == RAISED and "nccl" in dist.get_backend_config():
        with contextlib.suppress(RuntimeError):  # the process ends either way
            dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()
