"""What `codec="auto"` asks for, checked: the levels, the limit of the lag and the target."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.codecs import Codec
from thinwire.codecs.device import why_not_encoded
from thinwire.collective.core import Collective
from thinwire.errors import ConfigError
from thinwire.hooks.exchange_autopilot import ExchangeAutopilot
from thinwire.policies.autopilot.levels import LAG_LIMIT, TERNARY_LAG, Level, levels, residual_codec
from thinwire.policies.autopilot.pilot import Target
from thinwire.policies.compression import Compression
from thinwire.runtime.collective import CollectiveDriver

AUTO = "auto"
FIXED = {"id": "fixed"}
"""What ranks without a controller must have in common, in place of its `agreement`."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Automatic:
    """What a user asked of the controller."""

    levels: tuple[Level, ...]
    lag_limit: float
    target: Target

    @property
    def codec(self) -> Codec:
        """The codec that residuals are made for."""
        return residual_codec(self.levels)

    @property
    def agreement(self) -> dict[str, Any]:
        """What all ranks must have in common, as JSON values; beside `FIXED`, the `id` alone is told."""
        settings = [level.name for level in self.levels]
        return {"id": AUTO, "lag_limit": self.lag_limit, "target": self.target, "settings": settings}

    def start(
        self, core: Collective, driver: CollectiveDriver, start_step: int, *, blocking: bool = False
    ) -> ExchangeAutopilot | None:
        """Returns the controller; None where a rank is alone and has nobody to send to."""
        if core.residuals.world == 1:
            return None
        return ExchangeAutopilot(
            self.levels,
            core,
            driver,
            lag_limit=self.lag_limit,
            target=self.target,
            start_step=start_step,
            blocking=blocking,
        )


def automatic_levels(
    codec: str | Codec,
    options: Mapping[str, Any],
    *,
    codec_down: str | Codec | None,
    compression: Compression | None,
    lag_limit: float | None,
    target: Target | None,
    devices: Collection[torch.device],
) -> Automatic | None:
    """Returns what `codec="auto"` asks for; None for any other codec.

    Args:
        codec, options, codec_down, compression, lag_limit, target: as a hook is given them.
        devices: where gradients are.

    Raises:
        ConfigError: arguments that contradict each other, or that cannot be.
    """
    if codec != AUTO:
        given = [name for name, value in (("lag_limit", lag_limit), ("target", target)) if value is not None]
        if given:
            raise ConfigError(
                f"only codec='auto' takes {' and '.join(given)}, and codec is {codec!r}; a fixed codec has a limit of "
                "its own, as in compress(model, '3lc', sparsity=1.75, lag=5)"
            )
        return None
    if options or codec_down is not None or compression is not None:
        what = [*options, *["codec_down"] * (codec_down is not None), *["compression"] * (compression is not None)]
        raise ConfigError(
            f"codec='auto' decides both ways and all options itself; leave out {', '.join(what)}, or name a codec"
        )
    if target not in (None, "time", "bytes"):
        raise ConfigError(f"target={target!r}; allowed are 'time' and 'bytes'")
    limit = LAG_LIMIT if lag_limit is None else lag_limit
    found = levels(limit)
    if limit < TERNARY_LAG:
        _log.warning(
            "lag_limit=%g: 3LC keeps 2 steps or more waiting even at s = 1; codec='auto' stays at %s at most",
            limit,
            found[-1].name,
        )
    on_devices = tuple(level for level in found if _encoded(level, devices))
    return Automatic(on_devices, float(limit), target or "time")


def _encoded(level: Level, devices: Collection[torch.device]) -> bool:
    """Whether a level's codec has kernels where gradients are; on the host all have."""
    if level.codec is None:
        return True
    return all(device.type == "cpu" or not why_not_encoded(level.codec.scheme, device) for device in devices)
