"""The GPU suite: one set of tests, run by Triton's interpreter everywhere and by a GPU where there is one.

Its tests are marked `gpu` and take the fixture `device`. On a machine with CUDA they run on the GPU, in the process
of all other tests (`make test-gpu` runs them alone). Elsewhere they are deselected, because Triton cannot launch
anything there; `test_interpreted.py` then runs this folder once more in a process with TRITON_INTERPRET=1, which
has to be set before Triton is imported and would change what other tests import.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if INTERPRETED or torch.cuda.is_available():
        return
    left_out = [item for item in items if item.path.is_relative_to(HERE) and item.get_closest_marker("gpu")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True, scope="session")
def interpreter_patches_once() -> None:
    """The interpreter replaces `triton.language` at every launch and every call of a device function.

    That is over half of the suite's time, so here it is done once for each module of kernels, and stays.
    """
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    usual, patched = interpreter._patch_lang, set()

    def once(function: Any) -> Any:
        if id(function.__globals__) not in patched:
            patched.add(id(function.__globals__))
            usual(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = once


@pytest.fixture(autouse=True, scope="session")
def interpreter_does_nothing_in_vain() -> None:
    """Disables work of the interpreter that has no effect here; each part takes much of its time.

    The interpreter checks integer sums for overflow, for an assertion that only debugging makes; it builds the same
    table of types for every lookup; and it scans with a custom function value by value, though a scan may combine
    stretches, as the compiler's does.
    """
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)

    found: dict[str, Any] = {}
    usual = interpreter._get_np_dtype

    def dtype_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in found:
            found[name] = usual(kind)
        return found[name]

    def scan(self: Any, given: Any) -> Any:
        [size] = given[0].handle.data.shape
        done, step = [self.to_tensor(each.handle.data, each.dtype) for each in given], 1
        while step < size:
            before = [self.to_tensor(np.roll(each.handle.data, step), each.dtype) for each in done]
            both = self.combine_fn.fn(*before, *done)
            for old, new in zip(done, both if isinstance(both, tuple) else (both,), strict=True):
                old.handle.data = np.concatenate([old.handle.data[:step], new.handle.data[step:]])
            step *= 2
        return done

    interpreter._get_np_dtype = dtype_of
    interpreter.ScanOps.generic_scan = scan


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where tensors of the suite lie: the GPU, or the CPU under the interpreter."""
    if not INTERPRETED:
        return torch.empty(0, device="cuda").device  # with its number, as tensors say it
    from thinwire.codecs import device as dispatch
    from thinwire.codecs import tensors
    from thinwire.kernels.triton import batch

    # The CPU is taken for a GPU. Blocks are small, for more borders between them and less padding to interpret.
    monkeypatch.setattr(tensors, "HOST_DEVICES", frozenset())
    monkeypatch.setattr(dispatch, "KERNEL_DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(batch, "TILE", 512)
    return torch.device("cpu")
