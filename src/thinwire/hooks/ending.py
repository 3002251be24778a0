"""How a worker's part in a training ends: what others are told of a failure here, and a goodbye that was forgotten."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from typing import Protocol

from thinwire.cautions import caution

MOST_FAILURE = 500
"""Characters of what the others are told of a failure here."""
FAILED_S = 5.0
"""Where an exception ends a training here, how long shards may take to let this worker go, in seconds: a person waits
to read what went wrong."""


class Leaving(Protocol):
    """A worker's part in a training."""

    def leave_soon(self, failure: str) -> None:
        """Leaves within `FAILED_S`; `failure` is what went wrong, if anything did."""


_here: list[Leaving] = []
"""Who has joined and not left. They are held: a script's `main` may have returned, and its optimizer with it."""


def failure_text(error: BaseException) -> str:
    """Returns what the others are told.

    >>> failure_text(ValueError("no such file"))
    'ValueError: no such file'
    """
    text = f"{type(error).__name__}: {error}"[:MOST_FAILURE].rstrip(": ")
    return text.encode("utf-8", "replace").decode()  # a file's name may hold half a character


def joined(part: Leaving) -> None:
    """Has a part that is not left when the process ends say goodbye: the server would wait for it to return."""
    _here.append(part)


def left(part: Leaving) -> None:
    """Says that a part was left."""
    with suppress(ValueError):
        _here.remove(part)


def _say_goodbye() -> None:
    # What ended the script, where an exception did; at a prompt it may be of long ago.
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    forgotten = tuple(_here)
    for part in forgotten:
        with suppress(Exception):  # the others are to be left as well
            part.leave_soon("" if error is None else failure_text(error))
    if forgotten and error is None:
        caution(
            "this process ends and has not left its training, and says goodbye now: close() of what tw.distribute "
            "returned does that at once, or `with opt:` around the loop"
        )


atexit.register(_say_goodbye)
os.register_at_fork(after_in_child=_here.clear)  # a child takes part in nothing
