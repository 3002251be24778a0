"""The steps at which a process or a shard writes a checkpoint, and from which it resumes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.server.conversation import Shard
from thinwire.errors import ConfigError
from thinwire.runtime import checkpoint
from thinwire.runtime.checkpointing import CheckpointWriter, try_out
from thinwire.runtime.disk import Bytes, LocalDisk
from thinwire.runtime.shard_checkpoints import Checkpointer
from thinwire.server.core import ServerCore


class Held(Executor):
    """Runs a write when the test asks for it."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self.waited = threading.Event()

    def submit(self, call: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(call(*args, **options))
            except OSError as error:
                future.set_exception(error)

        def exception(timeout: float | None = None) -> BaseException | None:
            if not future.done():  # the writer waits: on a real disk, until the thread is done
                self.calls.pop(0)()
                self.waited.set()
            return Future.exception(future, timeout)

        future.exception = exception  # type: ignore[method-assign]
        self.calls.append(run)
        return future


class FullDisk(LocalDisk):
    """Is full unless the test sets otherwise."""

    full = False

    @contextmanager
    def write(self, path: Path, parts: Iterable[Bytes]) -> Iterator[None]:
        if self.full:
            raise OSError(28, "No space left on device")
        with super().write(path, parts):
            yield


def test_checkpoint_writer_writes_during_training(tmp_path: Path) -> None:
    """It waits for a file before the last step before the next one, or for the end, and no earlier."""
    path, executor, values, written = tmp_path / "file", Held(), torch.zeros(3), list[int]()
    writer = CheckpointWriter(path, "test", 4, on_written=written.append, executor=executor)
    for step in range(1, 10):
        values.fill_(step)
        writer.stepped(step, lambda: {"values": values})
        assert executor.waited.is_set() == (step == 7), step
        assert written == [[], [4]][step >= 7], step
        executor.waited.clear()
    assert checkpoint.read(path, "test")["values"].tolist() == [4.0] * 3
    writer.close()
    assert written == checkpoint.steps_in(path)[::-1] == [4, 8]
    assert checkpoint.read(path, "test")["values"].tolist() == [8.0] * 3
    for every, lead in ((1, 0), (4, 9)):  # too near, or too far ahead: then the next step waits
        executor = Held()
        writer = CheckpointWriter(tmp_path / f"{every}", "test", every, executor=executor)
        writer.stepped(4, dict, lead=lead)
        assert executor.waited.is_set()


def test_checkpoint_writer_full_disk_warns_once_and_retries(tmp_path: Path) -> None:
    disk, path = FullDisk(), tmp_path / "file"
    writer = CheckpointWriter(path, "test", 1, disk=disk)
    writer.stepped(1, dict)
    for first in (2, 5):  # a disk that was full, had room, and is full again, is worth another warning
        disk.full = True
        with pytest.warns(UserWarning, match="Training continues, and the next try is in 1 steps") as warned:
            writer.stepped(first, dict)
        writer.stepped(first + 1, dict)  # warnings are errors here
        assert warned[0].filename == "thinwire", "no line of the user's has caused it"
        assert "No space left on device" in str(warned[0].message) and checkpoint.steps_in(path)[0] == first - 1
        disk.full = False
        writer.stepped(first + 2, dict)
        assert checkpoint.steps_in(path) == [first + 2, first - 1]
    writer.close()
    assert sorted(os.listdir(tmp_path)) == ["file", "file.previous"]


def test_checkpoint_writer_unwritable_path_raises_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint '.*file' cannot be written: No such file.*Choose another place"):
        CheckpointWriter(tmp_path / "no folder" / "file", "test", 1)
    disk = FullDisk()
    try_out(tmp_path / "file", disk)
    checkpoint.write(tmp_path / "file", "test", 1, {})
    disk.full = True
    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        try_out(tmp_path / "file", disk=disk)
    with pytest.warns(UserWarning, match="No space left on device.* resumes from the existing checkpoints"):
        CheckpointWriter(tmp_path / "file", "test", 1, disk=disk, resumes=True).close()


def test_checkpointer_writes_at_interval(tmp_path: Path) -> None:
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


def test_checkpointer_resumes_requested_step(tmp_path: Path) -> None:
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


def test_checkpointer_writes_no_failed_training(tmp_path: Path) -> None:
    shard = Shard()
    checkpointer = Checkpointer(shard.core, tmp_path / "file", 1)
    shard.step(0)
    shard.carry_out(shard.core.closed(1, "gone"))
    checkpointer.write_if_due()
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="every 0 steps; at least 1"):
        Checkpointer(ServerCore(), tmp_path / "file", 0)
