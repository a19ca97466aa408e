"""Reduces a tensor to one row with torch operations, on its own device: no sync, no data-dependent shape.

The arithmetic is in the type of the row, float64 wherever the device has it, around the mean: a sum of squares in
float32 would return variance 0 at mean 300, std 0.01, and overflow at 1e20. On a device a launch costs more than
arithmetic: `reduce` makes thirteen for any number of rows, and leaves the arithmetic on single numbers to finalize.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import Parameter

from tbhooks.data.stats import COUNT, MAX, MIN, WIDTH, ZEROS
from tbhooks.reduction import streams
from tbhooks.reduction.torch_private import look_up

_STAND_INS = "tensors without numbers are recognised by an error that is counted"
_FakeTensor: type = look_up("torch._subclasses.fake_tensor.FakeTensor", type(None), _STAND_INS)
_is_of_functorch: Callable[[Tensor], bool] = look_up(
    "torch._C._functorch.is_functorch_wrapped_tensor", lambda _: False, _STAND_INS
)
has_storage: Callable[[Tensor], bool] = look_up("torch._C._has_storage", lambda _: True, _STAND_INS)
ORDINARY = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def has_no_data(tensor: Tensor) -> bool:
    """Whether it is a meta, fake or wrapped tensor, as deferred initialisation, tracing, export and torch.func use."""
    return (
        tensor.is_meta
        or isinstance(tensor, _FakeTensor)
        or bool(_is_of_functorch(tensor))
        or (type(tensor) is Tensor and tensor.layout is torch.strided and not has_storage(tensor))  # batched
    )


def storage_is_freed(tensor: Tensor) -> bool:
    """Whether its memory was freed, as FSDP does with gathered weights: reading it would crash the process."""
    if not tensor.numel() or tensor.layout is not torch.strided or not has_storage(tensor):
        return False
    return tensor.untyped_storage().nbytes() == 0


def is_ordinary(tensor: Tensor) -> bool:
    """Whether every torch operation supports its class and its type."""
    return type(tensor) in (Tensor, Parameter) and tensor.dtype in ORDINARY


def row_type(device: torch.device) -> torch.dtype:
    """The type of rows on a device: float64, or float32 where there is none (Apple's GPUs, some of Intel's)."""
    return torch.float64 if has_float64(device) else torch.float32


@cache
def has_float64(device: torch.device) -> bool:
    """Whether a device computes in float64."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


def readable(tensor: Tensor) -> Tensor | None:
    """The real numbers of a tensor in one dimension; None for integers, bools, quantised and nested tensors."""
    if tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided or has_no_data(tensor):
        return None
    if tensor._is_zerotensor():  # zeros made by autograd have no memory
        tensor = torch.zeros_like(tensor)
    if tensor.is_complex():
        # In float32 the magnitude of a finite number can be infinite.
        wide = torch.complex128 if has_float64(tensor.device) else torch.complex64
        return flat(tensor.detach().to(wide).abs())
    if not tensor.is_floating_point():
        return None
    return flat(tensor.detach().resolve_neg())


def describe(tensor: Tensor) -> str:
    """Describes a tensor, for messages about why it could not be read."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if has_no_data(tensor):
        return f"{dtype} tensor without data"
    if tensor.is_nested:
        return f"nested {dtype} tensor"
    if any(placement.is_partial() for placement in getattr(tensor, "placements", ())):
        return f"{dtype} tensor with partial placements"
    if type(tensor) not in (Tensor, Parameter):
        return f"{type(tensor).__name__} of {dtype}"
    return f"{dtype} tensor" if tensor.layout is torch.strided else f"{dtype} tensor of layout {tensor.layout}"


def flat(tensor: Tensor) -> Tensor:
    """One dimension of dense memory, without a copy wherever it is dense in any order (channels_last, transposed)."""
    if not tensor.is_contiguous():
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return tensor.reshape(-1).contiguous()


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a stretch of memory, in any order (channels_last, transposed)."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def difference(after: Tensor, before: Tensor) -> Tensor:
    """`after - before`; half precision is subtracted in float32, which rounds less. `before` may be overwritten."""
    if after.dtype.itemsize < 4:
        return after.float().sub_(before if before.dtype in ORDINARY else before.float())
    return torch.sub(after, before, out=before)


def parts_to_subtract(after: Tensor, before: Tensor, longest: int) -> Iterable[tuple[Tensor, Tensor]]:
    """Parts whose differences together are that of the tensors. The difference of half precision takes more memory than
    the tensors do: it is taken in parts of at most `longest` elements.
    """
    is_wide = after.dtype.itemsize >= 4  # subtracted in place
    if is_wide or after.numel() <= longest or after.stride() != before.stride():
        return [(after, before)]
    return zip(torch.split(flat(after), longest), torch.split(flat(before), longest), strict=True)


def write_row(numbers: Tensor, out: Tensor) -> None:
    """Reduces a real, flat tensor into the row `out`."""
    if numbers.numel() == 0:
        write_constant(out, count=0)
        return
    wide = numbers.to(out.dtype)
    bad = wide.isfinite().logical_not()
    n = numbers.numel() - bad.sum()
    mean = wide.masked_fill(bad, 0.0).sum() / n.clamp(min=1)
    deviation = (wide - mean).masked_fill(bad, 0.0)
    square = deviation.square()
    cubes, m2 = (square * deviation).sum(), square.sum()
    off = deviation.sum() / n.clamp(min=1)  # the mean of numbers far from zero is rounded
    nans = wide.isnan().sum()
    columns = (
        torch.full_like(n, numbers.numel()),
        mean,
        m2,
        wide.masked_fill(bad, torch.inf).amin(),
        wide.masked_fill(bad, -torch.inf).amax(),
        (wide == 0).sum(),
        nans,
        numbers.numel() - n - nans,
        torch.zeros_like(n),
        cubes - 3 * off * m2,
        square.square().sum() - 4 * off * cubes,
    )
    torch.stack([column.to(out.dtype) for column in columns], out=out)


# The results of `limits`, for each stream: another one would have to wait for those that fill them.
_constants: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}


def reduce(numbers: Tensor, row_type: torch.dtype) -> list[Tensor]:
    """The partial results of which finalize.py makes rows, along the last dimension, in thirteen launches; one more for
    types that are converted to float32 first. The first three are float32, unless the numbers are float64.

    Temporaries: 28 bytes for each element of float32, 32 for half precision, 44 for float64. A row may have at most
    2**24 elements: more could not be counted in float32.
    """
    numbers = numbers if numbers.dtype in (torch.float32, torch.float64) else numbers.to(torch.float32)
    largest, others = limits(numbers, numbers.dtype)
    inside = torch.le(numbers.abs(), largest)
    masked = torch.where(inside, numbers, others)
    parts = [torch.linalg.vector_norm(masked[1:], 0, -1), *torch.aminmax(masked[:2], dim=-1)]
    finite = masked[2].to(row_type, copy=True)
    del masked  # of which a view would keep all
    return [*parts, *moments(finite, inside[2])]


def moments(numbers: Tensor, inside: Tensor) -> list[Tensor]:
    """Variance, mean, and sum of cubes and norm of squares of the deviations from it, in six launches.

    Elements that are not `inside` have to be zeros. They are left out of the last two. Overwrites `numbers`.
    """
    variance, mean = torch.var_mean(numbers, -1, correction=0, keepdim=True)
    away = numbers.addcmul_(mean, inside, value=-1)
    square = away.square()
    fourths = torch.linalg.vector_norm(square, dim=-1)
    return [variance, mean, away.mul_(square).sum(-1), fourths]


def limits(like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The largest absolute value that counts in each of the four masks, and what replaces larger ones and NaN."""
    key = (like.dtype, dtype, like.device, like.dim(), streams.current(like.device))
    if key not in _constants:
        with torch.inference_mode(False):
            shape = (4, *(1 for _ in like.shape))
            # Filled on the device: a copy from the host would wait for it.
            made = like.detach().new_empty if like.device.type != "cpu" else partial(torch.empty, device="cpu")
            largest = made(shape, dtype=like.dtype).fill_(torch.finfo(like.dtype).max)
            largest[3].fill_(torch.inf)
            others = made(shape, dtype=dtype).fill_(0.0)
            others[0].fill_(-torch.inf)
            others[1].fill_(torch.inf)
            _constants[key] = largest, others
    return _constants[key]


def write_constant(out: Tensor, count: int) -> None:
    """The row of `count` zeros, which is the empty row when there are none."""
    out.zero_()
    if count == 0:
        out[MIN].fill_(torch.inf)
        out[MAX].fill_(-torch.inf)
    else:
        out[COUNT].fill_(count)
        out[ZEROS].fill_(count)


assert WIDTH == 11, "write_row writes the columns by position"
