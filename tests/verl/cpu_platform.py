"""A platform of verl without accelerators: the host stands for the device, and gloo for NCCL.

Start verl with VERL_USE_EXTERNAL_MODULES=tests.verl.cpu_platform VERL_PLATFORM=cpu. It needs verl, which the tests of
this package do without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

_NUMBERS = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")
_MODULE = SimpleNamespace(
    **{name: lambda *_: 0 for name in _NUMBERS},
    **{name: lambda *_: None for name in ("synchronize", "empty_cache", "set_device", "reset_peak_memory_stats")},
    get_device_name=lambda *_: "H100",  # whose FLOPS stand in for the host's, of which verl knows none
    is_available=lambda: False,
    device_count=lambda: 0,
    current_device=lambda: 0,
    mem_get_info=lambda *_: (0, 0),
    manual_seed=torch.manual_seed,
    manual_seed_all=torch.manual_seed,
)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """Answer for the host what verl asks of a device."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module: Any = _MODULE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VERL_CPU_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None

    def rollout_env_vars(self) -> dict[str, str]:
        return {}
