"""Copies of weights land where their readers are told to write, and never where there is no room for them."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from tbhooks.capture.step.weight_snapshots import Copies


def write(address: int | None, tensor: Tensor) -> None:
    assert address is not None
    ctypes.memmove(address, tensor.data_ptr(), tensor.nbytes)


def made(*tensors: Tensor) -> Copies:
    copies = Copies()
    copies.make_room(enumerate(tensors))
    return copies


def test_what_is_written_to_a_place_is_the_copy() -> None:
    tensors = (torch.randn(3, 5), torch.randn(7, dtype=torch.float64), torch.randn(1, 1), torch.randn(0))
    copies = made(*tensors)
    for key, tensor in enumerate(tensors):
        write(copies.place(key, tensor), tensor)
    copies.written()
    for key, tensor in enumerate(tensors):
        taken = copies.take(key)
        assert taken is not None
        assert taken.dtype == tensor.dtype
        assert torch.equal(taken, tensor)
        assert key not in copies


def test_a_parameter_that_has_grown_since_gets_no_place() -> None:
    copies = made(torch.randn(3))
    assert copies.place(0, torch.randn(4)) is None
    assert copies.place(1, torch.randn(3)) is None
    assert 0 not in copies


def test_a_place_is_taken_once_and_only_by_its_like() -> None:
    tensor = torch.randn(4)
    copies = made(tensor)
    address = copies.place(0, tensor)
    assert copies.take_place(0, tensor) is None, "nobody has said that it is written"
    copies.written()
    assert copies.take_place(0, torch.randn(4, dtype=torch.float64)) is None
    assert copies.take_place(0, torch.randn(2, 2)) is None
    assert copies.take_place(0, tensor) == address
    assert copies.take_place(0, tensor) is None
    assert copies.take(0) is None


def test_a_later_clone_takes_the_place_of_what_was_placed() -> None:
    tensor = torch.randn(4)
    copies = made(tensor)
    write(copies.place(0, tensor), tensor)
    copies.written()
    copies.clone({0: tensor + 1})
    assert copies.take_place(0, tensor) is None
    taken = copies.take(0)
    assert taken is not None
    assert torch.equal(taken, tensor + 1)


def test_the_block_is_kept_from_step_to_step() -> None:
    tensor = torch.randn(1000)
    copies = made(tensor)
    first = copies.place(0, tensor)
    copies.forget()
    assert 0 not in copies
    copies.make_room([(5, tensor)])
    assert copies.place(5, tensor) == first


class Stubborn(Tensor):
    """Does not do to many what it does to one."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch._foreach_copy_:
            raise NotImplementedError("only one at a time")
        return super().__torch_function__(function, types, args, kwargs or {})


def test_what_cannot_be_cloned_together_is_cloned_one_by_one() -> None:
    tensors = {0: torch.randn(3), 1: torch.randn(3).as_subclass(Stubborn)}
    copies = Copies()
    copies.clone(tensors)
    for key, tensor in tensors.items():
        taken = copies.take(key)
        assert taken is not None
        assert torch.equal(taken, tensor)


def test_nothing_is_kept_in_the_end() -> None:
    copies = made(torch.randn(1000))
    copies.release()
    assert copies._block is None
    copies.make_room([])
    assert copies._block is None
