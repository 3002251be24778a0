"""3LC in plain torch operators: what a user would write first, and what the kernels are compared with.

It makes the same bytes as `tw.codec("3lc")` (a test says so); it is no reference for speed beyond that.
"""

from __future__ import annotations

import torch

ZERO_CODE = 121
RUN_CODE = 243
MAX_RUN = 14


def encode(gradient: torch.Tensor, residual: torch.Tensor, sparsity: float) -> tuple[float, torch.Tensor]:
    """Encodes residual + gradient (flat float32) and updates the residual. Returns the scale and the payload."""
    total = residual + gradient
    scale = total.abs().max() * sparsity
    trits = torch.where(total.abs() > scale / 2, torch.sign(total), torch.zeros_like(total))
    residual.copy_(total - scale * trits)
    digits = (trits + 1).to(torch.uint8)
    padding = -digits.numel() % 5
    digits = torch.nn.functional.pad(digits, (0, padding), value=1).view(-1, 5)
    codes = digits[:, 0] * 81 + digits[:, 1] * 27 + digits[:, 2] * 9 + digits[:, 3] * 3 + digits[:, 4]
    return float(scale), zero_runs(codes)


def zero_runs(codes: torch.Tensor) -> torch.Tensor:
    """Zero-run encoding: position in its run decides what each zero code becomes."""
    zero = codes == ZERO_CODE
    _, counts = torch.unique_consecutive(zero, return_counts=True)
    starts = counts.cumsum(0) - counts
    position = torch.arange(codes.numel(), device=codes.device) - starts.repeat_interleave(counts)
    length = counts.repeat_interleave(counts)
    chunk = torch.clamp(length - position // MAX_RUN * MAX_RUN, max=MAX_RUN)
    first = position % MAX_RUN == 0
    out = torch.where(zero & (chunk > 1), (chunk + (RUN_CODE - 2)).to(torch.uint8), codes)
    keep = ~zero | first
    return out[keep]


def decode(payload: torch.Tensor, scale: float, size: int) -> torch.Tensor:
    """Decodes a payload of `encode` into a new flat float32 tensor."""
    run = torch.where(payload >= RUN_CODE, payload.to(torch.int64) - (RUN_CODE - 2), 1)
    codes = torch.where(payload >= RUN_CODE, torch.full_like(payload, ZERO_CODE), payload).repeat_interleave(run)
    digits = torch.stack([codes // 81, codes // 27 % 3, codes // 9 % 3, codes // 3 % 3, codes % 3], dim=1)
    return (digits.view(-1)[:size].to(torch.float32) - 1) * scale
