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

Inside = Iterator[tuple[str, Tensor, Tensor | None]]
"""The name of each part, its numbers, and those of each query as [..., heads, queries] if there are heads."""
Compute = Callable[[tuple[Any, ...], dict[str, Any], Tensor, int | None], Inside]
"""Called with the arguments of an operation, its result, and the number of heads that the module names."""

# Logits are computed in parts of at most this many elements, or of one query.
MOST_LOGITS = 1 << 22
# The logarithm of about the smallest normal float32. Below it `exp` takes a hundred times as long on a CPU.
FAINTEST = -87.0
# The entropy that weights as small as that may add up to.
NO_ENTROPY = 1e-25
# Collected weights: this many heads of one sample, and some of the queries of long sequences.
MOST_HEADS, MOST_QUERIES = 16, 128


def inside_softmax(args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor, heads: int | None = None) -> Inside:
    """The logits, the entropy of each distribution, and of attention the weight of the first key."""
    logits: Tensor = args[0] if args else kwargs["input"]
    if logits is result or not (logits.is_floating_point() and result.is_floating_point()):
        return
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if dim is None:
        dim = 0 if logits.dim() in (0, 1, 3) else 1  # softmax's own default
    entropy = _entropies(logits, dim)
    if dim not in (-1, logits.dim() - 1) or (by_head := _by_head(logits, heads)) is None or not logits.numel():
        yield "logits", logits, None
        yield "entropy", entropy, None
        return
    shape = by_head.shape[:-1]
    yield "logits", logits, by_head.amax(-1)
    yield "entropy", entropy, entropy.reshape(shape)
    first = result.detach()[..., 0]
    yield "first_token", first, first.reshape(shape)


def _by_head(logits: Tensor, heads: int | None) -> Tensor | None:
    """Logits as [batch, heads, queries, keys]; None without heads. nn.MultiheadAttention joins the first two."""
    if logits.dim() == 3 and heads and logits.size(0) % heads == 0:
        return logits.detach().reshape(-1, heads, *logits.shape[1:])
    return logits.detach() if logits.dim() >= 4 else None


def inside_attention(
    args: tuple[Any, ...], kwargs: dict[str, Any], _result: Tensor, _heads: int | None = None
) -> Inside:
    """Of each query the largest logit, the entropy of its weights, and the weight of the first key."""
    call = _parse(args, kwargs)
    if call is None:
        return
    with torch.no_grad(), torch.autocast(call.query.device.type, enabled=False):
        found = _per_query(*call.tensors, call.scale, call.causal)
    for part, numbers in zip(("logits", "entropy", "first_token"), found, strict=True):
        of_heads = numbers.flatten(-3, -2) if call.grouped else numbers
        yield part, of_heads, of_heads if of_heads.dim() >= 3 else None


def inside_flex_attention(
    args: tuple[Any, ...], kwargs: dict[str, Any], _result: Tensor, _heads: int | None = None
) -> Inside:  # fmt: skip
    """The same of the operator behind `flex_attention`, with its own functions of scores and masks."""
    names = ("query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options", "of_scores", "of_masks")
    given = dict(zip(names, args, strict=False)) | kwargs
    query, key = given["query"], given["key"]
    key = key.repeat_interleave(query.size(1) // key.size(1), 1).expand(query.size(0), -1, -1, -1)
    score = _over_all_indices(given["score_mod"], given["of_scores"], 1)
    mask = _over_all_indices(given["block_mask"][-1], given["of_masks"], 0)
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        size = 0 if _is_symbolic(query, key) else max(1, MOST_LOGITS // math.prod((*query.shape[:2], key.size(2))))
        firsts = range(0, query.size(2), size) if size else (0,)
        rows = [(query if len(firsts) == 1 else query[:, :, first : first + size], first) for first in firsts]
        parts = [_of_logits(_flex_logits(part, key, first, given["scale"], score, mask)) for part, first in rows]
        found = _joined(parts, -1)
    for part, numbers in zip(("logits", "entropy", "first_token"), found, strict=True):
        yield part, numbers, numbers


def _over_all_indices(function: Any, buffers: tuple[Any, ...], scores: int) -> Callable[..., Tensor]:
    """A function of batch, head, query and key, and of a score before them, as one of all of them."""
    from torch.nn.attention.flex_attention import _vmap_for_bhqkv  # noqa: PLC0415  slow to import

    mapped = _vmap_for_bhqkv(function, prefix=(0,) * scores, suffix=(None,) * len(buffers))
    return lambda *given: mapped(*given, *buffers)


def _flex_logits(
    query: Tensor, key: Tensor, first: int, scale: float, score: Callable[..., Tensor], mask: Callable[..., Tensor]
) -> Tensor:
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # noqa: PLC0415

    logits = torch.matmul(query.float(), key.float().transpose(-2, -1)) * scale
    starts = (0, 0, first, 0)
    indices = [torch.arange(n, n + size, device=key.device) for n, size in zip(starts, logits.shape, strict=True)]
    with TransformGetItemToIndex():
        return torch.where(mask(*indices), score(logits, *indices), -math.inf)


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
FLEX = "flex_attention"


@torch.no_grad()
def _entropies(logits: Tensor, dim: int) -> Tensor:
    """In nats. Masked logits stay finite on the way, and add nothing; where all are masked it is NaN."""
    return _entropies_of_logs(_log_weights(logits, dim), dim)


def _log_weights(logits: Tensor, dim: int) -> Tensor:
    wide = None if logits.dtype.itemsize >= 4 else torch.float32
    return torch.log_softmax(logits, dim, dtype=wide).clamp_(min=FAINTEST)


def _entropies_of_logs(logs: Tensor, dim: int) -> Tensor:
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


_PerQuery = tuple[Tensor, Tensor, Tensor]
"""The largest logit of each query, its entropy, and its weight of the first key."""


def _per_query(query: Tensor, key: Tensor, mask: Tensor | None, scale: float, causal: bool) -> _PerQuery:
    """In parts whose temporaries are small."""
    if _is_symbolic(query, key):
        return _of_all_rows(query, key, mask, scale, causal)
    rows, keys, width = query.size(-2), key.size(-2), key.size(-1)
    elements = math.prod(query.shape[:-2]) * max(rows * keys, rows * width, keys * width)
    dim = next((dim for dim, size in enumerate(query.shape[:-2]) if size > 1), None)
    if dim is None or elements <= MOST_LOGITS:
        return _by_rows(query, key, mask, scale, causal)
    size = max(1, query.size(dim) * MOST_LOGITS // elements)
    masks = repeat(None) if mask is None else torch.split(mask, size, dim)
    parts = zip(torch.split(query, size, dim), torch.split(key, size, dim), masks, strict=False)
    return _joined([_per_query(*part, scale, causal) for part in parts], dim)


def _is_symbolic(*tensors: Tensor) -> bool:
    """Whether a graph for any length is being traced: splitting into parts would fix its shapes."""
    return any(isinstance(size, torch.SymInt) for tensor in tensors for size in tensor.shape)


def _by_rows(query: Tensor, key: Tensor, mask: Tensor | None, scale: float, causal: bool) -> _PerQuery:
    size = max(1, MOST_LOGITS // (math.prod(query.shape[:-2]) * key.size(-2)))
    parts, key = [], key.float()
    for first in range(0, query.size(-2), size):
        of_rows = None if mask is None else mask[..., first : first + size, :]
        parts.append(_of_all_rows(query[..., first : first + size, :], key, of_rows, scale, causal, first))
    return _joined(parts, -1)


def _of_all_rows(
    query: Tensor, key: Tensor, mask: Tensor | None, scale: float, causal: bool, first: int = 0
) -> _PerQuery:  # fmt: skip
    """Of queries that begin at the position `first`."""
    logits = torch.matmul(query.float() * scale, key.float().transpose(-2, -1))
    rows = torch.arange(first, first + query.size(-2), device=key.device) if causal else None
    return _of_logits(_masked(logits, rows, mask))


def _of_logits(logits: Tensor) -> _PerQuery:
    logs = _log_weights(logits, -1)
    return logits.amax(-1), _entropies_of_logs(logs, -1), logs[..., 0].exp()


def _masked(logits: Tensor, causal_rows: Tensor | None, mask: Tensor | None) -> Tensor:
    """In place. `causal_rows` are the positions of the queries, where no key behind its query counts."""
    if causal_rows is not None:
        columns = torch.arange(logits.size(-1), device=logits.device)
        logits.masked_fill_(columns > causal_rows.unsqueeze(-1), -math.inf)
    if mask is not None:
        logits = logits.masked_fill_(~mask, -math.inf) if mask.dtype is torch.bool else logits.add_(mask)
    return logits


def _joined(parts: list[_PerQuery], dim: int) -> _PerQuery:
    largest, entropy, first = zip(*parts, strict=True)
    return torch.cat(largest, dim), torch.cat(entropy, dim), torch.cat(first, dim)
