"""What one end of a session keeps, and when it is told that it need not."""

from __future__ import annotations

import pytest

from thinwire.errors import ProtocolError
from thinwire.runtime.replay_buffer import ACKNOWLEDGE_MESSAGES, ACKNOWLEDGE_NBYTES, ReplayBuffer


def test_acknowledgements_that_cannot_be() -> None:
    buffer = ReplayBuffer()
    buffer.append(b"packet")
    buffer.acknowledge(1)
    for count in (0, 2, -1):
        with pytest.raises(ProtocolError, match=f"acknowledges {count} messages; between 1 and 1 are possible"):
            buffer.acknowledge(count)
    assert buffer.nbytes == 0 and buffer.unacknowledged == ()


def test_it_is_time_to_acknowledge_after_so_many_messages_or_bytes() -> None:
    buffer = ReplayBuffer()
    for _ in range(2):
        assert [buffer.record(b"x") for _ in range(ACKNOWLEDGE_MESSAGES)] == [False] * 63 + [True]
        assert buffer.record(bytes(ACKNOWLEDGE_NBYTES))
    assert buffer.received == 2 * (ACKNOWLEDGE_MESSAGES + 1)
