"""When a shard writes a checkpoint, and from which it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.conversation import Shard, make_plan
from thinwire.errors import ConfigError
from thinwire.runtime import checkpoint
from thinwire.runtime.checkpointing import Checkpointer
from thinwire.server.core import ServerCore


def test_every_so_many_steps_and_once(tmp_path: Path) -> None:
    shard, path = Shard(), tmp_path / "file"
    checkpointer = Checkpointer(shard.core, path, 2)
    written = []
    for step in range(7):
        for rank in (0, 1):
            shard.push(rank, step, shard.frames(rank, step))
            checkpointer.write_if_due()
            before = path.stat().st_mtime_ns if path.exists() else 0
            checkpointer.write_if_due()
            assert (path.stat().st_mtime_ns if path.exists() else 0) == before
        written.append(checkpoint.steps_in(path))
    assert written == [[], [2], [2], [4, 2], [4, 2], [6, 4], [6, 4]]


def test_it_goes_on_from_the_step_that_was_asked_for(tmp_path: Path) -> None:
    shard, path = Shard(), tmp_path / "file"
    checkpointer = Checkpointer(shard.core, path, 1)
    for step in range(3):
        shard.step(step)
        checkpointer.write_if_due()
    for asked, expected in ((None, 3), (2, 2)):
        core = ServerCore()
        other = Checkpointer(core, path, 1)
        other.resume(asked)
        assert core.step == expected
        other.write_if_due()
        assert checkpoint.steps_in(path) == [3, 2], "what was read is not written again"
    with pytest.raises(ConfigError, match="step 1 was asked for"):
        Checkpointer(ServerCore(), path, 1).resume(1)


def test_a_training_that_failed_is_not_kept(tmp_path: Path) -> None:
    shard = Shard()
    checkpointer = Checkpointer(shard.core, tmp_path / "file", 1)
    shard.step(0)
    shard.carry_out(shard.core.closed(1, "gone"))
    checkpointer.write_if_due()
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_kept(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="every 0 steps; at least 1"):
        Checkpointer(ServerCore(), tmp_path / "file", 0)
    shard = Shard(make_plan(consistency="asp"))
    checkpointer = Checkpointer(shard.core, tmp_path / "file", 1)
    shard.step(0)
    with pytest.raises(ConfigError, match="a policy that applies each push by itself"):
        checkpointer.write_if_due()
