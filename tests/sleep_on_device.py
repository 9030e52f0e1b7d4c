"""Sleep and wake on a device, in a process of its own: `python -m tests.sleep_on_device cuda DIRECTORY`."""

from __future__ import annotations

import sys

import torch

import meshwright as mw
from tests import tiny


def main(device: str, source: str) -> None:
    model = mw.load(source, mw.Mesh(device=device), dtype=torch.float32, memory=mw.MemoryOptions(compiled=False))
    engine, batches = mw.Engine(model, lr=1e-3), tiny.batches(0)
    engine.step(batches)
    engine.backward(batches)
    before, tensors = allocated(device), {**model.stored(), **model.grads(), **engine.optimizer.tensors}
    copies = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    for _ in range(2):
        freed = engine.sleep()
        buffers = [buffer for copy in model.calls.asleep.of(("weights", "optimizer")) for buffer in copy.buffers]
        assert all(buffer.is_pinned() == (device != "cpu") for buffer in buffers)
        assert device == "cpu" or before - allocated(device) >= freed, (before, allocated(device), freed)
        assert engine.wake() == freed > 0
        del buffers
        assert abs(allocated(device) - before) < freed / 10
        wrong = [name for name, tensor in tensors.items() if not torch.equal(tensor.cpu(), copies[name])]
        assert not wrong, wrong
    engine.update()
    print("slept", freed)


def allocated(device: str) -> int:
    """Return the bytes of all tensors on an accelerator."""
    return 0 if device == "cpu" else torch.get_device_module(device).memory_allocated()


if __name__ == "__main__":
    main(*sys.argv[1:])
