"""Ranks that serve each other (`group=`): each one's state holds its shard, and all go on from there."""

from __future__ import annotations

from typing import Any

import pytest

from tests.hooks.ddp_ranks import run_ranks
from tests.hooks.local import group_ranks

REFUSED = {
    "of another rank": "the state that rank 1 of 2 resumes from is one of rank 0 of 2",
    "of another exchange": "rank 0: exchange 2, rank 1: exchange 1",
    "one begins": "rank 0: exchange 2, rank 1: none",
    "another design": "rank 1 of 2 would train otherwise than rank 0: h, inner steps between exchanges",
    "torch's": "is one of torch's own optimizer",
    "no shard": "rank 0 of 2 resumes from is one that holds no shard",
    "damaged tensors": "rank 1 of 2 resumes from is one whose shard is damaged (",
    "damaged step": "rank 1 of 2 resumes from is one whose shard is damaged (",
    "damaged state": "rank 1 of 2 resumes from is one whose shard is damaged (",
    "damaged kind": "rank 1 of 2 resumes from is one whose shard is damaged (",
    "loaded later": "resume=state",
    "wrapped": "leave DistributedDataParallel out",
    "compiled": "compile what it wraps",
    "hooked": "has a communication hook already",
}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(2, group_ranks.everything, group_timeout_s=60.0)


def test_ranks_resume_bit_identical_from_what_each_saved(found: list[dict[str, Any]]) -> None:
    names = (*group_ranks.RESUMED, "local-sgd", "twice")
    assert [each["resumes"] for each in found] == [dict.fromkeys(names, True)] * 2


def test_ranks_whose_shards_are_lost_go_back_together_to_kept_steps(found: list[dict[str, Any]]) -> None:
    """One rank kept the state after step 9, and the other none newer than that after step 6."""
    for each in found:
        back = each["goes_back"]
        assert {name: back[name] for name in group_ranks.KEPT} == dict.fromkeys(group_ranks.KEPT, (True, [0, 6], 2))
        assert back["one began before"] == "nothing was refused"
        assert "rank 0: 7, rank 1: 8" in back["no common step"]
        assert "ranks [1] keep states to go back to" in back["one keeps none"]


def test_states_that_are_damaged_or_of_others_are_refused_on_every_rank_with_the_offender(
    found: list[dict[str, Any]],
) -> None:
    for each in found:
        assert each["refuses"].keys() == REFUSED.keys()
        for name, told in REFUSED.items():
            assert told in each["refuses"][name], (name, each["refuses"][name])
        assert "no training can go on from this state_dict()" in each["warned"]


def test_a_rank_moves_no_more_bytes_than_a_ring(found: list[dict[str, Any]]) -> None:
    """Traffic counts the bytes that a rank serves to the other, and none that stay within the rank."""
    for each in found:
        sent, received, least = each["moved"]
        assert sent >= least and received >= least and sent + received < 2.5 * least
