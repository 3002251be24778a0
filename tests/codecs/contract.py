"""The contract of codecs, and the codecs that are tested by it.

A codec enrols with one line in `ENROLLED`: the configured codec and its claims. The checklist is in `test_contract.py`
(one call), `test_contexts.py` (many steps), `test_golden.py` (old bytes) and `test_hostile.py` (bad bytes); each runs
every line below, as one test item a codec. Only stated claims are tested, so a line states all claims of a codec.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

import thinwire as tw

Floats = NDArray[np.float64]
Bound = Callable[[Floats], "Floats | float"]

FLOAT32_MAX = float(np.finfo(np.float32).max)


@contextmanager
def naming(case: str) -> Iterator[None]:
    """Names the case of a loop that failed."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"the case: {case}")
        raise


@dataclass(frozen=True, kw_only=True)
class Enrolled:
    """One configured codec and its claims.

    Args:
        codec: as configured; every option that changes bits deserves a line of its own.
        error: from the tensor's values to the most that a decoded value may differ from its own, without a residual.
        largest: the largest magnitude that a float32 tensor may have; above it NonFiniteError.
        bits: the most payload bits per value of a large tensor, before any zstd stage.
        unbiased: the expected decoded tensor is the tensor.
        feedback: with `error_feedback=True` the codec works ("fine"), works and warns ("warned"), or cannot be made
            ("refused").
        residual: a residual stays within this many times the largest magnitude of the inputs.
    """

    codec: tw.Codec
    error: Bound | None = None
    largest: float = FLOAT32_MAX
    bits: float | None = None
    unbiased: bool = False
    feedback: Literal["fine", "warned", "refused"] = "fine"
    residual: float | None = None

    @property
    def label(self) -> str:
        """The codec's id and the options that are not the defaults."""
        return str(self.codec)

    def with_options(self, **options: Any) -> tw.Codec:
        """Returns the codec with some options changed; its warnings are ignored."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return tw.codec(**{**self.codec.config(), **options})


def enrol(id: str, options: dict[str, Any] | None = None, **claims: Any) -> Enrolled:
    """One line of `ENROLLED`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return Enrolled(codec=tw.codec(id, **(options or {})), **claims)


# ---- error bounds


def exact(_: Floats) -> float:
    return 0.0


def relative(share: float, floor: float = 0.0) -> Bound:
    """|error| ≤ share·|x| + floor: a cast; `floor` is half the step between its smallest numbers."""
    return lambda x: share * np.abs(x) + floor


def of_largest(share: float) -> Bound:
    """|error| ≤ share·max|x|."""
    return lambda x: share * float(np.abs(x).max(initial=0.0))


def itself(x: Floats) -> Floats:
    """|error| ≤ |x|: a value is sent or it is not."""
    return np.abs(x)


def three_lc(sparsity: float = 1.0, bits: float | None = 1.6001, clip: float = 1.0, **options: Any) -> Enrolled:
    """Returns 3LC's claims, which follow from its multiplier: an error of m/2, or |x| − m above m; m must not overflow.

    With an error of e times the largest input, the residual is at most e / (1 − e) times the largest input. Unclipped,
    that is (s/2) / (1 − s/2): 1, 3, 7, 19 for s = 1, 1.5, 1.75, 1.9.
    """
    multiplier = sparsity * clip
    error = max(multiplier / 2, 1 - multiplier)
    return enrol(
        "3lc",
        {"sparsity": sparsity, "clip": clip, **options},
        error=of_largest(error),
        largest=FLOAT32_MAX / max(1.0, multiplier) * (1 if multiplier <= 1 else 1 - 2**-22),
        bits=bits,
        residual=error / (1 - error),
    )


# ---- one line each

ENROLLED: list[Enrolled] = [
    enrol("fp32", error=exact, bits=32),
    enrol("fp32", {"entropy": "zstd"}, error=exact),
    enrol("fp16", error=relative(2**-11, 2**-25), largest=65519.0, bits=16),
    enrol("bf16", error=relative(2**-8, 2**-134), largest=3.395e38, bits=16),
    enrol("int8", error=of_largest(1 / 254), bits=8, residual=1 / 253),
    three_lc(),
    three_lc(1.75),
    three_lc(1.9, layout="partition"),
    three_lc(1.5, zero_run=False),
    three_lc(1.75, entropy="zstd", bits=None),
    three_lc(clip=0.5),
    three_lc(clip=0.7, entropy="zstd", bits=None),
    three_lc(1.5, clip=0.75, layout="partition"),
    enrol("3lc", {"sparsity": 1.75, "lag": 5}, error=of_largest(0.5), bits=1.6001),
    enrol("3lc", {"sparsity": 1.75, "lag": 2, "clip": 0.8, "layout": "partition"}, error=of_largest(0.4), bits=1.6001),
    three_lc(error_feedback=False),
    three_lc(error_scale=0.1),
    enrol("onebit", bits=1.0001),
    enrol("onebit", {"norm": "l1"}, bits=1.0001),
    enrol("onebit", {"zeros": "keep"}, bits=2.0001),
    enrol("terngrad", error=of_largest(1), bits=2.0001, feedback="warned"),
    enrol(
        "terngrad",
        {"clip": 0, "packing": "base243"},
        error=of_largest(1),
        bits=1.6001,
        unbiased=True,
        feedback="warned",
    ),
    enrol("terngrad", {"sigma": "rms"}, error=of_largest(1), bits=2.0001, feedback="warned"),
    enrol("votes", error=of_largest(1 / 8), bits=4.0001, residual=1 / 7),
    enrol("votes", {"workers": 512}, error=of_largest(1 / 1024), bits=11.0001, residual=1 / 1023),
    enrol("topk", error=itself, bits=0.521),
    enrol("topk", {"k": 7, "positions": "bitmap"}, error=itself),
    enrol("topk", {"fraction": 0.3, "positions": "index"}, error=itself, bits=15.61),
    enrol("blocktopk", error=of_largest(2), largest=FLOAT32_MAX / 2, bits=0.135),
    enrol(
        "blocktopk",
        {"block": 64, "k": 9, "bits": 8, "layout": "tiles"},
        error=of_largest(2),
        largest=FLOAT32_MAX / 2,
        bits=1.9,
    ),
    enrol("blocktopk", {"block": 100, "k": 100, "bits": 1}, error=of_largest(2), largest=FLOAT32_MAX / 2, bits=1.3),
    enrol(
        "blocktopk",
        {"block": 1024, "k": 20, "bits": 4, "layout": "tiles", "transform": "dct"},
        largest=FLOAT32_MAX / 2,
        bits=0.3,
    ),
    enrol("entropy", error=of_largest(1 / 64), bits=10.0001),
    enrol(
        "entropy", {"preset": "size", "histogram_bits": 3, "rounding": "round"}, error=of_largest(1 / 32), bits=8.0001
    ),
    enrol("entropy", {"mode": "fixed", "bits": 12}, error=of_largest(1 / 4096), bits=12.0001),
    enrol("entropy", {"mode": "rms", "gradient_rms": 3.0}, error=of_largest(1 / 256), bits=8.0001),
]

GOLDEN = Path(__file__).with_name("golden.zip")
"""The archive of their golden frames."""

if _elsewhere := os.environ.get("THINWIRE_ENROLLED"):
    # A module with an ENROLLED of its own, in place of ours: codecs of elsewhere are held to the same (extending.md).
    _module = importlib.import_module(_elsewhere)
    ENROLLED[:], GOLDEN = _module.ENROLLED, getattr(_module, "GOLDEN", GOLDEN)


def one_item_each(lines: list[Enrolled]) -> Callable[[Callable[[Enrolled], None]], Callable[[str], None]]:
    """Turns a check of a line into a test with one item for each codec, which loops over the codec's lines."""

    def made(check: Callable[[Enrolled], None]) -> Callable[[str], None]:
        @pytest.mark.parametrize("codec", dict.fromkeys(entry.codec.id for entry in lines))
        def item(codec: str) -> None:
            for entry in lines:
                if entry.codec.id == codec:
                    with naming(entry.label):
                        check(entry)

        item.__doc__ = check.__doc__
        return item

    return made


every_codec = one_item_each(ENROLLED)


def one_item(check: Callable[[Enrolled], None]) -> Callable[[], None]:
    """Makes a quick check of a line one test of all lines."""

    def item() -> None:
        for entry in ENROLLED:
            with naming(entry.label):
                check(entry)

    item.__doc__ = check.__doc__
    return item
