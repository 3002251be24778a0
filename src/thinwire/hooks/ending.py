"""Ends a worker's part in a training: reports its failure, and leaves at exit if the script did not."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from typing import Protocol

from thinwire.cautions import caution

MAX_FAILURE_CHARS = 500
"""Limit on the report of a failure to the other workers."""
FAILED_S = 5.0
"""How long shards may take to release a worker that an exception ends, in seconds: a person waits for the message."""


class Leaving(Protocol):
    """A worker's part in a training."""

    def leave_soon(self, failure: str) -> None:
        """Leaves within `FAILED_S`; `failure` is the reason, empty without a failure."""


_here: list[Leaving] = []
"""Parts that joined and have not left. The list keeps them alive after a script's `main` has returned."""


def failure_text(error: BaseException) -> str:
    """Returns the report of a failure to the other workers.

    >>> failure_text(ValueError("no such file"))
    'ValueError: no such file'
    """
    text = f"{type(error).__name__}: {error}"[:MAX_FAILURE_CHARS].rstrip(": ")
    return text.encode("utf-8", "replace").decode()  # a file's name may contain half a character


def joined(part: Leaving) -> None:
    """Registers a part, which leaves when the process ends: the server would wait for it otherwise."""
    _here.append(part)


def left(part: Leaving) -> None:
    """Removes a part that has left."""
    with suppress(ValueError):
        _here.remove(part)


def _leave_all() -> None:
    # The exception that ended the script, if any; at a prompt it may be an old one.
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    remaining = tuple(_here)
    for part in remaining:
        with suppress(Exception):  # the next part must leave, too
            part.leave_soon("" if error is None else failure_text(error))
    if remaining and error is None:
        caution(
            "this process ends and has not left its training, and leaves it now: call close() on the optimizer that "
            "tw.distribute returned, or write `with opt:` around the loop"
        )


atexit.register(_leave_all)
os.register_at_fork(after_in_child=_here.clear)  # a child process belongs to no training
