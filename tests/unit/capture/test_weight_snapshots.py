"""Copies of weights are written to reserved slots, and never where no memory of their size is reserved."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from tbhooks.capture.parameters.weight_snapshots import WeightSnapshots


def write(address: int | None, tensor: Tensor) -> None:
    assert address is not None
    ctypes.memmove(address, tensor.data_ptr(), tensor.nbytes)


def reserved(*tensors: Tensor) -> WeightSnapshots:
    snapshots = WeightSnapshots()
    snapshots.reserve(enumerate(tensors))
    return snapshots


def test_what_is_written_to_a_slot_is_the_copy() -> None:
    tensors = (torch.randn(3, 5), torch.randn(7, dtype=torch.float64), torch.randn(1, 1), torch.randn(0))
    snapshots = reserved(*tensors)
    for key, tensor in enumerate(tensors):
        write(snapshots.slot(key, tensor), tensor)
    snapshots.commit()
    for key, tensor in enumerate(tensors):
        taken = snapshots.take(key)
        assert taken is not None
        assert taken.dtype == tensor.dtype
        assert torch.equal(taken, tensor)
        assert key not in snapshots


def test_a_parameter_that_has_grown_gets_no_slot() -> None:
    snapshots = reserved(torch.randn(3))
    assert snapshots.slot(0, torch.randn(4)) is None
    assert snapshots.slot(1, torch.randn(3)) is None
    assert 0 not in snapshots


def test_a_slot_is_taken_once_and_only_for_the_same_dtype_and_shape() -> None:
    tensor = torch.randn(4)
    snapshots = reserved(tensor)
    address = snapshots.slot(0, tensor)
    assert snapshots.take_slot(0, tensor) is None, "not committed yet"
    snapshots.commit()
    assert snapshots.take_slot(0, torch.randn(4, dtype=torch.float64)) is None
    assert snapshots.take_slot(0, torch.randn(2, 2)) is None
    assert snapshots.take_slot(0, tensor) == address
    assert snapshots.take_slot(0, tensor) is None
    assert snapshots.take(0) is None


def test_a_clone_replaces_an_earlier_slot() -> None:
    tensor = torch.randn(4)
    snapshots = reserved(tensor)
    write(snapshots.slot(0, tensor), tensor)
    snapshots.commit()
    snapshots.clone({0: tensor + 1})
    assert snapshots.take_slot(0, tensor) is None
    taken = snapshots.take(0)
    assert taken is not None
    assert torch.equal(taken, tensor + 1)


def test_the_block_is_reused_by_the_next_step() -> None:
    tensor = torch.randn(1000)
    snapshots = reserved(tensor)
    first = snapshots.slot(0, tensor)
    snapshots.clear()
    assert 0 not in snapshots
    snapshots.reserve([(5, tensor)])
    assert snapshots.slot(5, tensor) == first


class WithoutForeach(Tensor):
    """A tensor subclass without foreach operations."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch._foreach_copy_:
            raise NotImplementedError("no foreach operations")
        return super().__torch_function__(function, types, args, kwargs or {})


def test_tensors_without_foreach_operations_are_cloned_one_by_one() -> None:
    tensors = {0: torch.randn(3), 1: torch.randn(3).as_subclass(WithoutForeach)}
    snapshots = WeightSnapshots()
    snapshots.clone(tensors)
    for key, tensor in tensors.items():
        taken = snapshots.take(key)
        assert taken is not None
        assert torch.equal(taken, tensor)


def test_release_frees_the_block() -> None:
    snapshots = reserved(torch.randn(1000))
    snapshots.release()
    assert snapshots._block is None
    snapshots.reserve([])
    assert snapshots._block is None
