"""Warnings that point at the user's line that caused them, at any depth below it, or at no line."""

from __future__ import annotations

import sys
import warnings

_BELOW = frozenset({"thinwire", "torch", "contextlib", "copy", "functools", "pickle", "threading"})
"""Packages whose lines do not help a user."""


def caution(text: str) -> None:
    """Warns, with a UserWarning, at the innermost line outside of thinwire and torch.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     caution("one rank alone has no peers")
        >>> print(caught[0].message)
        one rank alone has no peers
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _BELOW:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, UserWarning, stacklevel=level)


def notice(text: str) -> None:
    """Warns, with a UserWarning that names no line, of events that no line caused: a worker that died, a full disk.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     notice("worker 1 went away")
        >>> print(caught[0].filename, caught[0].lineno, caught[0].message)
        thinwire 0 worker 1 went away
    """
    warnings.warn_explicit(text, UserWarning, "thinwire", 0)
