"""Many 3LC tensors by one kernel call: the bytes, residuals and sums of one after the other, and nothing else taken."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch
import zstandard

import thinwire as tw
from thinwire import frames
from thinwire.codecs import Context, decode_all, encode_all, open_frame
from thinwire.codecs.flats import Flats
from thinwire.codecs.tensor_set import TensorSet
from thinwire.codecs.ternary_batch import TernaryBatch, takes
from thinwire.packets import BatchedTensor

SIZES = (1, 4, 5, 6, 77, 640, 20_481, 70_000)


def tensors(seed: int) -> list[Any]:
    """Dense, sparse and zero arrays of every size."""
    draw = np.random.default_rng(seed)
    made = [
        (draw.standard_normal(size) ** (1 + 2 * (place % 3))).astype(np.float32) for place, size in enumerate(SIZES)
    ]
    return [*made, np.zeros(5000, np.float32), np.full(333, 2.0, np.float32)]


def contexts(given: list[Any]) -> list[Context]:
    """Contexts of several options: one clips, one has no residual, one forgets, one may send NaN, two have zstd."""
    options: list[dict[str, Any]] = [
        *({"sparsity": 1.75}, {}, {"error_feedback": False}),
        *({"error_scale": 0.1}, {"nonfinite": "skip"}, {"clip": 0.7}, {"sparsity": 1.75, "lag": 1.5, "clip": 0.9}),
        *({"sparsity": 1.5, "entropy": "zstd"}, {"clip": 0.7, "entropy": "zstd"}),
    ]
    return [tw.codec("3lc", **options[place % len(options)]).context(each) for place, each in enumerate(given)]


def addresses(arrays: list[Any]) -> Any:
    return np.array([each.ctypes.data for each in arrays])


def test_batch_frames_and_residuals_equal_those_of_single_encodes() -> None:
    ours, theirs = contexts(tensors(0)), contexts(tensors(0))
    batch = TernaryBatch(ours)
    for step in range(13):
        given = tensors(step)
        expected = [context.encode(each) for context, each in zip(theirs, given, strict=True)]
        assert batch.encode(addresses(given)) == expected, step
        for one, other in zip(ours, theirs, strict=True):
            assert (one.step, one.payload_nbytes) == (other.step, other.payload_nbytes)
            if one.lag_bound is not None and other.lag_bound is not None:
                assert one.lag_bound.changing().tolist() == other.lag_bound.changing().tolist(), (step, one.size)
            assert one.residual is None or one.residual.equal(other.residual), (step, one.size)  # type: ignore[arg-type]


def test_tensor_set_mixed_codecs_equal_single_encodes_and_adds() -> None:
    given = [each.reshape(-1, 1) for each in tensors(1)]
    options: list[dict[str, Any]] = [{}, {"nonfinite": "skip"}, {"layout": "partition"}, {"entropy": "zstd"}]
    codecs = [*(tw.codec("3lc", **each) for each in options), tw.codec("int8"), tw.codec("bf16"), tw.codec("fp32")]
    ours, theirs = ([codecs[place % 7].context(each, name="w") for place, each in enumerate(given)] for _ in range(2))
    assert [takes(context) for context in ours[:7]] == [True, True, False, True, False, False, False]
    together = TensorSet(ours, batched=[5, 6])
    for bad in (0.0, np.inf, 0.0):
        given[8][0] = bad  # where the codec then sends a frame that says so
        expected: list[Any] = [one.encode(each) for one, each in zip(theirs, given, strict=True)]
        for place in (5, 6):
            expected[place] = BatchedTensor.of(given[place].reshape(-1), "w", narrow=place == 5)
        frames = together.encode(Flats.of(given))
        assert frames == expected, bad
        assert [each.payload_nbytes for each in ours] == [each.payload_nbytes for each in theirs]
    frames[3] = b""
    begun = np.arange(len(given)) % 2
    for came in (frames, together.check(frames)):
        outs, sums = tensors(3), tensors(3)
        counts = begun.copy()
        nbytes = together.add(came, Flats.of(outs), counts)
        assert counts.tolist() == [before + (place != 3) for place, before in enumerate(begun)]
        for place, (total, adds) in enumerate(zip(sums, begun, strict=True)):
            if place != 3:
                frame = frames[place]
                if isinstance(frame, BatchedTensor):
                    frame.unpack(total, accumulate=bool(adds))
                else:
                    open_frame(frame).decode_flat(total, accumulate=bool(adds))
            assert np.array_equal(total, outs[place]), place
            assert nbytes[place] == (0 if place == 3 else theirs[place].payload_nbytes)


def test_tensor_set_foreign_frame_error_names_the_tensor() -> None:
    given = [np.ones(9, np.float32), np.ones(8, np.float32)]
    together = TensorSet([tw.codec("3lc").context(each, name=f"w{each.size}") for each in given])
    good = together.encode(Flats.of(given))
    other = tw.codec("3lc").encode(np.ones(7, np.float32))
    for bad, error in ((other, "w8: a frame of shape"), (BatchedTensor(given[1]), "w8: 8 values came in a fp32 batch")):
        with pytest.raises(tw.FrameError, match=error):
            together.check([good[0], bad])
    silent = tw.codec("3lc", nonfinite="skip").encode(np.full(8, np.nan, np.float32))
    assert together.check([b"", silent]) == [None, None]
    with pytest.raises(tw.FrameError, match="w8: the sender's tensor held NaN"):
        together.add([good[0], silent], Flats.of(given))


def test_batch_with_nan_or_overflowing_scale_changes_no_state() -> None:
    for bad in (np.nan, np.inf, 3e38):
        given, made = tensors(2), contexts(tensors(2))
        TernaryBatch(made).encode(addresses(given))
        before = [context.state_dict() for context in made]
        given[7][7] = bad
        assert TernaryBatch(made).encode(addresses(given)) is None, bad
        for context, state in zip(made, before, strict=True):
            assert context.step == state["step"] == 1
            assert context.residual is None or context.residual.equal(state["residual"])


def test_batch_decodes_like_single_frames_and_skips_foreign_frames() -> None:
    given = tensors(3)
    made = contexts(given)
    batch = TernaryBatch(made)
    received: list[Any] = [context.encode(each) for context, each in zip(made, given, strict=True)]
    received[1] = tw.codec("int8").encode(given[1])
    received[3] = tw.codec("3lc", layout="partition").encode(given[3])
    received[4] = b""
    received[6] = received[6][:-1] + bytes([received[6][-1] ^ 1])
    left = [1, 3, 4, 6]
    for accumulate in (True, False):
        outs = tensors(4)
        expected = tensors(4)
        done = batch.decode(received, addresses(outs), np.full(len(outs), accumulate))
        assert [place for place, was in enumerate(done) if not was] == left
        for place, out in enumerate(expected):
            if place not in left:
                open_frame(received[place]).decode_flat(out, accumulate=accumulate)
            assert np.array_equal(out, outs[place]), (accumulate, place)
    assert batch.decode([b""] * len(given), addresses(given), np.full(len(given), True)) == [0] * len(given)


def assert_left(batch: TernaryBatch, out: Any, hostile: dict[str, Any]) -> None:
    """Frames without their checksums are not taken, and change nothing."""
    before = out.copy()
    for name, data in hostile.items():
        for accumulate in (True, False):
            assert batch.decode([frames.with_checksum(data)], addresses([out]), np.array([accumulate])) == [0], name
            assert np.array_equal(out, before), name


def test_batch_skips_damaged_frames_with_a_valid_checksum() -> None:
    values = np.random.default_rng(0).standard_normal(700).astype(np.float32)
    context = tw.codec("3lc").context(values)
    body = bytes(frames.without_checksum(context.encode(values)))
    head = len(frames.head(frames.VERSION, "3lc", 0x0100, "fp32", (700,)))
    payload = body[head + 6 + (body[head + 5] >= 0x80) :]
    scale = body[head : head + 5]

    def with_size(size: bytes, payload: bytes = payload) -> bytes:
        return body[:head] + scale + size + payload

    size = body[head + 5 : -len(payload)]
    batch, out = TernaryBatch([context]), np.zeros(700, np.float32)
    assert batch.decode([frames.with_checksum(with_size(size))], addresses([out]), np.array([False])) == [len(payload)]
    assert out.any()
    hostile = {
        "nothing": b"",
        **{f"cut to {end}": body[:end] for end in range(1, len(body), 7)},
        **{f"head byte {at}": body[:at] + bytes([body[at] ^ 4]) + body[at + 1 :] for at in range(head)},
        "two scales": body[:head] + b"\x02" + body[head + 1 :],
        **{
            f"scale {bad}": body[: head + 1] + struct.pack("<f", bad) + body[head + 5 :]
            for bad in (np.nan, np.inf, -np.inf, -1.0)
        },
        "a longer size": with_size(bytes([size[0] | 0x80, *([size[1] | 0x80] if len(size) > 1 else []), 0])),
        "an endless size": with_size(b"\xff" * 9),
        "another size": with_size(bytes([size[0] ^ 1, *size[1:]])),
        "a byte more": with_size(bytes([size[0] + 1, *size[1:]]), payload + b"\x79"),
        "a longer run": with_size(size, payload[:-1] + b"\xff"),
    }
    assert_left(batch, out, hostile)


def test_batch_skips_damaged_zstd_stage_and_counts_wire_bytes() -> None:
    values = np.random.default_rng(0).standard_normal(7000).astype(np.float32) ** 3
    context = tw.codec("3lc", entropy="zstd").context(values)
    frame = context.encode(values)
    body, out = bytes(frames.without_checksum(frame)), np.zeros(7000, np.float32)
    batch = TernaryBatch([context])
    parsed = frames.parse(frame)
    assert parsed.zstd
    assert batch.decode([frame], addresses([out]), np.array([False])) == [len(parsed.payload)]
    assert batch.check([frame]) == [True]
    at = len(body) - len(parsed.payload)
    hostile = {
        "not zstd": body[:at] + bytes(len(parsed.payload)),
        "cut": body[:-1],
        "a byte more": body + b"x",
        "a byte of it": body[: at + 9] + bytes([body[at + 9] ^ 255]) + body[at + 10 :],
        "more than the tensor takes": frames.without_checksum(
            frames.write("3lc", "fp32", (7000,), (1.0,), parsed.flags, zstandard.compress(bytes(1 << 20)))
        ),
        "no payload": body[: len(body) - len(parsed.payload) - 2] + b"\0",
    }
    assert_left(batch, out, hostile)


# ---- many tensors in one call

VALUES = torch.linspace(-1, 1, 100)


def test_encode_all_on_the_host_takes_options_of_each_tensor() -> None:
    codec, plain = tw.codec("3lc"), tw.codec("fp32")
    contexts = [codec.context(VALUES), plain.context(VALUES), codec.context(VALUES)]
    expected = [codec.encode(VALUES), plain.encode(VALUES), codec.encode(2 * VALUES)]
    assert encode_all(contexts, [VALUES, VALUES, 2 * VALUES]) == expected
    assert [context.step for context in contexts] == [1, 1, 1]
    contexts = [tw.codec("terngrad", clip=0).context(VALUES) for _ in range(2)]
    frames = encode_all(contexts, [VALUES, VALUES], [{"scale": 2.0}, {}])
    assert [tw.frames.parse(frame).scales for frame in frames] == [(2.0,), (1.0,)]


def test_encode_all_refuses_missing_and_repeated_contexts() -> None:
    context = tw.codec("3lc").context(torch.zeros(4))
    with pytest.raises(tw.ConfigError, match="2 contexts for 1 tensors"):
        encode_all([context, context], [torch.ones(4)])
    with pytest.raises(tw.ConfigError, match="a context is given twice"):
        encode_all([context, context], [torch.ones(4), torch.ones(4)])
    assert context.step == 0


def test_decode_all_checks_every_tensor_before_decoding() -> None:
    decode_all([], [])
    values = [torch.ones(3), torch.zeros(0), torch.tensor([2.0, -2.0])]
    frames, outs = [tw.codec("3lc").encode(each) for each in values], [torch.full_like(each, 7.0) for each in values]
    with pytest.raises(tw.FrameError, match="ends inside"):
        decode_all([*frames[:2], frames[2][:-3]], outs)
    with pytest.raises(tw.ConfigError, match="3 frames for 2 tensors"):
        decode_all(frames, outs[:2])
    with pytest.raises(tw.ConfigError, match="a tensor is given twice"):
        decode_all([frames[0]] * 2, [outs[0], outs[0][:]])
    assert [out.tolist() for out in outs] == [[7.0] * 3, [], [7.0] * 2]
    decode_all(frames, outs, accumulate=True)
    assert [out.tolist() for out in outs] == [[8.0] * 3, [], [9.0, 5.0]]
