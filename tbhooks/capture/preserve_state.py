"""Runs a pass that is not part of training, and leaves the model exactly as it was.

Everything a pass may change is saved and restored: attributes of modules, buffers, tensors and arrays that are
attributes, gradients, random number generators, modes. That costs one copy of the buffers and of those tensors.
Parameters are not copied: a forward that changes one in place is reported, and not undone.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

_CONTAINERS = (dict, list, set, deque)
_ABSENT = object()
_HOOK_TABLES = frozenset(name for name in vars(nn.Module()) if "hooks" in name)
# Torch's own tables, which hold modules, parameters and buffers.
_TABLES = _HOOK_TABLES | {"_parameters", "_buffers", "_modules"}
# Containers among the attributes of a module are searched for tensors to this depth, and if they are no longer than
# this: a vocabulary is not searched.
_DEPTH, _LONGEST = 3, 1000

Restore = Callable[[], object]


class Snapshot:
    """The state of modules, their buffers and random number generators; `restore` may be called any number of times.

    Parameters are not saved. `hooks=False` leaves out the hooks on modules.
    """

    def __init__(self, model: nn.Module, more: Iterable[Tensor] = (), hooks: bool = True) -> None:
        tensors = [*model.buffers(), *plain_tensors(model).values(), *more]
        self.tensors = [tensor for tensor in tensors if _can_be_copied(tensor)]
        devices = {tensor.device.type for tensor in (*model.parameters(), *tensors)}
        left_out = frozenset() if hooks else _HOOK_TABLES
        self._attributes = [(module, dict(vars(module))) for module in model.modules()]
        self._restores: list[Restore] = [
            *(partial(_restore_bits, tensor.detach(), tensor.detach().clone()) for tensor in self.tensors),
            *(restore for module in model.modules() for restore in _contents(module, left_out)),
            *_random_states(devices),
        ]

    def restore(self) -> None:
        for module, attributes in self._attributes:
            _restore_attributes(module, attributes)
        for restore in self._restores:
            restore()


@contextlib.contextmanager
def preserved(model: nn.Module, inputs: Mapping[str, Tensor], more: Iterable[Tensor] = ()) -> Iterator[list[str]]:
    """Restores everything at the end, also after an exception. The list then describes what could not be restored.

    Inputs that the pass changes in place are reported; tensors in `more` are restored.
    """
    notes: list[str] = []
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    tensors = [*parameters.values(), *buffers.values()]
    with contextlib.ExitStack() as undo:
        undo.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
        undo.enter_context(_uncached_autocast())
        undo.callback(_call_all, _random_states({tensor.device.type for tensor in inputs.values()}))
        named = {f"input {index}".rstrip(): tensor for index, tensor in inputs.items()}
        plain = {name: tensor for name, tensor in plain_tensors(model).items() if not _can_be_copied(tensor)}
        undo.enter_context(_changes_reported({**plain, **parameters, **named}, notes))
        before = Snapshot(model, more)
        for tensor in before.tensors:
            if not tensor.is_inference():
                undo.enter_context(_unsafe_preserve_version_counter(tensor))
        undo.callback(before.restore)
        for tensor in tensors:
            undo.callback(_restore_tensor, tensor, tensor.detach(), tensor.requires_grad)
        undo.enter_context(without_gradients(tensors))
        yield notes


@contextlib.contextmanager
def without_gradients(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Inside, leaves have no `.grad`, and post-accumulate hooks are not called: an optimizer that steps in backward
    would train. Afterwards each has the same `.grad` object as before.
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
    """Inside, weights are not cached by an autocast that is active around it."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def _random_states(device_types: set[str]) -> list[Restore]:
    """What restores the random number generators of Python, NumPy and torch."""
    found: list[Restore] = [
        partial(random.setstate, random.getstate()),
        partial(np.random.set_state, np.random.get_state()),
        partial(torch.set_rng_state, torch.get_rng_state()),
    ]
    for kind in device_types - {"cpu", "meta"}:
        module = torch.get_device_module(kind)
        if kind == "mps":  # which is but one
            found.append(partial(module.set_rng_state, module.get_rng_state()))
        else:
            every = range(module.device_count())
            found += [partial(module.set_rng_state, module.get_rng_state(i), i) for i in every]
    return found


def _call_all(functions: Iterable[Restore]) -> None:
    for function in functions:
        function()


@contextlib.contextmanager
def _changes_reported(tensors: Mapping[str, Tensor], notes: list[str]) -> Iterator[None]:
    before = {name: _version(tensor) for name, tensor in tensors.items()}
    try:
        yield
    finally:
        changed = [name for name, tensor in tensors.items() if _version(tensor) != before[name]]
        if changed:
            notes.append(f"changed in place by the pass, and not restored: {', '.join(changed)}")


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def plain_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Tensors that modules hold as attributes or in containers, other than parameters and buffers."""
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            for index, item in _held(value) if name not in _TABLES else ():
                if isinstance(item, Tensor) and id(item) not in known:
                    known.add(id(item))
                    found[f"{path}.{name}{index}".lstrip(".")] = item
    return found


def _held(value: object, index: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, object]]:
    """A value, and what is in it if it is a container."""
    yield index, value
    if depth and isinstance(value, (*_CONTAINERS, tuple)) and len(value) <= _LONGEST:
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield from _held(item, f"{index}[{key}]", depth - 1)


def _can_be_copied(tensor: Tensor) -> bool:
    plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized and not tensor.is_meta
    return plain and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _contents(module: nn.Module, left_out: frozenset[str]) -> Iterator[Restore]:
    """What restores the contents of its attributes, including torch's own tables of parameters and hooks."""
    for name, value in vars(module).items():
        if name not in left_out:
            for _, item in _held(value, depth=0 if name in _TABLES else _DEPTH):
                restore = _content(item)
                if restore is not None:
                    yield restore


def _content(value: Any) -> Restore | None:
    restore: Restore | None = None
    if isinstance(value, _CONTAINERS):
        restore = partial(_restore_container, value, value.copy())
    elif isinstance(value, torch.Generator):
        restore = partial(value.set_state, value.get_state())
    elif isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        restore = partial(value.setstate, value.getstate())
    elif isinstance(value, np.random.RandomState):
        restore = partial(value.set_state, value.get_state())
    elif isinstance(value, np.random.Generator):
        restore = partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    elif isinstance(value, np.ndarray) and value.flags.writeable:
        restore = partial(np.copyto, value, value.copy())
    return restore


def _restore_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    now = vars(module)
    for name in now.keys() - attributes.keys():
        del now[name]
    for name, value in attributes.items():
        if now.get(name, _ABSENT) is not value:
            now[name] = value


def _restore_container(container: Any, content: Any) -> None:
    if not _is_same(container, content):
        container.clear()
        (container.extend if isinstance(container, list | deque) else container.update)(content)


def _is_same(container: Any, content: Any) -> bool:
    """By identity: not everything can be compared."""
    if len(container) != len(content):
        return False
    keys = all(one is other for one, other in zip(container, content, strict=True))
    if not keys or not isinstance(container, dict):
        return keys
    return all(one is other for one, other in zip(container.values(), content.values(), strict=True))


def _restore_tensor(tensor: Tensor, data: Tensor, requires_grad: bool) -> None:
    """`data` shares the memory the tensor had, and is no copy of it."""
    if type(tensor) in (Tensor, nn.Parameter) and not tensor.is_set_to(data):
        tensor.data = data
    if tensor.requires_grad != requires_grad:
        tensor.requires_grad_(requires_grad)


def _restore_bits(data: Tensor, kept: Tensor) -> None:
    if not _has_same_bits(data, kept):
        with torch.inference_mode(data.is_inference()), torch.no_grad():
            data.copy_(kept)


def _has_same_bits(one: Tensor, other: Tensor) -> bool:
    """Only changed tensors are written: torch refuses to write some, and autograd counts writes as versions."""
    if one.layout is not torch.strided or one.is_nested or one.is_quantized:
        return False
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
