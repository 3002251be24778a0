"""Ranks gather bytes, compare settings, measure the slowest link and leave together, before and after training.

Every two ranks exchange messages, over any `PeerGroup`; each purpose has its own tag, separate from training's tags.
"""

from __future__ import annotations

import hashlib
import json
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from thinwire.errors import ProtocolError, TransportError
from thinwire.policies.differences import differences
from thinwire.transports.peers import PeerGroup, ReceiveBuffer

_GATHER_TAG = 1 << 30
_PROBE_TAG = _GATHER_TAG + 1
_LEAVE_TAG = _GATHER_TAG + 2
_NOTE_TAG = _GATHER_TAG + 3
_PROBE_NBYTES = tuple(1 << power for power in range(14, 24, 2))
_PROBE_ENOUGH_S = 0.03
FAREWELL = timedelta(seconds=5)
"""How long a failing rank waits for all ranks, busy ones included, to receive its reason."""
_MESSAGE_NBYTES = 1 << 26
"""Longer data is split: gloo and AES-GCM limit a message's length, and rank 0 has a buffer for each rank."""
_LENGTH = struct.Struct("<Q")
_SECONDS = struct.Struct("<d")


def gather(group: PeerGroup, data: bytes) -> list[bytes]:
    """Returns every rank's bytes, in rank order; all ranks call it, each with bytes of any length.

    Raises:
        TransportError: not every rank called it in time.
    """
    lengths = [_LENGTH.unpack(each)[0] for each in _gather(group, _LENGTH.pack(len(data)), [_LENGTH.size] * group.size)]
    return _gather(group, data, lengths)


class Gathering:
    """A gather under way: the constructor starts it, and `wait` ends it.

    Args:
        group: all ranks construct one.
        data: of this rank.
        lengths: of every rank's data, in rank order; ranks with length 0 send no message.
        tag: distinguishes it from other messages.
    """

    def __init__(self, group: PeerGroup, data: bytes, lengths: Sequence[int], tag: int = _NOTE_TAG) -> None:
        self._group, self._data = group, data
        self._received = {
            peer: group.receive(peer, ReceiveBuffer(lengths[peer]), tag) for peer in group.peers if lengths[peer]
        }
        self._sent = [group.send(peer, bytearray(data), tag) for peer in group.peers if data]

    def wait(self) -> list[bytes]:
        """Returns every rank's data, in rank order. Raises TransportError if a rank does not send in time."""
        for transfer in [*self._received.values(), *self._sent]:
            self._group.wait(transfer)
        found = {peer: bytes(transfer.data) for peer, transfer in self._received.items()}
        return [self._data if rank == self._group.rank else found.get(rank, b"") for rank in range(self._group.size)]


def _gather(group: PeerGroup, data: bytes, lengths: Sequence[int]) -> list[bytes]:
    """Gathers as `gather` does, with lengths that all ranks know."""
    return Gathering(group, data, lengths, _GATHER_TAG).wait()


def gather_at_first(group: PeerGroup, data: bytes) -> list[bytes]:
    """Returns every rank's bytes on rank 0, in rank order, and an empty list elsewhere; all ranks call it.

    Raises:
        TransportError: not every rank called it in time.
    """
    lengths = [_LENGTH.unpack(each)[0] for each in gather(group, _LENGTH.pack(len(data)))]
    whole = [bytearray() for _ in lengths] if group.rank == 0 else []
    for start in range(0, max(lengths), _MESSAGE_NBYTES):
        stops = [min(length, start + _MESSAGE_NBYTES) for length in lengths]
        if group.rank == 0:
            coming = [
                group.receive(peer, ReceiveBuffer(stops[peer] - start), _GATHER_TAG)
                for peer in group.peers
                if stops[peer] > start
            ]
            for transfer in coming:
                whole[transfer.peer] += group.wait(transfer)
        elif stops[group.rank] > start:
            group.wait(group.send(0, bytearray(data[start : stops[group.rank]]), _GATHER_TAG))
    return [data if rank == group.rank else bytes(each) for rank, each in enumerate(whole)]


def from_first(group: PeerGroup, data: bytes) -> bytes:
    """Returns rank 0's bytes, of any length; all ranks call it. Raises TransportError as `gather` does."""
    (length,) = _LENGTH.unpack(gather(group, _LENGTH.pack(len(data)))[0])
    whole = bytearray()
    for start in range(0, length, _MESSAGE_NBYTES):
        piece = data[start : start + _MESSAGE_NBYTES] if group.rank == 0 else b""
        lengths = [min(_MESSAGE_NBYTES, length - start), *[0] * (group.size - 1)]
        whole += _gather(group, piece, lengths)[0]
    return bytes(whole)


def agree(
    group: PeerGroup,
    settings: Mapping[str, Any],
    *,
    when: str = "call compress",
    wanted: str = "every rank must call compress with the same model and arguments",
) -> None:
    """Compares settings, JSON values by name, with those of rank 0.

    Args:
        group: all ranks call it.
        settings: of this rank; the message names differences in their order.
        when: the call that all ranks make, for the message of a timeout.
        wanted: the remedy, for the message of a difference.

    Raises:
        ProtocolError: a rank's settings differ; the message names the rank and the setting, on every rank.
        TransportError: not every rank called it in time.
    """
    own = json.dumps(list(settings.items()), sort_keys=True).encode()
    try:
        digests = gather(group, hashlib.blake2b(own, digest_size=32).digest())
        if all(digest == digests[0] for digest in digests):
            return
        texts = gather(group, own)
    except TransportError as error:
        raise TransportError(
            f"rank {group.rank} could not reach every rank within {group.timeout.total_seconds():g} s; all of them "
            f"must {when}: {error}"
        ) from error
    first = dict(json.loads(texts[0]))
    for rank, text in enumerate(texts):
        other = dict(json.loads(text))
        for key in {**first, **other}:
            if found := list(differences(other.get(key), first.get(key), key)):
                leave(group, FAREWELL)  # the other ranks must read the texts before this rank closes its connections
                listed = ", ".join(
                    f"rank {rank} has {path} = {here} and rank 0 has {there}" for path, here, there in found
                )
                raise ProtocolError(f"{listed}; {wanted}")


def measure_link(group: PeerGroup, *, enough_s: float = _PROBE_ENOUGH_S, least_nbytes: int = 0) -> float:
    """Returns the bits per second of the slowest link from a rank to the next, while all ranks send.

    The measurement takes some 0.1 s: messages grow until one takes much longer than the link's delay.

    Args:
        group: all ranks call it.
        enough_s: that length, in seconds.
        least_nbytes: skips smaller messages, except the largest; the same on all ranks.
    """
    link_bps = 0.0
    before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    sizes = [nbytes for nbytes in _PROBE_NBYTES if 4 * nbytes > least_nbytes] or _PROBE_NBYTES[-1:]
    for nbytes in sizes if group.size > 1 else ():
        data = bytearray(nbytes)
        coming = group.receive(before, ReceiveBuffer(nbytes), _PROBE_TAG)
        gather(group, b"")  # all begin together
        begin = time.perf_counter()
        sending = group.send(after, data, _PROBE_TAG)
        group.wait(coming)
        taken = time.perf_counter() - begin
        group.wait(sending)
        slowest = max(_SECONDS.unpack(each)[0] for each in gather(group, _SECONDS.pack(taken)))
        link_bps = 8 * nbytes / slowest
        if slowest >= enough_s:
            break
    return link_bps


def leave(group: PeerGroup, timeout: timedelta) -> None:
    """Waits until every peer has called this too, or is gone, or the time is over.

    Without this wait a process that ends would lose its last packets: the kernel resets its connections, and peers lose
    packets that they have not read yet.
    """
    until = time.monotonic() + timeout.total_seconds()
    transfers = []
    for peer in group.peers:
        with suppress(TransportError):  # this peer is gone
            transfers.append(group.receive(peer, ReceiveBuffer(1), _LEAVE_TAG))
            transfers.append(group.send(peer, bytearray(1), _LEAVE_TAG))
    for transfer in transfers:
        with suppress(TransportError):
            group.wait(transfer, timedelta(seconds=max(0.001, until - time.monotonic())))
