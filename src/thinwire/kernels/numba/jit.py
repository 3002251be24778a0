"""One decorator for every compiled kernel.

Kernels are compiled on their first call (importing compiles nothing), release the interpreter lock and are cached on
disk, beside the source or in the user's cache folder. Where neither can be written, Numba refuses at import; kernels
are then compiled once in each process. No `parallel=True`: its thread layers abort when two threads enter, or in forks.

A kernel may call kernels of other files, whose machine code becomes part of its own. Numba's cache looks at the file of
the kernel that is called and at no other; the cache here looks at every file of the package.

`wide_vectors()`, the first line of a kernel bound by arithmetic, lets the compiler use the widest registers there are.
For processors with AVX-512 that lower their clock for it, it would stop at half of them. Results are the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core import types
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.extending import intrinsic


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` lazily, without the interpreter lock, cached where a cache can be written."""
    kernel: Any = numba.njit(nogil=True)(function)
    with suppress(RuntimeError):  # "cannot cache function ...: no locator available"
        kernel._cache = _KernelCache(function)  # what njit(cache=True) does, with another cache
    return kernel  # type: ignore[no-any-return]


def frozen(array: Any) -> Any:
    """A read-only view. Kernels see every input as read-only, so that they are compiled once, not twice."""
    view = array.view()
    view.setflags(write=False)
    return view


@cache
def _digest() -> bytes:
    """Of every file that may be compiled into a kernel: this package, and the numbers that both backends share."""
    here = Path(__file__).parent
    digest = hashlib.blake2b()
    for path in sorted([*here.glob("*.py"), *here.parent.glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.digest()


class _PackageLocator:
    """A locator of Numba's, which finds a folder for the cache, with a stamp that covers the whole package."""

    def __init__(self, locator: Any) -> None:
        self._locator = locator

    def get_source_stamp(self) -> tuple[Any, bytes]:
        """What the machine code was made of: where it differs, the cache is not used."""
        return self._locator.get_source_stamp(), _digest()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._locator, name)


class _KernelCacheImpl(CompileResultCacheImpl):  # type: ignore[misc]
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._locator: Any = _PackageLocator(self.locator)


class _KernelCache(FunctionCache):  # type: ignore[misc]
    _impl_class = _KernelCacheImpl


@intrinsic
def wide_vectors(typing_context: Any) -> tuple[Any, Callable[..., Any]]:
    """In a kernel: a hint to the vectoriser, worth up to a third in loops bound by arithmetic; no code of its own."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # llvmlite's own `add` knows no attributes with values. Where vectors are not 512 bits wide, LLVM ignores it.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.none(), generate
