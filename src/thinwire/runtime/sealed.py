"""Messages between ranks, encrypted and authenticated with a key that all ranks share.

Every message is AES-256-GCM under its sender's key. The key is derived from the shared secret and a random number of
every rank, drawn when the ranks connect. Two runs never use the same key, so a message of another run cannot be
replayed. A nonce is the receiver, the tag and the message's number among those of this receiver and tag. It is not
sent, since messages of one tag arrive in order; so a message that is omitted, repeated or returned cannot be opened.

`cryptography` is imported at its use, because the import takes 0.1 s and most runs are not sealed.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from thinwire.errors import ProtocolError, TransportError
from thinwire.runtime.peers import FAREWELL, gather, leave
from thinwire.transports.peers import PeerGroup, ReceiveBuffer, Transfer

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_NBYTES = 32
SALT_NBYTES = 32
LENGTH_NBYTES, SEAL_NBYTES = 8, 16
_CONFIRM = b"thinwire: ranks have one key"


@dataclass(frozen=True, slots=True)
class _Opening:
    """A receive under way: the sealed message's transfer, its nonce, and the buffer of the opened message."""

    sealed: Transfer
    nonce: bytes
    buffer: ReceiveBuffer

    def wait(self, timeout: timedelta) -> object:
        """Waits for the sealed message."""
        return self.sealed.work.wait(timeout)


class SealedPeerGroup(PeerGroup):
    """A peer group that seals all messages; all ranks construct one at the same time.

    Args:
        group: carries the messages.
        secret: the same on all ranks; random, of at least 128 bits.

    Raises:
        ProtocolError: another rank has another secret.
        TransportError: a rank did not connect in time.
    """

    def __init__(self, group: PeerGroup, secret: bytes) -> None:
        self._group = group
        self.rank, self.size, self.timeout = group.rank, group.size, group.timeout
        salt = b"".join(gather(group, secrets.token_bytes(SALT_NBYTES)))
        self._ciphers = [_cipher(secret, salt, rank) for rank in range(self.size)]
        self._counting = threading.Lock()
        self._numbers: Counter[tuple[bool, int, int]] = Counter()
        try:
            gather(self, _CONFIRM)
        except ProtocolError:
            leave(group, FAREWELL)  # the other ranks must fail the same way before this rank closes its connections
            raise

    @property
    def names(self) -> Sequence[int]:
        return self._group.names

    def receive(self, peer: int, buffer: ReceiveBuffer, tag: int) -> Transfer:
        sealed = ReceiveBuffer(LENGTH_NBYTES + len(buffer.data) + SEAL_NBYTES)
        nonce = self._nonce(False, peer, self.rank, tag)
        return Transfer(peer, _Opening(self._group.receive(peer, sealed, tag), nonce, buffer), buffer.data)

    def send(self, peer: int, data: bytearray, tag: int) -> Transfer:
        length = len(data).to_bytes(LENGTH_NBYTES, "little")
        nonce = self._nonce(True, peer, peer, tag)
        return self._group.send(
            peer, bytearray(length + self._ciphers[self.rank].encrypt(nonce, bytes(data), length)), tag
        )

    def wait(self, transfer: Transfer, timeout: timedelta | None = None) -> memoryview:
        from cryptography.exceptions import InvalidTag

        opening = transfer.work
        if not isinstance(opening, _Opening):
            return self._group.wait(transfer, timeout)
        sealed = self._group.wait(opening.sealed, timeout)
        length, opened = bytes(sealed[:LENGTH_NBYTES]), opening.buffer.data
        nbytes = int.from_bytes(length, "little")
        try:
            if nbytes > len(opened):
                raise InvalidTag
            coded = sealed[LENGTH_NBYTES : LENGTH_NBYTES + nbytes + SEAL_NBYTES]
            opened[:nbytes] = self._ciphers[transfer.peer].decrypt(opening.nonce, coded, length)
        except InvalidTag as error:
            raise ProtocolError(
                f"a message from rank {transfer.peer} cannot be opened: that rank has another key, or the message was "
                "changed on the way; every rank's token file must hold the same token without a rank"
            ) from error
        return opened

    def _nonce(self, sending: bool, peer: int, receiver: int, tag: int) -> bytes:
        """Returns the nonce of the next message between this rank and a peer, by its direction."""
        with self._counting:
            number = self._numbers[sending, peer, tag]
            self._numbers[sending, peer, tag] += 1
        try:
            return receiver.to_bytes(2, "little") + tag.to_bytes(4, "little") + number.to_bytes(6, "little")
        except OverflowError as error:
            raise TransportError("no nonces are left for this run; start all ranks again") from error


def _cipher(secret: bytes, salt: bytes, rank: int) -> AESGCM:
    """Returns the cipher that seals and opens a rank's messages."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return AESGCM(HKDF(SHA256(), KEY_NBYTES, salt, b"thinwire sealed, rank %d" % rank).derive(secret))
