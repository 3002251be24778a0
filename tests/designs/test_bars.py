"""Accuracy, sizes and lag on the digits, through server and workers: the bars that a correct implementation clears.

The bars were set with 3,000 steps (1,500 for plain SGD), at which `test_bars_long.py` holds every one of them. Here two
short runs show that training works at all; what takes longer is marked `long`.
"""

from __future__ import annotations

import pytest

import thinwire as tw
from tests.designs.digits_runs import train
from thinwire.policies.designs import design as find_design

STEPS = 250
EPOCH = "local[steps=42]"


def test_3lc_is_as_accurate_as_uncompressed_and_smaller() -> None:
    plain, found = train("fp32", steps=STEPS), train("3lc[s=1.0]", steps=STEPS)
    assert plain.accuracy >= 96.5 and found.accuracy >= plain.accuracy - 1.5
    for size in (found.bits_up, found.bits_down):
        assert 0.45 <= size <= 0.9
    assert 0 < found.lag <= 6, "‖residual‖ in units of one step's gradient"
    assert found.residual_error <= 1e-5, "the server's copy is the workers' and what was not sent"
    assert abs(found.accuracy - found.server_accuracy) <= 0.5


def test_a_residual_on_both_ways_of_a_random_codec_is_refused() -> None:
    with pytest.warns(UserWarning, match="stoch3 is unbiased"), pytest.raises(tw.ConfigError, match="may diverge"):
        find_design("stoch3[error_feedback=true]")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_3lc_without_a_residual_hurts() -> None:
    assert train("3lc[error_feedback=false]", steps=STEPS).accuracy <= 97


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_without_a_residual_on_pulls_the_servers_copy_drifts_from_the_model() -> None:
    """It is the workers' model that is evaluated."""
    found, kept = train("stoch3"), train("3lc[s=1.0]")
    assert found.accuracy >= 97.0
    assert found.drift > 5 * kept.drift


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_averages_of_coded_weights_are_as_good_as_of_plain_ones() -> None:
    """Øland & Raj: c = 6 and c = 5 above the entropy lose nothing, Huffman's code is below the raw bits."""
    floats = train("entropy", steps=378, consistency=EPOCH, up="fp32")
    assert floats.accuracy >= train("fp32").accuracy - 0.6
    accurate = train("entropy", steps=378, consistency=EPOCH)
    small = train("entropy[preset=size]", steps=378, consistency=EPOCH)
    eight = train("entropy[mode=fixed,bits=8]", steps=378, consistency=EPOCH)
    for found in (accurate, small, eight):
        assert abs(found.accuracy - floats.accuracy) <= 0.6
    assert train("entropy[mode=fixed,bits=2]", steps=378, consistency=EPOCH).accuracy < floats.accuracy - 1
    assert small.bits_up <= accurate.bits_up - 0.5, "a bit less above the entropy"
    assert eight.bits_up == pytest.approx(8, abs=0.01)
