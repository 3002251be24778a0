"""A transformer over bytes as in LLaMA: RMSNorm, rotary positions, SwiGLU, no biases, PyTorch's initial weights.

Shape suffixes: B batch, T time, D model width, H heads, K width of a head, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from thinwire.errors import ConfigError

BASE = 10_000.0
"""Rotary positions' longest wavelength, over 2π (Su et al., 2021)."""


class Rotary(nn.Module):
    """Turns pairs of a head's values by angles proportional to the position."""

    cos_TK: torch.Tensor
    sin_TK: torch.Tensor

    def __init__(self, context: int, head_width: int) -> None:
        super().__init__()
        frequencies = BASE ** (-torch.arange(0, head_width, 2) / head_width)
        angles = torch.arange(context)[:, None] * frequencies.repeat(2)
        self.register_buffer("cos_TK", angles.cos(), persistent=False)
        self.register_buffer("sin_TK", angles.sin(), persistent=False)

    def forward(self, x_BHTK: torch.Tensor) -> torch.Tensor:
        time = x_BHTK.shape[2]
        first, second = x_BHTK.chunk(2, dim=3)
        return x_BHTK * self.cos_TK[:time] + torch.cat((-second, first), dim=3) * self.sin_TK[:time]


class GatedLayer(nn.Module):
    """One block: x + attention(norm(x)), then x + SwiGLU(norm(x))."""

    def __init__(self, width: int, heads: int, hidden: int, rotary: Rotary) -> None:
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        batch, time, width = x_BTD.shape
        q, k, v = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x_BTD)).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        gate, up = self.gate_up(self.norm2(x_BTD)).chunk(2, dim=2)
        y_BTD: torch.Tensor = x_BTD + self.down(F.silu(gate) * up)
        return y_BTD


class GatedTransformer(nn.Module):
    """Predicts the next byte at every position; 994,400 parameters by default with 128 classes."""

    def __init__(
        self,
        in_shape: tuple[int, ...],
        num_classes: int,
        width: int = 160,
        layers: int = 3,
        heads: int = 4,
        hidden: int = 448,
    ) -> None:
        super().__init__()
        if len(in_shape) != 1 or in_shape[0] < 1:
            raise ConfigError(f"gated-transformer reads text: in_shape is (context,), not {in_shape}")
        self.embed = nn.Embedding(num_classes, width)
        rotary = Rotary(in_shape[0], width // heads)
        self.layers = nn.Sequential(*(GatedLayer(width, heads, hidden, rotary) for _ in range(layers)))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, num_classes, bias=False)

    def forward(self, bytes_BT: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, V) for bytes (B, T) of an integer type, T at most the context."""
        logits_BTV: torch.Tensor = self.head(self.norm(self.layers(self.embed(bytes_BT))))
        return logits_BTV
