"""`codec="auto"` of local updates: what a design says of it, and the settings that it chooses among."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from thinwire.codecs import Codec
from thinwire.errors import ConfigError
from thinwire.policies.autopilot.levels import LAG_LIMIT, TERNARY_LAG, Level, levels, residual_codec
from thinwire.policies.autopilot.pilot import Target

AUTO = "auto"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AutoCodec:
    """Which settings an exchange of updates may have, and what is to be least.

    Args:
        lag_limit: the most exchanges that may wait in a residual.
        target: `time` of a round, or `bytes`.

    Raises:
        ConfigError: a limit that is no positive number, or another target.

    Example:
        >>> [level.name for level in AutoCodec(lag_limit=1.5).levels]
        ['bf16', 'int8']
    """

    lag_limit: float = LAG_LIMIT
    target: Target = "time"

    def __post_init__(self) -> None:
        levels(self.lag_limit)
        if self.target not in get_args(Target):
            raise ConfigError(f"target={self.target!r}; allowed are 'time' and 'bytes'")

    @property
    def levels(self) -> tuple[Level, ...]:
        """The settings, from the mildest. All keep a residual: what waits of one goes with the next."""
        return tuple(level for level in levels(self.lag_limit) if level.codec is not None)

    @property
    def codec(self) -> Codec:
        """The codec that residuals are made for."""
        return residual_codec(self.levels)

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """The codecs of all settings."""
        return tuple(dict.fromkeys(level.codec for level in self.levels if level.codec is not None))

    def agreement(self) -> str:
        """What workers must have in common, as a plan states it."""
        return f"auto={self.lag_limit:g},target={self.target}"


def auto_codec(options: Mapping[str, Any]) -> AutoCodec:
    """Returns what options in a design's brackets beside `codec=auto` ask for.

    Args:
        options: `lag_limit` and `target`; no others go with it.

    Raises:
        ConfigError: options of a codec, or values that cannot be.
    """
    if others := [name for name in options if name not in ("lag_limit", "target")]:
        raise ConfigError(
            f"codec=auto decides both ways and all options itself; leave out {', '.join(others)}, or name a codec"
        )
    made = AutoCodec(**options)
    if made.lag_limit < TERNARY_LAG:
        _log.warning(
            "lag_limit=%g: 3LC keeps 2 exchanges or more waiting even at s = 1; codec=auto stays at %s at most",
            made.lag_limit,
            made.levels[-1].name,
        )
    return made
