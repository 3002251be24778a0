"""Scripts that end without leaving their training: the server hears so at once, and how they ended."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from thinwire.runtime.serving import serving
from thinwire.server.core import ServerCore
from thinwire.transports.grpc.server import serve

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
        ("pass", "and has not left its training: close() of what tw.distribute returned does", None),
        (
            "raise OSError('no disk')",
            "OSError: no disk",
            "worker 0 went away at step 3: it failed with OSError: no disk",
        ),
        ("opt.close()", "", None),
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
    assert (said in ended.stderr) if said else not ended.stderr
    assert ended.returncode == (1 if failed else 0) and core.failed == failed
    assert core.left == (() if failed else (0,))
