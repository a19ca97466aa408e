"""Views of outputs and weights with channels, or the heads of attention, as the first dimension.

Decided by the shapes of tensors and the attributes of modules; reads no values.
"""

from __future__ import annotations

from torch import Tensor, nn

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm)
# Attribute names of the number of heads, and of the output projection, in common attention modules.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "wo", "out_lin")


def has_channels(module: nn.Module) -> bool:
    """Whether the output of a module has a channel dimension."""
    return isinstance(module, (*_CONVOLUTIONS, *_TRANSPOSED, *_NORMS, nn.Linear)) or _is_gpt2_linear(module)


def _is_gpt2_linear(module: nn.Module) -> bool:
    """Conv1D of the transformers library: a linear layer with a transposed weight."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def by_channel(module: nn.Module, output: Tensor) -> Tensor | None:
    """A view of an output with the channels first; None if it has none."""
    if isinstance(module, nn.Linear) or _is_gpt2_linear(module):
        return output.movedim(-1, 0) if output.dim() else None
    if isinstance(module, (*_CONVOLUTIONS, *_TRANSPOSED)) and output.dim() == len(module.kernel_size) + 1:
        return output  # a single sample without batch dimension
    return output.movedim(1, 0) if output.dim() > 1 else None


def weight_by_channel(module: nn.Module, weight: Tensor) -> Tensor | None:
    """A view of a weight with the output channels first; None if it has no kernel per channel."""
    if isinstance(module, _NORMS) or weight.dim() < 2:
        return None
    if isinstance(module, _TRANSPOSED):
        return weight.movedim(1, 0) if module.groups == 1 else None
    return weight.movedim(1, 0) if _is_gpt2_linear(module) else weight


def heads_of(module: nn.Module) -> int:
    """The number of heads of an attention module; 0 for other modules, also for those that contain attention."""
    if "Attention" not in type(module).__name__ or any(heads_of(child) for child in module.children()):
        return 0
    config = getattr(module, "config", None)
    numbers = (getattr(owner, name, None) for owner in (module, config) for name in _HEADS)
    return next((number for number in numbers if isinstance(number, int) and number > 0), 0)


def projection_of(module: nn.Module) -> str | None:
    """The name of an attention's output projection, whose input has all heads concatenated.

    None for nn.MultiheadAttention, which never calls its projection as a module.
    """
    if isinstance(module, nn.MultiheadAttention):
        return None
    return next((name for name in _PROJECTIONS if isinstance(getattr(module, name, None), nn.Module)), None)


def by_head(tensor: Tensor, heads: int, *, concatenated: bool) -> Tensor | None:
    """A view with the heads first, of weights [samples, heads, queries, keys] or of concatenated heads."""
    if concatenated:
        fits = tensor.dim() >= 2 and tensor.size(-1) % heads == 0
        return tensor.reshape(*tensor.shape[:-1], heads, -1).movedim(-2, 0) if fits else None
    if tensor.dim() == 4 and tensor.size(1) == heads:
        return tensor.movedim(1, 0)
    return None


def operation_by_head(tensor: Tensor, heads: int) -> Tensor | None:
    """Like `by_head`, for operations inside attention, where samples and heads may be one dimension."""
    if tensor.dim() == 3 and tensor.size(0) % heads == 0:
        return tensor.reshape(-1, heads, *tensor.shape[1:]).movedim(1, 0)
    return by_head(tensor, heads, concatenated=False)


def projections_by_head(weight: Tensor, heads: int) -> Tensor | None:
    """The input projection of nn.MultiheadAttention (queries, keys and values) with the heads first."""
    if weight.dim() != 2 or weight.size(0) % (3 * heads):
        return None
    return weight.reshape(3, heads, -1).movedim(1, 0)
