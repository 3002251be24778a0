"""docs/a-gradients-journey.md names the files that a gradient passes, in the order in which it passes them.

One real step over gRPC in this process: every call is seen, from the parameter's hook to the worker's socket, and from
the shard's socket to the sum. A file is on the way if one of its functions is called there.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tests.hooks.cluster import start_server
from torch import nn

import thinwire as tw
from thinwire.server.core import ServerCore

PAGE = (Path(__file__).parents[1] / "docs" / "a-gradients-journey.md").read_text()
SOURCE = Path(tw.__file__).parent


def named(section: str) -> list[str]:
    """The files in a section of the page, in the order of the text."""
    [text] = re.findall(rf"^## {section}.*?\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    return re.findall(r"`((?:\w+/)*\w+\.py)`", text)


class Watch:
    """The files whose functions are called, by thread, in the order of their first call."""

    def __init__(self) -> None:
        self.worker: dict[str, None] = {}
        self.shard: dict[str, None] = {}
        self._main = threading.main_thread()
        self._on = False
        self._done = threading.Event()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if not self._on or self._done.is_set() or event not in ("call", "return") or not path.startswith(str(SOURCE)):
            return
        file = Path(path).relative_to(SOURCE).as_posix()
        thread = threading.current_thread()
        if event == "call" and thread is self._main:
            self.worker[file] = None
        elif event == "call" and thread.name.startswith("thinwire-serve"):
            self.shard[file] = None
        elif file == "server/table_group.py" and frame.f_code.co_name == "add" and event == "return":
            self._done.set()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Sees the calls of this thread within, and those of the server's until the gradient is in the sum."""
        self._on = True
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            assert self._done.wait(10), "the gradient came to no sum"


def test_the_page_names_the_way_of_a_gradient() -> None:
    watch = Watch()
    torch.manual_seed(0)
    model = nn.Linear(1024, 1024, bias=False)  # large enough to be sent at once, alone
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    threading.setprofile(watch)  # for the threads that the server and the connection start
    try:
        server, address = start_server(ServerCore(), "grpc")
        with server, tw.distribute(model, optimizer, server=address(), rank=0, workers=1, design="3lc") as opt:
            for step in range(3):  # the first ones compile kernels and fill caches
                loss = model(torch.randn(8, 1024)).square().mean()
                time.sleep(0.2)  # the shard's thread returns from sending the last update, which is not of this way
                with watch.on() if step == 2 else nullcontext():
                    loss.backward()
                opt.step()
    finally:
        threading.setprofile(None)
    for section, files in (("Up, at the worker", watch.worker), ("Up, at the shard", watch.shard)):
        page = named(section)
        assert page == [file for file in files if file in page], f"{section}: the order is {' '.join(files)}"
        assert not (lacking := files.keys() - set(page)), f"{section}: the page lacks {lacking} of {' '.join(files)}"
