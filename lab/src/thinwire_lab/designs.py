"""Designs that papers compare with, of the codecs here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thinwire.policies.designs import Design
from thinwire.policies.shipped import averaged, both_ways


def _design(name: str, choices: Callable[..., dict[str, Any]], cite: str) -> Callable[..., Design]:
    def make(**options: Any) -> Design:
        return Design(name=name, cite=cite, **choices(**options))

    make.__doc__ = cite
    return make


stoch3 = _design("stoch3", both_ways("stoch3"), "stochastic ternary in base-3⁵, no residual (3LC §4.2, Stoch 3-value)")
mqe1 = _design("mqe1", both_ways("mqe1"), "1 bit, least squared error, residual (3LC §4.2, MQE 1-bit int)")
sparse5 = _design(
    "sparse5",
    both_ways("threshold", fraction=0.05, error_feedback=True),
    "5 % of each tensor by a sampled threshold, residual (3LC §4.2, 5 % sparsification)",
)
qsgd_ds = _design(
    "qsgd-ds",
    averaged("qsgd-ds", "fp32", False, None),
    "DoubleSqueeze's biased ternary up, uncompressed down (DoubleSqueeze §5.1, QSGD)",
)
