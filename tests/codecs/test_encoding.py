"""Many tensors in one call, on the host (`tests/kernels/triton/test_device.py` has the other side)."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from thinwire.codecs import encode_all

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
