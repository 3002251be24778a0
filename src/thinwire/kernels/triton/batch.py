"""Many tensors, one launch: tables that map every program to a tensor and its values.

A program makes BLOCK bytes of payload (before zero runs) of one tensor, from [BLOCK, WIDTH] values: PER_BYTE values
to a byte, WIDTH the power of two that holds them. One table, made anew for each batch because gradients move in memory,
holds the tensors' addresses, sizes and places; the values are not copied together.

All encoders share the functions below the table: find the place, load v = residual_scale·residual + values. Both passes
of an encoder load v by the same lines, so that they get the same bits. Multiplication and addition must stay two
operations: every launch passes `enable_fp_fusion=False`. Kernels take the batch as one argument, `Tables`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Required, TypedDict, Unpack

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from thinwire.kernels.triton.workspace import DeviceWorkspace

TILE = 4096  # values per program
NUM_WARPS = 8
TRITON_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}
INTEGER_TYPES = {torch.float32: torch.int32, torch.float64: torch.int64}  # as wide as the float type
NUMPY_TYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}

# Rows of the table, `stride` entries apart; behind them, each program's tensor.
_VALUES, _RESIDUALS, _SIZES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_NUM_BYTES, _FIRST_BYTE, _FIRST_BLOCK = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
_FACTORS, _OWNERS = tl.constexpr(6), tl.constexpr(7)
_ROW_ALIGNMENT = 16  # entries: rows start at multiples of 128 bytes, so that Triton compiles one variant


class Tables(NamedTuple):
    """The batch as a kernel's argument; names in capitals are constants of its machine code.

    Attributes:
        table: int64, its rows `stride` entries apart.
        DTYPE: the batch's type.
        RESIDUAL: whether the batch has residuals.
        PER_BYTE: values per byte of payload.
        WIDTH: the power of two that holds them.
        BLOCK: bytes of payload per program.
        ALIGNED: whether all written tensors start at multiples of 16 bytes: neighbours may be one access.
    """

    table: Any
    stride: Any
    DTYPE: Any
    RESIDUAL: Any
    PER_BYTE: Any
    WIDTH: Any
    BLOCK: Any
    ALIGNED: Any


class Arrays(NamedTuple):
    """Flat tensors on one device, given by their addresses.

    Attributes:
        addresses, sizes: int64[n] each; no size is 0.
        dtype: of all tensors, float32 or float64.
    """

    addresses: NDArray[np.int64]
    sizes: NDArray[np.int64]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Arrays:
        """Returns the addresses of contiguous tensors, which the caller keeps alive."""
        addresses = np.array([tensor.data_ptr() for tensor in tensors], np.int64)
        return cls(addresses, np.array([tensor.numel() for tensor in tensors], np.int64), tensors[0].dtype)


class Batch:
    """Flat tensors of one type on one device, ready for launches inside `workspace.running()`.

    Args:
        values: float32[n] or float64[n] each, contiguous, n > 0; never written by encoders.
        residuals: of the same sizes and type; None: no error feedback.
        factors: of the residuals; in decoding, each tensor's scale.
        per_byte: values per byte of payload: 1, 5 or 8.
        workspace: of the tensors' device.
        name: of the table's memory; two batches in use at once need two.
        tile: values per program; by default `TILE`.
        written: whether kernels write the values.

    Attributes:
        num_tensors, num_blocks: numbers of tensors and blocks.
        num_bytes: bytes of all payloads before zero runs.
        ends, numels: int64[num_tensors] on the host: the end of each tensor's bytes, and its number of values.
        tables: argument of kernels.
        launch: keyword arguments of every encoder kernel: the tables, and compile options.
    """

    def __init__(
        self,
        values: Sequence[torch.Tensor] | Arrays,
        residuals: Sequence[torch.Tensor] | Arrays | None,
        *,
        factors: float | Sequence[float] | NDArray[np.float64] = 1.0,
        per_byte: int,
        workspace: DeviceWorkspace,
        name: str = "batch",
        tile: int | None = None,
        written: bool = False,
    ) -> None:
        self.workspace, self.name = workspace, name
        values = values if isinstance(values, Arrays) else Arrays.of(values)
        sizes, self.dtype = values.sizes, values.dtype
        width = 1 << (per_byte - 1).bit_length()
        block = (tile or TILE) // width
        num_bytes = -(-sizes // per_byte)
        num_blocks = -(-num_bytes // block)
        self.num_tensors, self.num_blocks, self.num_bytes = sizes.size, int(num_blocks.sum()), int(num_bytes.sum())
        self.ends, self.numels = np.cumsum(num_bytes), sizes
        stride = -(-self.num_tensors // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
        rows = np.zeros((8, stride), np.int64)
        rows[_VALUES.value, : sizes.size] = values.addresses
        if residuals is not None:
            held = residuals if isinstance(residuals, Arrays) else Arrays.of(residuals)
            rows[_RESIDUALS.value, : sizes.size] = held.addresses
        rows[_SIZES.value, : sizes.size] = sizes
        rows[_NUM_BYTES.value, : sizes.size] = num_bytes
        rows[_FIRST_BYTE.value, : sizes.size] = self.ends - num_bytes
        rows[_FIRST_BLOCK.value, : sizes.size] = np.cumsum(num_blocks) - num_blocks
        rows[_FACTORS.value].view(np.float64)[: sizes.size] = factors
        rows[7, : sizes.size] = np.cumsum(num_blocks) - 1
        owners = np.repeat(np.arange(sizes.size), num_blocks)
        # Kernels read each program's tensor from row seven on; only torch reads the last blocks behind these.
        table = np.concatenate([rows[:7].reshape(-1), owners, rows[7]])
        self.table = workspace.upload(f"{name}.table", table)
        self.sizes = self.table[2 * stride : 2 * stride + self.num_tensors]
        self.last_blocks = self.table[table.size - stride : table.size - stride + self.num_tensors]
        self.tables = Tables(
            self.table,
            stride,
            DTYPE=tl.constexpr(TRITON_TYPES[self.dtype]),
            RESIDUAL=tl.constexpr(residuals is not None),
            PER_BYTE=tl.constexpr(per_byte),
            WIDTH=tl.constexpr(width),
            BLOCK=tl.constexpr(block),
            ALIGNED=tl.constexpr(written and not (rows[_VALUES.value] % 16).any()),
        )
        self.launch: dict[str, Any] = {"batch": self.tables, "num_warps": NUM_WARPS, "enable_fp_fusion": False}

    def largest(self) -> torch.Tensor:
        """Returns the largest magnitude of each tensor's v, [num_tensors]; NaN or Inf where a value is."""
        bits = self.workspace.array(f"{self.name}.largest", self.num_tensors, INTEGER_TYPES[self.dtype]).zero_()
        _largest[(self.num_blocks,)](bits, **self.launch)
        return bits.view(self.dtype)


class Given(TypedDict, total=False):
    """Arguments of every encoder beside the values; see `thinwire.kernels.triton.ternary.encode_ternary`."""

    residuals: Sequence[torch.Tensor] | Arrays | None
    residual_scale: float | NDArray[np.float64]
    together: bool
    workspace: Required[DeviceWorkspace]


@contextmanager
def encoding(values: Sequence[torch.Tensor] | Arrays, *, per_byte: int, **given: Unpack[Given]) -> Iterator[Batch]:
    """Makes a batch to encode; work inside runs on the side stream."""
    workspace, residuals, scale = given["workspace"], given.get("residuals"), given.get("residual_scale", 1.0)
    workspace.follow()
    with workspace.running():
        batch = Batch(values, residuals, factors=scale, per_byte=per_byte, workspace=workspace)
        _results_memory(batch)  # runs out of memory, if at all, before a residual is written
        yield batch


@contextmanager
def decoding(
    outs: Sequence[torch.Tensor] | Arrays,
    scales: Sequence[float] | NDArray[np.float64],
    *,
    per_byte: int,
    tile: int,
    workspace: DeviceWorkspace,
) -> Iterator[Batch]:
    """Makes a batch to fill or add to; work inside runs on the side stream.

    It runs after work already queued on the caller's stream, and before later work there.
    """
    into: dict[str, Any] = {"per_byte": per_byte, "tile": tile, "workspace": workspace, "written": True}
    with workspace.decoding():
        yield Batch(outs, None, factors=scales, name="decode", **into)


class Sent(NamedTuple):
    """The encoding of one tensor.

    Attributes:
        finite: False for NaN, Inf or an overflowing scale.
        largest: the largest magnitude.
        scale: the scale to send.
        payload: a view into pinned memory, valid until the workspace's next use.
    """

    finite: bool
    largest: float
    scale: float
    payload: NDArray[np.uint8]


class Arrived(NamedTuple):
    """The encodings of a batch; fields as of `Sent`, one value for each tensor.

    Attributes:
        payloads: of all tensors, end to end in pinned memory, valid until the workspace's next use.
        ends: int64[n], the end of each payload.
    """

    finite: NDArray[np.bool_]
    largest: NDArray[np.float64]
    scales: NDArray[np.float64]
    payloads: NDArray[np.uint8]
    ends: NDArray[np.int64]


def may_change(largest: torch.Tensor, scales: torch.Tensor, *, together: bool) -> torch.Tensor:
    """Returns which tensors may change their residual, int8[num_tensors]: finite ones; if `together`, all or none."""
    finite = torch.isfinite(largest) & torch.isfinite(scales)
    if together:
        finite &= finite.all()
    return finite.to(torch.int8)


def _results_memory(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns memory for three numbers a tensor, on the device and on the host; float64 is exact for sizes to 2**53."""
    workspace, size = batch.workspace, 3 * batch.num_tensors
    return workspace.array("pending.results", size, torch.float64), workspace.host(
        "pending.results", size, torch.float64
    )


class Pending:
    """Payloads that the device still computes; made inside `workspace.running()`.

    Args:
        batch: of the encoded tensors.
        largest: [num_tensors].
        scales: [num_tensors].
        payload: on the device, the payloads of all tensors end to end.
        ends: int64[num_tensors] on the device, the end of each payload; None: as many numbers as the batch has bytes.
    """

    def __init__(
        self,
        batch: Batch,
        *,
        largest: torch.Tensor,
        scales: torch.Tensor,
        payload: torch.Tensor,
        ends: torch.Tensor | None = None,
    ) -> None:
        self._batch, self._payload, self._sized = batch, payload.view(torch.uint8), ends is not None
        self._width = payload.element_size()
        size = batch.num_tensors
        results, self._results = _results_memory(batch)
        for row, fact in zip(results.view(3, size), (largest, scales, ends), strict=True):
            row.zero_() if fact is None else row.copy_(fact)
        self._results.copy_(results, non_blocking=True)

    def arrive(self) -> Arrived:
        """Waits for the sizes, then for the compressed bytes. Call either this or `finish`, once."""
        workspace = self._batch.workspace
        workspace.synchronize()
        largest, scales, ends = self._results.numpy().reshape(3, -1)
        stops = ends.astype(np.int64) if self._sized else self._width * self._batch.ends
        host = workspace.host("pending.payload", int(stops[-1]), torch.uint8)
        with workspace.running():
            host.copy_(self._payload[: int(stops[-1])], non_blocking=True)
        workspace.synchronize()
        return Arrived(np.isfinite(largest) & np.isfinite(scales), largest, scales, host.numpy(), stops)

    def finish(self) -> list[Sent]:
        """As `arrive`, for each tensor."""
        finite, largest, scales, payloads, ends = self.arrive()
        stops = ends.tolist()
        parts = [payloads[start:stop] for start, stop in zip([0, *stops[:-1]], stops, strict=True)]
        results = zip(finite.tolist(), largest.tolist(), scales.tolist(), parts, strict=True)
        return [Sent(*sent) for sent in results]


@triton.jit
def find_start(batch: Tables) -> tl.tensor:
    """Returns this program's tensor, and the first of the bytes that it makes: two scalars."""
    program = tl.program_id(0)
    tensor = tl.load(batch.table + _OWNERS * batch.stride + program)
    block = program - tl.load(batch.table + _FIRST_BLOCK * batch.stride + tensor)
    return tensor, block * batch.BLOCK


@triton.jit
def find_block(batch: Tables) -> tl.tensor:
    """Returns this program's tensor, and the tensor's bytes that it makes: int64[BLOCK]."""
    tensor, start = find_start(batch)
    return tensor, start + tl.arange(0, batch.BLOCK)


@triton.jit
def num_values(batch: Tables, tensor: tl.tensor) -> tl.tensor:
    """Returns the number of values of a tensor."""
    return tl.load(batch.table + _SIZES * batch.stride + tensor)


@triton.jit
def byte_span(batch: Tables, tensor: tl.tensor) -> tl.tensor:
    """Returns the number of a tensor's bytes, and the offset of the first in the batch's bytes."""
    num_bytes = tl.load(batch.table + _NUM_BYTES * batch.stride + tensor)
    return num_bytes, tl.load(batch.table + _FIRST_BYTE * batch.stride + tensor)


@triton.jit
def factor_of(batch: Tables, tensor: tl.tensor) -> tl.tensor:
    """Returns the factor of the tensor's residual, or its scale."""
    bits = tl.load(batch.table + _FACTORS * batch.stride + tensor)
    return bits.to(tl.float64, bitcast=True).to(batch.DTYPE)


@triton.jit
def values_of(batch: Tables, tensor: tl.tensor) -> tl.tensor:
    """Returns a pointer for writing the tensor's values."""
    address = tl.load(batch.table + _VALUES * batch.stride + tensor)
    values = address.to(tl.pointer_type(batch.DTYPE))
    if batch.ALIGNED:
        values = tl.multiple_of(values, 16)
    return values


@triton.jit
def load_block(batch: Tables, tensor: tl.tensor, byte: tl.tensor) -> tl.tensor:
    """Returns the value index of each place of each byte, whether the tensor has it, and v: [BLOCK, WIDTH] each."""
    num_bytes, _ = byte_span(batch, tensor)
    place = tl.arange(0, batch.WIDTH)[None, :]
    index = byte[:, None] * batch.PER_BYTE + place
    known = (place < batch.PER_BYTE) & (byte[:, None] < num_bytes) & (index < num_values(batch, tensor))
    return index, known, load_sum(batch, tensor, 0, index, known)


@triton.jit
def load_sum(batch: Tables, tensor: tl.tensor, first: tl.tensor, at: tl.tensor, known: tl.tensor) -> tl.tensor:
    """Returns v = residual_scale·residual + values, or the values alone, at first + at; 0 outside the tensor.

    `first` is a scalar and may be large; with an int32 `at`, no lane computes in 64 bits.
    """
    values = tl.load(batch.table + _VALUES * batch.stride + tensor).to(tl.pointer_type(batch.DTYPE)) + first
    v = tl.load(values + at, mask=known, other=0.0)
    if batch.RESIDUAL:
        residual = tl.load(batch.table + _RESIDUALS * batch.stride + tensor).to(tl.pointer_type(batch.DTYPE)) + first
        v = factor_of(batch, tensor) * tl.load(residual + at, mask=known, other=0.0) + v
    return v


@triton.jit
def store_residual(
    batch: Tables,
    tensor: tl.tensor,
    first: tl.tensor,
    at: tl.tensor,
    known: tl.tensor,
    allowed: tl.tensor,
    unsent: tl.tensor,
) -> None:
    """Stores the unsent values at first + at, unless the tensor is refused."""
    residual = tl.load(batch.table + _RESIDUALS * batch.stride + tensor).to(tl.pointer_type(batch.DTYPE)) + first
    tl.store(residual + at, unsent, mask=known & (tl.load(allowed + tensor) != 0))


@triton.jit
def magnitude_bits(v: tl.tensor) -> tl.tensor:
    """Returns magnitudes as integers of the same width, which order like magnitudes; NaN and Inf are the largest."""
    INTEGER: tl.constexpr = tl.int64 if v.dtype == tl.float64 else tl.int32
    MAGNITUDE: tl.constexpr = 0x7FFFFFFFFFFFFFFF if v.dtype == tl.float64 else 0x7FFFFFFF
    return v.to(INTEGER, bitcast=True) & MAGNITUDE


@triton.jit
def _largest(largest: tl.tensor, batch: Tables) -> None:
    tensor, byte = find_block(batch)
    _, _, v = load_block(batch, tensor, byte)
    tl.atomic_max(largest + tensor, tl.max(magnitude_bits(v)), sem="relaxed")
