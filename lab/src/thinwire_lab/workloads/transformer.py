"""A small GPT over bytes, with 120,064 parameters by default.

Shape suffixes: B batch, T time, D model width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from thinwire.errors import ConfigError


class Attention(nn.Module):
    """Causal self-attention with several heads; no biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        batch, time, width = x_BTD.shape
        q, k, v = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x_BTD).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y_BTD: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return y_BTD


class Layer(nn.Module):
    """One transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        y_BTD: torch.Tensor = x_BTD + self.mlp(self.norm2(x_BTD))
        return y_BTD


class ByteTransformer(nn.Module):
    """Predicts the next byte at every position; `std` is of all initial matrices (GPT-2), None leaves PyTorch's own."""

    def __init__(
        self,
        in_shape: tuple[int, ...],
        num_classes: int,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        tied: bool = False,
        std: float | None = 0.02,
    ) -> None:
        super().__init__()
        if len(in_shape) != 1 or in_shape[0] < 1:
            raise ConfigError(f"byte-transformer reads text: in_shape is (context,), not {in_shape}")
        self.context = in_shape[0]
        self.embed = nn.Embedding(num_classes, width)
        self.position = nn.Embedding(self.context, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if std is not None:
            for parameter in self.parameters():
                if parameter.ndim > 1:
                    nn.init.normal_(parameter, std=std)

    def forward(self, bytes_BT: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, V) for bytes (B, T) of an integer type, T at most the context."""
        x_BTD = self.embed(bytes_BT) + self.position.weight[: bytes_BT.shape[1]]
        logits_BTV: torch.Tensor = self.head(self.norm(self.layers(x_BTD)))
        return logits_BTV
