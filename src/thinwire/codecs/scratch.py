"""Scratch memory that codecs work with, kept between calls.

Fresh pages cost more than the arithmetic: a new 100 MB tensor takes five times as long as decoding it. Scratch buffers
only grow and are used again; a pool holds as many sets as threads that encode at one moment, without a lock.
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
        """The zstd stage, made when first needed."""
        return EntropyStage()


class _Loan:
    """A scratch while it is lent; a generator's context manager would cost as much as encoding a small tensor."""

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
    """Lends scratch memory: on the host, and on each GPU. Its owner hands it to the codecs that share it.

    Taking from and adding to a list is atomic, so threads never share a loan.

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
        """A copy, in this process or another, starts empty."""
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
        workspace.synchronize()  # a decode that was not waited for may still read what was uploaded
        try:
            yield workspace
        except BaseException:  # such as no memory left; the tensors may be freed from now on
            workspace.synchronize()
            raise
        finally:
            idle.append(workspace)
