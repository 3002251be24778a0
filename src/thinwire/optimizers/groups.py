"""The parameter groups of a worker's optimizer, read at every step, and what changed in them since they were sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.errors import ConfigError, ProtocolError
from thinwire.optimizers.options import Options, apply_changes, changes, portable_options
from thinwire.optimizers.runner import Settings
from thinwire.schema import Changes


class ParameterGroups:
    """An optimizer's parameter groups, which schedulers write to, beside the options that the shards know.

    Args:
        optimizer: its class name.
        groups: its `param_groups`.
        defaults: its `defaults`: only these options are its own.

    Example:
        >>> groups = [{"lr": 0.1, "momentum": 0.9}]
        >>> watched = ParameterGroups("SGD", groups, {"lr": 1, "momentum": 0})
        >>> watched.options
        ({'momentum': 0.9},)
        >>> groups[0]["momentum"] = 0.85
        >>> watched.changes(), watched.changes()
        (((0, {'momentum': 0.85}),), ())
    """

    def __init__(self, optimizer: str, groups: Sequence[dict[str, Any]], defaults: Mapping[str, Any]) -> None:
        self._optimizer, self._groups, self._defaults = optimizer, groups, defaults
        self._sent = self.options

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rate of every group, now."""
        return tuple(float(group["lr"]) for group in self._groups)

    @property
    def options(self) -> tuple[Options, ...]:
        """The other options of every group, now, as JSON values."""
        return tuple(portable_options(group, self._defaults) for group in self._groups)

    @property
    def settings(self) -> Settings:
        """Rates and options, now."""
        return Settings(self.rates, self.options)

    def changes(self) -> Changes:
        """Returns what differs from the options sent last; from now on it counts as sent.

        Raises:
            ConfigError: an option changed that may not, or to a value out of range.
        """
        options = self.options
        found = changes(self._sent, options)
        if found:
            try:
                apply_changes(self._optimizer, self._sent, found)
            except ProtocolError as error:
                raise ConfigError(f"param_groups: {error}") from None
        self._sent = options
        return found
