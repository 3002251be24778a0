"""Error feedback around any scheme: what was not sent is kept and added to the next tensor (3LC §3, 1-bit SGD).

v = scale·residual + values        sent = decode(encode(v))        residual = v − sent
"""

from __future__ import annotations

import numpy as np

from thinwire.codecs.scheme import Payload, Scheme, Step
from thinwire.codecs.scratch import Scratch
from thinwire.codecs.tensors import Flat
from thinwire.frames import Frame


def encode(scheme: Scheme, flat: Flat, step: Step, space: Scratch) -> Payload:
    """Encodes `step.residual` + values and leaves in the residual what was not sent.

    A scheme with kernels that do all of it in their own passes does so; for any other it takes three more.
    Raises NonFiniteError before anything is changed.
    """
    residual = step.residual
    if residual is None or scheme.fuses_residual(flat.shape):
        return scheme.encode(flat, step, space)
    size, dtype = flat.values.size, flat.values.dtype
    total = space.array("feedback.sum", size, dtype)
    np.multiply(residual, dtype.type(step.residual_scale), out=total)
    total += flat.values
    payload = scheme.encode(Flat(total, flat.dtype, flat.shape), step._replace(residual=None), space)
    data = bytes(payload.data)  # a copy, because decoding may use the memory that it lies in
    sent = space.array("feedback.sent", size, dtype)
    scheme.decode(Frame(scheme.id, flat.dtype, flat.shape, payload.scales, payload.flags, data), sent, False, space)
    np.subtract(total, sent, out=residual)
    return Payload(data, payload.scales, payload.flags)
