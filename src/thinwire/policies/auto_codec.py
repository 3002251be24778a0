"""What `codec="auto"` asks of the controller, in hooks and of local updates, and what the controller chooses among."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from thinwire.codecs import Codec
from thinwire.errors import ConfigError
from thinwire.policies.autopilot.levels import LAG_LIMIT, TERNARY_LAG, Level, levels, residual_codec
from thinwire.policies.autopilot.pilot import Target

AUTO = "auto"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AutoCodec:
    """Which settings an exchange may have, and what is to be least.

    Args:
        lag_limit: the most exchanges that may wait in a residual.
        target: `time` of a step, or of a round of local updates; or `bytes`.

    Raises:
        ConfigError: a limit that is no positive number, or another target.

    Example:
        >>> [level.name for level in AutoCodec(lag_limit=1.5).settings()]
        ['bf16', 'int8']
        >>> [level.name for level in AutoCodec(lag_limit=0.1).settings(uncompressed=True)]
        ['uncompressed', 'bf16']
    """

    lag_limit: float = LAG_LIMIT
    target: Target = "time"

    def __post_init__(self) -> None:
        levels(self.lag_limit)
        object.__setattr__(self, "lag_limit", float(self.lag_limit))
        if self.target not in get_args(Target):
            raise ConfigError(f"target={self.target!r}; allowed are 'time' and 'bytes'")

    def settings(self, devices: Collection[torch.device] = (), *, uncompressed: bool = False) -> tuple[Level, ...]:
        """Returns the settings, from the mildest. What waits in a residual of one goes with the next.

        Args:
            devices: where tensors are; a setting whose codec has no kernels there is left out. Where none of the codecs
                has any, none is: all are encoded on the host, as a fixed codec is, with its warning.
            uncompressed: whether the one that keeps no residual is among them: for who adds what waits to it.
        """
        found = tuple(level for level in levels(self.lag_limit) if uncompressed or level.codec is not None)
        here = tuple(level for level in found if level.encodes_on(devices))
        return here if any(level.codec is not None for level in here) else found

    @property
    def codec(self) -> Codec:
        """The codec that residuals are made for, on the host."""
        return residual_codec(self.settings())

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """The codecs of all settings."""
        return tuple(dict.fromkeys(level.codec for level in self.settings() if level.codec is not None))

    def agreement(self) -> str:
        """What workers must have in common, as a plan states it."""
        return f"auto={self.lag_limit:g},target={self.target}"

    def warn(self, unit: Literal["step", "exchange"]) -> None:
        """Warns of a limit that leaves no 3LC among the settings; `unit` is what waits."""
        if self.lag_limit < TERNARY_LAG:
            _log.warning(
                "lag_limit=%g: 3LC keeps 2 %ss or more waiting even at s = 1; codec=auto stays at %s at most",
                self.lag_limit,
                unit,
                self.settings()[-1].name,
            )
