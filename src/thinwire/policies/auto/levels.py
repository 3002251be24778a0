"""The settings that the controller chooses among, from uncompressed to the fewest bits.

All compressed settings share one residual: what one setting does not send, the next one sends, whichever it is.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal, TypeAlias, get_args

import torch

from thinwire.codecs import Codec
from thinwire.codecs.device import why_not_encoded
from thinwire.codecs.registry import codec
from thinwire.errors import ConfigError

AUTO = "auto"
Target: TypeAlias = Literal["time", "bytes"]
LAG_LIMIT = 5.0
"""Steps that may wait in a residual, unless told otherwise."""
MOST_LAG = 1e9
"""More steps than any training has: a limit is below this."""
TERNARY_LAG = 2.0
"""The least lag of 3LC: even with s = 1 two to four steps wait."""
INT8_LAG = 0.25
"""The least lag of int8."""
MULTIPLIERS = (1.0, 1.25, 1.5, 1.75, 1.9)
"""The largest s of each level; a bound on the lag lowers it for each tensor."""
STEPS = (1.0, 1.08, 1.08, 1.18, 1.18)
"""How many times the steps of s = 1 a training takes to the same accuracy, by s; `docs/auto.md` has where from."""
_log = logging.getLogger(__name__)


def steps_of(sparsity: float) -> float:
    """Returns how many times the steps of s = 1 a training takes with a multiplier.

    >>> steps_of(1.0), steps_of(1.75), steps_of(1.99)
    (1.0, 1.18, 1.18)
    """
    return max(steps for s, steps in zip(MULTIPLIERS, STEPS, strict=True) if s <= max(sparsity, 1.0))


@dataclass(frozen=True, slots=True)
class Level:
    """One setting.

    Args:
        name: for people.
        codec: of the large tensors, both ways; None: everything is all-reduced as it is.
        sparsity: the largest multiplier s; 1 where there is none.
        bits: of a value, until it is measured.
        codec_ns: nanoseconds that a value takes to be coded and averaged on shared processors, until it is measured.
        steps: how many times the steps of s = 1 a training takes to the same accuracy.
    """

    name: str
    codec: Codec | None
    sparsity: float
    bits: float
    codec_ns: float
    steps: float = 1.0

    @property
    def mild(self) -> bool:
        """Whether values keep 8 bits or more, which costs no accuracy with any optimizer."""
        return self.codec is None or self.codec.id != "3lc"

    def encodes_on(self, devices: Collection[torch.device]) -> bool:
        """Returns whether the codec has kernels on all of these devices; the host has all kernels."""
        if self.codec is None:
            return True
        scheme = self.codec.scheme
        return all(device.type == "cpu" or not why_not_encoded(scheme, device) for device in devices)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """A user's requests to the controller.

    Args:
        lag_limit: the most steps that may wait in a residual.
        target: what is to be least: the `time` of a step, or `bytes`.

    Raises:
        ConfigError: a limit that is no positive number, or another target.
    """

    lag_limit: float = LAG_LIMIT
    target: Target = "time"

    def __post_init__(self) -> None:
        given: Any = self.lag_limit  # NumPy's integers, too
        number = isinstance(given, Real) and not isinstance(given, bool)
        if not number or not 0 < given < MOST_LAG:
            raise ConfigError(f"lag_limit={given!r:.80}; it is a number of steps above 0, as in lag_limit=5")
        if self.target not in get_args(Target):
            raise ConfigError(f"target={self.target!r}; allowed are 'time' and 'bytes'")
        object.__setattr__(self, "lag_limit", float(given))

    def levels(self, devices: Collection[torch.device] = ()) -> tuple[Level, ...]:
        """Returns the settings that the limit of the lag allows, from the mildest to the strongest.

        Args:
            devices: where tensors are; a setting whose codec has no kernels there is left out. Where none of the codecs
                has any, none is: all are encoded on the host, as a fixed codec is, with its warning.

        Example:
            >>> [level.name for level in Limits().levels()[:5]]
            ['uncompressed', 'bf16', 'int8', '3lc[s=1]', '3lc[s=1,entropy=zstd]']
            >>> [level.name for level in Limits(lag_limit=1.5).levels()]
            ['uncompressed', 'bf16', 'int8']
        """
        found = [
            Level("uncompressed", None, 1.0, 32.0, 0.0),
            Level("bf16", codec("bf16", error_feedback=True), 1.0, 16.0, 8.0),
        ]
        if self.lag_limit >= INT8_LAG:
            found.append(Level("int8", codec("int8", error_feedback=True), 1.0, 8.0, 8.0))
        if self.lag_limit >= TERNARY_LAG:
            ternary = codec("3lc", sparsity=MULTIPLIERS[-1], lag=self.lag_limit)
            smaller = replace(ternary, entropy="zstd")
            found.append(Level("3lc[s=1]", ternary, 1.0, 0.5, 8.0))
            bits = (0.35, 0.25, 0.18, 0.15, 0.12)
            found += [
                Level(f"3lc[s={s:g},entropy=zstd]", smaller, s, b, 10.0, steps)
                for s, b, steps in zip(MULTIPLIERS, bits, STEPS, strict=True)
            ]
        else:
            _log.warning(
                "lag_limit=%g: 3LC keeps 2 steps or more waiting even at s = 1; codec='auto' stays at %s at most",
                self.lag_limit,
                found[-1].name,
            )
        here = tuple(level for level in found if level.encodes_on(devices))
        return here if len(here) > 1 else tuple(found)


def residual_codec(among: tuple[Level, ...]) -> Codec:
    """Returns the codec that contexts are made for: the one whose state serves every level."""
    plainest = [level.codec for level in among if level.codec is not None and level.codec.entropy is None]
    return plainest[-1]
