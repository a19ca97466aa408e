"""One zoo of awkward models, and one way to train any of them.

Each `Case` isolates one thing that models do and that hooks tend to trip over. `train` returns raw
bytes, so that two runs can be compared with ``==``: equal means equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import tbhooks

__all__ = ["ZOO", "Case", "Gan", "Trace", "count_graph_nodes", "gan_step", "hook_count", "moved", "train"]

Batch = tuple[Any, ...]
OptimizerFactory = Callable[[Iterable[Parameter]], Optimizer]

VOCABULARY = 50


def adamw(parameters: Iterable[Parameter]) -> Optimizer:
    return AdamW(parameters, lr=1e-3)


def sgd(parameters: Iterable[Parameter]) -> Optimizer:
    return SGD(parameters, lr=1e-2)


@dataclass(frozen=True)
class Case:
    """A model, its data and its loss; all random numbers come from torch's global generator."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    optimizer: OptimizerFactory = adamw


@dataclass
class Trace:
    """Everything a training run leaves behind, as raw bytes."""

    losses: list[bytes]
    parameters: dict[str, bytes]
    gradients: dict[str, bytes]
    buffers: dict[str, bytes]
    optimizer_state: bytes
    rng: bytes


def train(
    case: Case,
    steps: int = 4,
    *,
    seed: int = 0,
    optimizer: OptimizerFactory | None = None,
    before: Callable[[nn.Module], Any] | None = None,
    each_step: Callable[[int, Tensor], None] | None = None,
) -> Trace:
    """Train a case from scratch.

    ``before`` gets the model once, after the optimizer was built. ``each_step`` gets the step's
    number and loss, after the optimizer's step and before gradients are cleared.
    """
    torch.manual_seed(seed)
    model = case.build()
    stepper = (optimizer or case.optimizer)(model.parameters())
    # Kept until the run is over: what it returns may stop working once collected.
    kept = before(model) if before is not None else None
    losses: list[bytes] = []
    gradients: dict[str, bytes] = {}
    for step in range(steps):
        stepper.zero_grad()
        loss = case.loss(model, case.batch())
        loss.backward()
        losses.append(raw(loss))
        gradients = {name: raw(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        stepper.step()
        if each_step is not None:
            each_step(step, loss)
    trace = Trace(
        losses=losses,
        parameters={name: raw(parameter) for name, parameter in model.named_parameters()},
        gradients=gradients,
        buffers={name: raw(buffer) for name, buffer in model.named_buffers()},
        optimizer_state=b"".join(_flat_bytes(stepper.state_dict())),
        rng=raw(torch.get_rng_state()),
    )
    del kept
    return trace


def plain_loop(
    case: Case, steps: int, before: Callable[[nn.Module], Any], each_step: Callable[[int, Tensor], None]
) -> None:
    """Trains and keeps nothing: unlike `train`, which copies tensors to keep their bytes."""
    torch.manual_seed(0)
    model = case.build()
    optimizer = case.optimizer(model.parameters())
    before(model)
    for step in range(steps):
        optimizer.zero_grad()
        loss = case.loss(model, case.batch())
        loss.backward()
        optimizer.step()
        each_step(step, loss)


def copies_on_device(case: Case, begin: Callable[[nn.Module], tbhooks.Watch], steps: int = 5) -> list[int]:
    """Trains on the simulated device with a watch that `begin` starts, and closes it.

    Returns how many copies to the host there were after each step; a wait for the device fails.
    """
    from tests.support import fake_device  # it registers a backend, which not every process with a zoo should have

    watches: list[tuple[tbhooks.Watch, nn.Module]] = []
    counts: list[int] = []
    with fake_device.Log() as record:
        on_device = moved(case, fake_device.to_device, fake_device.put)
        plain_loop(
            on_device, steps, lambda model: watches.append((begin(model), model)),
            lambda *_: counts.append(len(record.copies)),
        )  # fmt: skip
        assert record.syncs == 0
    watches[0][0].close()
    return counts


def raw(tensor: Tensor) -> bytes:
    """The bytes of a tensor's elements; of indices and values if it is sparse."""
    tensor = tensor.detach().cpu()
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return raw(tensor.indices()) + raw(tensor.values())
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _flat_bytes(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        yield raw(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield repr(key).encode()
            yield from _flat_bytes(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _flat_bytes(item)
    else:
        yield repr(value).encode()


def moved(case: Case, model: Callable[[nn.Module], nn.Module], tensor: Callable[[Tensor], Tensor]) -> Case:
    """The same case on another device: ``model`` and ``tensor`` say how to put things there."""
    return replace(
        case,
        build=lambda: model(case.build()),
        batch=lambda: tree_map_only(Tensor, tensor, case.batch()),
    )


def count_graph_nodes(loss: Tensor) -> int:
    """Number of autograd nodes that ``loss.backward()`` would visit."""
    seen: set[Any] = set()
    pending = [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending.extend(following for following, _ in node.next_functions)
    return len(seen)


def hook_count(model: nn.Module) -> int:
    """Number of hooks on all modules and parameters of a model."""
    module_hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    tensor_hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    on_modules = sum(len(getattr(module, name)) for module in model.modules() for name in module_hooks)
    on_parameters = sum(len(getattr(p, name) or ()) for p in model.parameters() for name in tensor_hooks)
    return on_modules + on_parameters


# --- Batches and losses ---------------------------------------------------------------------------


def _vectors() -> Batch:
    return (torch.randn(6, 8),)


def _images() -> Batch:
    return torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))


def _sequences() -> Batch:
    return (torch.randn(3, 5, 8),)


def _tokens() -> Batch:
    return (torch.randint(0, VOCABULARY, (2, 8)),)


def _square(model: nn.Module, batch: Batch) -> Tensor:
    return model(*batch).square().mean()


def _classify(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def _next_token(model: nn.Module, batch: Batch) -> Tensor:
    (tokens,) = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


# --- Plain torch models ---------------------------------------------------------------------------


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def _norm_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.2),
        nn.Conv2d(6, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def _inplace_relu() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 6, 3, stride=2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(54, 16),
        nn.ReLU(inplace=True),
        nn.Linear(16, 5),
    )


def _flatten_inplace() -> nn.Module:
    # The view that Flatten returns is overwritten before its gradient could be seen.
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(144, 5))


class _BaseOverwritten(nn.Module):
    """The base of a module's output is changed in place after the module has returned the view."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(8, 16)
        self.halve = nn.Unflatten(1, (2, 8))

    def forward(self, x: Tensor) -> Tensor:
        base = self.widen(x)
        view = self.halve(base)
        base.mul_(2.0)
        return view


class _Shared(nn.Module):
    """One module called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        return x


class _TwoNames(nn.Module):
    """Module objects that are each known under two names, one of them working in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(8, 8)
        self.first_activation = self.second_activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first_activation(self.first(x))
        return self.second_activation(self.second(x))


class _Tied(nn.Module):
    """Input and output embeddings share one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


class _Lstm(nn.Module):
    """A nested tuple as output, part of it unused."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        output, (_hidden, _cell) = self.lstm(x)
        return self.head(output)


class _GruLoop(nn.Module):
    """A cell called once per time step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 12)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 12)
        for moment in x.unbind(1):
            state = self.cell(moment, state)
        return self.head(state)


def _multihead() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)


# --- Awkward outputs ------------------------------------------------------------------------------


@dataclass
class Halves:
    """A plain dataclass, which pytree does not look into."""

    left: Tensor
    right: Tensor
    note: str = ""


class _OddOutput(nn.Module):
    """A linear layer inside a module that returns whatever ``shape`` makes of the layer's output."""

    def __init__(self, shape: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.shape = shape

    def forward(self, x: Tensor) -> Any:
        return self.shape(self.layer(x))


class _Around(nn.Module):
    """Linear layers around an `_OddOutput`; ``pick`` makes one tensor of the odd output again."""

    def __init__(self, shape: Callable[[Tensor], Any], pick: Callable[[Any], Tensor], picked_width: int = 8) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.odd = _OddOutput(shape)
        self.after = nn.Linear(picked_width, 4)
        self.pick = pick

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.pick(self.odd(self.before(x))))


def _dict_output() -> nn.Module:
    return _Around(lambda x: {"a": x, "deep": {"b": x.sigmoid()}}, lambda out: out["a"] * out["deep"]["b"])


def _dataclass_output() -> nn.Module:
    return _Around(lambda x: Halves(x, x.tanh(), note="text"), lambda out: out.left + out.right)


def _list_and_none_output() -> nn.Module:
    return _Around(lambda x: [x, None, (x.exp(), 3)], lambda out: out[0] + out[2][0])


def _chunk_unused() -> nn.Module:
    return _Around(lambda x: x.chunk(2, dim=-1), lambda out: out[0], picked_width=4)


def _int_and_bool_outputs() -> nn.Module:
    return _Around(lambda x: (x, x.argmax(-1), x > 0), lambda out: out[0] * out[2] + out[1].unsqueeze(-1))


def _complex_output() -> nn.Module:
    return _Around(torch.fft.rfft, lambda out: out.abs(), picked_width=5)


def _empty_output() -> nn.Module:
    return _Around(lambda x: (x, x[:0]), lambda out: out[0] + out[1].sum())


def _scalar_output() -> nn.Module:
    return _Around(lambda x: (x, x.mean()), lambda out: out[0] - out[1])


def _non_finite_output() -> nn.Module:
    return _Around(lambda x: (x, x.detach() / 0.0, x.detach() * torch.nan), lambda out: out[0])


class _KeywordsOnly(nn.Module):
    """A child that has no positional arguments at all."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, *, values: Tensor, scale: float) -> Tensor:
            return self.layer(input=values) * scale

    def __init__(self) -> None:
        super().__init__()
        self.scaled = self.Scaled()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.scaled(values=x, scale=0.5))


def _identity_dropout() -> nn.Module:
    # Each of the three in the middle returns the very object it was given.
    passive = nn.Sequential(nn.Identity(), nn.Dropout(0.0), nn.Dropout(0.5).eval())
    return nn.Sequential(nn.Identity(), nn.Linear(8, 8), passive, nn.Linear(8, 4))


class _ReturnsParameter(nn.Module):
    """A child that returns its own parameter: a leaf that lives on from step to step."""

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = Parameter(torch.randn(8))

        def forward(self) -> Tensor:
            return self.value

    def __init__(self) -> None:
        super().__init__()
        self.constant = self.Constant()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.constant())


# --- Awkward parameters and calls -----------------------------------------------------------------


def _sparse_embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 8, sparse=True), nn.Linear(8, VOCABULARY))


class _NeverCalled(nn.Module):
    """A child whose weights are used although it is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.called = nn.Linear(8, 8)
        self.functional = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.called(x), self.functional.weight, self.functional.bias)


class _Sometimes(nn.Module):
    """A branch that runs in every other step, and one whose result nobody uses."""

    calls: int = 0

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(8, 8)
        self.sometimes = nn.Linear(8, 8)
        self.in_vain = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.always(x)
        self.in_vain(x)
        return self.sometimes(x) if self.calls % 2 else x


class _NoGradBranch(nn.Module):
    """A target branch that runs without gradients, in one step with a branch that has them."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Linear(8, 4)
        self.target = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.target(x)
        return self.online(x) - target


def _frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    return model


class _Checkpointed(nn.Module):
    """A block that runs twice per step, the second time inside the backward pass."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8))
        self.after = nn.Linear(8, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.block, self.before(x), use_reentrant=self.use_reentrant)
        return self.after(x)


def _channels_last() -> nn.Module:
    return _cnn().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _channels_last_images() -> Batch:
    images, labels = _images()
    return images.to(memory_format=torch.channels_last), labels


def _autocast_loss(model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return _square(model, batch).float()


# --- A pair of models -----------------------------------------------------------------------------


class Gan(nn.Module):
    """Generator and discriminator, to be trained with one optimizer or with two (`gan_step`)."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(inplace=True), nn.Linear(16, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2, inplace=True), nn.Linear(16, 1))

    def forward(self, real: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        return self.discriminator(real), self.discriminator(self.generator(noise))


def _gan_batch() -> Batch:
    return torch.randn(6, 8), torch.randn(6, 4)


def _gan_loss(model: nn.Module, batch: Batch) -> Tensor:
    on_real, on_fake = model(*batch)
    return F.softplus(-on_real).mean() + F.softplus(on_fake).mean()


def gan_step(
    model: Gan, batch: Batch, generator_optimizer: Optimizer, discriminator_optimizer: Optimizer
) -> tuple[Tensor, Tensor]:
    """One training step with two optimizers; returns the losses of discriminator and generator.

    The discriminator is called three times and the generator once.
    """
    real, noise = batch
    fake = model.generator(noise)
    discriminator_optimizer.zero_grad()
    on_real, on_fake = model.discriminator(real), model.discriminator(fake.detach())
    discriminator_loss = F.softplus(-on_real).mean() + F.softplus(on_fake).mean()
    discriminator_loss.backward()
    discriminator_optimizer.step()
    generator_optimizer.zero_grad()
    generator_loss = F.softplus(-model.discriminator(fake)).mean()
    generator_loss.backward()
    generator_optimizer.step()
    return discriminator_loss, generator_loss


# --- Models of the transformers library, imported only when built ---------------------------------

_BERT_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
}
_LLAMA_SIZES = {**_BERT_SIZES, "num_key_value_heads": 1}


def _from_config(model_class: str, config_class: str, **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        config = getattr(transformers, config_class)(**sizes)
        return getattr(transformers, model_class)(config).train()

    return build


def _gpt2_checkpointed() -> nn.Module:
    model: Any = _GPT2()
    model.gradient_checkpointing_enable()
    return model


def _language_loss(model: nn.Module, batch: Batch) -> Tensor:
    (tokens,) = batch
    return model(input_ids=tokens, labels=tokens).loss


def _image_loss(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return model(pixel_values=images, labels=labels).loss


_GPT2 = _from_config(
    "GPT2LMHeadModel",
    "GPT2Config",
    vocab_size=VOCABULARY,
    n_embd=16,
    n_layer=2,
    n_head=2,
    n_positions=16,
    bos_token_id=0,
    eos_token_id=0,
)
_BERT = _from_config("BertForMaskedLM", "BertConfig", **_BERT_SIZES)
_ALBERT = _from_config("AlbertForMaskedLM", "AlbertConfig", embedding_size=8, **_BERT_SIZES)
_LLAMA = _from_config("LlamaForCausalLM", "LlamaConfig", **_LLAMA_SIZES)
_MIXTRAL = _from_config("MixtralForCausalLM", "MixtralConfig", num_local_experts=3, **_LLAMA_SIZES)
_T5 = _from_config(
    "T5ForConditionalGeneration",
    "T5Config",
    vocab_size=VOCABULARY,
    d_model=16,
    d_kv=8,
    d_ff=32,
    num_layers=2,
    num_heads=2,
    decoder_start_token_id=0,
)
_MAMBA = _from_config(
    "MambaForCausalLM",
    "MambaConfig",
    vocab_size=VOCABULARY,
    hidden_size=16,
    state_size=4,
    num_hidden_layers=2,
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=0,
)
_VIT = _from_config(
    "ViTForImageClassification",
    "ViTConfig",
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    image_size=8,
    patch_size=4,
    num_labels=5,
)
_RESNET = _from_config(
    "ResNetForImageClassification",
    "ResNetConfig",
    embedding_size=8,
    hidden_sizes=[8, 16],
    depths=[1, 1],
    layer_type="basic",
    num_labels=5,
)


ZOO: dict[str, Case] = {
    case.name: case
    for case in (
        Case("mlp", _mlp, _vectors, _square),
        Case("cnn", _cnn, _images, _classify),
        Case("inplace_relu", _inplace_relu, _images, _classify),
        Case("flatten_inplace", _flatten_inplace, _images, _classify),
        Case("base_overwritten", _BaseOverwritten, _vectors, _square),
        Case("shared_module", _Shared, _vectors, _square),
        Case("two_names", _TwoNames, _vectors, _square),
        Case("tied_weights", _Tied, _tokens, _next_token),
        Case("lstm", _Lstm, _sequences, _square),
        Case("gru_loop", _GruLoop, _sequences, _square),
        Case("multihead", _multihead, _sequences, _square),
        Case("dict_output", _dict_output, _vectors, _square),
        Case("dataclass_output", _dataclass_output, _vectors, _square),
        Case("list_and_none_output", _list_and_none_output, _vectors, _square),
        Case("kwargs_only", _KeywordsOnly, _vectors, _square),
        Case("identity_dropout", _identity_dropout, _vectors, _square),
        Case("chunk_unused", _chunk_unused, _vectors, _square),
        Case("returns_parameter", _ReturnsParameter, _vectors, _square),
        Case("sparse_embedding", _sparse_embedding, _tokens, _next_token, sgd),
        Case("never_called", _NeverCalled, _vectors, _square),
        Case("sometimes", _Sometimes, _vectors, _square),
        Case("no_grad_branch", _NoGradBranch, _vectors, _square),
        Case("int_and_bool_outputs", _int_and_bool_outputs, _vectors, _square),
        Case("complex_output", _complex_output, _vectors, _square),
        Case("empty_output", _empty_output, _vectors, _square),
        Case("scalar_output", _scalar_output, _vectors, _square),
        Case("non_finite_output", _non_finite_output, _vectors, _square),
        Case("frozen", _frozen, _vectors, _square),
        Case("checkpointed", lambda: _Checkpointed(False), _vectors, _square),
        Case("checkpointed_reentrant", lambda: _Checkpointed(True), _vectors, _square),
        Case("channels_last", _channels_last, _channels_last_images, _classify),
        Case("autocast", _norm_mlp, _vectors, _autocast_loss),
        Case("bfloat16", lambda: _norm_mlp().bfloat16(), lambda: (torch.randn(6, 8).bfloat16(),), _square),
        Case("float64", lambda: _norm_mlp().double(), lambda: (torch.randn(6, 8).double(),), _square),
        Case("gan", Gan, _gan_batch, _gan_loss),
        Case("resnet", _RESNET, lambda: (torch.randn(2, 3, 16, 16), torch.randint(0, 5, (2,))), _image_loss),
        Case("vit", _VIT, _images, _image_loss),
        Case("gpt2", _GPT2, _tokens, _language_loss),
        Case("gpt2_checkpointed", _gpt2_checkpointed, _tokens, _language_loss),
        Case("bert", _BERT, _tokens, _language_loss),
        Case("albert", _ALBERT, _tokens, _language_loss),
        Case("t5", _T5, _tokens, _language_loss),
        Case("llama", _LLAMA, _tokens, _language_loss),
        Case("mamba", _MAMBA, _tokens, _language_loss),
        Case("mixtral", _MIXTRAL, _tokens, _language_loss),
    )
}

# What `make test` takes of the zoo where every case takes long: all small models, and of the large ones a convolutional
# network, a transformer with checkpoints and a mixture of experts. The others are made of the same kinds of modules.
LARGE = ("resnet", "vit", "gpt2", "gpt2_checkpointed", "bert", "albert", "t5", "llama", "mamba", "mixtral")
ALWAYS = frozenset(ZOO) - frozenset(LARGE) | {"resnet", "gpt2_checkpointed", "mixtral"}
# The least of it: a plain model, a convolution, an operation in place, a module called twice, recurrence, attention, an
# output that is no tensor, keyword arguments, a checkpoint, sparse gradients and half precision.
FEW = frozenset({
    "mlp", "cnn", "inplace_relu", "shared_module", "lstm", "multihead", "dict_output", "kwargs_only", "checkpointed",
    "sparse_embedding", "autocast",
})  # fmt: skip
