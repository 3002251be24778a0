"""One bucket group in one step at one rank: takes received packets, returns packets to send.

The two passes are separate. The push pass ends with the average of this rank's own shard in its values; a caller whose
ranks keep only their own shard stops there. The pull pass brings the averages of all shards to every rank.

    push    `push()` → a packet for each owner              `receive(peer, PUSH, packet)` … until `pushed`
    pull    `pull()` → the same packet for all other ranks  `receive(peer, PULL, packet)` … until `complete`

Packets may come in any order; `OwnedShard` adds them in the order of the ranks, after the owner's own gradient. Without
threads and sockets, a test can run every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import cast

from thinwire.codecs.decoding import Values
from thinwire.collective.membership import Membership
from thinwire.collective.owned_shard import OwnedShard
from thinwire.collective.shard import Shard
from thinwire.collective.tally import Tally
from thinwire.errors import ConfigError, FrameError, NonFiniteError, ProtocolError, TransportError
from thinwire.packets import HEAD_NBYTES, LENGTH_NBYTES, parse, segments
from thinwire.schema import Abort, Skip
from thinwire.schema import Shard as ShardMessage

MAX_REASON = 1024
"""Longest reason of a rank that fails, in characters."""
_MESSAGE_NBYTES = 4 * MAX_REASON + 64
_PASSED_ON = {kind.__name__: kind for kind in (NonFiniteError, TransportError)}
"""Errors that keep their type on the other ranks; all others become a ProtocolError there."""


class Pass(Enum):
    """A direction: gradients to the owner of a shard, or its average to all ranks."""

    PUSH = 0
    PULL = 1


@dataclass(frozen=True, slots=True)
class Send:
    """A packet to send to one rank, and its numbers of payload bytes, values and frames."""

    peer: int
    way: Pass
    packet: bytearray
    payload_nbytes: int = 0
    num_values: int = 0
    num_frames: int = 0


@dataclass(frozen=True, eq=False)
class Group:
    """Buckets that share an exchange at every step.

    Args:
        shards: of every rank.
        rank: this rank.
        names: of the ranks, for messages.
        mean: whether ranks average or sum.
        clip: whether means over senders scale each rank's message down to the median norm.
        skip: whether NaN or Inf makes all ranks skip the step; otherwise it is an error.
        pulls: whether the pull pass follows.
    """

    shards: tuple[Shard, ...]
    rank: int
    names: Sequence[int]
    mean: bool
    clip: bool
    skip: bool
    pulls: bool
    members: Membership = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", Membership(len(self.shards)))

    @property
    def peers(self) -> list[int]:
        """The other ranks."""
        return [rank for rank in range(len(self.shards)) if rank != self.rank]

    def max_packet_nbytes(self, owner: int) -> int:
        """Returns the most bytes of a packet about a rank's shard."""
        shard = self.shards[owner]
        return HEAD_NBYTES + _MESSAGE_NBYTES + LENGTH_NBYTES * shard.num_frames + shard.max_nbytes


class Exchange:
    """One bucket group in one step.

    Args:
        group: the buckets.
        step: of the training.
        bucket: number of the group's first bucket in the step.
        last: whether the group ends the step.
        tally: records the bytes sent and received of every tensor; None: not measured.

    Attributes:
        skipped: a rank holds NaN or Inf: the values are undefined, and all ranks skip this step.
        received_nbytes: of the received frames.
    """

    def __init__(self, group: Group, step: int, bucket: int, *, last: bool, tally: Tally | None = None) -> None:
        self.group = group
        self.step = step
        self.bucket = bucket
        self.last = last
        self.pulls = group.pulls
        self.skipped = False
        self.received_nbytes = 0
        self._tally = tally
        self._values: Sequence[Values] = ()
        self._in_turn = [group.rank, *group.peers]
        self._owned = OwnedShard(
            self.own.tensors,
            None,
            group.members,
            means=dict.fromkeys(self.own.own, group.clip),
            over=len(group.shards) if group.mean else 1,
            blame=lambda turn, error: _unreadable(group.names[self._in_turn[turn]], error),
        )
        self._present: Sequence[bool] = ()
        self._awaited = {Pass.PUSH: set(group.peers), Pass.PULL: set(group.peers if group.pulls else ())}
        self._pulled = not group.pulls

    @property
    def own(self) -> Shard:
        """This rank's shard."""
        return self.group.shards[self.group.rank]

    @property
    def pushed(self) -> bool:
        """Whether the push pass is over: this rank's shard of the values is the average."""
        return bool(self._values) and not self._awaited[Pass.PUSH]

    @property
    def complete(self) -> bool:
        """Whether all passes are over: the values are the averages of all shards, without pulls of this rank's own."""
        return self.pushed and self._pulled and not self._awaited[Pass.PULL]

    def push(self, values: Sequence[Values]) -> list[Send]:
        """Encodes this rank's gradient.

        Args:
            values: of each bucket, flat; both passes change them in place.

        Returns:
            A packet for each owner.

        Raises:
            NonFiniteError: NaN or Inf, where steps are not skipped; nothing was sent.
            ConfigError: a packet is larger than the uncompressed values.
        """
        self._values = values
        frames: dict[int, list[bytes]] = {}
        if not self.skipped:
            try:
                self._slices = self.own.slices(values)
                counts = self.own.present_finite(self._slices)
                counts[[*self.own.own]] = 0
                self._owned.begin(self._slices, counts, self.own.encode_own(self._slices))
                frames = {peer: self._encode(peer, values) for peer in self.group.peers}
            except NonFiniteError:
                if not self.group.skip:
                    raise
                self.skipped = True
        sends = [self._send(peer, peer, Pass.PUSH, frames.get(peer, [])) for peer in self.group.peers]
        self._average()
        return sends

    def pull(self) -> list[Send]:
        """Encodes the average of this rank's shard, and decodes it into its own values. Call once `pushed`.

        Returns:
            The same packet for each other rank.

        Raises:
            NonFiniteError, ConfigError: as `push`.
        """
        frames: list[bytes] = []
        if not self.skipped:
            try:
                if self._tally is not None:
                    self._tally.given(self.own, self._values)
                frames = self.own.encode(self._slices, self._present)
            except NonFiniteError:
                if not self.group.skip:
                    raise
                self.skipped = True
        sends = [self._send(peer, self.group.rank, Pass.PULL, frames) for peer in self.group.peers]
        if not self.skipped:
            self.own.apply(self._values, frames)
        self._pulled = True
        return sends

    def receive(self, peer: int, way: Pass, packet: memoryview) -> None:
        """Takes a packet: adds a gradient to this rank's shard, or replaces a shard by its average.

        Args:
            peer: the sender.
            way: the pass that it belongs to.
            packet: at the start of a buffer that stays unchanged until the pass is over.

        Raises:
            ProtocolError: not the expected packet, or the peer failed.
            NonFiniteError: the peer failed because of NaN or Inf.
            TransportError: the peer failed because it lost another rank.
        """
        frames = self._read(peer, way, packet)
        self._awaited[way].discard(peer)
        if self.skipped:
            return
        name, about = self.group.names[peer], self.group.shards[peer]
        try:
            if way is Pass.PULL:
                about.apply(self._values, frames)
                if self._tally is not None:
                    self._tally.received(about, frames)
                return
            gradients = self.own.checked(frames)
        except FrameError as error:
            raise _unreadable(name, error) from error
        self._owned.receive(self._in_turn.index(peer), 0, range(len(gradients)), gradients)
        self._average()

    def _encode(self, peer: int, values: Sequence[Values]) -> list[bytes]:
        shard, tally = self.group.shards[peer], self._tally
        if tally is not None:
            tally.given(shard, values)
        slices = shard.slices(values)
        frames = shard.encode(slices, shard.present(slices))
        if tally is not None:
            tally.sent(shard, frames)
        return frames

    def _average(self) -> None:
        """Makes the averages when the gradients of all ranks are in."""
        if self.pushed and not self.skipped:
            taken = self._owned.pop_means(range(self.own.num_frames))
            self._present = [each.num_added > 0 for each in taken]
            if not self.pulls:
                self.own.put_back(self._slices, self._values)

    def _send(self, peer: int, owner: int, way: Pass, frames: Sequence[bytes]) -> Send:
        if self.skipped:
            return Send(peer, way, bytearray().join(segments(Skip(step=self.step, bucket=self.bucket))))
        packet = bytearray().join(segments(ShardMessage(step=self.step, bucket=self.bucket), frames))
        shard, most = self.group.shards[owner], self.group.max_packet_nbytes(owner)
        if len(packet) > most:
            raise ConfigError(
                f"{len(packet)} bytes for {shard.num_values} values are more than the values themselves; "
                "choose a codec that makes them smaller, or exclude these parameters"
            )
        return Send(peer, way, packet, shard.payload_nbytes, shard.num_values, len(frames))

    def _read(self, peer: int, way: Pass, packet: memoryview) -> Sequence[memoryview]:
        """Returns a packet's frames; none if its sender skips the step."""
        name = self.group.names[peer]
        try:
            message, frames = parse(packet, exact=False)
        except ProtocolError as error:
            raise ProtocolError(f"rank {name}: {error}") from error
        if isinstance(message, Abort):
            kind, _, reason = message.reason.partition(": ")
            raise _PASSED_ON.get(kind, ProtocolError)(f"rank {name} gave up: {reason}")
        if not isinstance(message, ShardMessage | Skip):
            raise ProtocolError(f"rank {name} sent {type(message).__name__}; it belongs to another conversation")
        if (message.step, message.bucket) != (self.step, self.bucket):
            raise ProtocolError(
                f"rank {name} is at step {message.step}, bucket {message.bucket}; this rank is at step {self.step}, "
                f"bucket {self.bucket}"
            )
        if isinstance(message, Skip):
            self.skipped = True
            return ()
        due = self.group.shards[self.group.rank if way is Pass.PUSH else peer].num_frames
        if len(frames) != due:
            raise ProtocolError(f"rank {name} sent {len(frames)} frames for bucket {self.bucket}; {due} were expected")
        self.received_nbytes += sum(map(len, frames))
        return cast("Sequence[memoryview]", frames)  # batched tensors are only in other messages


def abort_packet(error: BaseException) -> bytearray:
    """Returns the packet with which a rank that fails informs the others, in place of any other."""
    return bytearray().join(segments(Abort(reason=f"{type(error).__name__}: {error}"[:MAX_REASON])))


def _unreadable(name: int, error: FrameError) -> ProtocolError:
    return ProtocolError(f"rank {name} sent a frame that cannot be read: {error}")
