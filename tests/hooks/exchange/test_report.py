"""The text of the DDP and FSDP2 hooks' report; `ddp/test_training.py` tests its figures."""

from __future__ import annotations

from dataclasses import replace

from thinwire.hooks.exchange.report import Report

REPORT = Report(
    steps=4,
    steps_skipped=0,
    codecs="3lc[sparsity=1.75,lag=5]; fp32",
    sent_nbytes=1e3,
    uncompressed_nbytes=1e5,
    ratio=100.0,
    bits_per_value=0.3,
    encode_s=0.001,
    decode_s=0.001,
    copy_s=0.0,
    wait_s=0.002,
    link_bps=0.0,
    resumed="",
)


def test_report_has_lag_and_multipliers_of_a_codec_that_bounds_the_lag() -> None:
    assert "lag  " not in str(REPORT)
    bounded = str(replace(REPORT, lag=4.91, sparsity=(1.0, 1.46875)))
    assert bounded.splitlines()[-1] == "  lag              up to 4.9 steps, s from 1.00 to 1.47"


def test_verdict_names_link_saved_and_spent_time() -> None:
    copying = replace(REPORT, link_bps=1e8, copy_s=0.01)
    line = "measured link 100 Mbit/s, saved 7.92 ms, spent 12 ms a step"
    assert f"uncompressed would be faster: {line}" in str(copying)
    assert "compression pays: measured link 50 Mbit/s, saved 15.8 ms, spent 12 ms" in str(
        replace(copying, link_bps=5e7)
    )
