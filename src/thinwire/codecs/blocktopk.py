"""`blocktopk`: the k largest magnitudes of every block, rounded to a few levels (SparseLoCo; DeMo, with its transform).

    payload:  block, k (varints) · bits (1 byte) · number of values sent (varint) · coded positions and levels · zeros

The zeros make a payload at least one byte per 4,096 values of the tensor and per 64 values sent, so that a few bytes
cannot claim a tensor that fills the memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.codecs.blocks import round_to_bins, select_blocks
from thinwire.codecs.dct import transform_tiles
from thinwire.codecs.options import Between
from thinwire.codecs.scheme import Explained, Payload, Scheme, Sent, Step, finite_magnitude
from thinwire.codecs.scratch import Scratch
from thinwire.codecs.tensors import Flat, FloatArray, compute_dtype, put, put_some
from thinwire.errors import ConfigError, FrameError, NonFiniteError
from thinwire.frames import Flags, Frame
from thinwire.frames.layout import pack_varint, parse_varint
from thinwire.kernels.contract import Bytes
from thinwire.kernels.numba.positions import Blocks, decode_positions, encode_positions

TILES = int(Flags.OPTION_A)
"""Blocks are tiles of a matrix; without it, stretches of neighbouring values."""

DCT = int(Flags.OPTION_B)
"""The frame holds coefficients of the tiles' DCT."""

MIN_BLOCK, MAX_BLOCK = 16, 1 << 16
MAX_BITS = 8
SMALLEST_TILE = 1 / 16
"""Divisors that leave tiles of less than this share of a block are not used: the tensor is cut into stretches."""
VALUES_PER_BYTE, SENT_PER_BYTE = 4096, 64


@dataclass(frozen=True, kw_only=True)
class BlockTopK(Scheme):
    """0.13 bits a value at the defaults, 8 to 9 a value sent, with a residual.

    Args:
        block: values in a block, 16 … 65,536.
        k: how many of them are sent; of a smaller block the same share, rounded up.
        bits: each value sent is rounded to one of 2**bits levels; the frame holds the levels.
        layout: `"flat"` cuts a tensor of any shape into stretches of `block` values; `"tiles"` cuts a matrix
            into tiles, each axis by its largest divisor up to √block, as SparseLoCo and DeMo do.
        transform: `"dct"` selects and sends coefficients of each tile's orthonormal DCT-II, as DeMo does; tensors
            that are cut into stretches send values.
    """

    id: ClassVar[str] = "blocktopk"
    checks_finite: ClassVar[bool] = True
    keeps_residual: ClassVar[bool] = True
    sends_some: ClassVar[bool] = True
    option_flags: ClassVar[int] = TILES | DCT

    block: Annotated[int, Between(MIN_BLOCK, MAX_BLOCK)] = 4096
    k: Annotated[int, Between(1, MAX_BLOCK)] = 64
    bits: Annotated[int, Between(1, MAX_BITS)] = 2
    layout: Literal["flat", "tiles"] = "flat"
    transform: Literal["dct"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k > self.block:
            raise ConfigError(f"blocktopk: k={self.k!r}; a block has {self.block} values")
        if self.transform and self.layout == "flat":
            raise ConfigError("blocktopk: transform='dct' is of a matrix's tiles; it needs layout='tiles'")

    @property
    def flags(self) -> int:
        return (TILES if self.layout == "tiles" else 0) | (DCT if self.transform else 0)

    def encode(self, flat: Flat, step: Step, space: Scratch) -> Payload:
        values, largest = flat.values, finite_magnitude(flat)
        blocks = blocks_of(flat.shape, self.block, self.k, self.layout == "tiles")
        dct = _Dct.of(blocks, self.flags)
        most = float(np.finfo(values.dtype).max) / 2 / (1 if dct is None else 2 * blocks.block**1.5)
        if largest > most:
            raise NonFiniteError(
                f"largest magnitude {largest:g} is above {most:g}: the residual or the transform's sums may "
                "overflow; nothing was changed: scale the values down"
            )
        selected = select_blocks(values if dct is None else transform_tiles(values, blocks), blocks)
        codes = space.array("blocktopk.codes", selected.values.size, np.uint8)
        book = round_to_bins(selected.values, self.bits, codes)
        coded = encode_positions(selected.counts, selected.places, codes, bits=self.bits, blocks=blocks)
        head = b"".join((*map(pack_varint, (self.block, self.k, self.bits, codes.size)),))
        coded_nbytes = len(head) + coded.size
        payload = np.zeros(_padded(coded_nbytes, blocks.rows * blocks.columns, codes.size), np.uint8)
        payload[: len(head)] = np.frombuffer(head, np.uint8)
        payload[len(head) : coded_nbytes] = coded
        return Payload(payload, tuple(book.tolist()), self.flags)

    @classmethod
    def decode(cls, frame: Frame, out: FloatArray, accumulate: bool, space: Scratch) -> None:
        sent, book = _read(frame), np.array(frame.scales, out.dtype)
        if sent.dct is None:
            put_some(book[sent.codes], sent.positions, out, accumulate)
        else:
            put(sent.dct.inverse_of(sent.positions, sent.codes, book), out, accumulate)

    @classmethod
    def sent(cls, frame: Frame, space: Scratch) -> Sent:
        sent = _read(frame)
        return Sent(sent.positions, np.array(frame.scales, compute_dtype(frame.dtype))[sent.codes], sent.dct)

    @classmethod
    def explain(cls, frame: Frame, space: Scratch) -> Explained:
        head, sent = _head(frame), _read(frame)
        blocks = head.blocks
        tiles = bool(frame.flags & TILES)
        return {
            "layout": ("tiles" if tiles else "flat", "OPTION_A: blocks are tiles of a matrix; without it, stretches"),
            "block": ([blocks.tile_rows, blocks.tile_columns], f"rows and columns; {blocks.number} blocks"),
            "k": (head.k, f"of {head.block} values are sent: the largest magnitudes of each block"),
            "values sent": (head.sent, f"of {frame.size}; the others decode to 0"),
            "bits per value sent": (
                8 * sent.nbytes / max(1, head.sent),
                "its position and its level, as they are coded",
            ),
            "transform": (
                None if sent.dct is None else "dct",
                "OPTION_B: coefficients of each tile's DCT-II are sent; without it, values",
            ),
            "levels": (list(frame.scales[:8]), f"the decoded values of the first levels, of {1 << head.bits}"),
        }

    @classmethod
    def max_payload_nbytes(cls, frame: Frame) -> int:
        """The arithmetic code spends at most 12 bits on a decision, and few decisions on a value."""
        return 64 + 9 * frame.size

    @classmethod
    def min_payload_nbytes(cls, frame: Frame) -> int:
        head = _head(frame)
        return _padded(head.nbytes + 4, frame.size, head.sent)


class _Head(NamedTuple):
    """The checked header of a payload, and its size in bytes."""

    block: int
    k: int
    bits: int
    sent: int
    blocks: Blocks
    nbytes: int


class _Sent(NamedTuple):
    """The positions and levels of the values sent."""

    positions: np.ndarray[tuple[int], np.dtype[np.int64]]
    codes: Bytes
    nbytes: int
    dct: _Dct | None


@dataclass(frozen=True, slots=True)
class _Dct:
    """The transform of a matrix's tiles."""

    blocks: Blocks

    @classmethod
    def of(cls, blocks: Blocks, flags: int) -> _Dct | None:
        """Returns the transform of frames with these flags; None where the tensor was not cut into tiles."""
        return cls(blocks) if flags & DCT and blocks.rows > 1 else None

    def invert(self, values: FloatArray) -> None:
        values[...] = transform_tiles(values, self.blocks, inverse=True)

    def inverse_of(self, positions: NDArray[np.int64], codes: Bytes, book: FloatArray) -> FloatArray:
        """Returns the values of the coefficients that were sent: the same bits for a sender and a receiver."""
        size = self.blocks.rows * self.blocks.columns
        # torch's memory, as a product's bits may depend on how its factors are aligned.
        coefficients = torch.zeros(size, dtype=torch.from_numpy(book).dtype, device="cpu").numpy()
        coefficients[positions] = book[codes]
        return transform_tiles(coefficients, self.blocks, inverse=True)


def blocks_of(shape: tuple[int, ...], block: int, k: int, tiles: bool) -> Blocks:
    """Returns the blocks of a tensor of one or more values; with three or more dimensions the first are the rows.

    Example:
        >>> blocks_of((576, 192), 4096, 64, True)[:4], blocks_of((576, 192), 4096, 64, False)[:4]
        ((576, 192, 64, 64), (1, 110592, 1, 4096))
    """
    size = math.prod(shape)
    if tiles and len(shape) > 1:
        rows, columns, side = shape[0], size // shape[0], math.isqrt(block)
        tile = (_largest_divisor(rows, side), _largest_divisor(columns, side))
        if tile[0] * tile[1] >= SMALLEST_TILE * block:
            return Blocks(rows, columns, *tile, k, block)
    return Blocks(1, size, 1, min(block, size), k, block)


def _largest_divisor(number: int, most: int) -> int:
    return next(each for each in range(most, 0, -1) if number % each == 0)


def _padded(coded_nbytes: int, size: int, sent: int) -> int:
    """Returns the size of a payload in bytes, with the zeros behind its coded bytes."""
    return max(coded_nbytes, size // VALUES_PER_BYTE, sent // SENT_PER_BYTE)


def _head(frame: Frame) -> _Head:
    numbers, at = [], 0
    for what in ("the block's size", "k", "the bits of a level", "the number of values sent"):
        number, at = parse_varint(memoryview(frame.payload), at, what)
        numbers.append(number)
    block, k, bits, sent = numbers
    if not (MIN_BLOCK <= block <= MAX_BLOCK and 1 <= k <= block and 1 <= bits <= MAX_BITS and sent <= frame.size):
        raise FrameError(f"blocktopk: k={k} of {block} values, {bits} bits, {sent} of {frame.size} values sent")
    if len(frame.scales) != 1 << bits:
        raise FrameError(f"blocktopk: {len(frame.scales)} levels came for {bits} bits")
    if frame.flags & DCT and not frame.flags & TILES:
        raise FrameError("blocktopk: coefficients of tiles came for stretches")
    blocks = blocks_of(frame.shape, block, k, bool(frame.flags & TILES))
    most = float(np.finfo(compute_dtype(frame.dtype)).max) / (2 * block)
    if _Dct.of(blocks, frame.flags) and not max(map(abs, frame.scales)) <= most:
        raise FrameError(f"blocktopk: the values of coefficients above {most:g} may overflow")
    return _Head(block, k, bits, sent, blocks, at)


def _read(frame: Frame) -> _Sent:
    """Returns the checked positions and levels. Raises FrameError."""
    head, payload = _head(frame), memoryview(frame.payload)
    positions, codes, nbytes = decode_positions(payload[head.nbytes :], head.sent, bits=head.bits, blocks=head.blocks)
    coded_nbytes = head.nbytes + nbytes
    if len(payload) != _padded(coded_nbytes, frame.size, head.sent) or any(payload[coded_nbytes:]):
        raise FrameError(f"blocktopk: {head.sent} values take {coded_nbytes} bytes, {len(payload)} came")
    return _Sent(positions, codes, nbytes, _Dct.of(head.blocks, frame.flags))
