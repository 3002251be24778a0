"""Scratch memory of codecs, kept between calls.

New pages cost more than the arithmetic: allocating a 100 MB tensor takes five times as long as decoding it. Scratch
buffers only grow and are reused; a pool holds one set for each thread that encodes at the same time, without a lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from thinwire.codecs.entropy_stage import EntropyStage
from thinwire.kernels.numba import Workspace
from thinwire.kernels.triton.workspace import DeviceWorkspace


class Scratch:
    """The memory of one codec call: the kernels' workspace, named arrays, the zstd stage's objects."""

    def __init__(self) -> None:
        self.kernel = Workspace()
        self._arrays: dict[tuple[str, np.dtype[Any]], NDArray[Any]] = {}

    def array(self, name: str, size: int, dtype: DTypeLike) -> NDArray[Any]:
        """Returns `size` values with undefined content, the same memory for the same name until it must grow."""
        key = (name, np.dtype(dtype))
        held = self._arrays.get(key)
        if held is None or held.size < size:
            held = self._arrays[key] = np.empty(size, dtype)
        return held[:size]

    @cached_property
    def entropy_stage(self) -> EntropyStage:
        """Returns the zstd stage, made when first needed."""
        return EntropyStage()


class _Loan:
    """Lends a scratch; a generator's context manager would cost as much as encoding a small tensor."""

    __slots__ = ("_lent", "_pool")

    def __init__(self, pool: ScratchPool) -> None:
        self._pool = pool

    def __enter__(self) -> Scratch:
        try:
            self._lent = self._pool.idle.pop()
        except IndexError:
            self._lent = Scratch()
        return self._lent

    def __exit__(self, *_: object) -> None:
        self._pool.idle.append(self._lent)


class ScratchPool:
    """Lends scratch memory: on the host, and on each GPU. Its owner passes it to the codecs that share it.

    List `pop` and `append` are atomic, so threads never share a loan.

    Example:
        >>> pool = ScratchPool()
        >>> with pool.lend() as space:
        ...     space.array("numbers", 3, np.int32).size
        3
    """

    def __init__(self) -> None:
        self.idle: list[Scratch] = []
        self._idle_on: dict[torch.device, list[DeviceWorkspace]] = {}

    def __reduce__(self) -> tuple[type[ScratchPool], tuple[()]]:
        """Makes every copy an empty pool, in this process or another."""
        return ScratchPool, ()

    def lend(self) -> _Loan:
        """Lends a scratch, as in `with pool.lend() as space`."""
        return _Loan(self)

    @contextmanager
    def lend_on(self, device: torch.device) -> Iterator[DeviceWorkspace]:
        """Lends an idle workspace on a GPU, as in `with pool.lend_on(device) as workspace`."""
        idle = self._idle_on.setdefault(device, [])
        try:
            workspace = idle.pop()
        except IndexError:
            workspace = DeviceWorkspace(device)
        workspace.synchronize()  # an earlier decode may still read uploaded bytes
        try:
            yield workspace
        except BaseException:  # for example out of memory; the caller may free its tensors after this
            workspace.synchronize()
            raise
        finally:
            idle.append(workspace)
