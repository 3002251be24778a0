"""What travels down: one idea, several forms.

`delta`: the server keeps the model and, bit for bit, the workers' copy; their difference is encoded once for all
workers (3LC §3, shared pulls). Where each push is a separate update, copies differ, and each worker's unsent difference
adds up for that worker alone (the per-client sums of Wu 2018). `gradient`: the average gradient with a residual at the
server (DoubleSqueeze), or as whole votes (TernGrad), for workers that run the optimizer. `weights`: the average of
whole weights (Øland & Raj). `momentum`: as `delta`, and each end adds the optimizer's momentum itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from thinwire.codecs import Codec, Context, Step
from thinwire.codecs.levels import Votes
from thinwire.codecs.scheme import stream_seed
from thinwire.codecs.tensors import Flat, FloatArray
from thinwire.optimizers.outer_momentum import OuterMomentum, Part
from thinwire.packets import BatchedTensor, EncodedTensor
from thinwire.policies.compression import NARROW, is_batched
from thinwire.server.copies import Copies, Copy, own_array, unbounded

SEED = stream_seed(0, None)


class Downlink(ABC):
    """How one table's updates travel.

    Args:
        name: the table's, for messages and random streams.
        shape: of the table.
        codec: of the pulls.
        workers: how many.
        seed: of the codec's random numbers, which no worker has.
    """

    def __init__(self, name: str, shape: tuple[int, ...], codec: Codec, workers: int, *, seed: int = SEED) -> None:
        self.name, self.shape, self.codec, self.seed = name, shape, codec, seed
        self.senders = workers
        """How many workers' gradients are in the update that is published next; not all that took part have one."""
        self.values: FloatArray = np.zeros(shape, np.float32)
        """The server's copy, as far as it keeps one."""

    @abstractmethod
    def publish(self, aggregate: FloatArray, version: int, ranks: set[int], scale: float | None) -> EncodedTensor:
        """Encodes an update for some workers, which hold the same."""

    def snapshot(self, rank: int) -> FloatArray:
        """The whole table as this worker has it, or will."""
        return self.values

    def assign(self, values: FloatArray) -> None:
        """All workers now hold `values`."""
        self.values[...] = values

    def admit(self, rank: int) -> None:  # noqa: B027  # all hold the same in most forms
        """A further worker is there, and holds what most others do."""

    def state_dict(self) -> dict[str, Any]:
        """What it keeps. Arrays are copies; random streams need nothing, for they depend on the version alone."""
        return {"values": self.values.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave, in place: others hold views of the values."""
        self.values[...] = own_array(state["values"], self.shape)

    def encode(
        self, values: FloatArray, version: int, out: FloatArray, *, accumulate: bool, sparsity: float | None = None
    ) -> bytes:
        """Returns one frame of `values` by the codec, without a residual; stores in `out` what workers decode from it.

        Args:
            values: float32, of the table's shape.
            version: of the update, for the random numbers.
            out: float32, of the table's shape.
            accumulate: adds into `out` instead of overwriting it.
            sparsity: the multiplier that a bound on the lag has found.
        """
        flat = Flat(values.reshape(-1), "fp32", self.shape)
        step = Step(key=self.codec.key(self.seed, self.name, version), sparsity=sparsity)
        return self.codec.encode_flat(flat, step, self.name, out.reshape(-1), accumulate=accumulate).frame


class ModelDelta(Downlink):
    """The change of a model that the server updates.

    With a residual all that a copy lacks is sent, and what remains is `values − copy`, which cannot drift. Without one,
    only the change since the copy's last update is sent, and the codec's error is lost: the copies drift.
    """

    def __init__(self, name: str, shape: tuple[int, ...], codec: Codec, workers: int, *, seed: int = SEED) -> None:
        super().__init__(name, shape, codec, workers, seed=seed)
        kept = codec.residual_by_default
        lag_bound = codec.scheme.delta_lag_bound if kept else unbounded
        self.copies = Copies(shape, workers, keep_seen=not kept, lag_bound=lag_bound)
        self.is_batched = is_batched(codec, shape)
        self.pulls = replace(codec, error_feedback=False).context(self.values, name=name)
        """The context of what goes down together with other tables; copies stand for its residual."""

    def publish(self, aggregate: FloatArray, version: int, ranks: set[int], scale: float | None) -> EncodedTensor:
        copy = self.copies.move(ranks)
        with self.codec.pool.lend() as space:
            unsent = space.array("downlinks.unsent", self.values.size, np.float32).reshape(self.shape)
            np.subtract(self.values, copy.base, out=unsent)
            sparsity = None if copy.lag is None else copy.lag.sparsity
            frame = self.encode(unsent, version, copy.values, accumulate=True, sparsity=sparsity)
        self.sent(copy)
        return frame

    def sent(self, copy: Copy) -> None:
        """Notes that what a copy lacked was encoded."""
        if copy.seen is not None:
            copy.seen[...] = self.values
        if copy.lag is not None:
            copy.lag.follow_model(self.values.reshape(-1), copy.values.reshape(-1))

    def snapshot(self, rank: int) -> FloatArray:
        return self.copies.of(rank)

    def assign(self, values: FloatArray) -> None:
        super().assign(values)
        self.copies.assign(values, self.copies.owners)

    def admit(self, rank: int) -> None:
        self.copies.admit(rank)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "copies": self.copies.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.copies.load_state_dict(state["copies"])


class ModelMomentum(ModelDelta):
    """As `ModelDelta`; both ends add the optimizer's momentum to the copy.

    Args:
        name, shape, codec, workers, seed: as for `Downlink`.
        momentum: in (0, 1).
    """

    def __init__(
        self, name: str, shape: tuple[int, ...], codec: Codec, workers: int, *, momentum: float, seed: int = SEED
    ) -> None:
        super().__init__(name, shape, codec, workers, seed=seed)
        self.outer = OuterMomentum(momentum)
        self.part: Part = ()
        """Of the update that is published next."""

    def sent(self, copy: Copy) -> None:
        super().sent(copy)
        self.outer.follow(
            torch.from_numpy(copy.values), self.part
        )  # of all workers: with local updates they go in step

    def assign(self, values: FloatArray) -> None:
        super().assign(values)
        self.outer.begin(torch.from_numpy(self.values))

    def state_dict(self) -> dict[str, Any]:
        outer = {"anchor": self.outer.anchor, "ahead": self.outer.ahead}
        arrays = {name: tensor.numpy().copy() for name, tensor in outer.items() if tensor is not None}
        return {**super().state_dict(), **arrays}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if "anchor" in state:
            self.outer.load(*(torch.from_numpy(own_array(state[name], self.shape)) for name in ("anchor", "ahead")))


class AverageGradient(Downlink):
    """The average gradient, to which a codec that keeps a residual adds the server's (DoubleSqueeze, algorithm 1)."""

    def __init__(self, name: str, shape: tuple[int, ...], codec: Codec, workers: int, *, seed: int = SEED) -> None:
        super().__init__(name, shape, codec, workers, seed=seed)
        self.context: Context = codec.context(self.values, name=name, seed=seed)
        self._batched, self._narrow = is_batched(codec, shape), codec == NARROW

    def publish(self, aggregate: FloatArray, version: int, ranks: set[int], scale: float | None) -> EncodedTensor:
        if isinstance(self.codec.scheme, Votes) and scale is not None:
            # The votes of workers that share one scale are whole numbers of it (TernGrad §3.1).
            return self.codec.encode(aggregate, scale=scale, workers=self.senders)
        if self._batched:
            return BatchedTensor.of(aggregate.reshape(-1), self.name, narrow=self._narrow)
        return self.context.encode(aggregate)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "context": self.context.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.context.load_state_dict(state["context"])


class AverageWeights(Downlink):
    """The average of the workers' decoded weights, encoded anew (Øland & Raj §2: self-contained after each change)."""

    def publish(self, aggregate: FloatArray, version: int, ranks: set[int], scale: float | None) -> EncodedTensor:
        return self.encode(aggregate, version, self.values, accumulate=False)


FORMS: dict[str, type[Downlink]] = {
    "delta": ModelDelta,
    "momentum": ModelDelta,
    "gradient": AverageGradient,
    "weights": AverageWeights,
}
