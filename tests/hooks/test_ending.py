"""Scripts that end without leaving their training: the server hears so at once, and how they ended."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

import thinwire as tw
from thinwire.hooks import ending
from thinwire.runtime.serving import serving
from thinwire.server.core import ServerCore
from thinwire.transports.grpc.server import serve
from thinwire.transports.memory import MemoryServer

SCRIPT = """
import sys, torch, thinwire as tw

def main():
    model = torch.nn.Linear(4, 4)
    opt = tw.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), server=sys.argv[1], workers=1, codec="3lc")
    for _ in range(3):
        opt.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        opt.step()
    {last}

main()
"""


@pytest.mark.parametrize(
    ("last", "said", "failed"),
    [
        ("pass", "ends and has not left its training, and says goodbye now: close() of what tw.distribute", None),
        (
            "raise OSError('no disk')",
            "OSError: no disk",
            "worker 0 went away at step 3: it failed with OSError: no disk",
        ),
        ("import os; child = os.fork(); child or sys.exit(0); os.waitpid(child, 0); opt.close()", "", None),
    ],
)
def test_the_end_of_a_process_is_a_goodbye(last: str, said: str, failed: str | None) -> None:
    core = ServerCore()
    with serve(serving(core, grace_s=60.0), "127.0.0.1:0") as running:
        command = [sys.executable, "-c", SCRIPT.format(last=last), f"grpc://{running.address}"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        left = time.monotonic()
        while core.failed is None and not core.finished and time.monotonic() - left < 20:
            time.sleep(0.02)
    assert (said in ended.stderr) if said else "goodbye" not in ended.stderr  # gRPC may speak of the fork
    assert ended.returncode == (1 if failed else 0) and core.failed == failed
    assert core.left == (() if failed else (0,))


def test_where_another_thread_waits_for_an_answer_the_end_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ending, "FAILED_S", 0.2)
    model = torch.nn.Linear(4, 4)
    with MemoryServer(serving(ServerCore())) as server:
        opt = tw.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), server=server.connect(), codec="3lc")
        holds, over = threading.Event(), threading.Event()

        def wait() -> None:
            with opt._driver._running:
                holds.set()
                over.wait(60)

        thread = threading.Thread(target=wait)
        thread.start()
        holds.wait()
        begin = time.monotonic()
        opt.leave_soon("")
        assert time.monotonic() - begin < 20
        over.set()
        thread.join()


def test_at_a_prompt_an_error_of_long_ago_is_not_the_end_s(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    part = SimpleNamespace(leave_soon=said.append)
    monkeypatch.setattr(sys, "last_value", ValueError("of long ago"), raising=False)
    for prompt in (False, True):
        ending.joined(part)
        if prompt:
            monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
            with pytest.warns(UserWarning, match="says goodbye now"):
                ending._say_goodbye()
        else:
            ending._say_goodbye()
        ending.left(part)
    assert said == ["ValueError: of long ago", ""]
