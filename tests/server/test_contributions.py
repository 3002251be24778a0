"""Contributions of learners: quorum, grace window, weights and refusals. One shard, whose clock the test sets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.server.conversation import PLAIN, SHAPES, Shard, make_plan
from thinwire.schema import Contribution, Merged, Plan


def plan(policy: str = "quorum[k=2,grace=1.0,h=4,discount=0.0]", workers: int = 3, **others: Any) -> Plan:
    return make_plan(
        workers, up=PLAIN, down=PLAIN, groups=({"momentum": 0.0},), consistency=policy, local="fragments=1", **others
    )


@dataclass
class Timed:
    """A shard of learners whose clock the test sets."""

    policy: str = "quorum[k=2,grace=1.0,h=4,discount=0.0]"
    workers: int = 3
    min_workers: int | None = 1
    time: float = 0.0
    sent: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shard = Shard(plan(self.policy, self.workers), begin=False, min_workers=self.min_workers)
        self.core = self.shard.core
        self.core.now = lambda: self.time
        for rank in range(self.workers):
            self.shard.join(rank)
        self.shard.give_values(0)
        self.start = self.values()

    def values(self) -> np.ndarray[Any, Any]:
        return np.concatenate([table.values.numpy().ravel().copy() for table in self.core.tables])

    def moved(self) -> float:
        """How far the shard's first value is from where it started: contributions are constant tensors."""
        return float((self.start - self.values())[0])

    def contribute(self, rank: int, value: float, *, ended: bool = False, **changed: Any) -> list[Merged]:
        """Sends a constant tensor, 4 steps of 1 example after the one before; returns the merges that rank 0 hears."""
        self.sent[rank] = step = self.sent.get(rank, 0) + 4
        tables = tuple(SHAPES)[:2]
        frames = tuple(PLAIN.encode(np.full(SHAPES[table], value, np.float32)) for table in tables)
        given = {"step": step, "steps": 4, "examples": 4.0, "bases": (0, 0), "tables": tables, "rates": (1.0,)}
        return self.heard(self.core.received(rank, Contribution(**{**given, "ended": ended, **changed}), frames))

    def heard(self, effects: list[Any]) -> list[Merged]:
        before = len(self.shard.told[0])
        self.shard.carry_out(effects)
        return [message for message, _ in self.shard.told[0][before:] if isinstance(message, Merged)]

    def next_at(self) -> float | None:
        return self.core.merges_at

    def wait(self, seconds: float) -> list[Merged]:
        """Lets time pass; calls the core when it asked for that."""
        merges, until = [], self.time + seconds
        while (at := self.core.merges_at) is not None and at <= until:
            self.time = max(self.time, at)
            merges += self.heard(self.core.merge_due())
        self.time = until
        return merges


def test_merge_waits_for_all_live_learners_within_the_grace_window() -> None:
    timed = Timed()
    assert not timed.contribute(0, 1.0)
    assert timed.next_at() is None, "no quorum"
    assert not timed.contribute(1, 2.0)
    assert timed.next_at() == 1.0
    [merge] = timed.contribute(2, 6.0)
    assert (merge.version, merge.ranks, merge.steps, merge.examples) == (1, (0, 1, 2), (4, 4, 4), 12.0)
    assert timed.moved() == 3.0 and timed.next_at() is None


def test_merge_ends_the_grace_window_without_the_slow() -> None:
    timed = Timed()
    timed.contribute(0, 1.0)
    timed.contribute(1, 2.0)
    assert not timed.wait(0.9)
    [merge] = timed.wait(0.1)
    assert merge.ranks == (0, 1) and merge.weights == (0.5, 0.5) and timed.moved() == 1.0, "two thirds of the learners"
    assert not timed.contribute(2, 6.0), "it waits for the next merge"
    [merge] = timed.contribute(0, 2.0) + timed.wait(1.0)
    assert merge.ranks == (0, 2) and timed.moved() == pytest.approx(1.0 + 4.0 * 2 / 3)


def test_grace_window_ends_before_the_fastest_contributes_again() -> None:
    timed = Timed("quorum[k=2,grace=10.0,h=4]")
    timed.contribute(0, 1.0)
    timed.wait(0.5)
    timed.contribute(1, 1.0)
    timed.wait(10.0)
    timed.contribute(0, 1.0)  # 10.5 s after its first
    timed.wait(2.0)
    assert not timed.contribute(1, 1.0)
    assert timed.core.merges_at == pytest.approx(10.5 + 10.5), "when rank 0 is expected; rank 1's interval is longer"


def test_newer_contribution_is_added_to_the_one_that_waits() -> None:
    timed = Timed("quorum[k=2,grace=0.0,h=4,discount=0.0]")
    timed.contribute(0, 1.0)
    timed.contribute(0, 2.0)
    [merge] = timed.contribute(1, 6.0)
    assert merge.ranks == (0, 1) and merge.steps == (8, 4) and merge.examples == 12.0
    assert merge.weights == pytest.approx((2 / 3, 1 / 3)) and timed.moved() == pytest.approx(4.0 * 2 / 3)


def test_weights_count_examples_and_speed_and_versions() -> None:
    timed = Timed("quorum[k=2,grace=0.0,h=4,discount=1.0]", workers=2)
    timed.contribute(0, 0.0)
    timed.contribute(1, 0.0)
    timed.contribute(0, 0.0, bases=(0, 0))  # one version behind
    [merge] = timed.contribute(1, 0.0, bases=(1, 1), examples=8.0)
    assert merge.weights == pytest.approx((4 * 1 / 2 / (4 * 1 / 2 + 8 * 2), 8 * 2 / (4 * 1 / 2 + 8 * 2)))


def test_radial_merge_keeps_the_length() -> None:
    timed = Timed("quorum[k=2,grace=0.0,h=4,merge=radial,discount=0.0]", workers=2)
    timed.contribute(0, 1.0)
    timed.contribute(1, 3.0)
    assert timed.moved() == pytest.approx(2.0), "one direction: the mean of the lengths"
    timed = Timed("quorum[k=2,grace=0.0,h=4,merge=radial,discount=0.0]", workers=2)
    timed.contribute(0, 1.0)
    timed.contribute(1, -1.0)
    assert timed.moved() == pytest.approx(0.0, abs=1e-6), "opposite directions leave none"


def test_dead_learner_s_contribution_counts_and_it_is_not_waited_for() -> None:
    timed = Timed("quorum[k=3,grace=100.0,h=4,discount=0.0]")
    timed.contribute(0, 1.0)
    timed.contribute(2, 5.0)
    [merge] = timed.heard(timed.core.closed(2, "killed")) or timed.contribute(1, 0.0)
    assert merge.ranks == (0, 1, 2) and timed.moved() == 2.0, "all that live have contributed"
    timed.contribute(0, 1.0)
    [merge] = timed.contribute(1, 1.0)
    assert merge.ranks == (0, 1), "with fewer learners than the quorum, those that are there"


def test_learner_that_comes_back_has_new_counts() -> None:
    timed = Timed("quorum[k=2,grace=5.0,h=4,discount=0.0]")
    timed.contribute(2, 6.0)
    timed.shard.carry_out(timed.core.closed(2, "killed"))
    timed.shard.join(2)
    timed.sent[2] = 0
    timed.contribute(2, 3.0)
    [merge] = timed.contribute(0, 0.0) + timed.wait(5.0)
    assert merge.ranks == (0, 2) and merge.steps == (4, 4), "its new process knows of its own contribution"
    assert timed.moved() == pytest.approx(3.0), "what the process before contributed counts"


def test_last_version_comes_when_all_learners_have_ended() -> None:
    timed = Timed("quorum[k=2,grace=5.0,h=4,discount=0.0]", workers=2)
    [*none] = timed.contribute(0, 1.0, ended=True)
    assert not none
    [merge] = timed.contribute(1, 1.0, step=2, steps=2, ended=True)
    assert merge.ended and merge.ranks == (0, 1)
    timed = Timed("quorum[k=2,grace=0.0,h=4]", workers=2)
    timed.contribute(1, 1.0)
    [merge] = timed.contribute(0, 1.0, ended=True)
    assert not merge.ended
    [merge] = timed.heard(timed.core.closed(1, "killed"))
    assert merge.ended and not merge.ranks, "the other learner has died: nothing is left to merge"


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"bases": (9, 0)}, "'weight' started from version 9, which was never published: the newest is 0"),
        ({"bases": (-1, 0)}, "version -1"),
        ({"bases": (0,)}, "2 tables, 1 versions and 2 frames"),
        ({"examples": 0.0}, "a contribution of 0.0 examples in 4 steps"),
        ({"examples": float("nan")}, "nan examples"),
        ({"examples": -1.0}, "-1.0 examples"),
        ({"steps": 0}, "4.0 examples in 0 steps"),
        ({"step": 7}, "'weight' came at step 7, after that of step 4: h=4"),
        ({"steps": 9}, "9 steps came after step 8"),
        ({"tables": (0, 7)}, "tables \\(0, 7\\)"),
        ({"tables": (1, 0)}, "they ascend"),
        ({"rates": ()}, "learning rates \\(\\) came for 1"),
        ({"rates": (float("inf"),)}, "learning rates"),
    ],
)
def test_contribution_that_is_not_allowed_is_refused_by_name(changed: dict[str, Any], named: str) -> None:
    timed = Timed()
    timed.contribute(1, 1.0)
    timed.contribute(1, 1.0, **changed)
    assert timed.shard.ended[1] is not None
    with pytest.raises(AssertionError, match=named):
        raise AssertionError(timed.shard.ended[1])
    [merge] = timed.contribute(0, 3.0) + timed.contribute(2, 5.0)
    assert merge.ranks == (0, 1, 2) and timed.moved() == pytest.approx(3.0), "what it sent before counts, and no more"


def test_gradients_and_contributions_go_to_their_own_engines() -> None:
    timed = Timed()
    timed.shard.push(1, 0, {0: PLAIN.encode(np.zeros(SHAPES[0], np.float32))})
    assert "learners send contributions" in (timed.shard.ended[1] or "")
    shard = Shard(make_plan(2))
    effects = shard.core.received(1, Contribution(step=1, steps=1, examples=1.0, bases=(), tables=(), rates=(1.0,)), ())
    shard.carry_out(effects)
    assert "workers send gradients" in (shard.ended[1] or "")


def test_state_keeps_versions_and_examples() -> None:
    timed = Timed("quorum[k=1,grace=0.0,h=4]")
    timed.contribute(0, 1.0)
    state = timed.core.state_dict()
    again = Shard(plan("quorum[k=1,grace=0.0,h=4]"), begin=False, min_workers=1)
    again.core.load_state_dict(state)
    assert again.core.step == 1 and state["steps"]["examples"] == [4.0, 4.0]
    assert again.core.state_dict()["steps"]["examples"] == [4.0, 4.0]
