"""Where the channels of a module lie in its output and in its weight, and the heads of an attention.

Knows shapes and attributes of modules; reads no numbers.
"""

from __future__ import annotations

from torch import Tensor, nn

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm)
# Under these names attentions keep how many heads they have, and the layer that all heads are given to.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "wo", "out_lin")


def has_channels(module: nn.Module) -> bool:
    """Whether its output has a dimension of channels."""
    return isinstance(module, (*_CONVOLUTIONS, *_TRANSPOSED, *_NORMS, nn.Linear)) or _is_linear_of_gpt2(module)


def _is_linear_of_gpt2(module: nn.Module) -> bool:
    """The transformers library calls it Conv1D; its weight lies the other way round."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def by_channel(module: nn.Module, output: Tensor) -> Tensor | None:
    """A view with the channels of an output in front."""
    if isinstance(module, nn.Linear) or _is_linear_of_gpt2(module):
        return output.movedim(-1, 0) if output.dim() else None
    if isinstance(module, (*_CONVOLUTIONS, *_TRANSPOSED)) and output.dim() == len(module.kernel_size) + 1:
        return output  # of one sample
    return output.movedim(1, 0) if output.dim() > 1 else None


def weight_by_channel(module: nn.Module, weight: Tensor) -> Tensor | None:
    """A view with the output channels of a weight in front; None where it has no kernel a channel."""
    if isinstance(module, _NORMS) or weight.dim() < 2:
        return None
    if isinstance(module, _TRANSPOSED):
        return weight.movedim(1, 0) if module.groups == 1 else None
    return weight.movedim(1, 0) if _is_linear_of_gpt2(module) else weight


def heads_of(module: nn.Module) -> int:
    """How many heads an attention has; 0 for other modules, and for those around an attention."""
    if "Attention" not in type(module).__name__ or any(heads_of(child) for child in module.children()):
        return 0
    config = getattr(module, "config", None)
    found = (getattr(place, name, None) for place in (module, config) for name in _HEADS)
    return next((number for number in found if isinstance(number, int) and number > 0), 0)


def projection_of(module: nn.Module) -> str | None:
    """The name of the layer that an attention gives its heads to, side by side; torch's own never calls it."""
    if isinstance(module, nn.MultiheadAttention):
        return None
    return next((name for name in _PROJECTIONS if isinstance(getattr(module, name, None), nn.Module)), None)


def by_head(tensor: Tensor, heads: int, *, side_by_side: bool) -> Tensor | None:
    """A view with the heads in front: of weights [samples, heads, queries, keys], or of heads side by side."""
    if side_by_side:
        fits = tensor.dim() >= 2 and tensor.size(-1) % heads == 0
        return tensor.reshape(*tensor.shape[:-1], heads, -1).movedim(-2, 0) if fits else None
    if tensor.dim() == 4 and tensor.size(1) == heads:
        return tensor.movedim(1, 0)
    return None


def operation_by_head(tensor: Tensor, heads: int) -> Tensor | None:
    """The same of what attention computes inside, where samples and heads may be one dimension."""
    if tensor.dim() == 3 and tensor.size(0) % heads == 0:
        return tensor.reshape(-1, heads, *tensor.shape[1:]).movedim(1, 0)
    return by_head(tensor, heads, side_by_side=False)


def projections_by_head(weight: Tensor, heads: int) -> Tensor | None:
    """Of torch's own attention what makes queries, keys and values of its inputs, head by head."""
    if weight.dim() != 2 or weight.size(0) % (3 * heads):
        return None
    return weight.reshape(3, heads, -1).movedim(1, 0)
