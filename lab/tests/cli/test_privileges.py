"""When a command starts itself again, and as what."""

from __future__ import annotations

import pytest

from thinwire.engines.roles import own_command
from thinwire_lab.cli import privileges


def test_a_command_starts_again_where_that_gives_it_thin_links(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(privileges, "reexec_in_user_namespace", started.append)
    monkeypatch.setattr("sys.argv", ["thinwire", "train", "--link", "10mbit"])
    monkeypatch.setattr(privileges, "can_unshare", lambda: True)
    for link, shaping in ((None, "auto"), ("none", "kernel"), ("10mbit", "application")):
        privileges.with_privileges(link, shaping)
    assert not started, "nothing that the kernel would make"
    privileges.with_privileges("10mbit", "auto")
    assert started == [own_command("train", "--link", "10mbit")]
    monkeypatch.setattr(privileges, "can_unshare", lambda: False)
    privileges.with_privileges("10mbit", "auto")
    assert len(started) == 1, "it would not help"
