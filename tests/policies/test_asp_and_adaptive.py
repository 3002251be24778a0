"""Where nobody waits, or not everything is sent: every gradient is applied once or is held, under random schedules."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policies.ledger import ITERATIONS, Case, applied, cases, play, schedules, server_values

# ---- asynchronous


@given(case=cases())
@schedules
def test_asp_applies_every_gradient_exactly_once(case: Case) -> None:
    diaries, network = play(case, "asp")
    for values in server_values(network):
        np.testing.assert_array_equal(values, applied(ITERATIONS, case.workers))
    for rank, diary in enumerate(diaries):
        for iteration, copies in enumerate([*diary.seen, diary.end]):
            for copy in copies:
                assert set(np.unique(copy)) <= {0.0, -1.0}
                np.testing.assert_array_equal(copy[rank, :iteration], -1, err_msg="its own are all in")
                np.testing.assert_array_equal(copy[rank, iteration:], 0)


# ---- adaptive


@given(when=st.sampled_from(["norm", "variance", "period"]), case=cases())
@settings(max_examples=24, deadline=None)
def test_adaptive_what_is_not_sent_is_held(when: str, case: Case) -> None:
    threshold = {"norm": 0.9, "variance": 2.0, "period": 3}[when]
    diaries, network = play(case, f"adaptive[{when},threshold={threshold}]", flush=False)
    for index, values in enumerate(server_values(network)):
        held = sum(diary.held[index] for diary in diaries)
        np.testing.assert_array_equal(values - held, applied(ITERATIONS, case.workers))
    for diary in diaries:
        for copy, values in zip(diary.end, server_values(network), strict=True):
            np.testing.assert_array_equal(copy, values)


def test_adaptive_holds_some_and_a_flush_sends_them() -> None:
    case = Case(3, 1, (1, 1, 1), 3)
    kept, _ = play(case, "adaptive[period,threshold=3]", flush=False)
    assert any(held.any() for diary in kept for held in diary.held)
    sent, network = play(case, "adaptive[period,threshold=3]")
    assert not any(held.any() for diary in sent for held in diary.held)
    for values in server_values(network):
        np.testing.assert_array_equal(values, applied(ITERATIONS, case.workers))
