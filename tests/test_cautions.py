"""A warning names the user's line, through our frames and torch's, and is given in a thread that has none."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import thinwire
from thinwire.cautions import caution


def _of(module: str, inner: Callable[[], None]) -> Callable[..., None]:
    """A function of that module, which calls `inner` whatever it is called with."""
    space: dict[str, Any] = {"__name__": module, "inner": inner}
    exec("def call(*_):\n    inner()\n", space)
    call: Callable[..., None] = space["call"]
    return call


def _told(call: Callable[[], object]) -> warnings.WarningMessage:
    with warnings.catch_warnings(record=True, action="always") as told:
        call()
    [found] = told
    return found


def _deep(*modules: str) -> Callable[..., None]:
    space: dict[str, Any] = {"__name__": "thinwire.deepest", "caution": caution}
    exec("def inner():\n    caution('look here')\n", space)
    inner: Callable[..., None] = space["inner"]
    for module in modules:
        inner = _of(module, inner)
    return inner


def test_a_caution_names_the_line_that_led_to_it() -> None:
    for modules in ((), ("thinwire.worker.core",) * 7, ("thinwire.hooks.guards", "torch.optim.adamw")):
        found = _told(_deep(*modules))
        assert (found.filename, found.category) == (__file__, UserWarning), modules


def test_caution_skips_lines_of_torch_hooks() -> None:
    values = torch.ones(2, requires_grad=True)
    values.register_hook(_deep("thinwire.hooks.guards"))  # type: ignore[no-untyped-call]
    found = _told((values * 2).sum().backward)
    assert found.filename == __file__


def test_caution_in_a_thread_warns_without_a_line() -> None:
    def call() -> None:
        thread = threading.Thread(target=_deep("thinwire.runtime.driver"))
        thread.start()
        thread.join()

    assert str(_told(call).message) == "look here"


def test_every_warning_of_ours_is_a_caution() -> None:
    source = Path(thinwire.__file__).parent
    found = [path.name for path in source.rglob("*.py") if "warnings.warn(" in path.read_text()]
    assert found == ["cautions.py"]
