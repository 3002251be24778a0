"""When a shard writes a checkpoint, and what it goes on from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.conversation import Shard, make_plan
from thinwire.errors import ConfigError
from thinwire.runtime import checkpoint
from thinwire.runtime.shard_checkpoints import Checkpointer
from thinwire.server.core import ServerCore


def test_a_checkpoint_is_written_once_every_so_many_steps(tmp_path: Path) -> None:
    shard, path = Shard(), tmp_path / "file"
    checkpointer = Checkpointer(shard.core, path, 2)
    written = []
    for step in range(7):
        for rank in (0, 1):
            shard.push(rank, step, shard.frames(rank, step))
            checkpointer.write_if_due()
            checkpointer.write_if_due()
        if step % 2 == 0:  # the step before the next checkpoint: this one is on the disk
            written.append(checkpoint.steps_in(path))
    checkpointer.close()
    assert written == [[], [2], [4, 2], [6, 4]]


def test_resume_takes_the_step_that_was_asked_for(tmp_path: Path) -> None:
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


def test_a_failed_training_is_not_kept(tmp_path: Path) -> None:
    shard = Shard()
    checkpointer = Checkpointer(shard.core, tmp_path / "file", 1)
    shard.step(0)
    shard.carry_out(shard.core.closed(1, "gone"))
    checkpointer.write_if_due()
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="every 0 steps; at least 1"):
        Checkpointer(ServerCore(), tmp_path / "file", 0)


def test_where_every_push_is_an_update_rounds_are_counted(tmp_path: Path) -> None:
    shard, path = Shard(make_plan(consistency="asp")), tmp_path / "file"
    checkpointer = Checkpointer(shard.core, path, 2)
    for step in range(5):  # worker 1 is slow: it has made a third of worker 0's exchanges
        shard.push(0, step, shard.frames(0, step))
        checkpointer.write_if_due()
        if step % 3 == 0:
            shard.push(1, step // 3, shard.frames(1, step // 3))
            checkpointer.write_if_due()
    checkpointer.close()
    assert checkpoint.steps_in(path) == [2]
    core = ServerCore()
    resumed = Checkpointer(core, path, 2)
    resumed.resume()
    assert core.step == 4 and core.state_dict()["steps"]["exchanges"] == {0: [3, 3], 1: [1, 1]}
    resumed.write_if_due()
    resumed.close()
    assert checkpoint.steps_in(path) == [2], "what was read is not written again"
