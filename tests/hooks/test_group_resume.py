"""Ranks that serve: each one's state holds its shard, and all go on from there."""

from __future__ import annotations

from pathlib import Path

from tests.hooks.ddp_ranks import run_script


def test_ranks_go_on_bit_for_bit_from_what_each_saved_and_refuse_what_is_not_theirs() -> None:
    lines = run_script(2, Path(__file__).with_name("group_resume_ranks.py")).splitlines()
    for rank in range(2):
        mine = [line.partition(": ")[2] for line in lines if line.startswith(f"rank {rank}: ")]
        local = ("update", "diloco[h=3]", "streaming-diloco[h=6,delay=2]")
        assert mine[:6] == [f"{design} equal" for design in (*local, "3lc", "local-sgd", "twice")]
        assert mine[6:9] == ["kept equal [0, 6] 2"] * 3
        assert mine[9] == "begins"
        assert "the ranks keep no state of the same exchange: rank 0: 7, rank 1: 8. Begin anew" in mine[10]
        assert all("ranks [1] keep states to go back to" in each and "ranks [0] do not" in each for each in mine[11:13])
        one, unlike, begins, differ, plain, without, *damaged, loaded, early, moved, wrapped, compiled, hooked = mine[
            13:
        ]
        assert "give it as tw.distribute(…, resume=state), on every rank its own" in loaded
        assert "no training can go on from this state_dict(): with fragments" in early
        assert moved == "moved: True, serving {2}", (
            "what a rank sends to itself is none of the wire's, what it serves is"
        )
        assert "the state that rank 1 of 2 resumes from is one of rank 0 of 2: every rank saves a state of" in one
        assert "resume from different states, rank 0: exchange 2, rank 1: exchange 1. Give all of them" in unlike
        assert "rank 0: exchange 2, rank 1: none" in begins
        assert "rank 1 of 2 would train otherwise than rank 0: h, inner steps between exchanges: this worker" in differ
        assert "is one of torch's own optimizer: load it into that one, before tw.distribute" in plain
        assert "rank 0 of 2 resumes from is one that holds no shard" in without
        assert [each.partition(": ")[0] for each in damaged] == ["tensors", "step", "state", "kind"]
        assert all("rank 1 of 2 resumes from is one whose shard is damaged (" in each for each in damaged), damaged
        assert "leave DistributedDataParallel out, thinwire replaces it" in wrapped
        assert "or compile what it wraps" in compiled and "has a communication hook already" in hooked
