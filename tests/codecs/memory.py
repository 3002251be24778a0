"""Measures a process' memory for frames that claim more than they hold: `python -m tests.codecs.memory`.

Python's `tracemalloc` misses allocations of torch and NumPy's kernels, so the process is measured: `VmHWM` is the peak
of touched memory (and can be reset), `VmPeak` the peak of reserved memory; a large allocation touches none at first.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.codecs import fuzz, samples
from tests.codecs.contract import ENROLLED
from thinwire import frames
from thinwire.frames import Flags, Frame

CLAIMS = (1 << 22, 1 << 26, 1 << 30, 1 << 34, 1 << 38)
"""Values that forged shapes claim: 16 MiB to a terabyte of float32."""


def _status(field: str) -> int:
    """A field of this process' status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


def growth(action: Callable[[], object]) -> dict[str, int]:
    """Returns how many bytes more than before the process touched, and reserved, at most."""
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to what is resident now
    touched, reserved = _status("VmRSS"), _status("VmPeak")
    action()
    return {"touched": _status("VmHWM") - touched, "reserved": _status("VmPeak") - reserved}


def refuse(forged: list[Frame]) -> None:
    """Decodes frames that no decoder may take, nor refuse only once it tried to allocate them."""
    for frame in forged:
        with pytest.raises(tw.FrameError) as refused:
            tw.decode(frames.pack(frame))
        assert "does not fit this machine's memory" not in str(refused.value), f"{frame.codec} {frame.shape}"


def forgeries() -> list[Frame]:
    """Every codec's frame of 319 values under shapes that claim far more, and without its payload."""
    forged = []
    for entry in ENROLLED:
        for dtype in ("fp32", "fp64"):
            frame = frames.parse(entry.codec.encode(samples.tensor(samples.normal(319), dtype)))
            bare = replace(frame, payload=b"", flags=frame.flags & ~int(Flags.ZSTD))
            forged += [replace(each, shape=(claim,)) for claim in CLAIMS for each in (frame, bare)]
    return forged


def bombs() -> list[Frame]:
    """zstd stages that declare what the shape allows and their few bytes cannot hold."""
    declared = b"\x28\xb5\x2f\xfd" + bytes([0xE0]) + (1 << 30).to_bytes(8, "little") + b"\x01\x00\x00"
    return [Frame("fp32", "fp32", (claim,), flags=int(Flags.ZSTD), payload=declared) for claim in (1000, 1 << 28)]


def main() -> None:
    for entry in ENROLLED:
        fuzz.attack(entry, 25, seed=2)  # compiles kernels and grows the scratch memory, which stays
    refuse(forgeries()[:1])
    forged, bombing = forgeries(), bombs()
    found = {
        "forgeries": growth(lambda: refuse(forged)),
        "bombs": growth(lambda: refuse(bombing)),
        "mutations": growth(lambda: [fuzz.attack(entry, 25, seed=3) for entry in ENROLLED]),
        # That the measurement sees what it is for. Last, because `VmPeak` cannot be set back.
        "touching": growth(lambda: np.ones(8 << 20, np.float64)),
        "reserving": growth(lambda: torch.empty(1 << 30)),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
