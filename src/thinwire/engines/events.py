"""Events that a process reports to its engine: one JSON object a line on standard output.

An event is a frozen struct; its key `event` in JSON is the name of its class in small letters. The engine gets the
classes as an argument and does not interpret them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Union

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=str.lower):
    """Base class of all events.

    Example:
        >>> class Sum(Event, frozen=True, kw_only=True):
        ...     value: float
        >>> Sum(value=float("nan")).line()
        '{"event": "sum", "value": NaN}'
        >>> reader([Sum])('{"event": "sum", "value": 2}').value, reader([Sum])("warming up")
        (2.0, None)
    """

    def line(self) -> str:
        """Returns the event as one line of JSON, without the line's end."""
        # Not msgspec's own JSON: it writes NaN, which a diverged training reports, as null.
        return json.dumps(msgspec.to_builtins(self))


class Restarted(Event, frozen=True, kw_only=True):
    """The engine has restarted a process.

    Attributes:
        reason: how it ended.
        left: how many restarts are left.
    """

    reason: str
    left: int


class Lost(Event, frozen=True, kw_only=True):
    """An optional process has failed and is not restarted.

    Attributes:
        reason: how it ended, and the last lines that it wrote.
    """

    reason: str


class Said(Event, frozen=True, kw_only=True):
    """A process has printed a line that is no event."""

    text: str


class Listening(Event, frozen=True, kw_only=True):
    """A server accepts connections at `address`, `host:port`."""

    address: str


class Served(Event, frozen=True, kw_only=True):
    """A server's training has ended."""

    wire_bytes_sent: int
    wire_bytes_received: int


def reader(kinds: Sequence[type[Event]]) -> Callable[[str], Event | None]:
    """Returns a function that reads a line: the event in it, or None where it is something else.

    Args:
        kinds: the classes of the events that may come; without any, nothing is one.
    """
    if not kinds:
        return lambda line: None
    kind: Any = Union[tuple(kinds)]  # noqa: UP007  # of a sequence, which X | Y cannot spell

    def read(line: str) -> Event | None:
        try:
            data = json.loads(line)
            event: Event | None = msgspec.convert(data, kind) if isinstance(data, dict) and "event" in data else None
        except ValueError:  # msgspec's errors are of this kind too
            return None
        return event

    return read
