"""Compiled kernels in awkward processes: no cache folder, after a fork, from two threads at once, on import."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numba
import numpy as np

import thinwire
from thinwire.kernels.numba import Workspace, decode_ternary, encode_ternary
from thinwire.kernels.numba.jit import wide_vectors

ROUND_TRIP = """
import numpy as np
from thinwire.kernels.numba import Workspace, encode_ternary, decode_ternary
values = np.array([1.0, 0.0, -1.0, 0.25, 0.0, 0.0], dtype=np.float32)
out, workspace = np.empty(6, np.float32), Workspace()
scale, payload = encode_ternary(values, sparsity=1.0, workspace=workspace)
decode_ternary(payload, scale=scale, out=out, workspace=workspace)
assert out.tolist() == [1.0, 0.0, -1.0, 0.0, 0.0, 0.0], out
"""


def run_python(script: str, **environment: str) -> str:
    """Run `script` in a fresh interpreter with these variables added; returns what it printed."""
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_works_where_no_cache_can_be_written(tmp_path: Path) -> None:
    # A copy of the package whose cache folder's place is taken by a file, and no home to fall back to:
    # the same for every user, root included.
    source = Path(thinwire.__file__).parent
    package = tmp_path / "thinwire"
    for part in ("__init__.py", "errors.py", "executor.py", "kernels", "runtime"):
        (shutil.copytree if (source / part).is_dir() else shutil.copy)(source / part, _made(package) / part)
    cache = package / "kernels" / "numba" / "__pycache__"
    shutil.rmtree(cache, ignore_errors=True)
    cache.touch()
    script = (
        ROUND_TRIP + "import thinwire.kernels.numba.pack as pack; print(pack.__file__, type(pack._pack_values._cache))"
    )
    printed = run_python(
        script,
        PYTHONPATH=str(tmp_path),
        PYTHONDONTWRITEBYTECODE="1",
        HOME="/dev/null",
        XDG_CACHE_HOME="/dev/null/cache",
        NUMBA_CACHE_DIR="",
    )
    assert str(package) in printed
    assert "NullCache" in printed


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_works_after_a_fork() -> None:
    run_python(
        ROUND_TRIP
        + """
import os
child = os.fork()
if child == 0:
    again = np.empty(6, np.float32)
    scale, payload = encode_ternary(values, sparsity=1.0, residual=np.zeros(6, np.float32), workspace=workspace)
    decode_ternary(payload, scale=scale, out=again, workspace=workspace)
    os._exit(0 if again.tolist() == out.tolist() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    )


def test_importing_compiles_nothing_and_loads_no_torch() -> None:
    printed = run_python(
        """
import sys, threading
import thinwire.kernels.numba
from numba.core.dispatcher import Dispatcher
kernels = [
    value
    for name, module in sys.modules.items() if name.startswith("thinwire.kernels")
    for value in vars(module).values() if isinstance(value, Dispatcher)
]
assert not any(kernel.signatures for kernel in kernels)
assert "torch" not in sys.modules
assert threading.active_count() == 1
print(len(kernels))
"""
    )
    assert int(printed) > 10


def test_two_threads_at_once_give_the_same_bytes() -> None:
    rng = np.random.default_rng(1)
    inputs = [rng.standard_normal(30_001).astype(np.float32) for _ in range(2)]

    def encode_all(values: Any, found: list[bytes]) -> None:
        workspace, residual, out = Workspace(), np.zeros_like(values), np.empty_like(values)
        for _ in range(20):
            scale, payload = encode_ternary(values, sparsity=1.5, residual=residual, workspace=workspace)
            decode_ternary(payload, scale=scale, out=out, workspace=workspace)
            found.append(payload.tobytes() + out.tobytes())

    alone: list[list[bytes]] = [[], []]
    together: list[list[bytes]] = [[], []]
    for values, found in zip(inputs, alone, strict=True):
        encode_all(values, found)
    threads = [threading.Thread(target=encode_all, args=arguments) for arguments in zip(inputs, together, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
    assert len(alone[0]) == 20


def test_wide_vectors_reach_the_compiler() -> None:
    @numba.njit
    def add(values: Any) -> None:
        wide_vectors()
        for i in range(values.size):
            values[i] += np.float32(1)

    values = np.zeros(100, np.float32)
    add(values)
    assert (values == 1).all()
    (code,) = add.inspect_llvm().values()
    assert '"prefer-vector-width"="512"' in code
