"""Messages between ranks: what is packed is read, and everything else is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import ProtocolError
from thinwire.hooks.ddp.message import HEAD_NBYTES, Say, pack, read

FRAMES = [b"first", b"", b"x" * 300]


@given(frames=st.lists(st.binary(max_size=400), max_size=6), slack=st.integers(0, 40))
def test_what_is_packed_is_read(frames: list[bytes], slack: int) -> None:
    data = memoryview(bytes(pack(7, 2, frames)) + b"\xff" * slack)
    assert [bytes(frame) for frame in read(data, 7, 2, len(frames), "rank 1").frames] == frames


def test_a_void_message_has_no_frames() -> None:
    message = read(memoryview(pack(7, 2, [], Say.VOID)), 7, 2, 3, "rank 1")
    assert message.say is Say.VOID and message.frames == []


def test_a_reason_to_give_up_arrives_whatever_step_the_receiver_is_at() -> None:
    message = read(memoryview(pack(7, 2, [], Say.ABORT, "DataError: no such file")), 8, 0, 3, "rank 1")
    assert message.say is Say.ABORT and message.text == "DataError: no such file"


@pytest.mark.parametrize(
    ("step", "bucket", "frames", "text"),
    [(8, 2, 3, "rank 1 is at step 7"), (7, 1, 3, "bucket 2"), (7, 2, 4, "3 frames .* 4 were expected")],
)
def test_a_message_for_another_place_is_refused(step: int, bucket: int, frames: int, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        read(memoryview(pack(7, 2, FRAMES)), step, bucket, frames, "rank 1")


@pytest.mark.parametrize("at", range(HEAD_NBYTES + 4))
def test_a_damaged_head_is_refused(at: int) -> None:
    data = bytearray(pack(7, 2, FRAMES))
    data[at] ^= 0xFF
    try:
        read(memoryview(data), 7, 2, len(FRAMES), "rank 1")
    except ProtocolError:
        return
    raise AssertionError(f"byte {at} may be anything")


def test_a_message_longer_than_its_buffer_is_refused() -> None:
    with pytest.raises(ProtocolError, match="declares 3"):
        read(memoryview(pack(7, 2, FRAMES))[:-1], 7, 2, len(FRAMES), "rank 1")
