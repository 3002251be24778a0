"""What ranks do together before and after training, all of them in one process."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from tests.transports.memory_peers import MemoryPeerGroup, groups, on_every_rank
from thinwire.errors import ProtocolError, TransportError
from thinwire.runtime import peers as peers_module
from thinwire.runtime.peers import agree, gather, gather_at_first, leave, measure_link


def test_gather_takes_bytes_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [b"", b"one", b"x" * 1000]
    assert on_every_rank(groups(3), lambda group: gather(group, texts[group.rank])) == [texts] * 3
    assert on_every_rank(groups(1), lambda group: gather(group, b"alone")) == [[b"alone"]]
    monkeypatch.setattr(peers_module, "_MESSAGE_NBYTES", 300)
    texts = [b"first", b"", bytes(range(256)) * 4]
    assert on_every_rank(groups(3), lambda group: gather_at_first(group, texts[group.rank])) == [texts, [], []]
    assert on_every_rank(groups(1), lambda group: gather_at_first(group, b"alone")) == [[b"alone"]]


def agree_unless(group: MemoryPeerGroup, other: dict[str, Any]) -> None:
    """Rank 2 has other settings."""
    agree(group, other if group.rank == 2 else {"a": 1})


def test_other_settings_are_refused_on_every_rank_with_rank_and_setting() -> None:
    peers = groups(3)
    assert on_every_rank(peers, lambda group: agree(group, {"a": 1, "b": [2, "three"]})) == [None] * 3
    for settings, text in (
        ({"a": 2}, "rank 2 has a = 2 and rank 0 has 1"),
        ({"a": 1, "c": 4}, "rank 2 has c = 4 and rank 0"),
    ):
        for error in on_every_rank(groups(3), partial(agree_unless, other=settings)):
            assert isinstance(error, ProtocolError) and text in str(error)
    peers = groups(2, timeout_s=0.1)
    with pytest.raises(TransportError, match=r"within 0\.1 s; all of them must call compress"):
        agree(peers[0], {})


def test_the_link_is_measured_by_all_together() -> None:
    rates = on_every_rank(groups(3), measure_link)
    assert rates[0] > 0 and len(set(rates)) == 1, "all ranks report the slowest link's"
    assert on_every_rank(groups(1), measure_link) == [0.0]


def test_leaving_waits_for_ranks_that_are_there() -> None:
    peers = groups(4)
    peers[0].links.lose(1)
    left: list[int] = []

    def go(group: MemoryPeerGroup) -> None:
        if group.rank != 1:
            leave(group, timedelta(seconds=20))
            left.append(group.rank)

    on_every_rank(peers, go)
    assert sorted(left) == [0, 2, 3]
    leave(groups(2)[0], timedelta(seconds=0.05))  # rank 1 never comes: the time is over
