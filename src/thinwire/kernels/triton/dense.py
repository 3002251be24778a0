"""Codecs that make the same number of bytes of any values, and have one scale: how their kernels are launched.

Such a codec brings a rule for its scale and two kernels, one that makes bytes and one that takes them back. What is
around them is the same for all: a batch, its largest magnitudes, which tensors are refused, the payload's memory.
This file knows nothing of what the bytes mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Required, TypedDict, Unpack

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from thinwire.kernels.triton.batch import Batch
from thinwire.kernels.triton.pending import Pending, allow
from thinwire.kernels.triton.workspace import DeviceWorkspace

DECODE_BLOCK = 4096  # values per program, in decoding


class Given(TypedDict, total=False):
    """What every encoder takes beside the values; see `thinwire.kernels.triton.ternary.encode_ternary`."""

    residuals: Sequence[torch.Tensor] | None
    residual_scale: float
    together: bool
    workspace: Required[DeviceWorkspace]


class Scaled(NamedTuple):
    """What a codec's rule says of a batch.

    Attributes:
        scales: [num_tensors], in the type of the values; what is sent.
        arguments: of the kernel, beyond those that every kernel takes.
        limits: [num_tensors], what scales must reach for any tensor to be sent; None: nothing.
    """

    scales: torch.Tensor
    arguments: dict[str, Any]
    limits: torch.Tensor | None = None


def encode_dense(
    values: Sequence[torch.Tensor],
    *,
    kernel: Any,
    rule: Callable[[Batch, torch.Tensor], Scaled],
    per_byte: int,
    **given: Unpack[Given],
) -> Pending:
    """Encodes a batch: magnitudes, scales, one pass that makes the bytes and keeps the residuals.

    Args:
        values: as in `thinwire.kernels.triton.ternary.encode_ternary`, and so is what is `given`.
        kernel: takes `scales`, `allowed`, `payload`, the rule's arguments and the batch's.
        rule: finds the scales, from the batch and its largest magnitudes, on the device.
        per_byte: values that make a byte.
    """
    workspace, residuals = given["workspace"], given.get("residuals")
    workspace.follow()
    with workspace.running():
        batch = Batch(
            values,
            residuals,
            residual_scale=given.get("residual_scale", 1.0),
            per_byte=per_byte,
            workspace=workspace,
        )
        largest = batch.largest()
        scales, arguments, limits = rule(batch, largest)
        payload = workspace.array("dense.payload", batch.num_bytes, torch.uint8)
        kernel[(batch.num_blocks,)](
            scales=scales,
            allowed=allow(largest, scales, limits, together=given.get("together", False)),
            payload=payload,
            **arguments,
            **batch.launch,
        )
        return Pending(batch, largest=largest, scales=scales, payload=payload, limits=limits)


def decode_dense(
    kernel: Any,
    payload: NDArray[np.generic],
    *,
    scale: float,
    out: torch.Tensor,
    accumulate: bool,
    workspace: DeviceWorkspace,
) -> None:
    """Fills (or adds into) flat `out` from a payload that the caller has checked; does not wait.

    Args:
        kernel: takes `payload`, `scale`, `out`, `size`, and writes a block of the values.
        scale: finite in the type of `out`.
        workspace: of out's device; its next use must `synchronize` first.
    """
    workspace.follow()
    with workspace.running():
        kernel[(-(-out.numel() // DECODE_BLOCK),)](
            payload=workspace.upload("dense.received", payload),
            scale=torch.full((1,), scale, dtype=out.dtype, device=out.device),
            out=out,
            size=out.numel(),
            ACCUMULATE=accumulate,
            BLOCK=DECODE_BLOCK,
            enable_fp_fusion=False,
        )
    workspace.join()


@triton.jit
def put(out: tl.tensor, at: tl.tensor, value: tl.tensor, known: tl.tensor, ACCUMULATE: tl.constexpr) -> None:
    """``out = value``, or ``out += value``, where values are known."""
    if ACCUMULATE:
        value = tl.load(out + at, mask=known, other=0.0) + value
    tl.store(out + at, value, mask=known)
