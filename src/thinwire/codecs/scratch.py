"""Memory that codecs use between calls, lent to one thread at a time.

Fresh pages cost more than the arithmetic: a new 100 MB tensor takes five times as long as decoding it. So buffers
only grow and are used again; there are as many sets as threads that encode at one moment, and no lock.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from thinwire.kernels.numba import Workspace


class Scratch:
    """The kernels' workspace, and named arrays of any size beside it."""

    def __init__(self) -> None:
        self.kernel = Workspace()
        self.threads = 1
        """How many threads the borrower lets a decoder use; 0 means one for each core."""
        self._arrays: dict[tuple[str, np.dtype[Any]], NDArray[Any]] = {}

    def array(self, name: str, size: int, dtype: DTypeLike) -> NDArray[Any]:
        """Returns `size` values with undefined content, the same memory for the same name until it must grow."""
        key = (name, np.dtype(dtype))
        held = self._arrays.get(key)
        if held is None or held.size < size:
            held = self._arrays[key] = np.empty(size, dtype)
        return held[:size]


_idle: list[Scratch] = []


class _Loan:
    """A class of its own, because a generator's context manager costs as much as encoding a small tensor."""

    __slots__ = ("_lent",)

    def __enter__(self) -> Scratch:
        try:
            self._lent = _idle.pop()
        except IndexError:
            self._lent = Scratch()
        return self._lent

    def __exit__(self, *_: object) -> None:
        self._lent.threads = 1
        _idle.append(self._lent)


def scratch() -> _Loan:
    """Lends a scratch, as in `with scratch() as space`.

    Taking from and putting back to a list is atomic, so threads never share one.
    """
    return _Loan()
