"""`threshold`: all values that reach a magnitude, fixed or found from a sample; the others wait in the residual.

A fixed τ is Strom's and MXNet's, who send ±τ (thesis §2.3.3). The sampled one is 3LC's "5 % sparsification" (§4.2):
only sampled magnitudes are sorted, and all values at least as large as the sample's k-th are sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from thinwire.codecs.base import Draws
from thinwire.codecs.sparse import BITMAP, SIGNS, Chosen, Sparse
from thinwire.codecs.tensors import FloatArray
from thinwire.codecs.topk import check_fraction
from thinwire.errors import ConfigError
from thinwire.kernels.select import count_from, sample_of, select_from

MIN_SAMPLE = 1000
SAMPLE_SHARE = 0.01


@dataclass(frozen=True, kw_only=True)
class Threshold(Sparse):
    """1 bit a value of the tensor and 32 a value sent (or 64 a value sent), with a residual.

    Args:
        fraction: how many values the sampled threshold lets through, in (0, 1].
        sample: values to sample, without replacement and always at the same places; None takes 1 %, at least
            1,000. Smaller tensors are looked at whole.
        tau: a fixed threshold instead of a sampled one.
        send: `"values"`, or `"tau"` for ±threshold: one bit instead of 32.
    """

    id: ClassVar[str] = "threshold"
    option_flags: ClassVar[int] = int(BITMAP | SIGNS)

    fraction: float = 0.05
    sample: int | None = None
    tau: float | None = None
    send: Literal["values", "tau"] = "values"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction(self.id, self.fraction)
        whole = isinstance(self.sample, int) and not isinstance(self.sample, bool)
        if self.sample is not None and (not whole or self.sample < 1):
            raise ConfigError(f"threshold: sample={self.sample!r}; allowed are None and whole numbers from 1")
        if self.tau is not None and not (isinstance(self.tau, int | float) and 0 < self.tau < math.inf):
            raise ConfigError(f"threshold: tau={self.tau!r}; allowed are None (sampled) and finite numbers above 0")
        if self.send not in ("values", "tau"):
            raise ConfigError(f"threshold: send={self.send!r}; allowed are 'values' and 'tau'")

    @property
    def sends_signs(self) -> bool:
        return self.send == "tau"

    def choose(self, values: FloatArray, draws: Draws | None) -> Chosen:
        bound = self._sampled(values) if self.tau is None else values.dtype.type(self.tau)
        # A sample may hold nothing but zeros; zeros are not sent all the same.
        bound = float(max(bound, np.finfo(values.dtype).smallest_subnormal))
        return Chosen(select_from(values, bound, count_from(values, bound)), bound)

    def _sampled(self, values: FloatArray) -> float:
        """The magnitude that the given fraction of a sample reaches."""
        size = self.sample or max(MIN_SAMPLE, math.ceil(SAMPLE_SHARE * values.size))
        magnitudes = np.abs(sample_of(values, size))
        k = max(1, round(self.fraction * magnitudes.size))
        return float(np.partition(magnitudes, magnitudes.size - k)[magnitudes.size - k])
