"""Checkpoint files: what goes in comes out, an old file outlives a crash, damage is said; when a shard writes one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.server.conversation import Shard, make_plan
from thinwire.errors import ConfigError
from thinwire.runtime import checkpoint
from thinwire.runtime.checkpoint import Checkpointer
from thinwire.server.core import ServerCore

STATE: dict[str, Any] = {
    "numbers": [1, 0.1, float("inf"), True, None, 2**60],
    "by position": {0: {"step": torch.tensor(3.0)}, 1: {}},
    "pair": (0.9, (1, "two")),
    "frames": [b"", b"\x00abc"],
    "half": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
    "nothing": torch.zeros(0, 4),
    "$tensor": "a name like ours",
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    state = {**STATE, "views": [shared, shared.view(2, 3), shared[1:3]], "array": np.arange(3, dtype=np.float32)}
    checkpoint.write(tmp_path / "file", "test", 5, state)
    found = checkpoint.read(tmp_path / "file", "test")
    assert same(found, {**state, "array": torch.arange(3, dtype=torch.float32)})
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is left beside it"


def test_the_one_before_stays_until_the_next(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for step in (10, 20, 30):
        checkpoint.write(path, "test", step, {"step": step})
    assert checkpoint.steps_in(path) == [30, 20]
    assert checkpoint.read(path, "test") == {"step": 30}
    assert checkpoint.read(path, "test", 20) == {"step": 20}
    with pytest.raises(ConfigError, match="is of step 30 and 20; step 10 was asked for"):
        checkpoint.read(path, "test", 10)
    path.unlink()  # as after a crash between two renames
    assert checkpoint.read(path, "test") == {"step": 20}


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    checkpoint.write(path, "test", 1, {"step": 1})
    with pytest.raises(ConfigError, match="a object cannot be in a checkpoint"):
        checkpoint.write(path, "test", 2, {"step": object()})
    (tmp_path / "file.new").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        checkpoint.write(path, "test", 2, {"step": 2})
    assert checkpoint.read(path, "test") == {"step": 1}


def test_nothing_there(tmp_path: Path) -> None:
    assert checkpoint.steps_in(tmp_path / "file") == []
    with pytest.raises(ConfigError, match=r"there is no checkpoint '.*file' to resume from"):
        checkpoint.read(tmp_path / "file", "test")
    with pytest.raises(ConfigError, match="cannot be written"):
        checkpoint.write(tmp_path / "no folder" / "file", "test", 1, {})


def test_another_kind_and_another_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    checkpoint.write(path, "server", 1, {})
    with pytest.raises(ConfigError, match="is a server's; a worker's was expected"):
        checkpoint.read(path, "worker")
    monkeypatch.setattr(checkpoint, "FORMAT", 2)
    with pytest.raises(ConfigError, match="has format 1; this thinwire reads 2"):
        checkpoint.read(path, "server")


def test_damage_anywhere_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    checkpoint.write(path, "test", 1, {"values": torch.arange(50.0), "name": "x"})
    good = path.read_bytes()
    for position in range(0, len(good), 7):
        bad = bytearray(good)
        bad[position] ^= 0x10
        path.write_bytes(bad)
        with pytest.raises(ConfigError, match=r"damaged|is no checkpoint|has format|a \w*'s"):
            checkpoint.read(path, "test")
    for length in (0, 7, 100, len(good) - 1):
        path.write_bytes(good[:length])
        with pytest.raises(ConfigError, match="damaged"):
            checkpoint.read(path, "test")
    path.write_bytes(b"something else entirely")
    with pytest.raises(ConfigError, match="is no checkpoint, or it is damaged"):
        checkpoint.steps_in(path)


# ---- a shard's


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
