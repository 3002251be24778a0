"""One table: its values, its versions, the sum of the gradients that come in and the frames that go out.

Whose gradients come when, and what is added, is of all tables that move together (`aggregation.py`).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch

from thinwire import frames
from thinwire.codecs import CheckedFrame, Codec, decode, open_frame, open_parsed
from thinwire.codecs.decoding import Gradient, GradientSums
from thinwire.codecs.senders import SenderMeans
from thinwire.codecs.tensors import FloatArray
from thinwire.errors import FrameError, NonFiniteError, ProtocolError
from thinwire.optimizers.outer_momentum import OuterMomentum
from thinwire.packets import BatchedTensor, EncodedTensor
from thinwire.policies.compression import PLAIN, is_batched
from thinwire.policies.consistency import Terms
from thinwire.schema import Reduce, TableSpec
from thinwire.server.downlinks import FORMS, SEED, ModelDelta, ModelMomentum, diverged

NO_GRADIENT = b""
"""The frame of a parameter that took no part in this step."""

Held: TypeAlias = Gradient | bytes | memoryview
"""A gradient that is to be added: opened, or a frame of which it is known that it can be decoded."""


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
        sum: float32, of the gradients of the current clock that were added; before the first, the last aggregate.
        gradient: the same memory, for torch.
        aggregate: adds to the sum, and counts.
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
        self.reduce: Reduce = reduce if up.scheme.sends_some or reduce == "sum" else "mean"
        self.sum: FloatArray = np.zeros(spec.shape, np.float32)
        self.gradient = torch.from_numpy(self.sum)
        flat, plain = [self.sum.reshape(-1)], self.reduce in ("mean", "sum")
        clip = self.reduce == "clipped-mean-of-senders"
        self.aggregate = GradientSums(flat) if plain else SenderMeans(flat, clip=clip)
        self.given = dict.fromkeys(range(terms.workers), 0)
        """The version that each worker was led to last."""
        self._up = up
        self._batched, self._wide = is_batched(up, spec.shape), up == PLAIN
        self._scale: float | None = None

    @property
    def replica(self) -> FloatArray:
        """The workers' copy, where they all hold the same."""
        return self.downlink.snapshot(0)

    @property
    def residual(self) -> FloatArray:
        """What the workers' copies lack of the server's: values − replica."""
        difference: FloatArray = self.values.numpy() - self.replica
        return difference

    @property
    def codec(self) -> Codec:
        """Of the pushes."""
        return self._up

    @property
    def is_batched(self) -> bool:
        """Whether a gradient may come in a message's batch."""
        return self._batched

    def look(self, frame: EncodedTensor) -> tuple[Held | None, bool]:
        """Returns what is to be added of a worker's gradient, None for nothing; and whether it is finite.

        Raises:
            ProtocolError: the frame is no gradient of this table, in the codec that was agreed on.
        """
        if isinstance(frame, BatchedTensor):
            return self._checked(frame), True
        if frame == NO_GRADIENT:
            return None, True
        if (opened := self._open(frame, self._up.id)) is None:
            return None, False
        if opened.frame.scales:
            self._scale = opened.frame.scales[0]
        return opened, True

    def add(self, rank: int, gradient: Held) -> None:
        """Adds a worker's gradient, which `look` has returned, to the sum.

        Raises:
            FrameError: its payload is damaged; the sum is what it was.
        """
        try:
            self.aggregate.add([open_frame(gradient) if isinstance(gradient, bytes | memoryview) else gradient])
        except FrameError as error:
            raise FrameError(f"{self.spec.name}: the gradient of worker {rank}: {error}") from error

    def assign(self, frame: EncodedTensor, version: int) -> None:
        """Replaces the table by whole values.

        Raises:
            ProtocolError: the frame does not hold this table's values, uncompressed; nothing was changed.
        """
        if isinstance(frame, BatchedTensor):
            raise ProtocolError(f"{self.spec.name}: whole values came in a batch; they have a frame of their own")
        if (opened := self._open(frame, PLAIN.id)) is None:
            raise ProtocolError(f"{self.spec.name}: whole values that are not finite")
        if opened.frame.dtype != "fp32":  # kernels read these values as float32, wherever they lie
            raise ProtocolError(f"{self.spec.name}: whole values came in {opened.frame.dtype}; they travel in fp32")
        try:
            values = decode(frame).numpy()
        except FrameError as error:
            raise ProtocolError(f"{self.spec.name}: {error}") from error
        self.downlink.assign(values)
        self.version = version
        self.given = dict.fromkeys(self.given, version)

    def publish(
        self,
        aggregate: FloatArray | None,
        ranks: set[int] | None = None,
        *,
        made: EncodedTensor | None = None,
    ) -> list[tuple[set[int], EncodedTensor]]:
        """Encodes what leads workers (by default all) to the next version, once for each group with the same copy.

        An update to which nobody gave a gradient is an empty frame.

        Args:
            aggregate: of the gradients.
            ranks: whom it leads.
            made: the frame for all of them, where it was encoded together with other tables'.

        Raises:
            NonFiniteError: the update gave NaN or Inf: training has diverged.
        """
        self.version += 1
        targets = set(self.given) if ranks is None else ranks
        if aggregate is None:
            sent: list[tuple[set[int], EncodedTensor]] = [(targets, NO_GRADIENT)]
        elif made is not None:
            sent = [(targets, made)]
        else:
            try:
                sent = self.downlink.publish(aggregate, self.version, targets, self._scale)
            except NonFiniteError as error:
                raise diverged(error, self.version) from None
        for rank in targets:
            self.given[rank] = self.version
        return sent

    def snapshot(self, rank: int = 0) -> bytes:
        """Returns a worker's copy as one uncompressed frame; it now has the current version."""
        self.given[rank] = self.version
        return PLAIN.encode(self.downlink.snapshot(rank))

    @property
    def momentum(self) -> OuterMomentum | None:
        """What this end adds to what was sent, once something was; None where no end adds anything."""
        return self.downlink.outer if isinstance(self.downlink, ModelMomentum) and self.version else None

    def momentum_frame(self, *, anchor: bool) -> bytes:
        """Returns what an `Ahead` holds of this table."""
        assert self.momentum is not None
        values = self.momentum.anchor if anchor else self.momentum.ahead
        assert values is not None
        return PLAIN.encode(values.numpy())

    def admit(self, rank: int) -> None:
        """A worker that was never here holds what the others do. Of one whose rank lies in a gap nothing is known."""
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
            "scale": self._scale,
            "downlink": self.downlink.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        self.downlink.load_state_dict(state["downlink"])
        self.version, self._scale = int(state["version"]), state["scale"]
        self.given = dict(enumerate(state["given"]))

    def _checked(self, tensor: BatchedTensor) -> BatchedTensor:
        """A tensor of a batch, if it may be this table's gradient."""
        if not self._batched or not tensor.fits(self.sum.size) or (tensor.narrow and self._wide):
            raise ProtocolError(
                f"{self.spec.name}: {tensor.values.size} values came in a {'bf16' if tensor.narrow else 'fp32'} batch; "
                f"the table has shape {self.spec.shape}, and {self._up.id!r} was agreed on"
            )
        return tensor

    def _open(self, frame: bytes | memoryview, codec: str) -> CheckedFrame | None:
        """Checks a frame; None where it says that its sender's tensor was not finite."""
        try:
            parsed = frames.parse(frame, copy=False)
            if parsed.codec != codec:
                raise ProtocolError(f"{self.spec.name}: codec {parsed.codec!r} came, {codec!r} was agreed on")
            if parsed.shape != self.spec.shape:
                raise ProtocolError(
                    f"{self.spec.name}: a frame of shape {parsed.shape} came, the table is {self.spec.shape}"
                )
            return None if parsed.non_finite else open_parsed(parsed)
        except FrameError as error:
            raise ProtocolError(f"{self.spec.name}: {error}") from error
