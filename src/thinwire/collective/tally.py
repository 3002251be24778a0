"""The bytes that one measured step sent and received of every tensor, and the norms of its codecs' inputs.

A step is measured if its exchanges have a tally. The pushing and the pulling thread write into it concurrently, each
with one append, and it is read after the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from thinwire.codecs.decoding import Values
from thinwire.collective.shard import Shard
from thinwire.frames import parse


@dataclass(frozen=True, slots=True)
class Tally:
    """Payload bytes and squared norms, in the order of recording.

    Example:
        >>> tally = Tally()
        >>> tally.pushed.extend([("fc.weight", 200), ("fc.weight", 50)])
        >>> dict(total(tally.pushed))
        {'fc.weight': 250}
    """

    pushed: list[tuple[str, int]] = field(default_factory=list)
    pulled: list[tuple[str, int]] = field(default_factory=list)
    squares: list[tuple[str, float]] = field(default_factory=list)

    def given(self, shard: Shard, values: Sequence[Values]) -> None:
        """Records the values that a shard's codecs encode next, without residuals."""
        for name, each in zip(shard.coded.names, shard.coded.of(values).tensors(), strict=True):
            self.squares.append((name, float(torch.linalg.vector_norm(each)) ** 2))

    def sent(self, shard: Shard, frames: Sequence[bytes]) -> None:
        """Records the frames that were just encoded of a shard, for its owner."""
        for name, context, frame in zip(shard.coded.names, shard.contexts, frames, strict=False):
            self.pushed.append((name, context.payload_nbytes if frame else 0))
        self.pushed.extend(self._plain(shard))

    def received(self, shard: Shard, frames: Sequence[bytes | memoryview]) -> None:
        """Records the frames of a shard's average, after they were decoded without error."""
        for name, frame in zip(shard.coded.names, frames, strict=False):
            self.pulled.append((name, len(parse(frame, copy=False).payload) if frame else 0))
        self.pulled.extend(self._plain(shard))

    @staticmethod
    def _plain(shard: Shard) -> Iterable[tuple[str, int]]:
        return zip(shard.plain.names, (shard.dtype.itemsize * shard.plain.sizes).tolist(), strict=True)


def total(amounts: Iterable[tuple[str, float]]) -> Mapping[str, float]:
    """Returns the sum of the amounts of every name; 0 for all other names."""
    sums: defaultdict[str, float] = defaultdict(int)
    for name, amount in amounts:
        sums[name] += amount
    return sums
