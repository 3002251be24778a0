"""The border between callers' tensors and the flat arrays that kernels work on.

Codecs compute in float32, or in float64 for float64 tensors; float16 and bfloat16 are widened, because
max·s overflows float16 above 34,500 and bfloat16 keeps eight bits. Codecs only read callers' memory.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.errors import ConfigError
from thinwire.frames.layout import MAX_RANK

FloatArray = NDArray[Any]
"""A flat, C-contiguous array of float32 or float64."""

Tensor: TypeAlias = torch.Tensor | NDArray[Any]
"""A caller's tensor: any shape, on any device."""

_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float64: "fp64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class Flat(NamedTuple):  # made in half the time of a frozen dataclass, for every tensor of every step
    """A flattened tensor in the host's memory. `values` may be a view of the caller's memory and is never written."""

    values: FloatArray
    dtype: str
    shape: tuple[int, ...]


class DeviceFlat(NamedTuple):
    """A flattened tensor on its device. `values` may be the caller's memory and is never written."""

    values: torch.Tensor
    dtype: str
    shape: tuple[int, ...]


HOST_DEVICES = frozenset({"cpu"})
"""Types of devices whose memory NumPy can address."""


def off_host(tensor: object) -> TypeGuard[torch.Tensor]:
    """Whether this is a tensor in other memory than the host's."""
    if not isinstance(tensor, torch.Tensor) or (tensor.is_cpu and "cpu" in HOST_DEVICES):
        return False  # reading the device's type takes four times as long
    return tensor.device.type not in HOST_DEVICES


def put(values: NDArray[Any], out: FloatArray, accumulate: bool) -> None:
    """Fills a flat array, or adds to it; a sum that overflows becomes Inf, which the owner checks for."""
    if accumulate:
        with np.errstate(over="ignore", invalid="ignore"):
            out += values
    else:
        out[:] = values


def put_some(values: FloatArray, positions: NDArray[np.integer[Any]], out: FloatArray, accumulate: bool) -> None:
    """Fills a flat array with values at some positions and zeros elsewhere, or adds them; no position occurs twice."""
    if not accumulate:
        out.fill(0)
    out[positions] = out[positions] + values if accumulate else values


def flatten(tensor: Tensor, name: str = "the tensor") -> Flat:
    """Returns the tensor's values in C order, in the compute dtype, in the host's memory.

    Raises:
        TypeError: not a dense floating-point torch tensor or NumPy array.
        ConfigError: more dimensions than a frame can hold.
    """
    if isinstance(tensor, torch.Tensor):
        shape = tuple(tensor.shape)
        if tensor.dtype is torch.float32 and tensor.is_cpu and is_plain(tensor) and len(shape) <= MAX_RANK:
            # Nearly every gradient needs no conversion, and a call into torch costs as much as a small kernel.
            return Flat((tensor.detach() if tensor.requires_grad else tensor).numpy().reshape(-1), "fp32", shape)
        _check_rank(shape, name)
        return Flat(_flat(tensor, name).cpu().numpy(), _NAMES[tensor.dtype], shape)
    if not isinstance(tensor, np.ndarray):
        raise TypeError(f"{name} is a {type(tensor).__name__}; codecs take torch tensors and NumPy arrays")
    _check_rank(tensor.shape, name)
    if tensor.dtype.kind != "f" or tensor.dtype.itemsize > 8:
        raise TypeError(f"{name} has dtype {tensor.dtype}; codecs take float16, bfloat16, float32 and float64")
    dtype = {2: "fp16", 4: "fp32", 8: "fp64"}[tensor.dtype.itemsize]
    wide = np.float64 if dtype == "fp64" else np.float32
    return Flat(np.ascontiguousarray(tensor, dtype=wide).reshape(-1), dtype, tensor.shape)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether memory holds the values themselves in C order: dense, contiguous, not a lazy negation."""
    return tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_neg()


def refuse_meta(tensor: torch.Tensor, name: str) -> None:
    """Raises TypeError for a tensor on the meta device, which has no values."""
    if tensor.is_meta:
        raise TypeError(
            f"{name} is on the meta device; codecs take tensors that hold values: to_empty() gives it memory"
        )


_NO_MEMORY = "{name} is a {kind}, which has no memory; give the tensor that it holds, as a DTensor's to_local()"


def flatten_on_device(tensor: torch.Tensor, name: str = "the tensor") -> DeviceFlat:
    """As `flatten`, on the tensor's device."""
    shape = tuple(tensor.shape)
    if tensor.layout is torch.strided and tensor.numel() and not tensor.data_ptr():
        raise TypeError(_NO_MEMORY.format(name=name, kind=type(tensor).__name__))
    if tensor.dtype is torch.float32 and is_plain(tensor) and len(shape) <= MAX_RANK:
        values = tensor.detach() if tensor.requires_grad else tensor
        return DeviceFlat(values if len(shape) == 1 else values.view(-1), "fp32", shape)
    _check_rank(shape, name)
    return DeviceFlat(_flat(tensor, name), _NAMES[tensor.dtype], shape)


def _check_rank(shape: tuple[int, ...], name: str) -> None:
    if len(shape) > MAX_RANK:
        raise ConfigError(f"{name} has {len(shape)} dimensions; a frame holds at most {MAX_RANK}: reshape it")


def _flat(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Returns the values in C order, in the compute dtype, on their device."""
    if tensor.dtype not in _NAMES:
        raise TypeError(f"{name} has dtype {tensor.dtype}; codecs take float16, bfloat16, float32 and float64")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} has layout {tensor.layout}; codecs take dense tensors: call to_dense() first")
    refuse_meta(tensor, name)
    values = tensor.detach().to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)
    return values.resolve_neg().contiguous().reshape(-1)


def compute_dtype(dtype: str) -> type[np.float32] | type[np.float64]:
    """Returns NumPy's type for computing on a tensor of `dtype`, a frame's dtype name."""
    return np.float64 if dtype == "fp64" else np.float32


def empty(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns an unfilled tensor for a decoded frame, on the CPU."""
    return torch.empty(shape, dtype=_DTYPES[dtype], device="cpu")


def direct_view(out: Tensor) -> FloatArray | None:
    """Returns a flat view through which `out` can be filled in place, or None where it needs a temporary."""
    if isinstance(out, torch.Tensor):
        if out.device.type != "cpu" or out.dtype not in (torch.float32, torch.float64):
            return None
        return out.detach().view(-1).numpy() if is_plain(out) else None
    if out.dtype in (np.float32, np.float64) and out.flags.c_contiguous and out.flags.writeable:
        return out.reshape(-1)
    return None


def in_dtype(what: str, value: float, dtype: np.dtype[Any]) -> float:
    """Returns a number in a tensor's dtype. Raises ConfigError where it overflows."""
    with np.errstate(over="ignore"):
        found = float(dtype.type(value))
    if not math.isfinite(found):
        raise ConfigError(f"{what}={value!r} is not a finite number in {dtype}")
    return found


def data_address(tensor: Tensor) -> tuple[object, int]:
    """Returns the device of a tensor, None for NumPy's arrays, and its first value's address there."""
    if isinstance(tensor, torch.Tensor):
        return None if tensor.device.type in HOST_DEVICES else tensor.device, tensor.data_ptr()
    return None, int(tensor.ctypes.data)


def check_out(out: Tensor, shape: tuple[int, ...]) -> None:
    """Raises ConfigError where `out` cannot take a tensor of `shape`."""
    if not isinstance(out, torch.Tensor | np.ndarray):
        raise ConfigError(f"out is a {type(out).__name__}; it must be a torch tensor or a NumPy array")
    if tuple(out.shape) != shape:
        raise ConfigError(f"out has shape {tuple(out.shape)}; the frame holds {shape}")
    floating = out.is_floating_point() if isinstance(out, torch.Tensor) else out.dtype.kind == "f"
    if not floating:
        raise ConfigError(f"out has dtype {out.dtype}; decoding fills floating-point tensors")
    if isinstance(out, torch.Tensor) and out.layout != torch.strided:
        raise ConfigError(f"out has layout {out.layout}; decoding fills dense tensors")
    if isinstance(out, torch.Tensor) and out.numel() and not out.data_ptr():
        raise ConfigError(_NO_MEMORY.format(name="out", kind=type(out).__name__))
    if isinstance(out, np.ndarray):
        if not out.flags.writeable:
            raise ConfigError("out is a read-only array; decoding writes into it")
        shareable = out.dtype in (np.float16, np.float32, np.float64)
        if not shareable or any(step < 0 or step % out.itemsize for step in out.strides):
            raise ConfigError(
                f"out is an array of {out.dtype.str} with strides {out.strides}; a torch tensor must be able to share "
                "its memory: float16, float32 or float64 in this machine's byte order, whole strides from 0 on"
            )
    steps = out.strides if isinstance(out, np.ndarray) else out.stride()
    if 0 in steps and any(n > 1 and step == 0 for n, step in zip(out.shape, steps, strict=True)):
        raise ConfigError("the elements of out overlap in memory (an expanded view?); give a tensor without overlap")


def store(out: Tensor, values: FloatArray, accumulate: bool) -> None:
    """Writes or adds flat `values` into any floating `out`, of any layout, dtype or device.

    A narrower `out` takes its largest number in place of larger values and sums: a scale may exceed every sender's
    value, and one Inf would spread over the whole model. `values` may be overwritten.
    """
    store_tensor(out if isinstance(out, torch.Tensor) else torch.from_numpy(out), torch.from_numpy(values), accumulate)


def store_tensor(out: torch.Tensor, values: torch.Tensor, accumulate: bool) -> None:
    """As `store`, for tensors on any devices."""
    limit = torch.finfo(out.dtype).max  # the caller's own Inf stays: loss scalers look for it
    narrower = limit < torch.finfo(values.dtype).max
    if narrower:
        values.clamp_(-limit, limit)
    source = values.reshape(out.shape).to(device=out.device, dtype=out.dtype)
    with torch.no_grad():
        if accumulate and narrower:
            total = out + source
            out.copy_(torch.where(out.isinf(), total, total.clamp(-limit, limit)))
        elif accumulate:
            out.add_(source)
        else:
            out.copy_(source)
