"""What a worker does with its parameters and momenta at an exchange, each value taken from memory once.

An update u changes the shared values; the local ones go on from there, less the share of the residual that stays; and
an optimizer's first moment may be led where all workers went: ``(√second · correction + ε) · (−u − decay · shared) ·
factor`` replaces a share of it. By torch's operations these are nine passes over memory that is larger than caches.

What local values hold of a residual r, with a minus sign, is found again from both without keeping it: the *offset*
``shared − (shared − share · r)``, as rounded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.contract import Bytes, num_codes_of
from thinwire.kernels.numba.addresses import ONE, Addresses, array_at
from thinwire.kernels.numba.base243 import _SPREAD, BLOCK_CODES, Workspace
from thinwire.kernels.numba.decode_many import begin_of_payload
from thinwire.kernels.numba.jit import copy, jit, wide_vectors
from thinwire.kernels.numba.zero_run import _decode

_NO_CHANGE = np.float32(-0.0)  # which changes no bit of any number


class Continued(NamedTuple):
    """What goes on from the shared values of some tensors: float32 arrays by their addresses, 0 where there is none.

    Args:
        local: local values.
        residuals: of which a share stays in the local values.
        share: which.
        firsts, seconds: moments of an optimizer; neither or both.
        numbers: float32[n, 4], of each tensor what the root of its second moment is multiplied by, what is added to
            that, a last factor, and the share of the shared values that decay has taken, which leads nobody.
        lead: which share of the first moments is replaced.
    """

    local: Addresses
    residuals: Addresses
    share: float
    firsts: Addresses
    seconds: Addresses
    numbers: NDArray[np.float32]
    lead: float


def continue_many(before: Addresses, shared: Addresses, sizes: Addresses, continued: Continued) -> None:
    """Has local values and moments go on from shared values that an update has changed.

    Args:
        before: what the shared values were, float32 arrays by their addresses; 0 where no moment is led.
        shared: what they are now.
        sizes: of each.
        continued: local values and moments.

    Example:
        >>> shared, unsent, local = np.float32([1, 2]), np.float32([0.5, -1]), np.empty(2, np.float32)
        >>> first, second, third = (np.array([each.ctypes.data]) for each in (shared, unsent, local))
        >>> none = np.array([0])
        >>> numbers = np.zeros((1, 4), np.float32)
        >>> continue_many(none, first, np.array([2]), Continued(third, second, 1.0, none, none, numbers, 0.0))
        >>> local.tolist()
        [0.5, 3.0]
    """
    _continue_many(before, shared, sizes, *_typed(continued))


def decode_and_continue_many(
    frames: Bytes,
    ends: Addresses,
    heads: Bytes,
    head_spans: Addresses,
    shared: Addresses,
    sizes: Addresses,
    continued: Continued,
    *,
    workspace: Workspace,
) -> list[int]:
    """`decode_many` of updates to be added to the shared values, and `continue_many` from there, block by block.

    Args:
        frames, ends, heads, head_spans: as for `decode_many`.
        shared: addresses of the float32 arrays to add to.
        sizes: of each.
        continued: local values and moments.
        workspace: scratch.

    Returns:
        The size of each payload in bytes; 0 for a frame that is not the one expected, of which nothing is touched.
    """
    workspace.codes.reserve(num_codes_of(int(sizes.max())))
    payload_nbytes = np.zeros_like(sizes)
    _decode_and_continue_many(
        frames,
        ends,
        heads,
        head_spans,
        shared,
        sizes,
        workspace.codes.bytes,
        workspace.codes.words_at,
        workspace.digits,
        workspace.groups,
        payload_nbytes,
        *_typed(continued),
    )
    found: list[int] = payload_nbytes.tolist()
    return found


def _typed(continued: Continued) -> tuple[Any, ...]:
    local, residuals, share, firsts, seconds, numbers, lead = continued
    return local, residuals, np.float32(share), firsts, seconds, numbers, np.float32(lead)


@jit
def _continue_many(
    before: Any,
    shared: Any,
    sizes: Any,
    local: Any,
    residuals: Any,
    share: Any,
    firsts: Any,
    seconds: Any,
    numbers: Any,
    lead: Any,
) -> None:
    for i in range(shared.size):
        now = array_at(shared[i], sizes[i], ONE)
        if residuals[i]:
            _keep_unsent(now, array_at(residuals[i], sizes[i], ONE), share, array_at(local[i], sizes[i], ONE))
        else:
            copy(now, array_at(local[i], sizes[i], ONE))
        if firsts[i]:
            was, first = array_at(before[i], sizes[i], ONE), array_at(firsts[i], sizes[i], ONE)
            _lead(was, now, first, array_at(seconds[i], sizes[i], ONE), numbers[i], lead)


@jit
def _decode_and_continue_many(
    frames: Any,
    ends: Any,
    heads: Any,
    head_spans: Any,
    shared: Any,
    sizes: Any,
    codes: Any,
    words_at: Any,
    digits: Any,
    groups: Any,
    payload_nbytes: Any,
    local: Any,
    residuals: Any,
    share: Any,
    firsts: Any,
    seconds: Any,
    numbers: Any,
    lead: Any,
) -> None:
    for i in range(shared.size):
        frame = frames[ends[i - 1] if i else 0 : ends[i]]
        num_codes = (sizes[i] + 4) // 5
        begin, scale = begin_of_payload(frame, heads[head_spans[i, 0] : head_spans[i, 1]], num_codes)
        if not begin:
            continue
        payload_nbytes[i] = frame.size - begin
        _decode(frame[begin:], words_at)
        now, own = array_at(shared[i], sizes[i], ONE), array_at(local[i], sizes[i], ONE)
        for start in range(0, num_codes, BLOCK_CODES):
            block = codes[start : min(start + BLOCK_CODES, num_codes)]
            for k in range(block.size):
                groups[k] = _SPREAD[block[k]]
            part = slice(5 * start, min(5 * (start + BLOCK_CODES), sizes[i]))
            # Two loops with few arrays each, which compilers vectorise; the block stays in the cache.
            if residuals[i]:
                _add_keeping(digits, scale, now[part], array_at(residuals[i], sizes[i], ONE)[part], share, own[part])
            else:
                _add_keeping(digits, scale, now[part], None, share, own[part])
            if firsts[i]:
                first, second = array_at(firsts[i], sizes[i], ONE), array_at(seconds[i], sizes[i], ONE)
                _lead_by(digits, scale, now[part], first[part], second[part], numbers[i], lead)


@jit
def _keep_unsent(shared: Any, residual: Any, share: Any, local: Any) -> None:
    wide_vectors()
    for i in range(shared.size):
        local[i] = shared[i] - share * residual[i]


@jit
def _add_keeping(digits: Any, scale: Any, shared: Any, residual: Any, share: Any, local: Any) -> None:
    wide_vectors()
    for i in range(shared.size):
        digit = digits[i]
        now = shared[i] + (scale if digit > 1 else (-scale if digit < 1 else _NO_CHANGE))
        shared[i] = now
        local[i] = now if residual is None else now - share * residual[i]


@jit
def _lead_by(digits: Any, scale: Any, shared: Any, first: Any, second: Any, numbers: Any, lead: Any) -> None:
    wide_vectors()
    correction, eps, factor, decay, kept = numbers[0], numbers[1], numbers[2], numbers[3], ONE - lead
    for i in range(first.size):
        digit = digits[i]
        change = -scale if digit > 1 else (scale if digit < 1 else ONE - ONE)
        moment = (np.sqrt(second[i]) * correction + eps) * (change - decay * shared[i]) * factor
        first[i] = kept * first[i] + lead * moment


@jit
def _lead(before: Any, shared: Any, first: Any, second: Any, numbers: Any, lead: Any) -> None:
    wide_vectors()
    correction, eps, factor, decay, kept = numbers[0], numbers[1], numbers[2], numbers[3], ONE - lead
    for i in range(first.size):
        change = before[i] - shared[i]
        moment = (np.sqrt(second[i]) * correction + eps) * (change - decay * shared[i]) * factor
        first[i] = kept * first[i] + lead * moment
