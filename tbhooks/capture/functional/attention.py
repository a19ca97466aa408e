"""Statistics of attention: its logits, and the entropy of its weights.

Computed beside the operation, detached and in float32 at least, in parts of bounded size. Reads tensors only;
never waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

Inside = Iterator[tuple[str, Tensor]]
Compute = Callable[[tuple[Any, ...], dict[str, Any], Tensor], Inside]

# Logits are computed in parts of at most this many elements, or of one query.
MOST_LOGITS = 1 << 22
# The logarithm of about the smallest normal float32. Below it `exp` takes a hundred times as long on a CPU.
FAINTEST = -87.0
# The entropy that weights as small as that may add up to.
NO_ENTROPY = 1e-25
# Collected weights: this many heads of one sample, and some of the queries of long sequences.
MOST_HEADS, MOST_QUERIES = 16, 128


def inside_softmax(args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Inside:
    """The logits, and the entropy of each distribution."""
    logits: Tensor = args[0] if args else kwargs["input"]
    if logits is result or not (logits.is_floating_point() and result.is_floating_point()):
        return
    yield "logits", logits
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if dim is None:
        dim = 0 if logits.dim() in (0, 1, 3) else 1  # softmax's own default
    yield "entropy", _entropies(logits, dim)


def inside_attention(args: tuple[Any, ...], kwargs: dict[str, Any], _result: Tensor) -> Inside:
    """The largest logit of each query, and the entropy of its weights."""
    call = _parse(args, kwargs)
    if call is None:
        return
    with torch.no_grad(), torch.autocast(call.query.device.type, enabled=False):
        found = _per_query(*call.tensors, call.scale, call.causal)
    for part, numbers in zip(("logits", "entropy"), found, strict=True):
        yield part, numbers.flatten(-3, -2) if call.grouped else numbers


def first_weights(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The attention weights of the first sample of `scaled_dot_product_attention`: [heads, some queries, keys]."""
    call = _parse(args, kwargs)
    if call is None:
        return None
    heads = 2 if call.grouped else 1
    query, key, mask = (_first_heads(tensor, heads) for tensor in call.tensors)
    assert query is not None
    assert key is not None
    rows = torch.arange(0, query.size(-2), -(-query.size(-2) // MOST_QUERIES), device=key.device)
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        logits = torch.matmul(_at(query, rows).float() * call.scale, key.float().transpose(-2, -1))
        masked = _masked(logits, rows if call.causal else None, None if mask is None else _at(mask, rows))
        return torch.softmax(masked, -1)


def _at(tensor: Tensor, rows: Tensor) -> Tensor:
    """The rows with these indices, which are evenly spaced: they are not read, so nothing waits for the device."""
    return tensor[..., :: -(-tensor.size(-2) // len(rows)), :]


def _first_heads(tensor: Tensor | None, head_dimensions: int) -> Tensor | None:
    if tensor is None:
        return None
    while tensor.dim() > 2 + head_dimensions:
        tensor = tensor[0]
    return tensor.reshape(-1, *tensor.shape[-2:])[:MOST_HEADS]


class _Attention(NamedTuple):
    """The arguments of an attention, with query, key and mask broadcast to the same leading dimensions."""

    query: Tensor
    key: Tensor
    mask: Tensor | None
    scale: float
    causal: bool
    grouped: bool

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.query, self.key, self.mask


def _parse(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Attention | None:
    """None where there is nothing to attend to."""
    given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
    query, key, mask = given["query"], given["key"], given.get("attn_mask")
    if query.numel() == 0 or key.numel() == 0:
        return None
    scale = given.get("scale")
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    grouped = given.get("enable_gqa", False) and query.size(-3) != key.size(-3)
    if grouped:
        query, key, mask = _by_group(query, key, mask)
    return _Attention(*_of_one_shape(query, key, mask), scale, given.get("is_causal", False), grouped)


INSIDE: dict[str, Compute] = {"softmax": inside_softmax, "scaled_dot_product_attention": inside_attention}


@torch.no_grad()
def _entropies(logits: Tensor, dim: int) -> Tensor:
    """In nats. Masked logits stay finite on the way, and add nothing; where all are masked it is NaN."""
    wide = None if logits.dtype.itemsize >= 4 else torch.float32
    logs = torch.log_softmax(logits, dim, dtype=wide).clamp_(min=FAINTEST)
    return F.hardshrink(logs.exp().mul_(logs).sum(dim).neg_().float(), NO_ENTROPY)


def _by_group(query: Tensor, key: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gives the query heads that share a key head a dimension of their own, so that no key is repeated."""
    groups = (key.size(-3), query.size(-3) // key.size(-3))
    if mask is not None and mask.dim() > 2:
        mask = mask.unsqueeze(-3) if mask.size(-3) == 1 else mask.reshape(*mask.shape[:-3], *groups, *mask.shape[-2:])
    return query.reshape(*query.shape[:-3], *groups, *query.shape[-2:]), key.unsqueeze(-3), mask


def _of_one_shape(query: Tensor, key: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    shapes = [tensor.shape[:-2] for tensor in (query, key, mask) if tensor is not None]
    lead = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    if mask is not None:
        mask = mask.expand(*lead, query.size(-2), key.size(-2))
    return query.expand(*lead, -1, -1), key.expand(*lead, -1, -1), mask


def _per_query(query: Tensor, key: Tensor, mask: Tensor | None, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """The largest logit and the entropy of each query, in parts whose temporaries are small."""
    rows, keys, width = query.size(-2), key.size(-2), key.size(-1)
    elements = math.prod(query.shape[:-2]) * max(rows * keys, rows * width, keys * width)
    dim = next((dim for dim, size in enumerate(query.shape[:-2]) if size > 1), None)
    if dim is None or elements <= MOST_LOGITS:
        return _by_rows(query, key, mask, scale, causal)
    size = max(1, query.size(dim) * MOST_LOGITS // elements)
    masks = repeat(None) if mask is None else torch.split(mask, size, dim)
    parts = zip(torch.split(query, size, dim), torch.split(key, size, dim), masks, strict=False)
    return _joined([_per_query(*part, scale, causal) for part in parts], dim)


def _by_rows(query: Tensor, key: Tensor, mask: Tensor | None, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    keys = key.float().transpose(-2, -1)
    size = max(1, MOST_LOGITS // (math.prod(query.shape[:-2]) * key.size(-2)))
    parts = []
    for first in range(0, query.size(-2), size):
        logits = torch.matmul(query[..., first : first + size, :].float() * scale, keys)
        rows = torch.arange(first, first + logits.size(-2), device=key.device) if causal else None
        logits = _masked(logits, rows, None if mask is None else mask[..., first : first + size, :])
        parts.append((logits.amax(-1), _entropies(logits, -1)))
    return _joined(parts, -1)


def _masked(logits: Tensor, causal_rows: Tensor | None, mask: Tensor | None) -> Tensor:
    """In place. `causal_rows` are the positions of the queries, where no key behind its query counts."""
    if causal_rows is not None:
        columns = torch.arange(logits.size(-1), device=logits.device)
        logits.masked_fill_(columns > causal_rows.unsqueeze(-1), -math.inf)
    if mask is not None:
        logits = logits.masked_fill_(~mask, -math.inf) if mask.dtype is torch.bool else logits.add_(mask)
    return logits


def _joined(parts: list[tuple[Tensor, Tensor]], dim: int) -> tuple[Tensor, Tensor]:
    largest, entropy = zip(*parts, strict=True)
    return torch.cat(largest, dim), torch.cat(entropy, dim)
