"""Ratio and error of every codec on real gradients, measured by `thinwire bench sample` for this version.

Measuring all codecs compiles all kernels, which takes a minute on a machine that has none yet; a record is read at
once, without torch. `thinwire bench sample --json` wrote the record, and a test measures it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from thinwire.presentation.tables import Table
from thinwire.quantities import number_text

RECORD = Path(__file__).with_name("codec_sample.json")


@dataclass(frozen=True, slots=True)
class Sample:
    """One codec on the sample.

    Args:
        codec: its id.
        bits_per_value: payload bits.
        ratio: 32 / bits.
        relative_error: ‖g − decoded‖ / ‖g‖ of one encoding without a residual.
        after_feedback: the same of the mean of ten encodings of one gradient through a context; None where a codec
            keeps no residual.
    """

    codec: str
    bits_per_value: float
    ratio: float
    relative_error: float
    after_feedback: float | None


def recorded() -> list[Sample]:
    """Returns the record: the shipped codecs, in their order.

    Example:
        >>> [row.codec for row in recorded()][:4]
        ['fp32', 'fp16', 'bf16', 'int8']
    """
    return msgspec.json.decode(RECORD.read_bytes(), type=list[Sample])


def table(rows: list[Sample]) -> Table:
    """Returns a table of samples."""
    header = ["codec", "bits/value", "ratio", "relative error", "after ten steps with residual"]
    lines = [
        [
            row.codec,
            f"{row.bits_per_value:.3f}",
            f"{row.ratio:.1f}×",
            f"{row.relative_error:.3f}",
            number_text(row.after_feedback, ".3f"),
        ]
        for row in rows
    ]
    title = "Weight gradients of the digits MLP after 60 steps; each codec with its defaults, no zstd stage."
    return Table(header, lines, title)
