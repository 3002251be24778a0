"""Names of policies and designs, an id with options in brackets, as in `ssp[staleness=5]`; and the packages' own."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from inspect import signature
from typing import Any, Generic, TypeVar

from thinwire.errors import ConfigError, guess
from thinwire.plugins import load, load_or_warn

T = TypeVar("T")

_EXAMPLES = {
    "design": "3lc[s=1.75]",
    "codec": "topk[fraction=0.01]",
    "placement": "uniform[min=1024]",
    "compression": "by-shape",
}
_FORM = re.compile(r"^(?P<id>[\w.-]+)(?:\[(?P<options>(?:[^\[\]]|(?<=[a-z0-9])\[[^\[\]]*\])*)\])?$")
MAX_NAME = 2000
"""Characters of a name that a person has written."""
_COMMA = re.compile(r",(?![^\[]*\])")
"""A comma between options, not one within the brackets of an option's value, as in `diloco[codec=topk[k=2,seed=1]]`."""


def parse_name(
    name: str, what: str, *, short: dict[str, str] | None = None, bare: str | None = None
) -> tuple[str, dict[str, Any]]:
    """Returns the id and the options of a name.

    Args:
        name: as a user wrote it.
        what: the kind of thing, for messages.
        short: abbreviations of option names.
        bare: the option that a lone value means, as in `backup[1]`.

    Raises:
        ConfigError: not of that form.

    Example:
        >>> parse_name("ssp[staleness=5,mode=passive]", "consistency")
        ('ssp', {'staleness': 5, 'mode': 'passive'})
        >>> parse_name("backup[1]", "consistency", bare="spare")
        ('backup', {'spare': 1})
        >>> parse_name("diloco[h=30,codec=3lc[s=1.5,entropy=zstd]]", "design")
        ('diloco', {'h': 30, 'codec': '3lc[s=1.5,entropy=zstd]'})
    """
    if isinstance(name, str) and len(name) > MAX_NAME:  # a peer may have written it
        raise ConfigError(
            f"{what} {name[:60]!r}…: a name of {len(name):,} characters; at most {MAX_NAME:,} are possible"
        )
    match = _FORM.match(name) if isinstance(name, str) else None
    if match is None:
        raise ConfigError(
            f"{what} {name!r}; expected an id with options in brackets, as in {_EXAMPLES.get(what, 'ssp[staleness=5]')}"
        )
    options: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in _COMMA.split(match["options"] or ""))):
        key, equals, value = part.partition("=")
        if not equals and bare is not None:
            key, value = bare, part
        elif not equals:
            raise ConfigError(f"{what} {name!r}: {part!r} is not option=value")
        key = (short or {}).get(key.strip(), key.strip())
        if key == "id" or key in options:
            raise ConfigError(f"{what} {name!r}: {key!r} is given twice")
        options[key] = _value(value.strip())
    return match["id"], options


def _value(text: str) -> Any:
    """Numbers, true, false and null as in JSON, None as in Python; anything else is a string."""
    if text == "None":
        return None
    try:
        return json.loads(text.lower())
    except (ValueError, RecursionError):  # no JSON, or a number of too many digits
        return text


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
        self._short, self._bare = short, bare or {}

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
        _, options = parse_name(name, self.what, short=self._short, bare=self._bare.get(kind_id))
        if own := sorted(set(options) & set(given)):
            raise ConfigError(f"{self.what} {name!r}: the design says {', '.join(own)}; leave it out of the brackets")
        kind = known[kind_id]
        try:
            _signature(kind).bind(**given, **options)
        except TypeError as error:
            allowed = [option for option in _signature(kind).parameters if option not in given]
            raise ConfigError(f"{self.what} {name!r}: {error}; the options are {allowed}") from error
        made = kind(**given, **options)
        if not isinstance(made, self._base):
            raise ConfigError(f"{self.what} {name!r}: {made!r:.80} is no {self._base.__module__}.{self._base.__name__}")
        return made
