"""The learning rates and options that hold at each clock, from the pushes of the workers whose they are."""

from __future__ import annotations

from thinwire.errors import ProtocolError
from thinwire.optimizers.options import Options, apply_changes
from thinwire.optimizers.runner import Settings
from thinwire.policies.consistency import Terms
from thinwire.schema import Plan, Push


class Hyperparameters:
    """What the updates of the current clock and of those ahead of it go by.

    Args:
        plan: has the options with which every worker begins.
        terms: says whose rates and options count.
    """

    def __init__(self, plan: Plan, terms: Terms) -> None:
        self._plan, self._terms = plan, terms
        self._options: dict[int, tuple[Options, ...]] = {}
        self._at_clock: dict[int, Settings] = {}

    def joined(self, rank: int) -> None:
        """A worker joins: the changes of its options count from the plan's on."""
        self._options.pop(rank, None)

    def take(self, rank: int, push: Push) -> Settings | None:
        """Returns what a push says of them; None where this worker's do not count.

        Raises:
            ProtocolError: another number of rates than of parameter groups, or options that may not change.
        """
        if not self._terms.owns_hyperparameters(rank):
            return None
        if len(push.rates) != len(self._plan.groups):
            raise ProtocolError(f"{len(push.rates)} learning rates came for {len(self._plan.groups)} groups")
        options = self._options.get(rank, self._plan.groups)
        if push.options:
            options = self._options[rank] = apply_changes(self._plan.optimizer, options, push.options)
        return Settings(push.rates, options)

    def set(self, clock: int, settings: Settings) -> None:
        """Fixes what the updates of a clock go by: the first settings that come for it."""
        self._at_clock.setdefault(clock, settings)

    def at(self, clock: int) -> Settings:
        """Returns what the updates of a clock go by."""
        return self._at_clock[clock]

    def forget_before(self, step: int) -> None:
        """Drops clocks that are over, and keeps at least one."""
        while len(self._at_clock) > 1 and (oldest := min(self._at_clock)) < step:
            del self._at_clock[oldest]
