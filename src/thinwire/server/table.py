"""One table: the server's copy of a tensor, the workers' copy of it, and what leads from one to the other.

The server keeps, bit for bit, the copy that every worker holds (`replica`): it applies its own frames to it.
What has not been sent yet is then simply `values − replica`: that difference is the pull's residual
(3LC §3, "w_server − w_worker = residual"), it cannot drift, and a worker that is too far behind can be given the
exact table that the others have.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from thinwire import frames
from thinwire.codecs import Codec, decode
from thinwire.codecs.base import check_payload
from thinwire.codecs.registry import codec as make_codec
from thinwire.codecs.tensors import Flat, FloatArray
from thinwire.errors import FrameError, NonFiniteError, ProtocolError
from thinwire.schema import TableSpec
from thinwire.server.aggregation import NO_GRADIENT, Aggregation

_PLAIN = make_codec("fp32")


class Table:
    """A table and its versions. Version v is the state after v updates.

    Args:
        spec: name, shape, and whether it is a buffer.
        up: codec of the pushes, which a frame must name.
        down: codec of the pulls.
        workers: how many gradients make a step.
    """

    def __init__(self, spec: TableSpec, up: Codec, down: Codec, workers: int) -> None:
        self.spec = spec
        self.version = 0
        self.values = torch.zeros(spec.shape)
        self.replica = np.zeros(spec.shape, np.float32)
        self.incoming = Aggregation(spec.shape, workers)
        self._up = up
        self._down = down
        self._before: FloatArray | None = None if down.residual_by_default else np.zeros(spec.shape, np.float32)
        self._unsent = np.zeros(spec.shape, np.float32)
        self._log: deque[bytes] = deque()
        self._log_nbytes = 0

    @property
    def residual(self) -> FloatArray:
        """What the workers' copies lack of the server's: values − replica."""
        difference: FloatArray = self.values.numpy() - self.replica
        return difference

    def add(self, rank: int, frame: bytes) -> None:
        """Takes a worker's gradient.

        Raises:
            ProtocolError: the frame is no gradient of this table, in the codec that was agreed on.
            FrameError: a payload, perhaps of a worker whose frame had waited for its turn, is damaged.
        """
        if frame != NO_GRADIENT:
            self._check(frame, self._up.id)
        try:
            self.incoming.add(rank, frame)
        except FrameError as error:
            raise FrameError(f"{self.spec.name}: {error}") from error

    def assign(self, frame: bytes, version: int) -> None:
        """Replaces the table by whole values; the log of deltas starts anew.

        Raises:
            ProtocolError: the frame does not hold this table's values, uncompressed; nothing was changed.
        """
        self._check(frame, _PLAIN.id)
        try:
            decode(frame, out=self.replica)
        except FrameError as error:
            raise ProtocolError(f"{self.spec.name}: {error}") from error
        self.values.copy_(torch.from_numpy(self.replica))
        self.version = version
        self._log.clear()
        self._log_nbytes = 0

    def before_update(self) -> None:
        """Called before the optimizer changes `values`."""
        if self._before is not None:
            self._before[...] = self.values.numpy()

    def publish(self, *, changed: bool) -> bytes:
        """Encodes, once, what leads the workers' copies to the next version, and logs it.

        Returns an empty frame where no worker had a gradient.

        Raises:
            NonFiniteError: the update gave NaN or Inf: training has diverged.
        """
        self.version += 1
        frame = NO_GRADIENT
        if changed:
            base = self.replica if self._before is None else self._before
            with np.errstate(over="ignore", invalid="ignore"):  # the codec refuses what is not finite
                np.subtract(self.values.numpy(), base, out=self._unsent)
            flat = Flat(self._unsent.reshape(-1), "fp32", self.spec.shape)
            try:
                frame = self._down.encode_flat(
                    flat, self.spec.name, None, self._down.draws(0, self.spec.name, self.version)
                ).frame
            except NonFiniteError as error:
                raise NonFiniteError(f"after update {self.version}: {error}") from None
            decode(frame, out=self.replica, accumulate=True)
        self._remember(frame)
        return frame

    def since(self, version: int) -> list[bytes] | None:
        """Returns the frames that lead from `version` to now, oldest first; None where the log no longer has them."""
        lacking = self.version - version
        if not 0 <= lacking <= len(self._log):
            return None
        return list(self._log)[len(self._log) - lacking :]

    def snapshot(self) -> bytes:
        """Returns the workers' copy as one uncompressed frame."""
        return _PLAIN.encode(self.replica)

    def _remember(self, frame: bytes) -> None:
        # Deltas are worth keeping as long as they are smaller, together, than the table they replace.
        self._log.append(frame)
        self._log_nbytes += len(frame)
        while self._log and self._log_nbytes > self.replica.nbytes:
            self._log_nbytes -= len(self._log.popleft())

    def _check(self, frame: bytes, codec_id: str) -> None:
        try:
            parsed = frames.parse(frame, copy=False)
            if parsed.codec != codec_id:
                raise ProtocolError(f"{self.spec.name}: codec {parsed.codec!r} came, {codec_id!r} was agreed on")
            if parsed.shape != self.spec.shape:
                raise ProtocolError(
                    f"{self.spec.name}: a frame of shape {parsed.shape} came, the table is {self.spec.shape}"
                )
            check_payload(type(self._up if codec_id == self._up.id else _PLAIN), parsed)
        except FrameError as error:
            raise ProtocolError(f"{self.spec.name}: {error}") from error
