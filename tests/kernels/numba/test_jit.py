"""Compiled kernels in awkward processes: without a cache folder or with an old one, and after a fork."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import thinwire


def run_python(script: str, *, both: bool = False, **environment: str) -> str:
    """Runs `script` in a fresh interpreter with these variables added; returns its output, with `both` also errors."""
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout + finished.stderr if both else finished.stdout


def copy_of_the_package(folder: Path) -> Path:
    """Copies the files of thinwire that kernels need, without compiled code; returns the Numba kernels' folder."""
    source = Path(thinwire.__file__).parent
    (folder / "thinwire").mkdir()
    (folder / "thinwire" / "__init__.py").touch()
    shutil.copy(source / "errors.py", folder / "thinwire" / "errors.py")
    shutil.copytree(source / "kernels", folder / "thinwire" / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "thinwire" / "kernels" / "numba"


def test_kernels_work_without_a_writable_cache(tmp_path: Path) -> None:
    # A copy of the package whose cache folder's place is taken by a file, and no home to fall back to:
    # the same for every user, root included.
    package = copy_of_the_package(tmp_path)
    (package / "__pycache__").touch()
    printed = run_python(
        """
import numpy as np
from thinwire.kernels.numba import jit
print(jit.__file__, jit.max_magnitude(np.array([1.0, -3.0])), type(jit.largest_magnitude._cache))
""",
        PYTHONPATH=str(tmp_path),
        PYTHONDONTWRITEBYTECODE="1",
        HOME="/dev/null",
        XDG_CACHE_HOME="/dev/null/cache",
        NUMBA_CACHE_DIR="",
    )
    assert str(package) in printed and " 3.0 " in printed
    assert "NullCache" in printed


def test_kernel_cache_on_a_full_disk_loses_no_gradient(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: folders can be made and machine code cannot be written."""
    printed = run_python(
        """
import resource, sys
import numpy as np
from thinwire.kernels.numba import Workspace, encode_ternary
from thinwire.kernels.numba.jit import largest_magnitude
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
values, residual, workspace = np.linspace(-1, 1, 1000, dtype=np.float32), np.zeros(1000, np.float32), Workspace()
scale, payload = encode_ternary(values, sparsity=1.0, residual=residual, workspace=workspace)
sent = np.where(np.abs(values) >= 0.5 * scale, np.sign(values) * scale, 0)
print(np.allclose(residual, values - sent), largest_magnitude._cache.cache_path, file=sys.stderr)
""",
        both=True,
        NUMBA_CACHE_DIR=str(tmp_path),
        PYTHONDONTWRITEBYTECODE="1",  # what it imports is compiled under the limit, too: half files would stay
    )
    told, found = printed.splitlines()  # told once, of all kernels
    assert f"kernels cannot be kept in {tmp_path}" in told and "File too large" in told and "NUMBA_CACHE_DIR" in told
    assert found.startswith(f"True {tmp_path}")
    assert not list(tmp_path.rglob("*.nbc*")), "no half file stays"


def test_disabled_jit_raises_config_error() -> None:
    printed = run_python(
        """
import torch
import thinwire as tw
try:
    tw.codec("3lc").encode(torch.ones(10))
except tw.ConfigError as error:
    print(error)
""",
        NUMBA_DISABLE_JIT="1",
    )
    assert printed.startswith("NUMBA_DISABLE_JIT is set, but") and printed.endswith("unset it\n")


def test_kernel_cache_is_invalidated_by_any_changed_file(tmp_path: Path) -> None:
    """`addresses` compiles `magnitude_bits`, of `jit`, into its kernels."""
    package = copy_of_the_package(tmp_path)

    def compiled() -> tuple[str, str]:
        """The largest magnitude that a kernel finds, and where its machine code came from."""
        printed = run_python(
            """
import numpy as np
from thinwire.kernels.numba import addresses
array = np.array([1.0, -3.0 - 2.0**-22], np.float32)
largest = addresses.largest_of_many(np.array([array.ctypes.data]), np.array([2]))
stats = addresses._largest_of_many.stats
print(largest[0], "|", "compiled" if stats.cache_misses else "loaded", len(stats.cache_hits))
""",
            PYTHONPATH=str(tmp_path),
            NUMBA_CACHE_DIR="",
            PYTHONDONTWRITEBYTECODE="1",  # a source of the same size and time has the same bytecode
        )
        largest, origin = printed.split(" | ")
        return largest, origin.strip()

    wanted = str(3.0 + 2.0**-22)
    assert compiled() == (wanted, "compiled 0")
    assert compiled() == (wanted, "loaded 1")  # a second process does not compile again
    compiled_in = package / "jit.py"
    times = compiled_in.stat()
    mask = "(1 << (bits_type.bitwidth - 1)) - 1"
    assert mask in compiled_in.read_text()
    compiled_in.write_text(compiled_in.read_text().replace(mask, mask[:-1] + "2"))
    os.utime(compiled_in, ns=(times.st_atime_ns, times.st_mtime_ns))  # an installer may give new files old times
    changed, origin = compiled()
    assert changed != wanted and origin == "compiled 0"
    shared = package.parent / "contract.py"
    shared.write_text(shared.read_text() + "\n")
    assert compiled() == (changed, "compiled 0")
