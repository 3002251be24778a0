"""Policies by name: what is no policy or criterion, what a policy means, and when what accumulated is worth sending."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.errors import ConfigError
from thinwire.names import parse_name
from thinwire.policies.consistency import Asp, Backup, Bsp, Consistency, Local, Ssp, consistency, name_of
from thinwire.policies.criteria import CRITERIA, Criterion, Pending

VALUES = st.one_of(
    st.integers(-(2**40), 2**40),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.none(),
    st.from_regex(r"[g-m][g-m-]{0,8}", fullmatch=True),
)


@given(options=st.dictionaries(st.from_regex(r"[a-h]{1,6}", fullmatch=True), VALUES, max_size=4))
@settings(max_examples=50)
def test_what_is_written_is_read_again(options: dict[str, Any]) -> None:
    name = "policy-1.x[" + ", ".join(f"{key}={value}" for key, value in options.items()) + "]"
    assert parse_name(name, "policy") == ("policy-1.x", options)


def test_forms() -> None:
    forms: dict[str, dict[str, Any]] = {
        "a": {},
        "a[]": {},
        "a[ x = 1 ]": {"x": 1},
        "a[x=1,,y=2,]": {"x": 1, "y": 2},
        "a[x=1.5e3,y=FALSE,z=null]": {"x": 1500.0, "y": False, "z": None},
        "a[x=zstd,y=]": {"x": "zstd", "y": ""},
        "a[x=b=c]": {"x": "b=c"},
        "a[s=2]": {"sparsity": 2},
        "a[7,x=1]": {"lone": 7, "x": 1},
    }
    for name, options in forms.items():
        assert parse_name(name, "thing", short={"s": "sparsity"}, bare="lone") == ("a", options), name


def test_what_is_no_name() -> None:
    for name, named in {
        "": "thing ''; expected an id with options in brackets",
        "a[x=1": "expected an id",
        "a[x=[1]]": "expected an id",
        "a[7]": "'7' is not option=value",
        "a[x=1,x=2]": "'x' is given twice",
        "a[s=1,sparsity=2]": "'sparsity' is given twice",
    }.items():
        with pytest.raises(ConfigError, match=named):
            parse_name(name, "thing", short={"s": "sparsity"})
    with pytest.raises(ConfigError, match=r"as in ssp\["):
        parse_name("a b", "consistency")


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
        "quorum[2]": (2, 0, False, False, False, True, [0, 1, 2]),
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


def pending(*, gradient: float = 1.0, weights: float = 1.0, iterations: int = 1, seconds: float = 0.0) -> Pending:
    """`iterations` equal gradients of this size, four values each."""
    one = np.full(4, gradient, np.float32)
    squares = iterations * float(one @ one)
    return Pending(one * iterations, np.full(4, weights, np.float32), iterations, squares, seconds)


def test_norm_compares_the_update_with_the_weights() -> None:
    for gradient, sends in ((0.09, False), (0.1, True), (0.5, True), (0.0, False)):
        assert Criterion("norm", 0.0999999).send(pending(gradient=gradient)) is sends, gradient
    # A fresh bias: any gradient is significant beside nothing.
    assert Criterion("norm", 0.5).send(pending(gradient=1e-6, weights=0.0))


def test_variance_sends_gradients_that_agree_and_not_those_that_cancel() -> None:
    wanted = Criterion("variance", 2.0)
    assert not wanted.send(pending(iterations=1))
    assert wanted.send(pending(iterations=2)) and wanted.send(pending(iterations=9))
    gradients = np.random.default_rng(0).standard_normal((50, 1000)).astype(np.float32)
    total = gradients.sum(0)
    cancelling = Pending(total, total, 50, float((gradients**2).sum()), 0.0)
    assert not wanted.send(cancelling), "‖Σg‖² is about Σ‖g‖²"
    assert Criterion("variance", 0.5).send(cancelling)


def test_period_counts_iterations_and_time_seconds() -> None:
    assert [Criterion("period", 3).send(pending(iterations=n)) for n in (1, 2, 3, 4)] == [False, False, True, True]
    seconds = (0.0, 0.49, 0.5, 2.0)
    assert [Criterion("time", 0.5).send(pending(seconds=s)) for s in seconds] == [False, False, True, True]
    assert all(Criterion(name, 0).send(pending()) for name in CRITERIA), "a threshold of 0 always sends"


def test_what_is_no_criterion() -> None:
    refused: list[tuple[str, Any, str]] = [
        *(("mood", 1.0, "'mood'"), ("norm", -0.1, "threshold=-0.1"), ("time", "soon", "threshold='soon'")),
    ]
    for name, threshold, named in refused:
        with pytest.raises(ConfigError, match=named):
            Criterion(name, threshold)
