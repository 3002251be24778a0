"""States that a worker keeps in memory: how many, which it goes back to, and what cannot be kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.hooks.cluster import run_cluster
from thinwire.hooks.resuming import KeptSteps


def at(clock: int, *, needed_since: int | None = None, late: bool = False) -> Any:
    return SimpleNamespace(
        clock=clock,
        began_late=late,
        sync=lambda: None,
        state_dict=lambda: {"clock": clock},
        announce_checkpoints=lambda steps: needed_since,
    )


def test_the_newest_states_are_kept_and_no_more() -> None:
    kept = KeptSteps(nn.Linear(2, 1), keep=2)
    assert kept.steps() is None, "at the first time the training begins"
    for clock in (3, 6, 9):
        kept.add(at(clock), position=clock)
    assert kept.steps() == (9, 6)
    for clock, since in ((12, 6), (15, 6), (18, 15)):
        kept.add(at(clock, needed_since=since))
        assert kept.steps() == {12: (12, 9, 6), 15: (15, 12, 9, 6), 18: (18, 15)}[clock], "a shard has no newer one"


def test_one_that_was_never_let_in_takes_any_step() -> None:
    """It takes the place of one that died: the beginning that it has is another training's."""
    model = nn.Linear(2, 1)
    kept = KeptSteps(model)
    assert (kept.steps(), kept.steps(), kept.steps()) == (None, (), ())
    assert kept.load(50) is None and kept.load(0) is None, "the beginning is one as well"
    kept.began(at(0))
    assert kept.steps() == (0,)


def test_others_hear_what_is_kept_before_anything_is_pushed() -> None:
    """Else they might go on without this worker, and forget the one step that it has."""
    said: list[tuple[int, ...]] = []
    opt = at(0)
    opt.announce_checkpoints = lambda steps: said.append(tuple(steps))
    KeptSteps(nn.Linear(2, 1)).began(opt)
    assert said == [(0,)]


def test_distribute_says_that_the_training_goes_on() -> None:
    class Told(KeptSteps):
        at: int | None = None

        def began(self, opt: Any) -> None:
            self.at = opt.steps_done
            super().began(opt)

    kept = Told(nn.Linear(2, 1))
    run_cluster(lambda rank: nn.Linear(2, 1), lambda rank, model, opt: None, workers=1, codec="3lc", resume=kept)
    assert kept.at == 0


def test_going_back_gives_what_was_there_and_forgets_what_came_later() -> None:
    model = nn.Linear(2, 1)
    kept = KeptSteps(model)
    kept.steps()
    with torch.no_grad():
        model.weight.fill_(6.0)
    kept.add(at(6), position=60)
    with torch.no_grad():
        model.weight.fill_(9.0)
    kept.add(at(9), position=90)
    assert kept.load(6) == {"clock": 6}
    assert (model.weight.flatten().tolist(), kept.extra, kept.steps()) == ([6.0, 6.0], {"position": 60}, (6,))


def test_one_that_began_late_takes_any_step_until_it_goes_back_to_one_of_its_own() -> None:
    """Else its vote is for the beginning, of which it has a copy, and nobody else has: all end."""
    model = nn.Linear(2, 1)
    kept = KeptSteps(model)
    assert kept.steps() is None
    kept.began(at(45, late=True))
    assert kept.steps() == ()
    kept.add(at(60, late=True), position=600)
    assert kept.steps() == ()
    with torch.no_grad():
        model.weight.fill_(7.0)
    assert kept.load(40) is None and kept.extra == {}, "the parameters come from the shards"
    kept.began(at(40, late=True))
    kept.add(at(60, late=True), position=601)
    assert kept.steps() == () and kept.load(60) == {"clock": 60} and kept.extra == {"position": 601}
    kept.began(at(60))
    assert kept.steps() == (60, 0)


@pytest.mark.parametrize("keep", [0, -1, 1.5])
def test_no_state_at_all_is_refused(keep: Any) -> None:
    with pytest.raises(tw.ConfigError, match="keep"):
        KeptSteps(nn.Linear(2, 1), keep=keep)
