"""Small uncompressed tensors in one frame: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from thinwire.codecs import codec, decode
from thinwire.errors import FrameError, NonFiniteError
from thinwire.frames import Frame, pack, parse
from thinwire.packets import BatchedTensor
from thinwire.packets.batch import join, split

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
arrays_of_floats = st.lists(arrays(np.float32, st.integers(1, 40), elements=finite), min_size=1, max_size=8)


@given(values=arrays_of_floats, dtype=st.sampled_from([np.float32, np.float64]))
@settings(deadline=None)
def test_tensors_come_out_as_they_went_in(values: list[np.ndarray], dtype: type) -> None:
    values = [each.astype(dtype) for each in values]
    frame = join([BatchedTensor.of(each, "w") for each in values])
    assert decode(frame).numpy().tobytes() == b"".join(each.tobytes() for each in values)
    for part, each in zip(split(frame, [each.size for each in values], dtype), values, strict=True):
        assert part.values.tobytes() == each.tobytes() and part == BatchedTensor(each)


@given(values=arrays_of_floats)
@settings(deadline=None)
def test_rounded_tensors_travel_in_16_bits(values: list[np.ndarray]) -> None:
    values = [np.clip(each, -1e38, 1e38) for each in values]
    narrow = [BatchedTensor.of(each, "w", narrow=True) for each in values]
    for part, each in zip(narrow, values, strict=True):
        expected = torch.from_numpy(each).bfloat16().float().numpy()
        assert part.values.tobytes() == expected.tobytes(), "as torch rounds: half to even"
    sizes, total = [each.size for each in values], sum(each.size for each in values)
    frame = join(narrow)
    assert len(parse(frame).payload) == 2 * total == sum(map(len, narrow))
    for came, sent in zip(split(frame, sizes), narrow, strict=True):
        assert came == sent and came.narrow
    mixed = join([*narrow, BatchedTensor.of(values[0], "w")])
    assert len(parse(mixed).payload) == 4 * (total + sizes[0]), "beside others they travel as the others do"
    assert not any(part.narrow for part in split(mixed, [*sizes, sizes[0]]))


def test_a_batched_tensor_is_a_copy_of_checked_values_and_is_stored_or_added() -> None:
    values = np.ones(5, np.float32)
    made = BatchedTensor.of(values, "w")
    values[:] = 2
    assert made.values.tolist() == [1.0] * 5 and len(made) == 20
    for bad in (np.nan, np.inf, -np.inf):
        values[3] = bad
        for narrow in (False, True):
            with pytest.raises(NonFiniteError, match=r"layer\.bias: holds NaN or Inf"):
                BatchedTensor.of(values, "layer.bias", narrow=narrow)
    values[3] = np.finfo(np.float32).max
    with pytest.raises(NonFiniteError, match="holds NaN or Inf"):
        BatchedTensor.of(values, "w", narrow=True)  # it rounds to Inf

    out = np.full(3, 10.0, np.float32)
    made = BatchedTensor(np.arange(3, dtype=np.float32))
    made.unpack(out, accumulate=True)
    assert out.tolist() == [10.0, 11.0, 12.0]
    made.unpack(out, accumulate=False)
    assert out.tolist() == [0.0, 1.0, 2.0]


OTHER_FRAMES = [
    (codec("fp32").encode(np.ones(4, np.float32)), "a batch of 5 values"),
    (codec("fp32").encode(np.ones((5, 1), np.float32)), r"shape \(5, 1\)"),
    (codec("fp16").encode(np.ones(5, np.float32)), "came as 'fp16'"),
    (codec("fp32").encode(np.ones(5, np.float64)), "of fp64"),
    (codec("fp32", entropy="zstd").encode(np.zeros(5000, np.float32)), "came as"),
    (pack(Frame("fp32", "fp32", (5,), payload=bytes(19))), "takes 20 payload bytes"),
    (pack(Frame("fp32", "fp32", (5,), (1.0,), payload=bytes(20))), "1 scales came"),
    (pack(Frame("fp32", "fp32", (5,), payload=np.full(5, np.nan, np.float32).tobytes())), "NaN or Inf"),
    (pack(Frame("fp32", "fp32", (5,), flags=2, payload=b"")), "flags"),
    (pack(Frame("bf16", "fp32", (5,), payload=bytes(20))), "takes 10 payload bytes"),
    (pack(Frame("bf16", "fp64", (5,), payload=bytes(10))), "came as 'bf16' of fp64"),
    (pack(Frame("bf16", "fp32", (5,), payload=b"\x80\x7f" * 5)), "NaN or Inf"),
    (b"", "too few"),
]


def test_other_frames_are_no_batch() -> None:
    for frame, message in OTHER_FRAMES:
        with pytest.raises(FrameError, match=message):
            split(frame, [2, 3])


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_mutated_batches_raise_frame_errors_alone(data: st.DataObject) -> None:
    frame = bytearray(join([BatchedTensor(np.ones(2, np.float32)), BatchedTensor(np.zeros(30, np.float32))]))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    # A right checksum gets the rest of the frame looked at.
    with contextlib.suppress(FrameError):
        frame = bytearray(pack(parse(bytes(frame))))
    sizes = data.draw(st.lists(st.integers(1, 2**40), min_size=1, max_size=3)) if data.draw(st.booleans()) else [2, 30]
    try:
        tensors = split(bytes(frame), sizes)
    except FrameError:
        return
    assert [part.values.size for part in tensors] == sizes
