"""Functional operations are seen under the module that calls them, with true numbers, and nothing else changes."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tbhooks.capture.functional import attention, function_mode, redispatch
from tbhooks.capture.functional.function_mode import MOST_CALLS, OPERATIONS, FunctionalObserver
from tbhooks.data.frame import ROOT
from tbhooks.data.self_report import Report
from tests.support import fake_device, zoo
from tests.support.functional_models import depth
from tests.support.reference import to_numpy

pytestmark = pytest.mark.usefixtures("no_function_mode_left")
Array = NDArray[np.float64]


class StepContext:
    """A `Functional` driven by hooks of our own on every module, and copies of what it showed."""

    def __init__(self) -> None:
        self.report = Report()
        self.shown: list[tuple[str, Tensor]] = []
        self.functional = FunctionalObserver(self._saw, lambda *_: None, lambda *_: None, self.report)

    def _saw(self, path: str, index: str, tensor: Tensor) -> None:
        self.shown.append((path + index, tensor.detach().clone()))

    def attach(self, model: nn.Module) -> StepContext:
        for name, module in model.named_modules():
            path = name or ROOT
            module.register_forward_pre_hook(lambda m, _args, path=path: self.functional.enter_module(path, m))
            module.register_forward_hook(
                lambda _m, _args, _out, path=path: self.functional.leave_module(path), always_call=True
            )
        return self

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.shown]

    def __getitem__(self, name: str) -> Tensor:
        (found,) = [tensor for shown, tensor in self.shown if shown == name]
        return found


class Does(nn.Module):
    """A user's module whose forward is one function."""

    def __init__(self, function: Callable[..., Any], **children: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def seen_of(function: Callable[..., Any], *args: Any, **children: nn.Module) -> StepContext:
    model = Does(function, **children)
    seen = StepContext().attach(model)
    model(*args)
    assert seen.report.errors == 0, seen.report.messages
    return seen


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)
        self.output = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x), inplace=True), 2)
        return self.output(F.dropout(x.flatten(1), 0.2, self.training))


# --- What is seen, and its name -------------------------------------------------------------------


def test_the_operations_of_a_model_are_seen_under_its_path() -> None:
    torch.manual_seed(0)
    model = Cnn()
    seen = StepContext().attach(model)
    model(torch.randn(2, 1, 8, 8))
    assert seen.names == ["(root):relu", "(root):relu[1]", "(root):max_pool2d", "(root):dropout"]
    assert torch.equal(F.max_pool2d(seen["(root):relu[1]"], 2), seen["(root):max_pool2d"])
    assert depth() == 0


X = torch.linspace(-2, 2, 12).reshape(3, 4)
IMAGE = torch.linspace(-1, 1, 64).reshape(1, 1, 8, 8)
CALLS: list[tuple[str, Callable[[], Any]]] = [
    ("relu", lambda: F.relu(X)),
    ("relu", lambda: F.relu(X.clone(), inplace=True)),
    ("relu", lambda: F.relu_(X.clone())),
    ("relu", lambda: torch.relu(X)),
    ("relu", lambda: torch.relu_(X.clone())),
    ("relu", X.relu),
    ("relu", lambda: X.clone().relu_()),
    ("relu6", lambda: F.relu6(X)),
    ("leaky_relu", lambda: F.leaky_relu(X)),
    ("leaky_relu", lambda: F.leaky_relu_(X.clone())),
    ("elu", lambda: F.elu(X)),
    ("elu", lambda: F.elu_(X.clone())),
    ("gelu", lambda: F.gelu(X, approximate="tanh")),
    ("silu", lambda: F.silu(X)),
    ("mish", lambda: F.mish(X)),
    ("selu", lambda: F.selu(X)),
    ("selu", lambda: torch.selu(X)),
    ("celu", lambda: F.celu(X)),
    ("softplus", lambda: F.softplus(X)),
    ("sigmoid", lambda: F.sigmoid(X)),
    ("sigmoid", lambda: torch.sigmoid(X)),
    ("sigmoid", lambda: torch.special.expit(X)),
    ("sigmoid", lambda: X.clone().sigmoid_()),
    ("tanh", lambda: F.tanh(X)),
    ("tanh", lambda: torch.tanh(X)),
    ("tanh", lambda: X.clone().tanh_()),
    ("hardswish", lambda: F.hardswish(X)),
    ("hardsigmoid", lambda: F.hardsigmoid(X)),
    ("hardtanh", lambda: F.hardtanh(X)),
    ("glu", lambda: F.glu(X)),
    ("prelu", lambda: F.prelu(X, torch.ones(1))),
    ("rrelu", lambda: F.rrelu(X)),
    ("softmax", lambda: F.softmax(X, -1)),
    ("softmax", lambda: torch.softmax(X, dim=0)),
    ("softmax", lambda: X.softmax(1)),
    ("softmax", lambda: torch.special.softmax(X, 1)),
    ("log_softmax", lambda: F.log_softmax(X, -1)),
    ("log_softmax", lambda: X.log_softmax(-1)),
    ("gumbel_softmax", lambda: F.gumbel_softmax(X)),
    ("logsumexp", lambda: torch.logsumexp(X, 1)),
    ("logsumexp", lambda: X.logsumexp(1)),
    ("matmul", lambda: X @ X.t()),
    ("matmul", lambda: torch.matmul(X, X.t())),
    ("matmul", lambda: torch.linalg.matmul(X, X.t())),
    ("matmul", lambda: X.matmul(X.t())),
    ("mm", lambda: X.mm(X.t())),
    ("bmm", lambda: torch.bmm(X[None], X.t()[None])),
    ("addmm", lambda: torch.addmm(torch.zeros(3), X, X.t())),
    ("baddbmm", lambda: torch.baddbmm(torch.zeros(1, 3, 3), X[None], X.t()[None])),
    ("einsum", lambda: torch.einsum("ij,kj->ik", X, X)),
    ("scaled_dot_product_attention", lambda: F.scaled_dot_product_attention(X[None], X[None], X[None])),
    ("layer_norm", lambda: F.layer_norm(X, (4,))),
    ("layer_norm", lambda: torch.layer_norm(X, (4,))),
    ("rms_norm", lambda: F.rms_norm(X, (4,))),
    ("group_norm", lambda: F.group_norm(X, 2)),
    ("batch_norm", lambda: F.batch_norm(X, torch.zeros(4), torch.ones(4))),
    ("instance_norm", lambda: F.instance_norm(IMAGE)),
    ("normalize", lambda: F.normalize(X)),
    ("dropout", lambda: F.dropout(X)),
    ("dropout2d", lambda: F.dropout2d(IMAGE)),
    ("alpha_dropout", lambda: F.alpha_dropout(X, training=True)),
    ("linear", lambda: F.linear(X, X)),
    ("conv1d", lambda: F.conv1d(X[None], torch.ones(1, 3, 2))),
    ("conv2d", lambda: F.conv2d(IMAGE, torch.ones(1, 1, 2, 2))),
    ("conv_transpose2d", lambda: F.conv_transpose2d(IMAGE, torch.ones(1, 1, 2, 2))),
    ("embedding", lambda: F.embedding(torch.tensor([1]), X)),
    ("max_pool2d", lambda: F.max_pool2d(IMAGE, 2)),
    ("max_pool2d", lambda: F.max_pool2d(IMAGE, 2, return_indices=True)),
    ("max_pool2d", lambda: torch.max_pool2d(IMAGE, 2)),
    ("avg_pool2d", lambda: F.avg_pool2d(IMAGE, 2)),
    ("adaptive_avg_pool2d", lambda: F.adaptive_avg_pool2d(IMAGE, 1)),
    ("adaptive_max_pool2d", lambda: F.adaptive_max_pool2d(IMAGE, 1, return_indices=True)),
    ("interpolate", lambda: F.interpolate(IMAGE, scale_factor=2)),
    ("cosine_similarity", lambda: F.cosine_similarity(X, X)),
]


@pytest.mark.parametrize(("name", "call"), CALLS, ids=[f"{i}-{name}" for i, (name, _) in enumerate(CALLS)])
def test_an_operation_has_one_name_however_it_is_spelt(name: str, call: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    expected = call()
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.manual_seed(0)
    seen = seen_of(call)
    assert [shown for shown in seen.names if "." not in shown] == [f"(root):{name}"]
    assert torch.equal(seen[f"(root):{name}"], expected)


def test_every_listed_name_is_known_to_torch() -> None:
    assert set(function_mode._LISTED) == set(OPERATIONS.values())


def test_other_operations_are_not_seen() -> None:
    assert seen_of(lambda: (X + X).view(-1).sum().exp().relu_()).names == ["(root):relu"]


def test_what_torchs_own_modules_call_is_their_activation_and_not_seen_twice() -> None:
    class Linear(nn.Linear):
        pass

    layers = nn.Sequential(
        nn.Linear(4, 4),
        nn.ReLU(),
        nn.LayerNorm(4),
        Linear(4, 4),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    )
    assert seen_of(lambda: layers(X).tanh(), layers=layers).names == ["(root):tanh"]


def test_a_module_that_overrides_a_forward_of_torchs_shows_what_it_calls() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * F.linear(x, self.weight, self.bias)

    layer = Doubled(4, 4)
    assert seen_of(lambda: layer(X), layer=layer).names == ["layer:linear"]


def test_a_softmax_module_shows_its_distributions() -> None:
    softmax = nn.Softmax(dim=-1)
    assert seen_of(lambda: softmax(X), softmax=softmax).names == [
        "softmax:softmax", "softmax:softmax.logits", "softmax:softmax.entropy",
    ]  # fmt: skip


def test_the_functional_activation_of_a_transformer_layer_is_seen() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8)
    names = seen_of(lambda: layer(torch.randn(3, 2, 4)), layer=layer).names
    assert "layer:relu" in names
    assert "layer.self_attn:scaled_dot_product_attention.entropy" in names
    assert not [name for name in names if name.startswith(("layer.linear1", "layer.norm"))]


def test_nothing_is_seen_outside_of_modules() -> None:
    seen = StepContext().attach(model := nn.Linear(4, 4))
    F.cross_entropy(F.relu(model(F.relu(X))), torch.tensor([0, 1, 2]))
    assert seen.names == []


def test_the_innermost_running_module_is_named() -> None:
    inner = Does(F.relu)
    seen = seen_of(lambda x: F.relu(inner(F.tanh(x))), X, inner=inner)
    assert seen.names == ["(root):tanh", "inner:relu", "(root):relu"]


def test_calls_are_numbered_within_each_forward_and_the_last_index_is_shared() -> None:
    def many() -> None:
        for _ in range(MOST_CALLS + 3):
            X.relu()
        X.tanh()

    model = Does(many)
    seen = StepContext().attach(model)
    model()
    expected = ["", *(f"[{n}]" for n in range(1, MOST_CALLS)), *[f"[{MOST_CALLS - 1}]"] * 3]
    assert seen.names == [*(f"(root):relu{index}" for index in expected), "(root):tanh"]
    seen.shown.clear()
    model()
    assert seen.names[0] == "(root):relu"


def test_a_module_that_calls_itself_numbers_each_call_on_its_own() -> None:
    def countdown(n: int) -> None:
        X.relu()
        if n:
            model(n - 1)
        X.relu()

    model = Does(countdown)
    seen = StepContext().attach(model)
    model(1)
    assert seen.names == ["(root):relu", "(root):relu", "(root):relu[1]", "(root):relu[1]"]


def test_of_nested_operations_the_outermost_is_seen() -> None:
    assert [n for n in seen_of(lambda: F.gumbel_softmax(X)).names if "logits" not in n] == ["(root):gumbel_softmax"]
    assert seen_of(lambda: torch.einsum("ij,kj->ik", X, X)).names == ["(root):einsum"]


@pytest.fixture(params=["this_torch", "before_2.13"])
def redispatching(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to run the body of a composite function."""
    if request.param == "before_2.13":
        monkeypatch.setattr(redispatch, "_redispatch", None)


@pytest.mark.usefixtures("redispatching")
def test_operations_inside_a_composite_function_are_seen() -> None:
    attention = nn.MultiheadAttention(4, 2)

    def forward(x: Tensor) -> Tensor:
        weights = (attention.in_proj_weight, attention.in_proj_bias, None, None, False, 0.0)
        projection = (attention.out_proj.weight, attention.out_proj.bias)
        return F.multi_head_attention_forward(x, x, x, 4, 2, *weights, *projection)[0]

    seen = seen_of(forward, torch.randn(3, 2, 4))
    assert {"(root):bmm", "(root):bmm[1]", "(root):softmax", "(root):linear"} < set(seen.names)
    assert seen.names[-1] == "(root):multi_head_attention_forward"
    assert depth() == 0


@pytest.mark.usefixtures("redispatching")
@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_shows_its_attention_and_nothing_else(need_weights: bool) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(3, 5, 8)
    seen = seen_of(lambda: attention(x, x, x, need_weights=need_weights), attention=attention)
    operation = "softmax" if need_weights else "scaled_dot_product_attention"
    assert seen.names == [f"attention:{operation}{part}" for part in ("", ".logits", ".entropy", ".first_token")]
    q, k, _ = (
        to_numpy(F.linear(x, attention.in_proj_weight, attention.in_proj_bias))
        .reshape(3, 5, 3, 2, 4)
        .transpose(2, 0, 3, 1, 4)
    )
    logits = q @ k.swapaxes(-2, -1) / 2
    assert np.isclose(seen[f"attention:{operation}.logits"].max().item(), logits.max(), rtol=1e-5)
    shown = to_numpy(seen[f"attention:{operation}.entropy"]).ravel()
    np.testing.assert_allclose(shown, entropy_of(logits).ravel(), rtol=1e-5)


def test_in_place_operations_are_read_after_they_ran() -> None:
    x = torch.tensor([-1.0, 2.0])
    seen = seen_of(lambda: x.relu_().neg_())
    assert seen["(root):relu"].tolist() == [0.0, 2.0]


def test_a_tuple_shows_its_first_tensor() -> None:
    assert seen_of(lambda: F.max_pool2d(IMAGE, 2, return_indices=True))["(root):max_pool2d"].dtype is torch.float32


# --- Numbers --------------------------------------------------------------------------------------


def softmax_of(logits: Array, axis: int = -1) -> Array:
    with np.errstate(invalid="ignore"):
        weights = np.exp(logits - logits.max(axis, keepdims=True))
    return weights / weights.sum(axis, keepdims=True)


def entropy_of(logits: Array, axis: int = -1) -> Array:
    weights = softmax_of(logits, axis)
    logs = np.log(weights, where=weights > 0, out=np.zeros_like(weights))
    return -np.where(np.isnan(weights), np.nan, weights * logs).sum(axis)


def attention_logits(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    gqa: bool = False,
) -> Array:
    """In float64, straight from the documentation of scaled_dot_product_attention."""
    query, key = to_numpy(q), to_numpy(k)
    if gqa:
        key = np.repeat(key, query.shape[-3] // key.shape[-3], axis=-3)
    logits = query @ key.swapaxes(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        logits = np.where(np.tril(np.ones(logits.shape[-2:], bool)), logits, -np.inf)
    if mask is not None:
        logits = np.where(mask.numpy(), logits, -np.inf) if mask.dtype is torch.bool else logits + to_numpy(mask)
    return logits


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    dim=st.integers(-4, 3),
    spread=st.sampled_from([1e-3, 1.0, 30.0, 1e4]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1000),
)
def test_the_entropy_of_a_softmax(shape: list[int], dim: int, spread: float, dtype: torch.dtype, seed: int) -> None:
    dim = max(-len(shape), min(dim, len(shape) - 1))
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)
    seen = seen_of(lambda: F.softmax(x, dim))
    assert torch.equal(seen["(root):softmax.logits"], x)
    entropy = seen["(root):softmax.entropy"]
    assert entropy.dtype is torch.float32
    np.testing.assert_allclose(to_numpy(entropy), entropy_of(to_numpy(x), dim), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.softmax(x, dim=-1),
        lambda x: F.softmax(x, -1, dtype=torch.float32),
        lambda x: torch.softmax(input=x, dim=-1),
        lambda x: torch.softmax(x, -1),
        lambda x: x.softmax(-1),
        lambda x: x.softmax(dim=2),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_entropy_however_softmax_is_called(call: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    entropy = seen_of(call, x)["(root):softmax.entropy"]
    np.testing.assert_allclose(to_numpy(entropy), entropy_of(to_numpy(x)), rtol=1e-5)


def test_what_is_computed_is_no_part_of_the_graph() -> None:
    attached: dict[str, bool] = {}
    seen = StepContext()
    seen.functional._on_result = lambda path, _index, tensor: attached.update(
        {path.split(":")[1]: tensor.requires_grad}
    )
    q = torch.randn(1, 2, 3, 4, requires_grad=True)
    seen.attach(model := Does(lambda: (F.softmax(q, -1), F.scaled_dot_product_attention(q, q, q))))
    model()
    assert seen.report.errors == 0
    assert attached == {
        "softmax": True,
        "softmax.logits": True,
        "softmax.entropy": False,
        "softmax.first_token": False,
        "scaled_dot_product_attention": True,
        "scaled_dot_product_attention.logits": False,
        "scaled_dot_product_attention.entropy": False,
        "scaled_dot_product_attention.first_token": False,
    }


@pytest.mark.filterwarnings("ignore:Implicit dimension")
@pytest.mark.parametrize(("shape", "dim"), [((3,), 0), ((2, 3), 1), ((2, 3, 4), 0), ((2, 3, 4, 5), 1)])
def test_the_dimension_softmax_takes_when_none_is_given(shape: tuple[int, ...], dim: int) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    entropy = seen_of(lambda: F.softmax(x))["(root):softmax.entropy"]
    np.testing.assert_allclose(to_numpy(entropy), entropy_of(to_numpy(x), dim), rtol=1e-5)


def test_entropies_at_the_edges() -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[0.0, -inf, -inf, 0.0], [-inf] * 4, [nan] * 4, [1000.0, 0.0, 0.0, 0.0], [1.0] * 4])
    entropy = seen_of(lambda: F.softmax(x, -1))["(root):softmax.entropy"]
    np.testing.assert_allclose(to_numpy(entropy), [np.log(2), np.nan, np.nan, 0, np.log(4)], rtol=1e-6, atol=1e-12)


def test_softmax_of_integers_or_into_its_input_shows_the_result_alone() -> None:
    assert seen_of(lambda: F.softmax(torch.arange(4), 0, dtype=torch.float32)).names == ["(root):softmax"]
    x = X.clone()
    assert seen_of(lambda: torch.softmax(x, 1, out=x)).names == ["(root):softmax"]


def check_attention(seen: StepContext, logits: Array, tolerance: float = 1e-5) -> None:
    name = "(root):scaled_dot_product_attention"
    largest, entropy = seen[f"{name}.logits"], seen[f"{name}.entropy"]
    assert largest.dtype is entropy.dtype is torch.float32
    np.testing.assert_allclose(to_numpy(largest), logits.max(-1), rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(to_numpy(entropy), entropy_of(logits), rtol=tolerance, atol=tolerance)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_largest_logit_and_entropy_of_attention(data: st.DataObject) -> None:
    draw = data.draw
    batch, heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rows, keys, width = draw(st.integers(1, 7)), draw(st.integers(1, 7)), draw(st.integers(1, 4))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    torch.manual_seed(draw(st.integers(0, 1000)))
    q = torch.randn(batch, heads * groups, rows, width).mul(3).to(dtype).requires_grad_()
    k, v = (torch.randn(batch, keys, heads, width).to(dtype).transpose(1, 2) for _ in range(2))
    shape = draw(
        st.sampled_from(
            [(rows, keys), (1, keys), (batch, 1, rows, keys), (1, heads * groups, rows, keys), (batch, 1, 1, keys)]
        )
    )
    masks = {
        "none": None,
        "bool": torch.rand(shape) > 0.3,
        "float": torch.randn(shape).to(dtype),
        "inf": torch.zeros(shape, dtype=dtype).masked_fill_(torch.rand(shape) > 0.8, float("-inf")),
    }
    mask = masks[draw(st.sampled_from(sorted(masks)))]
    causal = mask is None and draw(st.booleans())
    scale = draw(st.sampled_from([None, 0.3, 1.0]))
    patch = pytest.MonkeyPatch()
    patch.setattr(attention, "MOST_LOGITS", draw(st.sampled_from([1, 5, 20, 64, 1 << 22])))
    try:
        seen = seen_of(
            lambda: F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=groups > 1
            )
        )
    finally:
        patch.undo()
    check_attention(seen, attention_logits(q, k, mask, causal, scale, gqa=groups > 1), 3e-5)


@pytest.mark.parametrize("most", [7, 14, 100])
def test_causal_attention_in_parts(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(attention, "MOST_LOGITS", most)
    q, k = torch.randn(2, 3, 7, 2), torch.randn(2, 3, 7, 2)
    seen = seen_of(lambda: F.scaled_dot_product_attention(q, k, k, is_causal=True))
    check_attention(seen, attention_logits(q, k, causal=True))


def test_attention_in_half_precision_is_looked_at_in_single() -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(2, 2, 6, 16, dtype=torch.bfloat16) * 4 for _ in range(2))
    check_attention(seen_of(lambda: F.scaled_dot_product_attention(q, k, k)), attention_logits(q, k))


def test_autocast_does_not_reach_what_is_computed_for_attention() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 6, 16), torch.randn(2, 2, 6, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen = seen_of(lambda: F.scaled_dot_product_attention(q, k, k))
    check_attention(seen, attention_logits(q, k))


def test_attention_with_positional_arguments_and_other_ranks() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(5, 4), torch.randn(5, 4)
    check_attention(
        seen_of(lambda: F.scaled_dot_product_attention(q, k, k, None, 0.0, True)), attention_logits(q, k, causal=True)
    )
    q, k = torch.randn(2, 2, 3, 5, 4), torch.randn(2, 2, 3, 6, 4)
    check_attention(seen_of(lambda: F.scaled_dot_product_attention(query=q, key=k, value=k)), attention_logits(q, k))


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_query_that_may_look_at_nothing() -> None:
    q = torch.randn(1, 1, 2, 4)
    mask = torch.tensor([[True, False], [False, False]])
    seen = seen_of(lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=mask))
    largest, entropy = (seen[f"(root):scaled_dot_product_attention.{part}"].ravel() for part in ("logits", "entropy"))
    assert torch.isfinite(largest[0])
    assert largest[1] == float("-inf")
    assert entropy[0] == 0
    assert entropy[1].isnan()


def test_attention_over_nothing_shows_the_result_alone() -> None:
    q, k = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 0, 4)
    assert len(seen_of(lambda: F.scaled_dot_product_attention(q, k, k)).names) == 1


def test_a_mask_that_only_stands_for_one_is_not_misread() -> None:
    q = torch.randn(1, 1, 3, 4)
    seen = seen_of(lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=causal_lower_right(3, 3)))
    assert seen.names == ["(root):scaled_dot_product_attention"]
    assert "CausalBias" in seen.report.unseen["(root):scaled_dot_product_attention.entropy"]


class Largest(TorchDispatchMode):
    """The largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func.is_view:
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("rows", "keys", "width"), [(50, 60, 8), (9, 3, 64), (3, 9, 64)])
@pytest.mark.parametrize("most", [700, 5_000, 100_000])
def test_no_temporary_is_larger_than_allowed(
    causal: bool, rows: int, keys: int, width: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k = (torch.randn(2, h, n, width, dtype=torch.bfloat16) for h, n in ((4, rows), (2, keys)))
    monkeypatch.setattr(attention, "MOST_LOGITS", most)
    largest = Largest()
    with largest, torch.no_grad():
        for _ in attention.inside_attention((q, k, k), {"is_causal": causal, "enable_gqa": True}, q):
            pass
    assert 0 < largest.elements <= most


# --- Real models ----------------------------------------------------------------------------------


def gpt2(attention: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, attn_implementation=attention,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def bert(attention: str) -> nn.Module:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    return BertModel(
        BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            attn_implementation=attention, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


@pytest.mark.parametrize("build", [gpt2, bert])
def test_attention_of_transformers_is_the_same_by_both_implementations(build: Callable[[str], nn.Module]) -> None:
    tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(1))
    padding = torch.ones_like(tokens)
    padding[1, 6:] = 0
    shown = {}
    for implementation, operation in (("eager", "softmax"), ("sdpa", "scaled_dot_product_attention")):
        model = build(implementation)
        seen = StepContext().attach(model)
        output = model(tokens, attention_mask=padding, output_attentions=implementation == "eager")
        sites = [name for name in seen.names if name.endswith(f":{operation}.entropy")]
        assert len(sites) == 2, seen.names
        assert len({site.split(":")[0] for site in sites}) == 2
        shown[operation] = [(to_numpy(seen[s]), seen[s.replace("entropy", "logits")].max().item()) for s in sites]
        if implementation == "eager":
            for (entropy, _), weights in zip(shown[operation], output.attentions, strict=True):
                np.testing.assert_allclose(
                    entropy, entropy_of(np.log(np.maximum(to_numpy(weights), 1e-300))), rtol=1e-4, atol=1e-6
                )
    for eager, sdpa in zip(*shown.values(), strict=True):
        np.testing.assert_allclose(eager[0], sdpa[0], rtol=1e-4, atol=1e-6)
        assert np.isclose(eager[1], sdpa[1], rtol=1e-4)


class Attends(nn.Module):
    """Every way to attend there is, with dropout, an in-place activation and a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.block = nn.Sequential(nn.Linear(8, 8), Does(F.relu), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x, x, x, need_weights=True)[0]
        x = self.layer(x)
        x = F.dropout(F.relu(x + 0, inplace=True), 0.1, self.training)
        x = x + F.scaled_dot_product_attention(x, x, x, dropout_p=0.1, is_causal=True)
        return checkpoint(self.block, x, use_reentrant=False) + torch.softmax(x @ x.mT, -1) @ x


def _square(model: nn.Module, batch: zoo.Batch) -> Tensor:
    return model(*batch).square().mean()


NEUTRAL = [
    zoo.Case("attends", Attends, lambda: (torch.randn(3, 5, 8),), _square),
    zoo.Case("cnn", Cnn, lambda: (torch.randn(2, 1, 8, 8),), _square),
    *[zoo.ZOO[name] for name in ("gpt2_checkpointed", "checkpointed", "checkpointed_reentrant")],
]


@pytest.mark.usefixtures("redispatching")
@pytest.mark.parametrize("case", NEUTRAL, ids=lambda case: case.name)
def test_training_is_the_same_to_the_last_bit(case: zoo.Case) -> None:
    seen = StepContext()
    watched = zoo.train(case, 3, before=seen.attach)
    assert watched == zoo.train(case, 3)
    assert seen.report.errors == 0, seen.report.messages
    assert depth() == 0
    assert seen.names or case.name.startswith("checkpointed")


@pytest.mark.usefixtures("redispatching")
def test_the_graph_has_as_many_nodes_and_results_are_the_operations_own() -> None:
    counts = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = Attends()
        if watched:
            StepContext().attach(model)
        counts.append(zoo.count_graph_nodes(_square(model, (torch.randn(3, 5, 8),))))
    assert counts[0] == counts[1]
    results: list[Tensor] = []
    seen = StepContext()
    seen.functional._on_result = lambda _path, _index, tensor: results.append(tensor)
    model = Does(F.relu)
    seen.attach(model)
    assert model(X) is results[0]


class Dispatched(TorchDispatchMode):
    """A user's mode that writes down what reaches the device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_fused_path_of_evaluation_is_left_alone() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    calls = []
    for watched in (False, True):
        model = Does(lambda: attention(x, x, x)[0], attention=attention)
        if watched:
            StepContext().attach(model)
        with torch.no_grad(), Dispatched() as dispatched:
            model()
        calls.append(dispatched.calls)
    assert calls[0] == calls[1]
    assert "aten._native_multi_head_attention.default" in calls[1]


def test_modules_inside_a_fused_module_do_not_put_the_mode_on() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16).eval()
    depths: list[int] = []
    StepContext().attach(layer)
    layer.linear1.register_forward_pre_hook(lambda *_: depths.append(depth()))
    layer(torch.randn(2, 3, 8))
    assert depths == [0]


def test_after_a_fused_module_operations_are_seen_again() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    seen = seen_of(lambda: (F.relu(x), attention(x, x, x), F.relu(x)), attention=attention)
    assert seen.names == ["(root):relu", "(root):relu[1]"]


# --- Always off again -----------------------------------------------------------------------------


def fails(problem: type[BaseException]) -> nn.Module:
    def fail(x: Tensor) -> Tensor:
        x.relu()
        raise problem

    inner = Does(fail)
    return Does(lambda x: inner(x.tanh()), inner=inner)


def test_an_exception_leaves_no_mode() -> None:
    seen = StepContext().attach(model := fails(LookupError))
    for _ in range(2):
        with pytest.raises(LookupError):
            model(X)
        assert depth() == 0
    assert seen.names == ["(root):tanh", "inner:relu"] * 2


def test_an_operation_that_fails_raises_its_own_error_and_is_not_seen() -> None:
    model = Does(lambda: X @ X)
    seen = StepContext().attach(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model()
    assert seen.names == []
    assert seen.report.errors == 0
    assert depth() == 0


@pytest.mark.parametrize("problem", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_after_an_interrupt_nothing_more_is_seen_and_the_next_call_cleans_up(problem: type[BaseException]) -> None:
    seen = StepContext().attach(model := fails(problem))
    with pytest.raises(problem):
        model(X)
    seen.shown.clear()
    F.relu(X)
    assert seen.names == []
    sound = Does(F.relu)
    seen.attach(sound)
    sound(X)
    assert seen.names == ["(root):relu"]
    assert depth() == 0


def test_abandon_cleans_up_after_an_interrupt() -> None:
    seen = StepContext().attach(model := fails(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model(X)
    seen.functional.abandon()
    assert depth() == 0


def test_interrupts_again_and_again_leave_one_mode_at_most() -> None:
    seen = StepContext().attach(model := fails(KeyboardInterrupt))
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            model(X)
        assert depth() <= 1
        assert len(seen.functional._mode().calls) == 2
    seen.functional.abandon()


def test_an_interrupt_that_the_model_itself_catches_does_not_confuse_names() -> None:
    inner = fails(KeyboardInterrupt)

    def forward(x: Tensor) -> Tensor:
        with pytest.raises(KeyboardInterrupt):
            inner(x)
        return x.relu()

    seen = seen_of(forward, X, inner=inner)
    assert seen.names == ["inner:tanh", "inner.inner:relu", "(root):relu"]
    assert depth() == 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recompute_that_stops_early_leaves_no_mode(reentrant: bool) -> None:
    block = nn.Sequential(nn.Linear(4, 4), Does(F.relu), nn.Linear(4, 4), Does(torch.tanh))
    model = Does(lambda x: checkpoint(block, x, use_reentrant=reentrant), block=block)
    seen = StepContext().attach(model)
    loss = model(X.clone().requires_grad_()).sum()
    assert depth() == 0
    loss.backward()
    assert depth() == 0
    assert seen.names[:2] == ["block.1:relu", "block.3:tanh"]


def test_missing_and_surplus_calls_are_tolerated() -> None:
    seen = StepContext()
    enter, leave = seen.functional.enter_module, seen.functional.leave_module
    module = Does(F.relu)
    leave("nobody")
    enter("a", module)
    enter("a.b", module)
    enter("a.b.c", module)
    leave("a.b")
    X.relu()
    leave("a.b.c")
    assert depth() == 1
    leave("a")
    leave("a")
    assert depth() == 0
    assert seen.names == ["a:relu"]


def test_a_generator_runs_outside_of_its_module() -> None:
    inner = Does(torch.tanh)

    def forward(x: Tensor) -> Iterator[Tensor]:
        yield x.relu()
        yield inner(x)
        yield x.relu()

    model = Does(forward, inner=inner)
    seen = StepContext().attach(model)
    for _ in model(X):
        assert depth() == 0
    assert seen.names == ["inner:tanh"]


def test_each_thread_has_its_own_modules() -> None:
    barrier, depths = threading.Barrier(3), []

    def forward(n: int) -> None:
        for _ in range(n):
            barrier.wait(10)
            X.relu()
        depths.append(depth())

    model = Does(forward)
    seen = StepContext().attach(model)

    def run() -> None:
        model(5)
        depths.append(depth())

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(depths) == [0, 0, 0, 1, 1, 1]
    assert sorted(seen.names) == sorted(["(root):relu", *(f"(root):relu[{n}]" for n in range(1, 5))] * 3)
    assert depth() == 0


def test_abandon_reaches_other_threads() -> None:
    entered, abandoned, depths = threading.Event(), threading.Event(), []

    def forward() -> None:
        X.relu()
        entered.set()
        abandoned.wait(10)
        X.tanh()

    model = Does(forward)
    seen = StepContext().attach(model)
    thread = threading.Thread(target=lambda: (model(), depths.append(depth())))
    thread.start()
    entered.wait(10)
    seen.functional.abandon()
    abandoned.set()
    thread.join()
    assert seen.names == ["(root):relu"]
    assert depths == [0]


def test_abandon_in_the_middle_of_a_forward() -> None:
    seen = StepContext()
    model = Does(lambda: (X.relu(), seen.functional.abandon(), depths.append(depth()), X.relu()))
    depths: list[int] = []
    seen.attach(model)
    model()
    assert seen.names == ["(root):relu"]
    assert depths == [0]


def test_abandon_inside_an_operation_takes_the_mode_off_at_the_next_module() -> None:
    seen = StepContext()

    def forward() -> None:
        x = X.clone().requires_grad_()
        x.register_hook(lambda _gradient: seen.functional.abandon())
        x.sum().backward()
        X.relu()

    seen.attach(model := Does(forward))
    model()
    assert seen.names == []
    assert depth() == 0


def test_a_backward_with_a_recompute_inside_a_forward() -> None:
    block = nn.Sequential(nn.Linear(4, 4), Does(F.relu), nn.MultiheadAttention(4, 2).eval())

    def forward(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y = checkpoint(lambda x: block[1](block[0](x)), x, use_reentrant=False)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        return gradient.tanh()

    seen = seen_of(forward, X, block=block)
    assert seen.names == ["block.1:relu", "(root):tanh"]
    assert depth() == 0


@pytest.mark.parametrize("problem", [LookupError, KeyboardInterrupt])
def test_no_tensor_is_kept_alive(problem: type[BaseException]) -> None:
    seen = StepContext()
    seen.functional._on_result = lambda *_: None
    model = fails(problem)
    seen.attach(model)

    def run() -> weakref.ref[Tensor]:
        x = X.clone()
        with pytest.raises(problem):
            model(x)
        return weakref.ref(x)

    kept = run()
    gc.collect()
    assert kept() is None
    seen.functional.abandon()


# --- Beside other modes ---------------------------------------------------------------------------


class Spy(TorchFunctionMode):
    """A user's mode that writes down every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def _attend(x: Tensor) -> Tensor:
    x = F.relu(x) @ x.mT
    return F.scaled_dot_product_attention(x, x, x.softmax(-1)).relu_()


def test_a_mode_around_the_model_sees_the_same_calls_as_ever() -> None:
    calls = []
    for watched in (False, True):
        model = Does(_attend)
        seen = StepContext()
        if watched:
            seen.attach(model)
        with Spy() as spy:
            model(torch.ones(1, 3, 3))
            assert depth() == 1
        calls.append(spy.calls)
    assert calls[0] == calls[1]
    assert [name for name in seen.names if "." not in name] == [
        "(root):relu", "(root):matmul", "(root):softmax", "(root):scaled_dot_product_attention", "(root):relu[1]",
    ]  # fmt: skip


def test_a_mode_inside_the_model_sees_the_same_calls_as_ever() -> None:
    calls = []
    for watched in (False, True):
        spy = Spy()

        def forward(x: Tensor) -> Tensor:
            with spy:
                x = _attend(x)
            assert depth() == watched
            return F.tanh(x)

        model = Does(forward)
        seen = StepContext()
        if watched:
            seen.attach(model)
        model(torch.ones(1, 3, 3))
        calls.append(spy.calls)
    assert calls[0] == calls[1]
    assert seen.names[0] == "(root):relu"
    assert seen.names[-1] == "(root):tanh"


def test_a_mode_that_the_model_leaves_on_stays_on_and_ours_does_not() -> None:
    spy = Spy()
    model = Does(lambda: (X.relu(), spy.__enter__(), X.tanh()))
    seen = StepContext().attach(model)
    model()
    assert _get_current_function_mode_stack() == [spy]
    spy.__exit__(None, None, None)
    assert seen.names == ["(root):relu", "(root):tanh"]


def test_a_model_that_takes_the_wrong_mode_off_does_no_lasting_harm() -> None:
    spy = Spy()
    model = Does(lambda: (X.relu(), torch._C._pop_torch_function_stack()))
    seen = StepContext().attach(model)
    with spy:
        model()
        assert _get_current_function_mode_stack() == [spy]
        seen.shown.clear()
    seen.attach(sound := Does(F.relu))
    sound(X)
    assert seen.names == ["(root):relu"]


def test_a_default_device_may_be_set_around_and_inside() -> None:
    def forward() -> Tensor:
        with torch.device("meta"):
            assert torch.zeros(1).is_meta
        torch.set_default_device("cpu")
        return X.relu()

    model = Does(forward)
    seen = StepContext().attach(model)
    try:
        model()
        assert depth() == 1
    finally:
        torch.set_default_device(None)
    assert seen.names == ["(root):relu"]
    assert depth() == 0


@pytest.mark.usefixtures("redispatching")
def test_attention_is_seen_on_a_default_device_too() -> None:
    attention = nn.MultiheadAttention(4, 2)
    with torch.device("cpu"):
        seen = seen_of(lambda: attention(X, X, X), attention=attention)
    assert "attention:softmax.entropy" in seen.names


@pytest.mark.usefixtures("redispatching")
def test_a_mode_that_changes_a_composite_function_is_asked_as_ever() -> None:
    class Replaced(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.multi_head_attention_forward:
                return X, None
            return func(*args, **(kwargs or {}))

    class Replacing(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.multi_head_attention_forward:
                return X, None
            return super().__torch_function__(func, types, args, kwargs)

    results = []
    attention = nn.MultiheadAttention(4, 2)
    model = Does(lambda x: results.append(attention(x, x, x)[0]), attention=attention)
    StepContext().attach(model)
    with Replaced():
        model(X)
    model(X.as_subclass(Replacing))
    assert [result is X for result in results] == [True, True]


@pytest.mark.usefixtures("redispatching")
def test_two_on_one_model() -> None:
    model = Does(
        lambda: (X.relu(), attention(X[None], X[None], X[None])), attention=(attention := nn.MultiheadAttention(4, 2))
    )
    first, second = StepContext().attach(model), StepContext().attach(model)
    model()
    assert first.names == second.names
    assert len(first.names) == 5  # relu; softmax with its logits, entropies and weights of the first key
    assert depth() == 0


# --- Never in the way -----------------------------------------------------------------------------


def test_an_error_of_ours_is_counted_and_training_goes_on() -> None:
    def broken(path: str, _index: str, _tensor: Tensor) -> None:
        if path.endswith("relu"):
            raise RuntimeError("ours")
        shown.append(path)

    shown: list[str] = []
    report = Report()
    seen = StepContext()
    seen.functional = FunctionalObserver(broken, lambda *_: None, lambda *_: None, report)
    seen.attach(model := Does(lambda x: x.relu().tanh().relu()))
    assert torch.equal(model(X), X.relu().tanh())
    assert report.errors == 1  # a site that failed is not asked again
    assert "(root):relu" in report.messages[0]
    assert shown == ["(root):tanh"]


def test_tensors_without_data_pass_through() -> None:
    model = Does(_attend)
    seen = StepContext().attach(model)
    model(torch.ones(1, 3, 3, device="meta"))
    with FakeTensorMode():
        model(torch.ones(1, 3, 3))
    torch.vmap(model)(torch.ones(2, 1, 3, 3))
    try:
        torch.func.grad(lambda x: _attend(x).sum())(torch.ones(1, 3, 3))
    except RuntimeError:  # from torch 2.15 on: flash attention keeps the output that is modified in place
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.func.grad(lambda x: model(x).sum())(torch.ones(1, 3, 3))
    else:
        torch.func.grad(lambda x: model(x).sum())(torch.ones(1, 3, 3))
    assert seen.names == []
    assert seen.report.errors == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_tracing_and_export_see_a_plain_model() -> None:
    x = torch.ones(1, 3, 3)
    plain, watched = Does(_attend), Does(_attend)
    seen = StepContext().attach(watched)
    traced = [torch.jit.trace(model, (x,), check_trace=False).graph for model in (plain, watched)]
    assert len(list(traced[0].nodes())) == len(list(traced[1].nodes()))
    exported = [[node.target for node in torch.export.export(m, (x,)).graph.nodes] for m in (plain, watched)]
    assert exported[0] == exported[1]
    assert seen.names == []
    assert depth() == 0


def test_a_compiled_part_of_a_model_compiles_and_shows_nothing() -> None:
    torch.compiler.reset()
    compiled = torch.compile(_attend, backend="aot_eager", fullgraph=True)
    x = torch.rand(1, 3, 3)
    seen = seen_of(lambda: (x.tanh(), compiled(x), compiled(x), x.tanh()))
    assert seen.names == ["(root):tanh", "(root):tanh[1]"]
    assert torch.equal(compiled(x), _attend(x))


def test_nothing_waits_for_the_device() -> None:
    host = torch.randn(2, 4, 5, 8)
    x = fake_device.put(host)
    mask = fake_device.put(torch.rand(5, 5) > 0.5)

    def forward() -> None:
        F.scaled_dot_product_attention(x, x, x, is_causal=True)
        F.scaled_dot_product_attention(x, x[:, :2], x[:, :2], attn_mask=mask, enable_gqa=True)
        F.softmax(x, -1)

    logs = []
    for watched in (False, True):
        model = Does(forward)
        seen = StepContext()
        if watched:
            seen.attach(model)
        with fake_device.Log() as log:
            model()
        logs.append((log.copies, log.syncs))
    assert seen.report.errors == 0, seen.report.messages
    assert logs[0] == logs[1]
    assert len(seen.names) == 12  # each result with its logits, entropies and weights of the first key
    np.testing.assert_allclose(
        to_numpy(seen["(root):scaled_dot_product_attention.logits"]),
        attention_logits(host, host, causal=True).max(-1),
        rtol=1e-5,
    )


def test_a_frame_is_a_modules_call_only_if_it_is_of_that_module() -> None:
    """The address of a call that was interrupted may be that of another module's call later."""
    import sys
    import weakref

    from tbhooks.capture.functional.function_mode import MODULE_CALL, is_call

    found = []

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            frame: Any = sys._getframe()
            while frame.f_code is not MODULE_CALL:
                frame = frame.f_back
            found.append(is_call(frame, id(frame), weakref.ref(self)))
            found.append(is_call(frame, id(frame), weakref.ref(other)))
            found.append(is_call(sys._getframe(), id(sys._getframe()), weakref.ref(self)))
            return x

    other = nn.Linear(1, 1)
    Looks()(torch.ones(1))
    assert found == [True, False, False]
