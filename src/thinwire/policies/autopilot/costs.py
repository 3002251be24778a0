"""What a step would take at each level: a small model, fed with what ranks have measured.

    step(level) = compute + codec + max(0, link − hidden) + excess

link is bytes over the measured rate, hidden what of the backward pass is left when messages can leave; excess is what
a level has been measured to take beyond that, on this link, wherever it was in use.
"""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.policies.autopilot.levels import Level

_MESSAGE_S = 1e-4
"""CPU time of a message, sent and received."""
_MESSAGE_NBYTES = 80
"""A packet's head and its frames' heads, roughly."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is exchanged in a step.

    Args:
        coded: values that levels compress.
        plain: values that always travel as float32.
        ranks: how many exchange.
        groups: messages that a rank sends another in each direction.
        uncompressed_nbytes: of all gradients in their own dtypes.
        pulls: whether averages travel too, as they do but in a reduce-scatter.
    """

    coded: int
    plain: int
    ranks: int
    groups: int
    uncompressed_nbytes: int
    pulls: bool = True

    @property
    def messages(self) -> int:
        """Messages that a rank sends in a step, compressed."""
        return (2 if self.pulls else 1) * (self.ranks - 1) * self.groups

    @property
    def passes(self) -> float:
        """How often a rank sends its values: 2·(N − 1)/N times, or half of it."""
        return (2 if self.pulls else 1) * (self.ranks - 1) / self.ranks

    def nbytes(self, level: Level, bits: float) -> float:
        """Returns the bytes that a rank sends in a step at a level, with so many bits a value."""
        if level.codec is None:
            return self.passes * self.uncompressed_nbytes
        return self.passes * (self.coded * bits / 8 + 4 * self.plain) + _MESSAGE_NBYTES * self.messages

    def bits(self, sent_nbytes: float) -> float:
        """Returns the bits of a compressed value, from the bytes that a rank has sent."""
        whole = sent_nbytes - _MESSAGE_NBYTES * self.messages - self.passes * 4 * self.plain
        return max(0.01, 8 * whole / max(1.0, self.passes * self.coded))

    def codec_s(self, level: Level) -> float:
        """Returns the seconds that a level's codec is expected to take, until it is measured."""
        return 0.0 if level.codec is None else 1e-9 * level.codec_ns * self.coded + _MESSAGE_S * self.messages

    def hidden(self, level: Level, overlap_s: float) -> float:
        """Returns for how long messages travel behind the backward pass that goes on."""
        return overlap_s if level.codec is None else overlap_s * (1 - 1 / max(1, self.groups))
