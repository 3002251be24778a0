"""Scores of a training step, as scripts have them: numbers, or tensors with one value."""

from __future__ import annotations

import math
from typing import SupportsFloat

from thinwire.errors import ConfigError


def number(name: str, score: SupportsFloat | None) -> float | None:
    """Returns a score as a number; None for none.

    Args:
        name: of the score, for the message.
        score: a number, or an array or a tensor with one value; a tensor that requires a gradient, too.

    Raises:
        ConfigError: it is neither.

    Example:
        >>> import torch
        >>> number("loss", torch.tensor(0.5, requires_grad=True)), number("loss", 2)
        (0.5, 2.0)
    """
    if score is None:
        return None
    shape = tuple(getattr(score, "shape", ()))
    if not hasattr(score, "__float__") or math.prod(shape) != 1:
        of = f" of shape {shape}" if shape else ""
        raise ConfigError(f"{name} is a {type(score).__name__}{of}; expected a number, or a tensor with one value")
    return float(score.item() if hasattr(score, "item") else score)  # torch warns of float(loss)
