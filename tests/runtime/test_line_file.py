"""Lines that are nice to have: whole ones as long as there is room, then one warning."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from thinwire.runtime.line_file import LineFile


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file of this process grows past 100 bytes, which ends like a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_one_warning(tmp_path: Path, small_disk: None) -> None:
    file = LineFile(tmp_path / "new" / "lines", "lines")
    for _ in range(4):
        file.write(b"x" * 24)
    with pytest.warns(UserWarning, match=r"lines are no longer written to .*The training goes on"):
        file.write(b"x" * 24)
    file.write(b"x" * 24)  # of which there is no second warning: that would be an error
    file.close()
    assert (tmp_path / "new" / "lines").read_bytes() == (b"x" * 24 + b"\n") * 4


def test_a_line_that_fits_in_part_is_the_last(tmp_path: Path, small_disk: None) -> None:
    file = LineFile(tmp_path / "lines", "lines")
    file.write(b"x" * 79)
    with pytest.warns(UserWarning, match="no space is left for a whole line"):
        file.write(b"y" * 79)
    file.write(b"z")
    file.close()
    assert (tmp_path / "lines").read_bytes() == b"x" * 79 + b"\n" + b"y" * 20
