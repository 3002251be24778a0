"""A new compression policy: the first and the last matrix in half precision, everything between by another codec.

It is an object that is handed over: `tw.distribute(model, optimizer, compression=Ends(…), …)`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

import thinwire as tw
from thinwire.codecs import Codec
from thinwire.policies.compression import ByShape, Choice


@dataclass(frozen=True, kw_only=True)
class Ends:
    """Chooses by the place of a tensor in its model; biases, norms and small tensors as `ByShape` does."""

    model: nn.Module
    inner: Codec

    def choose(self, name: str, shape: tuple[int, ...]) -> Choice:
        """Returns the codecs for the tensor called `name`."""
        matrices = [key for key, parameter in self.model.named_parameters() if parameter.ndim > 1]
        half = tw.codec("fp16")
        codec = half if name in (matrices[0], matrices[-1]) else self.inner
        return ByShape(up=codec, down=codec).choose(name, shape)
