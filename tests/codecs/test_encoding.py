"""Many tensors in one call, on the host (`tests/kernels/triton/test_device.py` has the other side)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire.codecs import Encoding, decode_all, device, encode_all, ternary_device
from thinwire.codecs.ternary_device import DeviceTernary

VALUES = torch.linspace(-1, 1, 100)


def test_tensors_on_the_host_are_encoded_one_by_one_each_with_options_of_its_own() -> None:
    codec, plain = tw.codec("3lc"), tw.codec("fp32")
    contexts = [codec.context(VALUES), plain.context(VALUES), codec.context(VALUES)]
    expected = [codec.encode(VALUES), plain.encode(VALUES), codec.encode(2 * VALUES)]
    assert encode_all(contexts, [VALUES, VALUES, 2 * VALUES]) == expected
    assert [context.step for context in contexts] == [1, 1, 1]
    contexts = [tw.codec("terngrad", clip=0).context(VALUES) for _ in range(2)]
    frames = encode_all(contexts, [VALUES, VALUES], [{"scale": 2.0}, {}])
    assert [tw.frames.parse(frame).scales for frame in frames] == [(2.0,), (1.0,)]


def test_there_is_one_context_for_each_tensor_and_none_stands_twice() -> None:
    context = tw.codec("3lc").context(torch.zeros(4))
    with pytest.raises(tw.ConfigError, match="2 contexts for 1 tensors"):
        encode_all([context, context], [torch.ones(4)])
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


# ---- batches on a GPU, which others stand for here


class FakeBatch:
    """A batch of one entry, which fails where and as the entry says."""

    def __init__(self, entries: list[Any]) -> None:
        [self.entry] = entries
        self.fail("made")

    def finish(self) -> list[Any]:
        self.fail("finished")
        return [SimpleNamespace(frame=b"frame", payload_nbytes=1)]

    def fail(self, when: str) -> None:
        self.entry.calls.append(f"{self.entry.alike} {when}")
        if when in self.entry.fails:
            raise self.entry.fails[when]


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Encoding]:
    """Queues a batch for each of what is given: the errors that come of it, by when."""
    monkeypatch.setattr(device, "Batch", FakeBatch)

    def start(*fails: dict[str, Exception], calls: list[str]) -> Encoding:
        entries = [SimpleNamespace(alike=n, fails=each, calls=calls) for n, each in enumerate(fails)]
        contexts: Any = [
            SimpleNamespace(
                on_host=False, lag_bound=None, entry=lambda *_, entry=entry: entry, sent=lambda nbytes: None
            )
            for entry in entries
        ]
        return Encoding(contexts, [VALUES] * len(fails), [{"scale": 1.0}] * len(fails))

    return start


def test_every_batch_is_finished_where_one_fails_and_nan_is_the_last_to_be_told(queue: Any) -> None:
    nan, memory, other = tw.NonFiniteError("w holds NaN"), torch.OutOfMemoryError("none left"), ValueError("later")
    for fails, told in (((nan, memory, other), memory), ((nan, None, None), nan)):
        calls: list[str] = []
        started = queue(*({} if each is None else {"finished": each} for each in (*fails, None)), calls=calls)
        with pytest.raises(type(told)) as raised:
            started.frames()
        assert raised.value is told
        assert calls[4:] == [f"{n} finished" for n in range(4)]
    calls = []
    with pytest.raises(torch.OutOfMemoryError):
        queue({"finished": nan}, {}, {"made": memory}, calls=calls)
    assert calls == ["0 made", "1 made", "2 made", "0 finished", "1 finished"], "those queued before are finished"


def test_a_workspace_is_given_back_after_an_error_only_when_nothing_reads_the_tensors_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("none left")

    calls: list[str] = []
    workspace = SimpleNamespace(synchronize=lambda: calls.append("synchronize"))
    pool = SimpleNamespace(take_on=lambda _: workspace, give_back_on=lambda _: calls.append("give back"))
    batch = DeviceTernary([tw.codec("3lc").context(VALUES)])
    batch._pool = pool  # type: ignore[assignment]
    monkeypatch.setattr(ternary_device, "why_not", lambda _: None)
    kernels = SimpleNamespace(encode_ternary=fail, Arrays=lambda *_: None)
    monkeypatch.setattr(ternary_device, "import_module", lambda _: kernels)
    with pytest.raises(torch.OutOfMemoryError):
        batch.encode_on(VALUES.device, np.array([VALUES.data_ptr()], np.int64))
    assert calls == ["synchronize", "give back"]
