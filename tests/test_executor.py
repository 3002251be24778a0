"""The pool behind large tensors: it runs everything, says what failed, and survives a fork."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import partial

import pytest

from thinwire.executor import Threads


def test_codecs_use_threads_and_start_none_before_a_tensor_is_large() -> None:
    script = """
import threading, numpy as np, thinwire as tw
values, small = np.ones(3 << 20, np.float32), np.ones(1000, np.float32)
codec = tw.codec("3lc", threads=3)
tw.decode(codec.encode(small), threads=3)
assert threading.active_count() == 1
tw.decode(codec.encode(values))
assert threading.active_count() > 1
print("ok")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "ok\n", done.stderr


def test_all_tasks_run_some_of_them_elsewhere() -> None:
    seen: list[tuple[int, int]] = []

    def see(i: int) -> None:
        seen.append((i, threading.get_ident()))

    Threads().run([partial(see, i) for i in range(9)])
    assert sorted(i for i, _ in seen) == list(range(9))
    assert dict(seen)[0] == threading.get_ident() and len({ident for _, ident in seen}) > 1
    Threads().run([])


def test_the_first_failure_is_raised_after_all_have_ended() -> None:
    ended = []

    def fail(text: str) -> None:
        raise ValueError(text)

    with pytest.raises(ValueError, match="first"):
        Threads().run([lambda: ended.append(1), lambda: fail("first"), lambda: fail("second"), lambda: ended.append(2)])
    assert sorted(ended) == [1, 2]


def test_a_forked_child_makes_its_own_threads() -> None:
    script = """
import os
from thinwire.executor import Threads
threads, seen = Threads(), []
threads.run([lambda: seen.append(1), lambda: seen.append(2)])
child = os.fork()
if child == 0:
    threads.run([lambda: seen.append(3), lambda: seen.append(4)])
    os._exit(0 if sorted(seen) == [1, 2, 3, 4] else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("ok")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "ok\n", done.stderr


def test_width_is_the_cores_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= Threads().width <= (os.cpu_count() or 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 5}, raising=False)
    assert Threads().width == 3
