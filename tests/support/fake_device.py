"""A simulated accelerator: tensors labelled ``fakegpu:0`` that hold ordinary CPU data.

Every operation runs for real, so numbers are those of the CPU, bit for bit, wherever torch does not
choose another algorithm by device (as it does for attention). What crosses from the device to the
host is recorded in a `Log`, which is how a test shows that code neither copies nor waits when it
should not. Mixing devices in one operation raises, as it would on a real accelerator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from tests.support import fake_streams

__all__ = ["DEVICE", "FakeDeviceTensor", "Log", "host_of", "put", "to_device", "without_float64"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

aten = torch.ops.aten


class _DeviceGuard(torch._C._acc.DeviceGuard):
    """Names the device type. An exception inside a backward pass on this device may end the process: C++ asks
    here with the exception still pending.
    """

    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


class _DeviceModule(_DummyBackendModule):
    """What ``torch.fakegpu`` offers; random numbers are those of the CPU, so there is no state to keep."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def current_stream(self, device: Any = None) -> fake_streams.Stream:
        return fake_streams.current_stream(device)

    def get_rng_state(self, _device: Any = None) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, _device: Any = None) -> None:
        pass


_setup_privateuseone_for_python_backend("fakegpu", _DeviceModule(), device_guard=_DeviceGuard())
DEVICE = torch.device("fakegpu:0")
_HOST = torch.device("cpu")
_LISTS = (list, tuple)
_DATA: Any = vars(torch._C.TensorBase)["data"]

_INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
_NO_KERNEL = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
# Operations that may legitimately see both devices at once; index tensors are moved implicitly.
_CROSSING = _INDEXING | {
    aten._to_copy.default,
    aten.copy_.default,
    aten._copy_from.default,
    aten._foreach_copy_.default,
}


class Log:
    """What crossed from device to host while the ``with`` block was open.

    Logs are process-wide, because backward passes of a device run on a thread of their own.
    """

    _open: ClassVar[list[Log]] = []

    def __init__(self) -> None:
        self.copies: list[tuple[int, ...]] = []
        """Shapes of what was copied from the device to the host."""
        self.uploads: list[tuple[int, ...]] = []
        """Shapes of what was copied from the host to the device. A copy of memory that is not pinned waits for the
        device; the host has no other memory here.
        """
        self.syncs: int = 0
        self.ops: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        """Operations that a device would start a kernel for: no views and no mere allocations."""
        self.peak_bytes: int = 0
        """The most that all tensors made since then have held at once; not what is hidden inside an operation."""
        self._before = _Lease.held

    def __enter__(self) -> Self:
        Log._open.append(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        Log._open.remove(self)

    def reset(self) -> None:
        """Forget everything recorded so far."""
        self.copies.clear()
        self.uploads.clear()
        self.syncs = 0
        self.ops.clear()
        self.launches.clear()
        self.peak_bytes, self._before = 0, _Lease.held


class _Lease:
    """Bytes a live tensor of the device holds; each storage counts once."""

    held: ClassVar[int] = 0
    _users: ClassVar[Counter[int]] = Counter()

    def __init__(self, host: Tensor) -> None:
        storage = host.untyped_storage()
        self._place, self._size = storage.data_ptr(), storage.nbytes()
        _Lease._users[self._place] += 1
        if _Lease._users[self._place] == 1:
            _Lease.held += self._size
            for log in Log._open:
                log.peak_bytes = max(log.peak_bytes, _Lease.held - log._before)

    def __del__(self) -> None:
        if _Lease is None:  # the interpreter ends
            return
        _Lease._users[self._place] -= 1
        if _Lease._users[self._place] == 0:
            _Lease.held -= self._size


class FakeDeviceTensor(Tensor):
    """A tensor that claims to live on `DEVICE`; ``host`` is the CPU tensor that holds its data."""

    host: Tensor
    _lease: _Lease

    @staticmethod
    def __new__(cls, host: Tensor) -> Self:
        if isinstance(host, FakeDeviceTensor) or host.layout is not torch.strided:
            raise NotImplementedError("the simulated device holds plain strided CPU tensors only")
        # In inference mode too, a view of an ordinary tensor is an ordinary tensor.
        with torch.inference_mode(host.is_inference()):
            wrapper = Tensor._make_wrapper_subclass(
                cls,
                host.shape,
                strides=host.stride(),
                storage_offset=host.storage_offset(),
                dtype=host.dtype,
                device=DEVICE,
            )
        wrapper.host = host
        wrapper._lease = _Lease(host)
        return wrapper

    # Assigning `.data` swaps the C++ half of a tensor only; the Python half has to follow.
    @property
    def data(self) -> Tensor:
        return _DATA.__get__(self)

    @data.setter  # type: ignore[override]
    def data(self, value: FakeDeviceTensor) -> None:
        _DATA.__set__(self, value)
        self.host = value.host

    def record_stream(self, stream: Any) -> None:
        """Notes that another stream reads it, so that its memory is not used again too early."""
        self.streams = {*getattr(self, "streams", ()), stream}

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __format__(self, specification: str) -> str:
        return format(self.item() if self.dim() == 0 else repr(self), specification)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FakeDeviceTensor({self.host!r})"

    # With these two torch moves a module's parameters by swapping whole tensors, not `.data`.
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["host"], None

    @staticmethod
    def __tensor_unflatten__(host: dict[str, Tensor], _meta: None, _size: Any, _stride: Any) -> FakeDeviceTensor:
        return FakeDeviceTensor(host["host"])

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        _check_devices(func, args, kwargs)
        _check_types(func, kwargs)
        _record(func, args, kwargs)
        to_host = "device" in kwargs and torch.device(kwargs["device"] or DEVICE).type == "cpu"
        host_kwargs = dict(kwargs, device=_HOST) if "device" in kwargs else kwargs
        host_out = func(*_changed(args, _unwrap), **_changed(host_kwargs, _unwrap))
        _check_float64(host_out)
        out = host_out if to_host else _rewrap(func, (args, kwargs), host_out)
        if _kernels_of(func, args):
            fake_streams.notify(func, args, kwargs, out)
        return out


def put(tensor: Tensor) -> Tensor:
    """Copy of a CPU tensor on the simulated device; not differentiable with respect to it."""
    return FakeDeviceTensor(tensor.detach().clone()).requires_grad_(tensor.requires_grad)


def to_device(model: ModuleT) -> ModuleT:
    """Move parameters and buffers to the simulated device, in place, keeping tied ones tied."""
    return model.to(DEVICE)


def host_of(value: Any) -> Tensor | None:
    """The CPU tensor that holds the data of a tensor of the device; None for anything else."""
    return value.host if isinstance(value, FakeDeviceTensor) else None


def _unwrap(value: Any) -> Any:
    return value.host if isinstance(value, FakeDeviceTensor) else value


# What an operation takes and returns: values, lists and tuples of them, and a dictionary of keywords. For these torch's
# trees, which look for every other container too, take most of the time of a test.
def _tensors(*values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, _LISTS):
            found += _tensors(*value)
        elif isinstance(value, dict):
            found += _tensors(*value.values())
    return found


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, _LISTS):
        return type(value)([_changed(each, change) for each in value])
    if isinstance(value, dict):
        return {name: _changed(each, change) for name, each in value.items()}
    return change(value)


def _check_devices(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if func in _CROSSING:
        return
    for tensor in _tensors(args, kwargs):
        # Host scalars may join any device operation, as wrapped numbers do on a real device.
        if not isinstance(tensor, FakeDeviceTensor) and tensor.dim() > 0:
            raise RuntimeError(f"{func}: expected all tensors on {DEVICE}, found one on {tensor.device}")


def _check_types(func: OpOverload, kwargs: dict[str, Any]) -> None:
    """Refuses what a CPU computes and CUDA kernels, which are chosen by the type of the output, do not."""
    out = kwargs.get("out")
    if isinstance(out, Tensor) and out.is_floating_point():
        name = func._schema.name.removeprefix("aten::")
        if name.startswith("bitwise_"):
            raise NotImplementedError(f'"{name}_cuda" not implemented for {out.dtype}')


_without_float64 = [False]


@contextmanager
def without_float64() -> Iterator[None]:
    """The device has no float64, as Apple's GPUs and some of Intel's."""
    _without_float64[0] = True
    try:
        yield
    finally:
        _without_float64[0] = False


def _check_float64(made: Any) -> None:
    if _without_float64[0] and any(tensor.dtype is torch.float64 for tensor in _tensors(made)):
        raise TypeError("the device has no float64")


def _rewrap(func: OpOverload, inputs: Any, host_out: Any) -> Any:
    """Wrap results, giving back the caller's own tensor where the operation returned an argument."""
    given = {id(_unwrap(tensor)): tensor for tensor in _tensors(inputs)}

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return given[id(value)] if id(value) in given else FakeDeviceTensor(value)

    out = _changed(host_out, wrap)
    if func.is_view:
        for view in _tensors(out):
            torch._functionalize_unsafe_set(view, inputs[0][0])
    if func._schema.is_mutable:
        for tensor in given.values():
            _follow_host(tensor)
    return out


def _follow_host(tensor: Tensor) -> None:
    """Give a wrapper the shape its data has after an operation that resized or restrided it."""
    if isinstance(tensor, FakeDeviceTensor) and _layout(tensor) != _layout(tensor.host):
        _DATA.__set__(tensor, FakeDeviceTensor(tensor.host))


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _record(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    copies, uploads = _crossings(func, args, kwargs)
    synced = _waits_for_data(func, args)
    for log in Log._open:
        log.ops[str(func)] += 1
        log.launches[str(func)] += _kernels_of(func, args)
        log.copies.extend(copies)
        log.uploads.extend(uploads)
        log.syncs += synced


def _kernels_of(func: OpOverload, args: tuple[Any, ...]) -> int:
    """How many kernels CUDA starts for an operation."""
    if func.is_view or func in _NO_KERNEL:
        return 0
    if func is aten.where.self:  # which first converts one to the type of the other
        return 1 + (args[1].dtype != args[2].dtype and args[1].dim() > 0 and args[2].dim() > 0)
    return 2 if func is aten.aminmax.default else 1  # along a dimension, the minimum and then the maximum


Shapes = list[tuple[int, ...]]


def _crossings(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Shapes, Shapes]:
    """Shapes of what this call copies from the device to the host, and from the host to the device."""
    if func is aten._to_copy.default:
        device = kwargs.get("device")
        return ([tuple(args[0].shape)] if device is not None and torch.device(device).type == "cpu" else []), []
    if func in _INDEXING:
        return [], [tuple(index.shape) for index in _tensors(args[1]) if not isinstance(index, FakeDeviceTensor)]
    if func is aten.copy_.default:
        pairs = [(args[0], args[1])]
    elif func is aten._copy_from.default:
        pairs = [(args[1], args[0])]
    elif func is aten._foreach_copy_.default:
        pairs = list(zip(args[0], args[1], strict=True))
    else:
        return [], []
    return _moved(pairs, to_device=False), _moved(pairs, to_device=True)


def _moved(pairs: list[tuple[Tensor, Tensor]], to_device: bool) -> Shapes:
    return [
        tuple(source.shape)
        for target, source in pairs
        if isinstance(target, FakeDeviceTensor) is to_device and isinstance(source, FakeDeviceTensor) is not to_device
    ]


def _waits_for_data(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether the host would have to see device data before this call could return."""
    if func in _INDEXING:
        return any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1]))
    if func is aten.histc.default:
        low, high = (*args[2:4], 0, 0)[:2]
        return bool(low == high)
    tags = func.tags
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def _empty(size: list[int], *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    _record(aten.empty.memory_format, (size,), {})
    memory_format = options.get("memory_format") or torch.contiguous_format
    made = torch.empty(size, dtype=dtype, device=_HOST, memory_format=memory_format)
    _check_float64(made)
    return FakeDeviceTensor(made)


def _empty_strided(size: list[int], stride: list[int], *, dtype: torch.dtype | None = None, **_options: Any) -> Tensor:
    _record(aten.empty_strided.default, (size, stride), {})
    return FakeDeviceTensor(torch.empty_strided(size, stride, dtype=dtype, device=_HOST))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _record(aten._copy_from.default, (source, target), {})
    _unwrap(target).copy_(_unwrap(source))
    fake_streams.notify(aten._copy_from.default, (source, target), {}, target)
    return target


# Factories carry no FakeDeviceTensor among their arguments, and some of torch's C++ copies bypass
# `__torch_dispatch__`: both arrive at the backend's own kernels.
_kernels = torch.library.Library("aten", "IMPL", "PrivateUse1")
_kernels.impl("empty.memory_format", _empty)
_kernels.impl("empty_strided", _empty_strided)
_kernels.impl("_copy_from", _copy_from)
