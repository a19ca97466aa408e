"""Ready functions for `Watch.metric`: from a tensor to one number or a few, on its device and without waiting for it.

Each computes in float32 or wider. Formulas are in the docstrings; x is the tensor, its last dimension are the features,
logits or keys, and all others together are its rows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MOST_ROWS = 256
COLD_ITERATIONS, WARM_ITERATIONS = 64, 2


def logsumexp(x: Tensor) -> Tensor:
    """The mean over rows of log(sum(exp(row))): grows where the logits of the output layer drift away.

    Source: the z-loss of PaLM (Chowdhery et al. 2022); Wortsman et al. 2023, "Small-scale proxies for large-scale
    Transformer training instabilities".
    """
    return torch.logsumexp(_wide(x), -1).mean()


def channel_outliers(x: Tensor) -> Tensor:
    """The largest channel over the median one: max(rms_c) / median(rms_c), with rms_c over all rows of channel c.

    The last dimension are the channels. The median of an even number is the lower one. Source: Dettmers et al. 2022,
    "LLM.int8()", on features with large magnitude.
    """
    rms = _rows(x).square().mean(0).sqrt()
    return rms.max() / rms.median()


class EffectiveRank:
    """The effective rank of at most 256 rows: exp(-sum(p_i log p_i)), with p_i = s_i / sum(s) of the singular values s.

    The rows are taken evenly from all. Between 1, if all rows are multiples of one, and the number of rows or features.
    Source: Roy and Vetterli 2007, "The effective rank".

    An eigenvalue solver waits for the device. So in a watch only the products of rows are computed on the device
    (`on_device`), and the rank in the background after the copy (`on_host`).
    """

    def __call__(self, x: Tensor) -> Tensor:
        values = torch.linalg.eigvalsh(self.on_device(x)).clamp(min=0).sqrt()
        p = values / values.sum()
        result: Tensor = torch.special.entr(p).sum().exp()
        return result

    def on_device(self, x: Tensor) -> Tensor:
        """The products of all pairs of rows, or of columns if there are fewer of them."""
        rows = _rows(x)
        rows = _exact(rows[:: -(-len(rows) // MOST_ROWS)])
        return rows @ rows.T if len(rows) <= rows.size(1) else rows.T @ rows

    def on_host(self, products: NDArray[np.float64]) -> float:
        """The effective rank that follows from these products."""
        if not np.isfinite(products).all():
            return float("nan")
        values = np.sqrt(np.linalg.eigvalsh(products).clip(0))
        p = values[values > 0] / values.sum()
        return float(np.exp(-(p * np.log(p)).sum()))


effective_rank = EffectiveRank()


def mean_cosine(x: Tensor) -> Tensor:
    """The mean cosine of all pairs of different rows: near 1 where representations collapse to one direction.

    (|sum(u_i)|^2 - n) / (n (n - 1)), with u_i = row_i / |row_i|. Source: Ethayarajh 2019, "How contextual are
    contextualized word representations?"; Dong et al. 2021, "Attention is not all you need".
    """
    rows = torch.nn.functional.normalize(_exact(_rows(x)), dim=1)
    return (rows.sum(0).square().sum() - len(rows)) / (len(rows) * (len(rows) - 1))


class StableRank:
    """The stable rank of a weight: |W|_F^2 / |W|_2^2, the squared norm over the largest squared singular value.

    The first dimension are the rows of W, all others its columns. The largest singular value comes from a power
    iteration; in a watch it goes on at each step from the vector of the last one. Source: Rudelson and Vershynin 2007,
    "Sampling from large matrices"; Miyato et al. 2018, "Spectral normalization", for the iteration.
    """

    def __init__(self, keeps_vector: bool = False) -> None:
        self._keeps_vector = keeps_vector
        self._vector: Tensor | None = None

    def for_site(self) -> StableRank:
        """One for each weight, which keeps its vector."""
        return StableRank(keeps_vector=True)

    def __call__(self, w: Tensor) -> Tensor:
        matrix = _wide(w).reshape(w.size(0), -1)
        vector, iterations = self._vector, WARM_ITERATIONS
        if vector is None or len(vector) != matrix.size(1) or vector.device != matrix.device:
            vector, iterations = _first_vector(matrix), COLD_ITERATIONS
        for _ in range(iterations):
            vector = matrix.T @ (matrix @ vector)
            vector = vector / vector.norm().clamp(min=torch.finfo(vector.dtype).tiny)
        if self._keeps_vector:
            self._vector = vector
        return matrix.square().sum() / (matrix @ vector).square().sum()


stable_rank = StableRank()


def entropy(x: Tensor) -> Tensor:
    """The mean over rows of the entropy of softmax(row), in nats: near 0 where attention collapses to one key.

    x are logits: attention scores before the softmax, or the output of the last layer. For probabilities p pass their
    logarithms. Source: Zhai et al. 2023, "Stabilizing Transformer training by preventing attention entropy collapse".
    """
    wide = _wide(x)
    result: Tensor = torch.special.entr(torch.softmax(wide, -1)).sum(-1).mean()
    return result


def sparsity(threshold: float = 0.0) -> Callable[[Tensor], Tensor]:
    """Returns a metric: the fraction of elements with |x| <= threshold; of zeros without a threshold.

    Source: Hurley and Rickard 2009, "Comparing measures of sparsity" (the measure l0 with a threshold).
    """

    def fraction(x: Tensor) -> Tensor:
        return (_wide(x).abs() <= threshold).float().mean()

    return fraction


def per_head_max(x: Tensor) -> Tensor:
    """The largest element of each head: max over all dimensions of x [batch, heads, queries, keys] but the second.

    Source: Dehghani et al. 2023, "Scaling vision Transformers to 22 billion parameters", on the growth of attention
    logits.
    """
    return x.movedim(1, 0).flatten(1).amax(1)


def write_ratio(given: Tensor, output: Tensor) -> Tensor:
    """How much a module changes what it is given: rms(output - input) / rms(input).

    In a residual stream x + f(x), the size of what a block writes relative to what it reads.
    """
    before = _wide(given)
    return (_wide(output) - before).square().mean().sqrt() / before.square().mean().sqrt()


READY: dict[str, Callable[[Tensor], Tensor]] = {
    "logsumexp": logsumexp,
    "channel_outliers": channel_outliers,
    "effective_rank": effective_rank,
    "mean_cosine": mean_cosine,
    "stable_rank": stable_rank,
    "entropy": entropy,
    "sparsity": sparsity(),
    "per_head_max": per_head_max,
}
"""The functions by the names under which `Watch.metric` knows them."""


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _exact(x: Tensor) -> Tensor:
    """In float64, where the device has it: differences of nearly equal numbers follow."""
    return x.float() if x.device.type == "mps" else x.double()


def _rows(x: Tensor) -> Tensor:
    return _wide(x).reshape(-1, x.size(-1))


def _first_vector(matrix: Tensor) -> Tensor:
    """A vector that is the same in every run and draws no random numbers."""
    angle = torch.arange(1, matrix.size(1) + 1, dtype=matrix.dtype, device=matrix.device)
    vector = torch.sin(angle * angle) + 0.5
    unit: Tensor = vector / vector.norm()
    return unit
