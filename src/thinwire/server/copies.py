"""The workers' copies of a table, bit for bit, at the server: one array for all workers with the same copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from thinwire.codecs.lag import DeltaLagBound
from thinwire.codecs.tensors import FloatArray
from thinwire.errors import ConfigError


def unbounded() -> DeltaLagBound | None:
    """Makes no bound on the lag: a codec's options alone say its sparsity multiplier."""
    return None


@dataclass
class Copy:
    """The copy that some workers have in common.

    Args:
        values: the workers' copy, bit for bit; changed in place.
        seen: the server's values when these workers were sent their last update; None where it is not needed.
        owners: the workers.
        lag: chooses the sparsity multiplier of what the copy lacks; None where the codec's options alone say it.

    Attributes:
        address, base_address: where the values, and the base, lie.
    """

    values: FloatArray
    seen: FloatArray | None
    owners: set[int]
    lag: DeltaLagBound | None = None

    def __post_init__(self) -> None:
        self.address, self.base_address = self.values.ctypes.data, self.base.ctypes.data

    @property
    def base(self) -> FloatArray:
        """The values to subtract from the server's before they are sent: the copy, or the values sent last."""
        return self.values if self.seen is None else self.seen


class Copies:
    """The workers' copies of one table: as many arrays as there are different copies.

    Args:
        shape: of the table.
        workers: how many.
        keep_seen: whether to remember what the server's values were at each copy's last update.
        lag_bound: makes what chooses each copy's sparsity multiplier, or returns None.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        workers: int,
        *,
        keep_seen: bool,
        lag_bound: Callable[[], DeltaLagBound | None] = unbounded,
    ) -> None:
        self._shape, self._keep_seen, self._lag_bound = shape, keep_seen, lag_bound
        # Fresh zeros take no memory before values come: a plan of huge tables, from anyone, must not fill it.
        seen = np.zeros(shape, np.float32) if keep_seen else None
        self._copies = [Copy(np.zeros(shape, np.float32), seen, set(range(workers)), lag_bound())]

    def move(self, ranks: set[int]) -> Copy:
        """Returns the copy of some workers, which all hold the same, to be changed in place.

        The other workers keep their copy: a group that splits is copied first.
        """
        [copy] = [copy for copy in self._copies if copy.owners & ranks]
        moving = copy.owners & ranks
        if moving != copy.owners:
            copy.owners -= moving
            seen, lag = copy.seen, copy.lag
            copy = Copy(copy.values.copy(), None if seen is None else seen.copy(), moving, lag and lag.clone())
            self._copies.append(copy)
        return copy

    @property
    def owners(self) -> set[int]:
        """All workers."""
        return {rank for copy in self._copies for rank in copy.owners}

    def of(self, rank: int) -> FloatArray:
        """The copy of one worker."""
        return next(copy.values for copy in self._copies if rank in copy.owners)

    def assign(self, values: FloatArray, ranks: set[int]) -> None:
        """These workers now hold `values`, and lack nothing."""
        for copy in self._copies:
            copy.owners -= ranks
        self._copies = [copy for copy in self._copies if copy.owners]
        values = np.array(values, np.float32)  # which is a copy
        seen = values.copy() if self._keep_seen else None
        self._copies.append(Copy(values, seen, set(ranks), self._lag_bound()))

    def admit(self, rank: int) -> None:
        """A further worker holds what most others do."""
        if not any(rank in copy.owners for copy in self._copies):
            max(self._copies, key=lambda copy: len(copy.owners)).owners.add(rank)

    def state_dict(self) -> list[dict[str, Any]]:
        """Every copy and its workers."""
        return [
            {
                "values": copy.values.copy(),
                "seen": None if copy.seen is None else copy.seen.copy(),
                "owners": sorted(copy.owners),
                **({} if copy.lag is None else {"lag": copy.lag.state_dict()}),
            }
            for copy in self._copies
        ]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Takes back what `state_dict` gave."""
        self._copies = []
        for copy in state:
            seen, lag = None if copy["seen"] is None else own_array(copy["seen"], self._shape), self._lag_bound()
            if lag is not None:
                lag.load_state_dict(copy["lag"])
            self._copies.append(Copy(own_array(copy["values"], self._shape), seen, set(copy["owners"]), lag))

    def __len__(self) -> int:
        return len(self._copies)


def own_array(values: Any, shape: tuple[int, ...]) -> FloatArray:
    """Returns a saved tensor or array as a new array. Raises ConfigError where it has another shape."""
    array: FloatArray = torch.as_tensor(values, dtype=torch.float32, device="cpu").clone().numpy()
    if array.shape != shape:
        raise ConfigError(f"the state holds values of shape {array.shape}; the table has {shape}")
    return array
