"""Many tensors in one call, on the host (`tests/kernels/triton/test_device.py` has the other side)."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from thinwire.codecs import decode_all, encode_all

VALUES = torch.linspace(-1, 1, 100)


def test_tensors_on_the_host_are_encoded_one_by_one() -> None:
    codec, plain = tw.codec("3lc"), tw.codec("fp32")
    contexts = [codec.context(VALUES), plain.context(VALUES), codec.context(VALUES)]
    expected = [codec.encode(VALUES), plain.encode(VALUES), codec.encode(2 * VALUES)]
    assert encode_all(contexts, [VALUES, VALUES, 2 * VALUES]) == expected
    assert [context.step for context in contexts] == [1, 1, 1]


def test_there_is_one_context_for_each_tensor() -> None:
    context = tw.codec("3lc").context(VALUES)
    with pytest.raises(tw.ConfigError, match="2 contexts for 1 tensors; there must be one for each"):
        encode_all([context, context], [VALUES])


def test_every_tensor_has_its_own_step_options() -> None:
    contexts = [tw.codec("terngrad", clip=0).context(VALUES) for _ in range(2)]
    frames = encode_all(contexts, [VALUES, VALUES], [{"scale": 2.0}, {}])
    assert [tw.frames.parse(frame).scales for frame in frames] == [(2.0,), (1.0,)]


def test_a_context_stands_once_in_a_call() -> None:
    context = tw.codec("3lc").context(torch.zeros(4))
    with pytest.raises(tw.ConfigError, match="a context is given twice"):
        encode_all([context, context], [torch.ones(4), torch.ones(4)])
    assert context.step == 0


def test_many_frames_are_decoded_or_refused_before_a_tensor_that_does_not_fit() -> None:
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
