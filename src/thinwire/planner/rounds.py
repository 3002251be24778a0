"""A round: the steps from one exchange to the next, and how many of them are enough for exchanges to cost little."""

from __future__ import annotations

import math
from dataclasses import dataclass

from thinwire.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Round:
    """What a round is predicted to take.

    Args:
        steps: how many, the last of which exchanges.
        alone_s: of a step without an exchange, in seconds.
        exchanged_s: of the step with it.

    Example:
        >>> made = Round(steps=4, alone_s=1.0, exchanged_s=7.0)
        >>> made.step_s, made.exchange_share, made.steps_for(0.25)
        (2.5, 0.6, 18)
        >>> Round(steps=18, alone_s=1.0, exchanged_s=7.0).exchange_share
        0.25
    """

    steps: int
    alone_s: float
    exchanged_s: float

    @property
    def step_s(self) -> float:
        """Seconds of a step, the mean over those with and without an exchange."""
        return ((self.steps - 1) * self.alone_s + self.exchanged_s) / self.steps

    @property
    def exchange_s(self) -> float:
        """What the exchange adds to the round, in seconds."""
        return max(0.0, self.exchanged_s - self.alone_s)

    @property
    def exchange_share(self) -> float:
        """Of the round's time, what the exchange adds."""
        return self.exchange_s / (self.steps * self.step_s) if self.exchange_s else 0.0

    def steps_for(self, share: float) -> int | None:
        """Returns with how many steps a round the same exchange takes at most a share of the time.

        Args:
            share: of the round's time, above 0 and below 1.

        Returns:
            1 or more; None where no number is enough, as steps take no time.
        """
        if not self.exchange_s:
            return 1
        if not self.alone_s:
            return None
        # A share that is met exactly shall not ask for a step more because of the last bit of a product.
        return max(1, math.ceil(self.exchange_s * (1 - share) / (share * self.alone_s) * (1 - 1e-12)))


def check_share(share: float) -> float:
    """Returns a share of the time that exchanges may take.

    Raises:
        ConfigError: it is not above 0 and below 1.
    """
    if not 0 < share < 1:
        raise ConfigError(f"exchange_share={share}: exchanges may take a share of the time above 0 and below 1")
    return share
