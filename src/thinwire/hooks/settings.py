"""What schedulers move: the rates and options of an optimizer's parameter groups, and what of them is news."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.errors import ConfigError, ProtocolError
from thinwire.schema import Changes, Plan
from thinwire.server.options import Options, changed, changes, portable_options
from thinwire.server.updater import Settings


class Groups:
    """An optimizer's parameter groups, read at every step, beside what the shards were told of them.

    Args:
        groups: the optimizer's `param_groups`, which schedulers write to.
        defaults: the optimizer's `defaults`: only these options are its own.
        plan: of any shard, which told them how the groups began.

    Example:
        >>> plan = Plan(workers=1, tables=(), codecs=(), optimizer="SGD", groups=({"momentum": 0.9},))
        >>> groups = Groups([{"lr": 0.1, "momentum": 0.9}], {"lr": 1, "momentum": 0}, plan)
        >>> groups.news()
        ()
        >>> groups._groups[0]["momentum"] = 0.85
        >>> groups.news(), groups.news()
        (((0, {'momentum': 0.85}),), ())
    """

    def __init__(self, groups: Sequence[dict[str, Any]], defaults: Mapping[str, Any], plan: Plan) -> None:
        self._groups, self._defaults, self._optimizer = groups, defaults, plan.optimizer
        self._said: tuple[Options, ...] = plan.groups

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rate of every group, now."""
        return tuple(float(group["lr"]) for group in self._groups)

    def settings(self) -> Settings:
        """Everything that an optimizer of this worker's own goes by, now."""
        return Settings(self.rates, self._now())

    def news(self) -> Changes:
        """What differs from what was said last; from now on it counts as said.

        Raises:
            ConfigError: an option changed that may not, or to what it may not be.
        """
        now = self._now()
        found = changes(self._said, now)
        if found:
            try:
                changed(self._optimizer, self._said, found)
            except ProtocolError as error:
                raise ConfigError(f"param_groups: {error}") from None
        self._said = now
        return found

    def _now(self) -> tuple[Options, ...]:
        return tuple(portable_options(group, self._defaults) for group in self._groups)
