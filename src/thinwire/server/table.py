"""One table: its values, its versions, the sum of its gradients, and the frames that a worker gets.

`OwnedShard` decides which gradients are added when.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from thinwire import frames
from thinwire.codecs import Codec, decode
from thinwire.codecs.tensors import FloatArray
from thinwire.errors import FrameError, NonFiniteError, ProtocolError
from thinwire.optimizers.outer_momentum import OuterMomentum
from thinwire.packets import BatchedTensor, EncodedTensor
from thinwire.policies.compression import PLAIN, is_batched
from thinwire.policies.consistency import Terms
from thinwire.schema import Reduce, TableSpec
from thinwire.server.downlinks import FORMS, SEED, ModelDelta, ModelMomentum

NO_GRADIENT = b""
"""The frame of a parameter that took no part in this step."""


class Table:
    """A table and its versions. Version v is the state after v updates.

    Args:
        spec: name, shape, and whether it is a buffer.
        up: codec of the pushes, which a frame must name.
        down: codec of the pulls.
        terms: how many workers push, and how many gradients make an update.
        downlink: what travels down, a key of `FORMS`.
        reduce: how gradients are aggregated; where `up` sends all values, a mean over senders is the mean.
        seed: of the pulls' random numbers, which no worker has.
        momentum: that each end adds to what is sent; 0: none.

    Attributes:
        pushes: the context of pushes, for decoding.
        is_batched: whether a gradient may come in a message's batch.
        sum: float32, of the current clock's gradients so far; before the first one, the last aggregate.
        gradient: the same memory, for torch.
        reduce: how gradients are aggregated.
        scale: the last one that workers shared.
    """

    def __init__(
        self,
        spec: TableSpec,
        up: Codec,
        down: Codec,
        terms: Terms,
        downlink: str = "delta",
        reduce: Reduce = "mean",
        seed: int = SEED,
        momentum: float = 0.0,
    ) -> None:
        self.spec = spec
        self.version = 0
        self.downlink = (
            ModelMomentum(spec.name, spec.shape, down, terms.workers, momentum=momentum, seed=seed)
            if momentum
            else FORMS["delta" if spec.state else downlink](spec.name, spec.shape, down, terms.workers, seed=seed)
        )
        self.values = torch.from_numpy(self.downlink.values)
        self.pushes = replace(up, error_feedback=False).context(self.downlink.values, name=spec.name)
        self.is_batched = is_batched(up, spec.shape)
        self.sum: FloatArray = np.zeros(spec.shape, np.float32)
        self.gradient = torch.from_numpy(self.sum)
        self.reduce: Reduce = reduce if up.scheme.sends_some or reduce == "sum" else "mean"
        self.given = dict.fromkeys(range(terms.workers), 0)
        """The version that each worker was led to last."""
        self.scale: float | None = None

    def assign(self, frame: EncodedTensor, version: int) -> None:
        """Replaces the table by whole values.

        Raises:
            ProtocolError: the frame does not hold this table's values, uncompressed; nothing was changed.
        """
        name, shape = self.spec.name, self.spec.shape
        if isinstance(frame, BatchedTensor):
            raise ProtocolError(f"{name}: whole values came in a batch; they have a frame of their own")
        try:
            parsed = frames.parse(frame, copy=False)
            if parsed.shape != shape:
                raise FrameError(f"a frame of shape {parsed.shape} came, the table is {shape}")
            if (parsed.codec, parsed.dtype) != (PLAIN.id, "fp32"):  # kernels read these values as they lie
                raise FrameError(
                    f"codec {parsed.codec!r} came, in {parsed.dtype}; whole values travel by {PLAIN.id!r} in fp32"
                )
            values = decode(frame).numpy()
        except FrameError as error:
            raise ProtocolError(f"{name}: {error}") from error
        self.downlink.assign(values)
        self.version = version
        self.given = dict.fromkeys(self.given, version)

    def publish(
        self,
        aggregate: FloatArray | None,
        ranks: set[int] | None = None,
        *,
        made: EncodedTensor | None = None,
    ) -> EncodedTensor:
        """Encodes an update to the next version for workers that hold the same, by default all.

        An update without any gradient is an empty frame.

        Args:
            aggregate: of the gradients.
            ranks: the workers.
            made: the frame for all of them, where it was encoded together with other tables'.

        Raises:
            NonFiniteError: the update is NaN or Inf: training has diverged.
        """
        self.version += 1
        targets = set(self.given) if ranks is None else ranks
        if aggregate is None:
            sent: EncodedTensor = NO_GRADIENT
        elif made is not None:
            sent = made
        else:
            try:
                sent = self.downlink.publish(aggregate, self.version, targets, self.scale)
            except NonFiniteError:
                told = f"update {self.version} of {self.spec.name!r} is not finite, or too large for its codec"
                raise NonFiniteError(told) from None
        for rank in targets:
            self.given[rank] = self.version
        return sent

    def snapshot(self, rank: int = 0) -> bytes:
        """Returns a worker's copy as one uncompressed frame; it now has the current version."""
        self.given[rank] = self.version
        return PLAIN.encode(self.downlink.snapshot(rank))

    @property
    def momentum(self) -> OuterMomentum | None:
        """The momentum that each end adds to updates; None before the first update, and without one."""
        return self.downlink.outer if isinstance(self.downlink, ModelMomentum) and self.version else None

    def momentum_frame(self, *, anchor: bool) -> bytes:
        """Returns what an `Ahead` holds of this table."""
        assert self.momentum is not None
        values = self.momentum.anchor if anchor else self.momentum.ahead
        assert values is not None
        return PLAIN.encode(values.numpy())

    def admit(self, rank: int) -> None:
        """Gives a worker that was never here the copy that the others hold."""
        self.given.setdefault(rank, self.version)
        self.downlink.admit(rank)

    def hand_over(self, rank: int) -> bytes:
        """As `snapshot`, but of the server's own values: a worker that starts late gets everything."""
        if isinstance(self.downlink, ModelDelta):
            self.downlink.copies.assign(self.downlink.values, {rank})
        return self.snapshot(rank)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the gradients that have come for the next version: their workers send them again."""
        return {
            "version": self.version,
            "given": [self.given.get(rank, 0) for rank in range(max(self.given) + 1)],
            "scale": self.scale,
            "downlink": self.downlink.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        self.downlink.load_state_dict(state["downlink"])
        self.version, self.scale = int(state["version"]), state["scale"]
        self.given = dict(enumerate(state["given"]))
