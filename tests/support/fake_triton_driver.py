"""A driver for Triton without a GPU: kernels are specialised and compiled, and a launch is an entry in a list."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver as active_driver


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel, its number of programs, the device that was current, and the arguments."""

    kernel: str
    programs: int
    device: int
    arguments: tuple[Any, ...]


class _Utils:
    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 101376, "multiprocessor_count": 108}

    def unload_module(self, _: int) -> None:
        pass


class FakeDriver(DriverBase):  # type: ignore[misc]
    """Launches of an A100 that are not made."""

    def __init__(self, architecture: int = 80) -> None:
        self.launches: list[Launch] = []
        self.device = 0
        self.refusal: Exception | None = None
        """What the next launch raises, as where there is no C compiler for the launcher."""
        self.utils = _Utils()
        self._target = GPUTarget("cuda", architecture, 32)

    def launcher_cls(self, _source: Any, metadata: Any) -> Callable[..., None]:
        if self.refusal is not None:
            raise self.refusal

        def launch(programs: int, *rest: Any) -> None:
            self.launches.append(Launch(metadata.name, programs, self.device, rest[8:]))

        return launch

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 1000 + device

    def get_current_target(self) -> Any:
        return self._target

    @staticmethod
    def is_active() -> bool:
        return True

    def map_python_to_cpp_type(self, name: str) -> str:
        return name

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        return None


@contextmanager
def installed() -> Iterator[FakeDriver]:
    """Makes a new fake driver the active one."""
    made, before = FakeDriver(), active_driver._active
    active_driver.set_active(made)
    try:
        yield made
    finally:
        active_driver._active = before
