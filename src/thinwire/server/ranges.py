"""Whether a worker's push is of a size with which the others can go on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thinwire import frames as framing
from thinwire.codecs import decode
from thinwire.errors import FrameError, ProtocolError
from thinwire.packets import BatchedTensor, EncodedTensor
from thinwire.schema import MAX_VALUE
from thinwire.server.table import Table


def check_range(
    tables: Sequence[Table], indices: Sequence[int], frames: Sequence[EncodedTensor], *, decodes: bool
) -> None:
    """Raises ProtocolError where a tensor is not decodable, or holds values above `MAX_VALUE`.

    One such push, though finite, makes every worker's forward pass overflow, or the optimizer's sums of squares. It is
    refused before anything has changed, so that an update is finite whatever the optimizer does with the pushes.

    Args:
        tables: of the shard.
        indices: which of them are pushed.
        frames: one for each.
        decodes: whether to decode frames whose scales do not tell; it takes as long as adding them.
    """
    for index, frame in zip(indices, frames, strict=False):
        if not 0 <= index < len(tables):
            return  # the shard says so
        name = tables[index].spec.name
        try:
            largest = _largest(frame, tables[index].spec.shape, decodes)
        except FrameError as error:
            raise ProtocolError(f"{name}: {error}") from error
        if largest > MAX_VALUE:
            raise ProtocolError(
                f"the push of {name!r} holds values up to {largest:.3g}, with which an update or the next forward pass "
                "is not finite: this worker's training has diverged, or it sends what is no gradient"
            )


def _largest(frame: EncodedTensor, shape: tuple[int, ...], decodes: bool) -> float:
    """Returns the largest magnitude in a frame, as its scales tell, or the values themselves."""
    if isinstance(frame, BatchedTensor):
        return float(np.abs(frame.values).max(initial=0))
    if not len(frame):
        return 0.0
    parsed = framing.parse(frame, copy=False)
    if parsed.scales:
        return max(map(abs, parsed.scales))
    if not decodes or parsed.non_finite or not parsed.size or parsed.shape != shape:  # the shard refuses this shape
        return 0.0
    return float(decode(frame).abs().max())
