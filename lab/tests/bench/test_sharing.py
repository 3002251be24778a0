"""What processes that share processors take from each other, measured among real ones."""

from __future__ import annotations

import pytest

from thinwire.errors import EngineError
from thinwire.planner.transport_costs import Sharing
from thinwire_lab.bench.peer_costs import Trained, measure_sharing, sharing_of


def trained(alone_s: float | None, beside_s: float, used_s: float, lasted_s: float) -> Trained:
    return Trained(alone_s=alone_s, beside_s=beside_s, used_s=used_s, lasted_s=lasted_s)


def test_two_processes_train_side_by_side() -> None:
    found = measure_sharing("mlp", "digits", ranks=2)
    assert 1.0 <= found.slowdown < 5.0 and 0.05 < found.use <= 1.0


def test_one_shares_with_nobody() -> None:
    assert measure_sharing("mlp", "digits", ranks=1) == Sharing()


def test_steps_of_all_make_the_figures() -> None:
    four = [
        trained(0.004, 0.005, 0.006, 0.016),
        *(trained(None, seconds, 0.006, 0.016) for seconds in (5e-3, 6e-3, 6e-3)),
    ]
    assert sharing_of(four, 2) == Sharing(slowdown=1.375, use=0.75)
    assert sharing_of(four, 4) == Sharing(slowdown=1.375, use=0.375), "processors that nobody needs are not in use"
    lucky = [trained(0.004, 0.0039, 0.006, 0.0059), trained(None, 0.0039, 0.006, 0.0059)]
    assert sharing_of(lucky, 2) == Sharing(), "noise never makes company a help, nor more than all in use"


def test_processes_that_fail_are_told() -> None:
    with pytest.raises(EngineError, match="nothing"):
        measure_sharing("nothing", "digits", ranks=2)
