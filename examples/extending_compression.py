"""A new compression policy: only large matrices take the design's codecs, the others travel in half precision.

With the entry point of docs/extending.md installed: `tw.distribute(…, design="3lc", compression="large[least=10000]")`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import thinwire as tw
from thinwire.policies.compression import ByShape, Choice


@dataclass(frozen=True, kw_only=True)
class Large(ByShape):
    """As `ByShape`, which keeps biases, norms and small tensors as they are, with a third class in between.

    Args:
        least: matrices with fewer values travel as fp16.
    """

    least: int = 10_000

    def choose(self, name: str, shape: tuple[int, ...]) -> Choice:
        """Returns the codecs for the tensor called `name`."""
        found = super().choose(name, shape)
        if found.up is not self.up or math.prod(shape) >= self.least:
            return found
        half = tw.codec("fp16")
        return Choice(half, half)
