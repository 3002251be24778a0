"""Scratch memory that a context owns and uses again: a kernel call allocates nothing that grows with the tensor.

Fresh pages cost more than the arithmetic (a new 100 MB block takes five times as long as decoding it), so buffers
only grow. There are two of a byte per five values, `payload` for what an encoder hands out and `codes` for what a
decoder expands, so that a payload may be decoded in the workspace that encoded it. The rest has a fixed size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.contract import Bytes

BLOCK_CODES = 4096  # codes per block: 20,480 values, so that a block's digits stay in the first-level cache
SLACK = 64  # bytes behind the last code: kernels write whole words


class Grown:
    """A byte buffer with the views that kernels write through.

    Attributes:
        bytes: uint8[capacity + SLACK].
        words: the same memory as uint64, eight bytes apart.
        words_at: the same memory as uint64 starting at *every* byte: ``words_at[k] = w`` stores bytes k..k+7.
    """

    def __init__(self) -> None:
        self._resize(0)

    def _resize(self, capacity: int) -> None:
        self.bytes: Bytes = np.zeros((capacity + SLACK + 7) // 8 * 8, dtype=np.uint8)
        self.words: NDArray[np.uint64] = self.bytes.view(np.uint64)
        self.words_at = words_apart(self.bytes, 1)

    def reserve(self, capacity: int) -> None:
        """Hold at least `capacity` bytes; what was inside is lost when that needs a new buffer."""
        if self.bytes.size < capacity + SLACK:
            self._resize(capacity)


class Workspace:
    """The scratch buffers of one caller. Not thread safe: one per thread, or per owner that takes turns.

    Example:
        >>> import numpy as np
        >>> from thinwire.kernels.numba import encode_ternary
        >>> workspace = Workspace()
        >>> scale, payload = encode_ternary(np.zeros(1000, np.float32), sparsity=1.0, workspace=workspace)
        >>> payload.size, workspace.nbytes < 200_000
        (15, True)
    """

    def __init__(self) -> None:
        self.payload = Grown()
        self.codes = Grown()
        self.digits: Bytes = np.zeros(5 * BLOCK_CODES + 8, dtype=np.uint8)
        self.groups = words_apart(self.digits, 5)  # word i holds the digits of code i, and three of the next
        self.words: NDArray[np.uint64] = np.zeros((3, BLOCK_CODES // 8 + 1), dtype=np.uint64)
        self.found: NDArray[np.int64] = np.zeros(1024, dtype=np.int64)  # where a sparse payload sends values
        self._tables = {np.dtype(t): np.zeros(256 * 8, dtype=t) for t in (np.float32, np.float64)}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        held: list[NDArray[Any]] = [self.payload.bytes, self.codes.bytes, self.digits, self.words, self.found]
        return sum(array.nbytes for array in [*held, *self._tables.values()])

    def table(self, dtype: np.dtype[Any]) -> NDArray[Any]:
        """A table of `dtype`, eight entries per code: its five values, and three fillers."""
        return self._tables[dtype]


def words_apart(buffer: Bytes, step: int) -> NDArray[np.uint64]:
    """`buffer` seen as overlapping 64-bit words that start every `step` bytes."""
    return np.ndarray(((buffer.size - 8) // step + 1,), dtype=np.uint64, buffer=buffer, strides=(step,))
