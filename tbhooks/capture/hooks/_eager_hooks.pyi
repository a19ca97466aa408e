from collections.abc import Callable, MutableMapping
from typing import Any

from tbhooks.capture.hooks.passes import Pass
from tbhooks.data.self_report import Report

ABI: int

def is_unchanged(known: list[Any]) -> bool: ...

class Lane:
    tensor_type: type
    parameter_type: type
    can_read: Callable[..., bool]
    new_hooks: Callable[[], MutableMapping[Any, Any]]
    running_backward: Callable[[], int]
    tracing_state: Callable[[], object]
    count_modes: Callable[[], int]
    threads: Callable[[], int]
    is_neg: Callable[..., bool]
    storage_offset: Callable[..., Any]
    is_view: Callable[..., bool]
    report: Report
    unseen: dict[str, str]
    key: int
    gradient_reader: object
    read_gradient: Callable[..., None]
    on_units: Callable[..., None]
    on_failure: Callable[..., None]
    is_open: bool
    def use(self, exchange: object, reduce: int, find_alive: int) -> None: ...
    def open_forward(
        self, place: tuple[Any, ...], units: tuple[Any, ...], model: object, forward: object, context: object,
        called: set[str], recent: dict[int, Any], gradient_hooks: list[Any],
    ) -> None: ...  # fmt: skip
    def open_backward(self, place: tuple[Any, ...], context: object, running: object, reached: object) -> None: ...
    def describe(self, tensors: list[Any], table: int) -> None: ...
    def close(self) -> tuple[int, float]: ...

class EagerForwardHook:
    hook: Any
    site: int | None
    gradient_site: int | None
    is_ready: bool
    units: str | None
    def __init__(self, lane: Lane, hook: object, path: str) -> None: ...
    def read(self, module: Any, args: Any, output: Any) -> None: ...

class EagerGradientHook:
    observer: Any
    step: object
    sites: list[int]
    passes: list[Pass]
    fired: bool
    is_view: bool
    failure: str
    span: tuple[int, int, int]
    version: int
    def __call__(self, gradient: Any) -> None: ...
