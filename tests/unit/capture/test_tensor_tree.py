"""Tensors are found inside whatever a module returns, under the index a reader would use."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tbhooks.capture.tensor_tree import tensors
from tests.support.zoo import Halves

A, B, C = torch.zeros(1), torch.ones(2), torch.ones(3)

Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Partly:
    first: Tensor
    second: Tensor | None
    later: Tensor = dataclasses.field(init=False)


class Custom:
    def __init__(self) -> None:
        self.tensor = A


SHAPES: dict[str, tuple[Any, list[tuple[str, Tensor]]]] = {
    "tensor": (A, [("", A)]),
    "parameter": (p := nn.Parameter(B), [("", p)]),
    "tuple": ((A, B), [("[0]", A), ("[1]", B)]),
    "tuple_with_none": ((A, None, B), [("[0]", A), ("[2]", B)]),
    "tensor_alone_in_a_tuple": ((A,), [("", A)]),
    "tensor_alone_beside_other_things": ((None, 3, {"deep": [A]}), [("", A)]),
    "nested": ((A, (B, C)), [("[0]", A), ("[1][0]", B), ("[1][1]", C)]),
    "list": ([A, B], [("[0]", A), ("[1]", B)]),
    "dict": ({"logits": A, "loss": B}, [("[logits]", A), ("[loss]", B)]),
    "ordered_dict": (OrderedDict(b=B, a=A), [("[b]", B), ("[a]", A)]),
    "other_mapping": (MappingProxyType({"x": A, "y": B}), [("[x]", A), ("[y]", B)]),
    "whole_number_keys": ({0: A, 7: B}, [("[0]", A), ("[7]", B)]),
    "dict_of_lists": ({"a": [A, B], "c": C}, [("[a][0]", A), ("[a][1]", B), ("[c]", C)]),
    "namedtuple": (Pair(A, B), [("[0]", A), ("[1]", B)]),
    "dataclass": (Halves(A, B, note="text"), [("[left]", A), ("[right]", B)]),
    "dataclass_with_none_and_unset": (Partly(A, None), [("", A)]),
    "dataclass_type": (Halves, []),
    "same_tensor_twice": ((A, A), [("[0]", A), ("[1]", A)]),
    "custom_object": (Custom(), []),
    "text": ("abc", []),
    "none": (None, []),
    "number": (3.0, []),
    "empty": ([], []),
    "set": ({1, 2}, []),
    "seven_deep": ([[[[[[[A, B]]]]]]], [("[0][0][0][0][0][0][0]", A), ("[0][0][0][0][0][0][1]", B)]),
}


def assert_found(output: object, expected: list[tuple[str, Tensor]]) -> None:
    found = tensors(output)
    assert [index for index, _ in found] == [index for index, _ in expected]
    assert all(one is other for (_, one), (_, other) in zip(found, expected, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_tensors_are_found_in_order(shape: str) -> None:
    assert_found(*SHAPES[shape])


def test_the_state_of_an_lstm_is_a_nested_tuple() -> None:
    output = nn.LSTM(4, 3)(torch.randn(2, 1, 4))
    assert_found(output, [("[0]", output[0]), ("[1][0]", output[1][0]), ("[1][1]", output[1][1])])


def test_model_outputs_of_transformers_are_read_by_key() -> None:
    from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

    output = CausalLMOutput(loss=A, logits=B, hidden_states=(A, C))
    expected = [("[loss]", A), ("[logits]", B), ("[hidden_states][0]", A), ("[hidden_states][1]", C)]
    assert_found(output, expected)
    assert_found(BaseModelOutput(last_hidden_state=A), [("", A)])


def _list_in_itself() -> object:
    loop: list[Any] = [A]
    loop += [loop, loop]
    return loop


def _dict_in_itself() -> object:
    loop: dict[str, Any] = {"a": A}
    loop["self"] = loop
    return loop


@pytest.mark.timeout(10)
@pytest.mark.parametrize("make", [_list_in_itself, _dict_in_itself])
def test_a_structure_that_contains_itself_does_not_hang(make: Callable[[], object]) -> None:
    found = tensors(make())
    assert found[0][1] is A
    assert len(found) < 1000
