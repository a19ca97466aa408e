"""The model and loss to measure: from the user's factory, or a small built-in transformer.

What a factory returns is checked here, before anything is timed; every error is one sentence.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tbhooks.capture import tensor_tree
from tbhooks.data.errors import ArgumentError, nearest, quoted

Loss = Callable[[nn.Module], Tensor]

BUILT_IN = "a small transformer encoder (built in; use --model module:factory for your own)"
FACTORY_RETURNS = (
    "a factory returns (model, loss_function) with loss_function(model) -> loss, (model, example_inputs), "
    "or a model with example inputs of its own (dummy_inputs, example_input_array, a forward without arguments)"
)


@dataclass(frozen=True)
class Workload:
    """A model on its device, and the loss of one training step on it."""

    name: str
    model: nn.Module
    loss: Loss

    def copied(self) -> nn.Module:
        """A copy of the model. Raises ArgumentError if it cannot be copied."""
        try:
            return copy.deepcopy(self.model)
        except Exception as problem:  # whatever a user's __deepcopy__ raises
            raise ArgumentError(
                f"{self.name} cannot be copied, and every variant trains its own copy: {_describe(problem)}"
            ) from problem

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


def load(specification: str | None, device: torch.device) -> Workload:
    """The workload that `--model` names, checked by one training step on a copy. Raises ArgumentError."""
    torch.manual_seed(0)
    if specification is None:
        return make_workload(_small_transformer(device), device, BUILT_IN)
    return make_workload(_made(_factory(specification), specification, device), device, specification)


def make_workload(made: Any, device: torch.device, name: str = "the model") -> Workload:
    """A workload from the result of a factory: a model, (model, loss_function) or (model, example_inputs).

    Raises ArgumentError if it cannot be trained.
    """
    model, rest = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"{name} returned {quoted(made)}: {FACTORY_RETURNS}")
    _check_parameters(model, name)
    try:
        model = model.to(device).train()
    except Exception as problem:
        raise ArgumentError(f"{name} cannot be moved to {device}: {_describe(problem)}") from problem
    # A module is callable, too, but not as a loss function of the model.
    if callable(rest) and not isinstance(rest, nn.Module):
        workload = Workload(name, model, rest)
    else:
        workload = Workload(name, model, _loss_on(_inputs(model, rest, name), device))
    check(workload)
    return workload


def check(workload: Workload) -> None:
    """Raises ArgumentError for a model that cannot be trained."""
    model, name = workload.copied(), workload.name
    try:
        loss = workload.loss(model)
    except Exception as problem:
        raise ArgumentError(f"the loss of {name} failed: {_describe(problem)}") from problem
    if not isinstance(loss, Tensor):
        raise ArgumentError(f"the loss of {name} must be a tensor, got {quoted(loss)}")
    if loss.numel() != 1:
        raise ArgumentError(f"the loss of {name} must be one number, got shape {tuple(loss.shape)}: reduce it")
    if not loss.requires_grad:
        raise ArgumentError(
            f"the loss of {name} does not depend on any parameter of the model it was given (detached, no_grad, "
            "or computed with another model)"
        )
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    except Exception as problem:
        raise ArgumentError(f"the backward pass of {name} failed: {_describe(problem)}") from problem
    if all(parameter.grad is None for parameter in model.parameters()):
        raise ArgumentError(f"no gradient reached any parameter of {name}: loss_function(model) must use its argument")


def device_named(text: str) -> torch.device:
    """The torch device `cpu`, `cuda` or `cuda:N`. Raises ArgumentError if it does not exist."""
    kind, _, number = text.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()) or text.endswith(":"):
        raise ArgumentError(f"device must be cpu, cuda or cuda:N, got {text!r}")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = "is built without CUDA" if torch.version.cuda is None else "finds no CUDA device"
        raise ArgumentError(f"device {text!r} is not available: torch {torch.__version__} {built}")
    if int(number or 0) >= torch.cuda.device_count():
        raise ArgumentError(f"there is no device {text!r}: torch finds {torch.cuda.device_count()}, counted from 0")
    return torch.device("cuda", int(number or 0))


# --- From a name to a factory -------------------------------------------------------------------------


def _factory(specification: str) -> Callable[..., Any]:
    module_name, colon, name = specification.partition(":")
    if not (colon and module_name and name):
        raise ArgumentError(f"--model must be module:factory, such as train:make_model, got {specification!r}")
    module = _imported(module_name.removesuffix(".py") if "/" not in module_name else module_name)
    found = getattr(module, name, None)
    if found is None:
        there = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ArgumentError(f"module {module_name!r} has no factory {name!r}: {nearest(name, there)}")
    if not callable(found) or isinstance(found, nn.Module):
        raise ArgumentError(f"{specification} is {quoted(found)}; a factory is a function that makes a model")
    factory: Callable[..., Any] = found
    return factory


def _imported(name: str) -> Any:
    here = os.getcwd()
    if here not in sys.path:  # the console script does not have it on its path
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as problem:
        if problem.name is None or not f"{name}.".startswith(f"{problem.name}."):
            raise ArgumentError(f"importing {name!r} failed: {_describe(problem)}") from problem
        there = [file.stem for file in Path(here).glob("*.py")]
        raise ArgumentError(f"there is no module {name!r} here or installed: {nearest(name, there)}") from problem
    except SystemExit as problem:
        raise ArgumentError(
            f"{name!r} ended the program when it was imported: put what it runs under if __name__ == '__main__':"
        ) from problem
    except Exception as problem:
        raise ArgumentError(f"importing {name!r} failed: {_describe(problem)}") from problem


def _made(factory: Callable[..., Any], name: str, device: torch.device) -> Any:
    """Calls a factory; with the device, if it has a parameter of that name."""
    try:
        signature = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # some callables have no signature
        signature = {}  # type: ignore[assignment]
    given: dict[str, Any] = {"device": device} if "device" in signature else {}
    missing = [
        key for key, parameter in signature.items()
        if key not in given and parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]  # fmt: skip
    if missing:
        raise ArgumentError(f"{name} needs {', '.join(missing)}; a factory is called without arguments (but `device`)")
    try:
        return factory(**given)
    except Exception as problem:
        raise ArgumentError(f"{name} failed: {_describe(problem)}") from problem


# --- From what a factory returned to a loss -----------------------------------------------------------


def _check_parameters(model: nn.Module, name: str) -> None:
    parameters = list(model.parameters())
    if not parameters:
        raise ArgumentError(f"{name} has no parameters: there is nothing to train")
    if any(isinstance(parameter, nn.parameter.UninitializedParameter) for parameter in parameters):
        raise ArgumentError(f"{name} has lazy parameters without a shape: call it once inside the factory")
    if not any(parameter.requires_grad for parameter in parameters):
        raise ArgumentError(f"{name} has no parameter that requires a gradient: there is nothing to train")


def _inputs(model: nn.Module, given: Any, name: str) -> Any:
    if given is not None:
        return given
    for own in ("dummy_inputs", "example_input_array"):  # of transformers, of Lightning
        inputs = getattr(model, own, None)
        if inputs is not None:
            return inputs
    needed = [p for p in inspect.signature(model.forward).parameters.values() if p.default is p.empty]
    if any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in needed):
        raise ArgumentError(f"{name} returned a model without inputs: {FACTORY_RETURNS}")
    return ()


def _loss_on(inputs: Any, device: torch.device) -> Loss:
    """A loss on fixed inputs: a tensor is the only argument, a sequence the arguments, a dict the keyword arguments."""
    held = _moved(inputs, device)
    keywords = dict(held) if isinstance(held, Mapping) else {}
    positional = () if keywords else tuple(held) if isinstance(held, list | tuple) else (held,)

    def loss(model: nn.Module) -> Tensor:
        return _loss_of(model(*positional, **keywords))

    return loss


def _loss_of(output: Any) -> Tensor:
    """The output's own `loss` if it has one; otherwise the mean squares of its tensors, which cost little."""
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    numbers = [tensor for _, tensor in tensor_tree.tensors(output) if tensor.is_floating_point()]
    if not numbers:
        raise ArgumentError(f"the model's output, {quoted(output)}, has no floating-point tensor")
    return torch.stack([tensor.float().square().mean() for tensor in numbers]).sum()


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _moved(one, device) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_moved(one, device) for one in value]
    return value


def _describe(problem: BaseException) -> str:
    text = " ".join(str(problem).split())
    return f"{type(problem).__name__}: {text[:300] + '...' if len(text) > 300 else text}"


# --- The built-in model --------------------------------------------------------------------------------


class _Encoder(nn.Module):
    def __init__(self, words: int = 1000, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embedding(tokens)))
        return logits


def _small_transformer(device: torch.device) -> tuple[nn.Module, Loss]:
    model = _Encoder()
    tokens = torch.randint(1000, (16, 64)).to(device)
    return model, lambda model: nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
