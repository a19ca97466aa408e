"""A model left exactly as it was, for a pass that is not part of its training.

What a pass may change is kept aside and put back: attributes of modules, buffers, gradients, random numbers,
modes. That costs one copy of the buffers. Parameters are not copied: a forward that changes one in place is
told about, and cannot be undone.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

_CONTAINERS = (dict, list, set, deque)
_ABSENT = object()


@contextlib.contextmanager
def untouched(model: nn.Module, inputs: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Puts everything back in the end, an exception or not; then the list holds what could not be, in words."""
    notes: list[str] = []
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    tensors = [*parameters.values(), *buffers.values()]
    with contextlib.ExitStack() as undo:
        undo.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
        undo.enter_context(_uncached_autocast())
        undo.enter_context(_random_numbers({tensor.device.type for tensor in (*tensors, *inputs.values())}))
        told = {f"input {index}".rstrip(): tensor for index, tensor in inputs.items()}
        undo.enter_context(_changes_told({**_plain_tensors(model), **parameters, **told}, notes))
        for module in model.modules():
            undo.callback(_put_back, module, dict(vars(module)), _contents(module))
        for tensor in tensors:
            undo.callback(_put_back_tensor, tensor, tensor.detach(), tensor.requires_grad)
        for buffer in buffers.values():
            if not buffer.is_inference():
                undo.enter_context(_unsafe_preserve_version_counter(buffer))
            undo.callback(_put_back_bits, buffer.detach(), buffer.detach().clone())
        undo.enter_context(gradients_aside(tensors))
        yield notes


@contextlib.contextmanager
def gradients_aside(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Leaves have no `.grad` inside, and afterwards the very one they had; what others do once one has come is not
    done: an optimizer that steps in backward would train.
    """
    leaves = [tensor for tensor in tensors if tensor.is_leaf]
    kept = [(leaf, leaf.grad, leaf._post_accumulate_grad_hooks) for leaf in leaves]
    hooks = [(table, dict(table)) for _, _, table in kept if table]
    try:
        for leaf in leaves:
            leaf.grad = None
        for table, _ in hooks:
            table.clear()
        yield
    finally:
        for leaf, gradient, _ in kept:
            leaf.grad = gradient
        for table, content in hooks:
            table.clear()
            table.update(content)


@contextlib.contextmanager
def _uncached_autocast() -> Iterator[None]:
    """Weights that an autocast around us has cast stay those of its own passes."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


@contextlib.contextmanager
def _random_numbers(device_types: set[str]) -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        with contextlib.ExitStack() as devices:
            for kind in device_types - {"cpu"}:
                every = range(torch.get_device_module(kind).device_count())
                devices.enter_context(torch.random.fork_rng(every, device_type=kind))
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@contextlib.contextmanager
def _changes_told(tensors: Mapping[str, Tensor], notes: list[str]) -> Iterator[None]:
    before = {name: _version(tensor) for name, tensor in tensors.items()}
    try:
        yield
    finally:
        changed = [name for name, tensor in tensors.items() if _version(tensor) != before[name]]
        if changed:
            notes.append(f"changed in place by the pass itself, and left so: {', '.join(changed)}")


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _plain_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Those that are attributes of modules, and neither parameters nor buffers."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }


def _contents(module: nn.Module) -> list[tuple[Any, Any]]:
    """What is in the containers among its attributes, torch's own tables of parameters and hooks among them."""
    kept: list[tuple[Any, Any]] = []
    for value in vars(module).values():
        if isinstance(value, _CONTAINERS):
            kept.append((value, value.copy()))
        elif isinstance(value, torch.Generator):
            kept.append((value, value.get_state()))
    return kept


def _put_back(module: nn.Module, attributes: dict[str, Any], contents: list[tuple[Any, Any]]) -> None:
    now = vars(module)
    for name in now.keys() - attributes.keys():
        del now[name]
    for name, value in attributes.items():
        if now.get(name, _ABSENT) is not value:
            now[name] = value
    for container, content in contents:
        if isinstance(container, torch.Generator):
            container.set_state(content)
        elif not _is_same(container, content):
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(content)


def _is_same(container: Any, content: Any) -> bool:
    """By identity: what is in it may not want to be compared."""
    if len(container) != len(content):
        return False
    keys = all(one is other for one, other in zip(container, content, strict=True))
    if not keys or not isinstance(container, dict):
        return keys
    return all(one is other for one, other in zip(container.values(), content.values(), strict=True))


def _put_back_tensor(tensor: Tensor, data: Tensor, requires_grad: bool) -> None:
    """`data` is what it was made of, and not a copy."""
    if type(tensor) in (Tensor, nn.Parameter) and not tensor.is_set_to(data):
        tensor.data = data
    if tensor.requires_grad != requires_grad:
        tensor.requires_grad_(requires_grad)


def _put_back_bits(data: Tensor, kept: Tensor) -> None:
    if not _has_same_bits(data, kept):
        with torch.inference_mode(data.is_inference()), torch.no_grad():
            data.copy_(kept)


def _has_same_bits(one: Tensor, other: Tensor) -> bool:
    """Only what has changed is written: torch refuses to write some tensors, and autograd remembers writes."""
    if one.layout is not torch.strided or one.is_nested or one.is_quantized:
        return False
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
