"""Warnings that point at the line of the user's that they are about, however deep below it, or at none."""

from __future__ import annotations

import sys
import warnings

_BELOW = frozenset({"thinwire", "torch", "contextlib", "copy", "functools", "pickle", "threading"})
"""Packages whose lines tell a user nothing."""


def caution(text: str) -> None:
    """Warns, with a UserWarning, at the innermost line that is neither ours nor torch's.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True, action="always") as told:
        ...     caution("one rank alone has nobody to send to")
        >>> print(told[0].message)
        one rank alone has nobody to send to
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _BELOW:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, UserWarning, stacklevel=level)


def notice(text: str) -> None:
    """Warns, with a UserWarning that names no line, of what no line has caused: a worker that died, a full disk.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True, action="always") as told:
        ...     notice("worker 1 went away")
        >>> print(told[0].filename, told[0].lineno, told[0].message)
        thinwire 0 worker 1 went away
    """
    warnings.warn_explicit(text, UserWarning, "thinwire", 0)
