"""Checkpoint files: states round-trip, an old file survives a crash, damage raises; one writer to a path."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from thinwire.errors import ConfigError
from thinwire.runtime import checkpoint, claim
from thinwire.runtime.claim import claimed
from thinwire.runtime.disk import Bytes, LocalDisk
from thinwire.runtime.nested_state import Tensors, put_together, take_apart

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


def test_nested_state_round_trips_through_json() -> None:
    tensors: Tensors = {}
    text = json.dumps(take_apart(STATE, tensors))
    assert same(put_together(json.loads(text), tensors), STATE)


def test_checkpoint_round_trips(tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    state = {**STATE, "views": [shared, shared.view(2, 3), shared[1:3]], "array": np.arange(3, dtype=np.float32)}
    checkpoint.write(tmp_path / "file", "test", 5, state)
    found = checkpoint.read(tmp_path / "file", "test")
    assert same(found, {**state, "array": torch.arange(3, dtype=torch.float32)})
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is left beside it"


def test_checkpoint_keeps_previous_file(tmp_path: Path) -> None:
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


def test_checkpoint_failed_write_keeps_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    checkpoint.write(path, "test", 1, {"step": 1})
    with pytest.raises(ConfigError, match="a object cannot be in a checkpoint"):
        checkpoint.write(path, "test", 2, {"step": object()})
    with pytest.raises(ConfigError, match=r"a tensor of torch.complex64 cannot be in a checkpoint"):
        checkpoint.write(path, "test", 2, {"step": torch.zeros(1, dtype=torch.complex64)})
    assert checkpoint.read(path, "test") == {"step": 1}


class FailingDisk(LocalDisk):
    """Fails after so many operations: with an error that a program sees, or like a machine that loses power."""

    def __init__(self, left: int, failure: type[BaseException]) -> None:
        self._left, self._failure = left, failure

    def _operate(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise self._failure(28, "No space left on device")

    @contextmanager
    def write(self, path: Path, parts: Iterable[Bytes]) -> Iterator[None]:
        def counted() -> Iterator[Bytes]:
            for part in parts:
                yield part[: len(part) // 2]
                self._operate()
                yield part[len(part) // 2 :]

        with super().write(path, counted()):
            yield

    def rename(self, old: Path, new: Path) -> None:
        self._operate()
        super().rename(old, new)

    def sync(self, folder: Path) -> None:
        self._operate()
        super().sync(folder)


class PowerLoss(BaseException):
    pass


def test_checkpoint_interrupted_write_leaves_whole_file(tmp_path: Path) -> None:
    """A full disk leaves no file; the next process removes a killed process's files."""
    for failure in (OSError, PowerLoss):
        for operations in range(6):  # header, two tensors, two renames, the folder
            path = tmp_path / f"{failure.__name__}-{operations}"
            states = [{"step": step, "values": torch.full((50,), step), "x": torch.ones(3)} for step in range(4)]
            for step in (1, 2):
                checkpoint.write(path, "test", step, states[step])
            disk = FailingDisk(operations, failure)
            with pytest.raises((ConfigError, PowerLoss), match="No space left"):
                checkpoint.write(path, "test", 3, states[3], disk)
            there = checkpoint.steps_in(path)
            assert there in ([2, 1], [2], [3, 2]), (failure, operations, there)
            assert checkpoint.read(path, "test")["step"] == there[0]
            left = [each for each in tmp_path.iterdir() if each.name.endswith(".new")]
            assert len(left) == (failure is PowerLoss and operations < 5), (failure, operations)
            assert checkpoint.remove_unfinished(path) == left and not any(each.exists() for each in left)


def test_checkpoint_missing_file_other_kind_or_format_raises_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checkpoint.steps_in(tmp_path / "file") == []
    with pytest.raises(ConfigError, match=r"there is no checkpoint '.*file' to resume from"):
        checkpoint.read(tmp_path / "file", "test")
    with pytest.raises(ConfigError, match="cannot be written"):
        checkpoint.write(tmp_path / "no folder" / "file", "test", 1, {})
    path = tmp_path / "file"
    checkpoint.write(path, "server", 1, {})
    with pytest.raises(ConfigError, match="is a server's; a worker's was expected"):
        checkpoint.read(path, "worker")
    monkeypatch.setattr(checkpoint, "FORMAT", 2)
    with pytest.raises(ConfigError, match="has format 1; this thinwire reads 2"):
        checkpoint.read(path, "server")


def test_checkpoint_damaged_byte_raises_config_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    checkpoint.write(path, "test", 1, {"values": torch.arange(50.0), "name": "x"})
    good = path.read_bytes()
    for position in range(0, len(good), 7):
        bad = bytearray(good)
        bad[position] ^= 0x10
        path.write_bytes(bad)
        with pytest.raises(ConfigError, match=r"damaged|is no checkpoint|has format|a \w*'s"):
            checkpoint.read(path, "test")
    for step in ("x", None, [1], -1, True):
        checkpoint.write(path, "test", step, {})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"damaged: it is of step"):
            checkpoint.steps_in(path)
    for length in (0, 7, 100, len(good) - 1):
        path.write_bytes(good[:length])
        with pytest.raises(ConfigError, match="damaged"):
            checkpoint.read(path, "test")
    path.write_bytes(b"something else entirely")
    with pytest.raises(ConfigError, match="is no checkpoint, or it is damaged"):
        checkpoint.steps_in(path)


HOLDS = """
import sys, time
from pathlib import Path
from thinwire.runtime.claim import claimed
with claimed(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "ENDING_S", 0.2)
    monkeypatch.setattr(claim, "LEASE_S", 0.5)


def test_claimed_path_refuses_second_process(tmp_path: Path) -> None:
    path = tmp_path / "file"
    holder = subprocess.Popen([sys.executable, "-c", HOLDS, path], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=r"writes checkpoints to '.*file': wait until"), claimed(path):
            pass
        holder.send_signal(signal.SIGKILL)
    finally:
        holder.kill()
        holder.communicate()
    assert os.listdir(tmp_path) == ["file.lock"]
    with claimed(path):
        pass
    assert not os.listdir(tmp_path)


def test_claimed_path_resuming_process_waits_for_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, gone = tmp_path / "file", threading.Event()

    def hold() -> None:
        with claimed(path):
            ready.set()
            gone.wait(60)

    ready = threading.Event()
    holder = threading.Thread(target=hold)
    holder.start()
    ready.wait(60)
    with (
        pytest.warns(UserWarning, match="or has died on another machine: this one waits for it, 0 s at most"),
        pytest.raises(ConfigError, match="another process writes checkpoints"),
        claimed(path, resumes=True),
    ):
        pass
    monkeypatch.setattr(claim, "LEASE_S", 60)
    timer = threading.Timer(0.5, gone.set)
    timer.start()
    with pytest.warns(UserWarning, match="this one waits for it, 60 s at most"), claimed(path, resumes=True):
        assert os.listdir(tmp_path) == ["file.lock"]
    for each in (timer, holder):
        each.join()
