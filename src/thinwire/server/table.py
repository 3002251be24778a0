"""One table: its values, its versions, the gradients that come in and the frames that go out.

Gradients are decoded and added in the order of the ranks, whatever the order of arrival: floating-point addition is not
associative, and two runs with one seed must give the same weights. Where everybody's gradient is needed, a frame whose
turn has come is decoded at once, so that on a slow link the work is spread over the arrivals; where some may be
missing, nobody's turn is known before the quorum is there. Gradients of later clocks wait as frames.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from thinwire import frames
from thinwire.codecs import CheckedFrame, Codec, decode, open_parsed
from thinwire.codecs.decoding import Gradient, GradientSums
from thinwire.codecs.senders import SenderMeans
from thinwire.codecs.tensors import FloatArray
from thinwire.errors import FrameError, NonFiniteError, ProtocolError
from thinwire.packets import BatchedTensor, EncodedTensor
from thinwire.policies.compression import PLAIN, is_batched
from thinwire.policies.consistency import Terms
from thinwire.schema import Reduce, TableSpec
from thinwire.server.downlinks import FORMS, ModelDelta, diverged
from thinwire.server.membership import Membership

NO_GRADIENT = b""
"""The frame of a parameter that took no part in this step."""
NOBODY = (-1,)
"""The ranks of an update that a worker's NaN or Inf made everybody skip, or whose workers have all gone away."""


class Aggregation:
    """The gradients of the current clock and of those ahead of it.

    Args:
        shape: of the table.
        members: who is expected to push.
        reduce: how gradients are aggregated; a mean over senders is of frames that hold some of the values.
    """

    def __init__(self, shape: tuple[int, ...], members: Membership, reduce: Reduce = "mean") -> None:
        self.clock = 0
        self._members, self._eager = members, members.lockstep
        self._sum = np.zeros(shape, np.float32)
        self._reduce = reduce
        flat = [self._sum.reshape(-1)]
        plain, clip = reduce in ("mean", "sum"), reduce == "clipped-mean-of-senders"
        self._total = GradientSums(flat) if plain else SenderMeans(flat, clip=clip)
        self._arrived: dict[int, dict[int, Gradient | None]] = {0: {}}
        self._refused: set[int] = set()
        self._next = 0

    @property
    def size(self) -> int:
        """Number of values."""
        return self._sum.size

    def has(self, rank: int, clock: int | None = None) -> bool:
        """Whether this worker's gradient of a clock (by default the current one) is in."""
        return rank in self._arrived.get(self.clock if clock is None else clock, ())

    @property
    def started(self) -> bool:
        """Whether any worker's gradient of the current clock, or of a later one, is in."""
        return any(self._arrived.values())

    @property
    def arrived(self) -> Collection[int]:
        """The ranks whose gradients of the current clock are in."""
        return self._arrived[self.clock].keys()

    @property
    def untouched(self) -> int:
        """The first clock that nobody has begun."""
        return max((clock + 1 for clock, arrived in self._arrived.items() if arrived), default=self.clock)

    def add(self, rank: int, frame: Gradient | None, clock: int | None = None) -> None:
        """Takes a worker's gradient, already checked against the table; None says that it has none.

        Raises:
            FrameError: this frame, or one that waited for its turn, holds a damaged payload: the text says whose.
                It is dropped, and the sum is what it was.
        """
        self._arrived.setdefault(self.clock if clock is None else clock, {})[rank] = frame
        if self._eager:
            self._decode_in_turn()

    def refuse(self, rank: int, clock: int | None = None) -> None:
        """A worker's gradient is not finite: it is in, and nobody's counts at this clock."""
        self._refused.add(self.clock if clock is None else clock)
        self.add(rank, None, clock)

    @property
    def complete(self) -> bool:
        """Whether enough gradients of the current clock are in."""
        return self._members.complete(self.clock, self._arrived[self.clock])

    def take(self) -> tuple[FloatArray | None, tuple[int, ...]]:
        """Ends the current clock.

        Returns:
            The aggregate (None where nobody had a gradient; the array is used again by the next clock), and the
            ranks that took part: `NOBODY` where one of them refused, or all have gone away.
        """
        arrived = self._arrived.pop(self.clock)
        refused = self.clock in self._refused
        self._refused.discard(self.clock)
        if not self._eager and not refused:
            for rank in sorted(arrived):
                self._add_to_sum(rank, arrived[rank])
        given = self._total.contributions[0]
        self._start_anew()
        self.clock += 1
        self._arrived.setdefault(self.clock, {})
        if refused:
            return None, NOBODY
        if given and self._reduce != "sum":
            self._total.average(given)
        return (self._sum if given else None), tuple(sorted(arrived)) or NOBODY

    def begin_at(self, clock: int) -> None:
        """Goes on with this clock; what had come is forgotten."""
        self.clock = clock
        self._start_anew()
        self._arrived = {clock: {}}
        self._refused.clear()

    def resume(self) -> None:
        """Decodes what is in for the current clock, where nobody is waited for any more.

        Called once the last aggregate is no longer needed, and when a worker was dropped.
        """
        if self._eager:
            self._decode_in_turn()

    def _decode_in_turn(self) -> None:
        arrived = self._arrived[self.clock]
        highest = max(arrived, default=-1)
        while self._next <= highest:
            rank = self._next
            if rank in arrived:
                try:
                    self._add_to_sum(rank, arrived[rank])
                except FrameError:
                    del arrived[rank]
                    raise
                arrived[rank] = None  # it is in the sum; its bytes may go
            elif self._members.expects(rank, self.clock):
                return
            self._next += 1

    def _start_anew(self) -> None:
        self._total.contributions[0] = self._next = 0

    def _add_to_sum(self, rank: int, frame: Gradient | None) -> None:
        try:
            self._total.add([frame])
        except FrameError as error:
            raise FrameError(f"the gradient of worker {rank}: {error}") from error


class Table:
    """A table and its versions. Version v is the state after v updates.

    Args:
        spec: name, shape, and whether it is a buffer.
        up: codec of the pushes, which a frame must name.
        down: codec of the pulls.
        terms: how many workers push, and how many gradients make an update.
        downlink: what travels down, a key of `FORMS`.
        reduce: how gradients are aggregated; where `up` sends all values, a mean over senders is the mean.
        members: who is expected to push; by default all workers, always.
    """

    def __init__(
        self,
        spec: TableSpec,
        up: Codec,
        down: Codec,
        terms: Terms,
        downlink: str = "delta",
        reduce: Reduce = "mean",
        members: Membership | None = None,
    ) -> None:
        self.spec = spec
        self.version = 0
        self.downlink = FORMS["delta" if spec.state else downlink](spec.name, spec.shape, down, terms.workers)
        self.values = torch.from_numpy(self.downlink.values)
        some = up.scheme.sends_some or reduce == "sum"
        self._members = members or Membership(terms.workers, terms.quorum)
        self.incoming = Aggregation(spec.shape, self._members, reduce if some else "mean")
        self.given = dict.fromkeys(range(terms.workers), 0)
        """The version that each worker was led to last."""
        self._up = up
        self._batched = is_batched(up, spec.shape)
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

    def add(self, rank: int, frame: EncodedTensor, clock: int | None = None) -> None:
        """Takes a worker's gradient of a clock, by default the current one.

        Raises:
            ProtocolError: the frame is no gradient of this table, in the codec that was agreed on.
            FrameError: a payload, perhaps of a worker whose frame had waited for its turn, is damaged.
        """
        opened: CheckedFrame | BatchedTensor | None
        if isinstance(frame, BatchedTensor):
            opened = self._checked(frame)
        else:
            opened = None if frame == NO_GRADIENT else self._open(frame, self._up.id)
            if opened is not None and opened.frame.scales:
                self._scale = opened.frame.scales[0]
            if opened is None and frame != NO_GRADIENT:
                self.incoming.refuse(rank, clock)
                return
        try:
            self.incoming.add(rank, opened, clock)
        except FrameError as error:
            raise FrameError(f"{self.spec.name}: {error}") from error

    def assign(self, frame: EncodedTensor, version: int) -> None:
        """Replaces the table by whole values.

        Raises:
            ProtocolError: the frame does not hold this table's values, uncompressed; nothing was changed.
        """
        if isinstance(frame, BatchedTensor):
            raise ProtocolError(f"{self.spec.name}: whole values came in a batch; they have a frame of their own")
        if self._open(frame, PLAIN.id) is None:
            raise ProtocolError(f"{self.spec.name}: whole values that are not finite")
        try:
            values = decode(frame).numpy()
        except FrameError as error:
            raise ProtocolError(f"{self.spec.name}: {error}") from error
        self.downlink.assign(values)
        self.version = version
        self.given = dict.fromkeys(self.given, version)

    def publish(
        self, aggregate: FloatArray | None, ranks: set[int] | None = None, *, senders: int | None = None
    ) -> list[tuple[set[int], EncodedTensor]]:
        """Encodes what leads workers (by default all) to the next version, once for each group with the same copy.

        An update to which nobody gave a gradient is an empty frame.

        Args:
            aggregate: of the gradients.
            ranks: whom it leads.
            senders: how many workers' gradients are in it; by default as many as last time.

        Raises:
            NonFiniteError: the update gave NaN or Inf: training has diverged.
        """
        self.version += 1
        targets = set(self.given) if ranks is None else ranks
        if aggregate is None:
            sent: list[tuple[set[int], EncodedTensor]] = [(targets, NO_GRADIENT)]
        else:
            self.downlink.senders = senders or self.downlink.senders
            try:
                sent = self.downlink.publish(aggregate, self.version, targets, self._scale)
            except NonFiniteError as error:
                raise diverged(error, self.version) from None
        for rank in targets:
            self.given[rank] = self.version
        self.incoming.resume()
        return sent

    def snapshot(self, rank: int = 0) -> bytes:
        """Returns a worker's copy as one uncompressed frame; it now has the current version."""
        self.given[rank] = self.version
        return PLAIN.encode(self.downlink.snapshot(rank))

    def admit(self, rank: int) -> None:
        """A worker that was never here holds what the others do."""
        if rank not in self.given:
            self.given[rank] = self.version
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
        self.incoming.begin_at(self.version)

    def _checked(self, tensor: BatchedTensor) -> BatchedTensor:
        """A tensor of a batch, if it may be this table's gradient."""
        if not self._batched or tensor.values.size != self.incoming.size or (tensor.narrow and self._up == PLAIN):
            raise ProtocolError(
                f"{self.spec.name}: {tensor.values.size} values came in a {'bf16' if tensor.narrow else 'fp32'} batch; "
                f"the table has shape {self.spec.shape}, and {self._up.id!r} was agreed on"
            )
        return tensor

    def _open(self, frame: bytes | memoryview, codec_id: str) -> CheckedFrame | None:
        """Checks a frame; None where it says that its sender's tensor was not finite."""
        try:
            parsed = frames.parse(frame, copy=False)
            if parsed.codec != codec_id:
                raise ProtocolError(f"{self.spec.name}: codec {parsed.codec!r} came, {codec_id!r} was agreed on")
            if parsed.shape != self.spec.shape:
                raise ProtocolError(
                    f"{self.spec.name}: a frame of shape {parsed.shape} came, the table is {self.spec.shape}"
                )
            return None if parsed.non_finite else open_parsed(parsed)
        except FrameError as error:
            raise ProtocolError(f"{self.spec.name}: {error}") from error
