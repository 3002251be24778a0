"""Policies by name, as in `ssp[staleness=5]`: ours, and those of other packages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from inspect import signature
from typing import Any, Generic, TypeVar

from thinwire.errors import ConfigError, guess
from thinwire.names import parse_name
from thinwire.plugins import load, load_or_warn

T = TypeVar("T")


def check_count(what: str, value: object, least: int, most: float = math.inf) -> None:
    """Raises ConfigError where an option is not a whole number of at least `least`, and of at most `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        bound = f"of at least {least}" if most == math.inf else f"in {least} … {most}"
        raise ConfigError(f"{what} is {value!r}; it must be a whole number {bound}")


_signature = cache(signature)
"""Cached, because a training names policies hundreds of times."""


@cache
def plugins(group: str) -> tuple[EntryPoint, ...]:
    """Returns the entry points of a group, such as `thinwire.placement`, as they were at the first call.

    Nothing is imported. Cached, because reading the metadata of all packages takes tens of milliseconds.

    >>> plugins("thinwire.none-of-ours")
    ()
    """
    return tuple(entry_points(group=group))


class Family(Generic[T]):
    """The policies of one kind: ours, and those of other packages, under the entry point `thinwire.<what>`.

    Args:
        what: the kind, as in `placement`.
        shipped: what makes each of ours, by id.
        base: what a policy is.
        short: abbreviations of option names.
        bare: the option that a lone value means, by id.
    """

    def __init__(
        self,
        what: str,
        shipped: Mapping[str, Callable[..., T]],
        base: type,
        *,
        short: dict[str, str] | None = None,
        bare: Mapping[str, str] | None = None,
    ) -> None:
        self.what, self.shipped, self._base = what, shipped, base
        self._short, self._bare = short or {}, bare or {}

    def known(self) -> dict[str, Callable[..., T]]:
        """Returns what makes each policy, by id. Raises ConfigError where two have one id."""
        found = dict(self.shipped)
        for point in plugins(f"thinwire.{self.what}"):
            if (kind := load_or_warn(point)) is None:
                continue
            kind_id = own if isinstance(own := getattr(kind, "id", None), str) else point.name
            if found.setdefault(kind_id, kind) is not kind:
                raise ConfigError(f"{self.what} id {kind_id!r} of {point.value} is taken by {found[kind_id].__name__}")
        return found

    def make(self, name: str, **given: Any) -> T:
        """Returns a policy by name, made with the options in brackets, and with those `given`, which are a design's.

        Raises:
            ConfigError: an unknown policy or option, listing what there is.
        """
        known = self.known()
        kind_id, _ = parse_name(name, self.what, bare="")
        if kind_id not in known:
            for point in plugins(f"thinwire.{self.what}"):
                if point.name == kind_id:
                    load(point)  # says why it cannot be
            raise ConfigError(f"unknown {self.what} {kind_id!r}{guess(kind_id, known)}; there are {', '.join(known)}")
        kind = known[kind_id]
        short = {brief: full for brief, full in self._short.items() if brief not in _signature(kind).parameters}
        _, options = parse_name(name, self.what, short=short, bare=self._bare.get(kind_id))
        if own := sorted(set(options) & set(given)):
            raise ConfigError(f"{self.what} {name!r}: the design says {', '.join(own)}; leave it out of the brackets")
        try:
            _signature(kind).bind(**given, **options)
        except TypeError as error:
            allowed = [option for option in _signature(kind).parameters if option not in given]
            raise ConfigError(f"{self.what} {name!r}: {error}; the options are {allowed}") from error
        made = kind(**given, **options)
        if not isinstance(made, self._base):
            raise ConfigError(f"{self.what} {name!r}: {made!r:.80} is no {self._base.__module__}.{self._base.__name__}")
        return made
