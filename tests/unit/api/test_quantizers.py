"""Quantizers are known by their classes: those of torch, and stand-ins with the names and attributes of others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tbhooks
from tbhooks.api.quantizers import formats_in_use

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


def stand_in(name: str, **attributes: Any) -> nn.Module:
    made: nn.Module = type(name, (nn.Linear,), {})(2, 2)
    for attribute, value in attributes.items():
        setattr(made, attribute, value)
    return made


def fake_quantize(low: int, high: int) -> nn.Module:
    from torch.ao.quantization import FakeQuantize

    made: nn.Module = FakeQuantize(quant_min=low, quant_max=high)
    return made


@pytest.mark.parametrize(
    ("make", "formats"),
    [
        (lambda: nn.Linear(2, 2), ()),
        (lambda: fake_quantize(0, 255), ("int8",)),
        (lambda: fake_quantize(0, 15), ()),
        (lambda: stand_in("IntxFakeQuantizer", config=SimpleNamespace(dtype=torch.int8)), ("int8",)),
        (lambda: stand_in("IntxFakeQuantizer", config=SimpleNamespace(dtype="TorchAODType.INT4")), ()),
        (lambda: stand_in("Float8FakeQuantizer", config=SimpleNamespace(dtype=torch.float8_e4m3fn)), FLOAT8[:1]),
        (lambda: stand_in("Float8Linear"), FLOAT8),
        (lambda: stand_in("Linear8bitLt"), ("int8",)),
        (lambda: nn.Linear(2, 2).to(torch.float8_e5m2), FLOAT8[1:]),
    ],
    ids=["none", "8 bits", "4 bits", "torchao int8", "int4", "torchao float8", "Float8Linear", "bitsandbytes", "dtype"],
)
def test_the_formats_of_the_quantizers_in_a_model(make: Any, formats: tuple[str, ...]) -> None:
    assert formats_in_use(nn.Sequential(nn.ReLU(), make())) == formats


class Broken(nn.Linear):
    @property
    def config(self) -> object:
        raise RuntimeError("not now")


def test_a_class_that_cannot_be_asked_has_no_formats() -> None:
    assert formats_in_use(type("BrokenFakeQuantize", (Broken,), {})(2, 2)) == ()


@pytest.mark.parametrize("quantized", [True, False])
def test_a_model_trained_with_fake_quantization_hears_about_int8(quantized: bool) -> None:
    torch.manual_seed(0)
    middle = fake_quantize(0, 255) if quantized else nn.Identity()
    model = nn.Sequential(nn.Linear(8, 64), middle, nn.Linear(64, 1))
    with torch.no_grad():
        model[0].bias[0] = 1e5  # one channel that takes all of the range
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    with tbhooks.watch(model, every=1) as w:
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
    said = [finding for finding in w.findings if finding.rule == "low_precision"]
    assert [(f.site.path, f.evidence["format"]) for f in said if f.site] == [("0", "int8")] * quantized
