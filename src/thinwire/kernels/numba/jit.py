"""One decorator for every compiled kernel.

Kernels are compiled on their first call (importing compiles nothing), release the interpreter lock and are cached on
disk, beside the source or in the user's cache folder. Where neither can be written, Numba refuses at import; we then
compile once per process instead. No `parallel=True`: its thread layers abort when two threads enter, or in forks.

Numba's cache looks at the file of the kernel that is called and at no other. So **a kernel calls only kernels of its
own file**: otherwise an edit elsewhere would leave old machine code in use.

`wide_vectors()`, the first line of a kernel bound by arithmetic, lets the compiler use the widest registers there are.
For processors with AVX-512 that lower their clock for it, it would stop at half of them. Results are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from numba.core import types
from numba.extending import intrinsic


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` lazily, without the interpreter lock, cached where a cache can be written."""
    try:
        return numba.njit(nogil=True, cache=True)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # "cannot cache function ...: no locator available"
        return numba.njit(nogil=True)(function)  # type: ignore[no-any-return]


@intrinsic
def wide_vectors(typing_context: Any) -> tuple[Any, Callable[..., Any]]:
    """In a kernel: a hint to the vectoriser, worth up to a third in loops bound by arithmetic; no code of its own."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # llvmlite's own `add` knows no attributes with values. Where vectors are not 512 bits wide, LLVM ignores it.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.none(), generate
