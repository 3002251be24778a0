"""Unsigned LEB128 integers, canonical: the shortest form is the only form. At most 63 bits."""

from __future__ import annotations

from thinwire.errors import FrameError

_MAX_NBYTES = 9


def write(number: int) -> bytes:
    """Returns `number` (0 ≤ number < 2**63) as 1 to 9 bytes.

    >>> write(300).hex()
    'ac02'
    """
    if 0 <= number < 0x80:
        return bytes((number,))
    if not 0 <= number < 1 << 63:
        raise ValueError(f"a varint holds 0 … 2**63 - 1, not {number}")
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def read(data: memoryview, at: int, what: str) -> tuple[int, int]:
    """Returns (number, position after it). Raises FrameError where it is cut, too long or not the shortest form."""
    if at < len(data) and data[at] < 0x80:  # most numbers in a frame
        return data[at], at + 1
    number = 0
    for i in range(_MAX_NBYTES):
        if at + i >= len(data):
            raise FrameError(f"the frame ends inside {what}, at byte {at + i}")
        byte = data[at + i]
        number |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            if byte == 0 and i:
                raise FrameError(f"{what} at byte {at} is not in its shortest form")
            return number, at + i + 1
    raise FrameError(f"{what} at byte {at} is longer than {_MAX_NBYTES} bytes")
