"""One decorator for every compiled kernel.

Kernels are compiled on their first call (importing compiles nothing), release the interpreter lock and are cached on
disk, beside the source or in the user's cache folder. Where neither can be written, Numba refuses at import; we then
compile once per process instead. No `parallel=True`: its thread layers abort when two threads enter, or in forks.

Numba's cache looks at the file of the kernel that is called and at no other. So **a kernel calls only kernels of its
own file**: otherwise an edit elsewhere would leave old machine code in use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` lazily, without the interpreter lock, cached where a cache can be written."""
    try:
        return numba.njit(nogil=True, cache=True)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # "cannot cache function ...: no locator available"
        return numba.njit(nogil=True)(function)  # type: ignore[no-any-return]
