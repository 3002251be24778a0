"""The lab's codecs and their claims, for the checklist of `tests/codecs/contract.py`."""

from __future__ import annotations

from pathlib import Path

from tests.codecs.contract import FLOAT32_MAX, Enrolled, enrol, exact, itself, of_largest, relative

ENROLLED: list[Enrolled] = [
    enrol("mqe1", bits=1.0001),
    enrol("mqe1", {"axis": 1}, bits=1.0001),
    enrol("stoch3", error=of_largest(1), bits=1.6001, unbiased=True, feedback="warned"),
    enrol("stoch3", {"packing": "2bit"}, error=of_largest(1), bits=2.0001, unbiased=True, feedback="warned"),
    enrol("qsgd-ds", bits=1.6001),
    enrol("threshold", error=itself, bits=2.8),
    enrol("threshold", {"sample": 20}, error=itself),
    enrol("threshold", {"tau": 0.5}, error=itself),
    enrol("threshold", {"tau": 0.5, "send": "tau", "positions": "index"}, error=itself),
    enrol("threshold", {"send": "tau"}, error=itself, bits=1.08),
    enrol("randomk", largest=FLOAT32_MAX / 10 * (1 - 1e-6), bits=3.3, unbiased=True, feedback="refused"),
    enrol("randomk", {"scaled": False, "p": 0.25}, error=itself, bits=8.1),
    enrol("qsgd", bits=1.9, unbiased=True, feedback="warned"),
    enrol(
        "qsgd", {"levels": 15, "bucket": 64, "norm": "max"}, error=of_largest(1 / 15), unbiased=True, feedback="warned"
    ),
    enrol("dithering", error=of_largest(1 / 7), bits=4.0001, unbiased=True, feedback="warned"),
    enrol(
        "dithering",
        {"grid": "natural", "levels": 15},
        error=of_largest(1 / 2),
        bits=5.0001,
        unbiased=True,
        feedback="warned",
    ),
    enrol("dithering", {"norm": "l2", "levels": 127}, bits=8.0001, unbiased=True, feedback="warned"),
    enrol("truncate", error=relative(2**-7, 2**-133), bits=16.0001),
    enrol("truncate", {"bits": 0}, error=exact, bits=32.0001),
    enrol("truncate", {"bits": 23}, error=itself, bits=9.0001),
]

GOLDEN = Path(__file__).with_name("golden.zip")
"""The archive of their golden frames."""
