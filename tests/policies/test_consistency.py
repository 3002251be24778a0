"""How consistency policies are named, what is no policy, and what a policy means for a number of workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from thinwire.errors import ConfigError
from thinwire.policies.consistency import Asp, Backup, Bsp, Consistency, Local, Ssp, consistency, name_of

NAMED: dict[str, Consistency | None] = {
    "bsp": Bsp(),
    "asp": Asp(),
    "ssp[3]": Ssp(staleness=3),
    "ssp[τ=5,mode=aggressive]": Ssp(staleness=5, mode="aggressive"),
    "backup[b=2]": Backup(spare=2),
    "local[k=3]": Local(steps=3),
    "adaptive[norm,threshold=0.05]": None,
    "adaptive[time]": None,
}


def test_a_name_makes_a_policy_whose_full_name_makes_an_equal_one() -> None:
    for name, expected in NAMED.items():
        policy = consistency(name)
        assert expected is None or policy == expected, name
        assert consistency(policy) is policy and consistency(name_of(policy)) == policy, name
        assert name_of(consistency(name_of(policy))) == name_of(policy)


def test_what_is_no_policy() -> None:
    for name, named in {
        "psp": r"'psp' \(did you mean 'ssp'\?\); there are bsp, asp, ssp, backup, local, adaptive",
        "ssp[-1]": "staleness is -1",
        "ssp[2,mode=lazy]": "mode='lazy'",
        "backup[-1]": "spare is -1",
        "local[0]": "steps is 0",
        "bsp[staleness=1]": r"'staleness'; the options are \[\]",
        "adaptive[mood]": "'mood'",
        "adaptive[norm,threshold=nan]": "threshold='nan'",
    }.items():
        with pytest.raises(ConfigError, match=named):
            consistency(name)


def test_terms() -> None:
    """(quorum, lead, barrier, partial quorum, lockstep, accepts newer, ranks that own hyperparameters)"""
    expected = {
        "bsp": (3, 0, False, False, True, False, [0]),
        "asp": (1, 0, False, False, False, True, [0, 1, 2]),
        "ssp[2]": (3, 0, False, False, True, False, [0]),
        "ssp[2,mode=aggressive]": (3, 2, False, False, False, True, [0]),
        "ssp[2,mode=traditional]": (3, 2, True, False, False, True, [0]),
        "backup[1]": (2, 0, False, True, False, True, [0, 1, 2]),
        "backup[9]": (1, 0, False, True, False, True, [0, 1, 2]),
        "local[4]": (3, 0, False, False, True, False, [0]),
    }
    for name, answers in expected.items():
        terms = consistency(name).terms(3)
        owners = [rank for rank in range(3) if terms.owns_hyperparameters(rank)]
        found = (terms.quorum, terms.lead, terms.barrier, terms.partial_quorum, terms.lockstep, terms.accepts_newer)
        assert (*found, owners) == answers, name
        assert (terms.workers, terms.immediate) == (3, name == "asp")
    assert consistency("asp").terms(1).accepts_newer and not consistency("backup[1]").terms(1).partial_quorum


class Skips(Consistency):
    id: ClassVar[str] = "skips"

    def exchanges(self, iteration: int) -> bool:
        return iteration % 3 == 1


def test_iterations_are_those_that_exchanges_makes() -> None:
    """A policy that says nothing of iterations has them counted; ours say the same without counting."""
    for name in ("bsp", "local[3]", "local[4,warmup=4]", "local[3,warmup=2]", "ssp[2]", "ssp[2,mode=aggressive]"):
        policy = consistency(name)
        for clock in range(12):
            assert policy.iterations(clock) == Consistency.iterations(policy, clock), (name, clock)
    assert [Skips().iterations(clock) for clock in range(4)] == [0, 2, 5, 8]
    for name, steps in (("local[3,warmup=2]", [0, 1, 4, 7, 10]), ("ssp[1]", [1, 3, 5, 7, 9, 11])):
        assert [step for step in range(12) if consistency(name).exchanges(step)] == steps, name


@dataclass(frozen=True, kw_only=True)
class Early(Consistency):
    """Of another package: options of its own, and answers that may be nonsense."""

    id: ClassVar[str] = "early"
    stop: str | None = None
    share: float = 1.0

    def quorum(self, workers: int) -> int:
        return workers * self.share  # type: ignore[return-value]


def test_a_quorum_that_can_never_be_met_is_refused() -> None:
    for share, said in ((0.5, "1.5"), (0, "0"), (2, "6")):
        with pytest.raises(ConfigError, match=f"early: the quorum of 3 workers is {said};"):
            Early(share=share).terms(3)
