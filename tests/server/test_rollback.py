"""A shard whose workers have lost another one goes back with all of them, or with none."""

from __future__ import annotations

from typing import Any

from tests.server.conversation import Shard, make_plan
from tests.server.votes import BACK, kept, last, lost, vote
from thinwire.schema import Leave, Offer, Resume, Welcome


def test_all_go_back_to_the_newest_step_that_everybody_has_and_train_the_same_again() -> None:
    shard, _ = kept(2, 4)
    bits = shard.bits()
    shard.say(0, BACK)
    vote(shard, 10, (4, 2))
    assert last(shard, 10) is None, "worker 1 trains on, for all that is known here"
    shard.say(1, BACK)
    vote(shard, 11, (2, 0))
    assert last(shard, 10) == last(shard, 11) == Offer(steps=(2,))
    shard.say(10, Resume(step=2))
    assert shard.core.step == 5, "one word alone changes nothing"
    shard.say(11, Resume(step=2))
    assert shard.core.step == 2
    for peer in (10, 11):
        messages = [message for message, _ in shard.told[peer]]
        assert messages[1] == Welcome(send_values=False, step=2)
    for step in range(2, 5):
        for rank in (0, 1):
            shard.push(10 + rank, step, shard.frames(rank, step))
    assert shard.core.failed is None and shard.bits() == bits


def test_one_worker_alone_makes_nobody_go_back() -> None:
    shard, _ = kept(2, 4)
    vote(shard, 10, (2,))
    assert shard.ended == {10: "rank 0 is taken: every worker needs a rank of its own"}
    shard.core.interrupted(0)
    vote(shard, 20, (2,))
    assert "the others go on at 5: start it without its checkpoint" in str(shard.ended[20])
    shard.core.resumed(0)
    shard.say(0, BACK)
    vote(shard, 30, (2,))
    shard.say(30, Resume(step=2))
    assert "step 2 was chosen to go back to; offered were none" in str(shard.ended[30])
    assert shard.core.step == 5


def test_one_that_wanted_to_go_back_may_go_on_with_the_others() -> None:
    """It was away for long, and no shard was lost: another shard has told it so."""
    shard = Shard(min_workers=1)
    shard.step(0)
    shard.say(0, BACK)
    vote(shard, 10, (1,))
    shard.say(10, BACK)
    shard.join(0, peer=20)
    welcome = shard.told[20][0][0]
    assert isinstance(welcome, Welcome) and welcome.begin == welcome.step == 1
    for peer, rank in ((20, 0), (1, 1)):
        shard.push(peer, 1, shard.frames(rank, 1))
    assert shard.core.step == 2 and shard.core.failed is None


def test_one_that_goes_and_comes_again_has_the_same_offer_and_nobody_else_comes_again() -> None:
    shard, _ = kept(2)
    for rank in (0, 1):
        shard.say(rank, BACK)
        vote(shard, 10 + rank, (2,))
    shard.say(10, Resume(step=2))
    shard.say(11, BACK)  # it has lost yet another shard
    assert shard.core.step == 5, "one word is missing"
    for peer, steps in ((21, (2,)), (31, ())):  # another process comes, which has no checkpoint
        shard.core.interrupted(peer - 10)
        vote(shard, peer, steps)
        assert last(shard, peer) == Offer(steps=(2,)) and 10 not in shard.ended
    shard.say(31, Resume(step=2))
    assert shard.core.step == 2 and isinstance(shard.told[10][1][0], Welcome)


def test_an_offer_that_somebody_cannot_take_is_void() -> None:
    shard, _ = kept(2, 4)
    for rank in (0, 1):
        shard.say(rank, BACK)
        vote(shard, 10 + rank, (4, 2))
    shard.say(10, Resume(step=4))
    shard.say(11, BACK)
    vote(shard, 21, (2,))  # it has lost its newest checkpoint
    assert lost(shard, 10) and last(shard, 21) is None
    vote(shard, 20, (4, 2))
    assert last(shard, 20) == last(shard, 21) == Offer(steps=(2,))


def test_a_choice_by_another_shards_old_offer_makes_all_come_again() -> None:
    shard, _ = kept(2, 4)
    for rank in (0, 1):
        shard.say(rank, BACK)
        vote(shard, 10 + rank, ())
    shard.say(10, Resume(step=4))
    shard.say(11, Resume(step=2))
    assert lost(shard, 10) and lost(shard, 11) and shard.core.step == 5 and shard.core.failed is None


def test_one_that_is_gone_for_good_ends_the_training_where_it_is_needed() -> None:
    shard, _ = kept(2)
    for rank in (0, 1):
        shard.say(rank, BACK)
        vote(shard, 10 + rank, ())
    shard.carry_out(shard.core.closed(10, "connection reset"))
    assert "worker 0 went away before all had gone back" in str(shard.ended[11])


def test_the_others_go_on_without_one_that_wanted_to_go_back_and_is_gone() -> None:
    """Nobody goes back; they may wait for its gradient."""
    for name, plan, min_workers in (
        ("elastic", make_plan(3), 2),
        ("backup", make_plan(3, consistency="backup[b=1]"), None),
    ):
        shard = Shard(plan, min_workers=min_workers)
        shard.step(0)
        shard.say(0, BACK)
        vote(shard, 10, ())
        for rank in (1, 2):
            shard.push(rank, 1, shard.frames(rank, 1))
        shard.carry_out(shard.core.closed(10, None))  # at another shard it was told that the others go on
        assert shard.core.step == 2 and shard.core.failed is None, name


def test_where_others_go_on_nobody_is_sent_back_for_one_that_waits() -> None:
    """Its own process of before, say, of which the shard does not know yet that it died."""
    shard = Shard(make_plan(3), min_workers=1)
    shard.step(0)
    for rank in (0, 1):
        shard.say(rank, BACK)
        vote(shard, 10 + rank, ())
    shard.core.interrupted(10)
    shard.join(0, peer=20)
    welcome = shard.told[20][0][0]
    assert isinstance(welcome, Welcome) and welcome.begin == 1
    shard.say(2, BACK)
    shard.join(3, peer=13)
    assert 13 not in shard.ended
    for peer in (20, 13):
        shard.say(peer, BACK)
    shard.join(4, peer=14)
    assert lost(shard, 14), "now all are about to go back"


def test_one_that_comes_after_the_offer_takes_part_in_it() -> None:
    """Where ranks above the plan's may join, nobody knows who else comes."""
    shard, _ = kept(2, min_workers=1)
    for rank in (0, 1):
        shard.say(rank, BACK)
        vote(shard, 10 + rank, (2,))
    shard.say(10, Resume(step=2))
    vote(shard, 12, ())
    assert last(shard, 12) == Offer(steps=(2,))
    shard.say(11, Resume(step=2))
    assert shard.core.step == 5, "nobody goes back without it"
    shard.say(12, Resume(step=2))
    welcomes = [shard.told[peer][1][0] for peer in (12, 10, 11)]
    assert [welcome.begin for welcome in welcomes if isinstance(welcome, Welcome)] == [2, -1, -1]
    for peer, rank in ((10, 0), (11, 1)):
        shard.push(peer, 2, shard.frames(rank, 2))
    shard.say(10, BACK)
    vote(shard, 30, ())
    shard.say(12, BACK)
    vote(shard, 32, ())
    shard.carry_out(shard.core.closed(11, "connection reset"))
    assert last(shard, 30) == last(shard, 32) == Offer(steps=(2,)), "nobody waits for one that died"


def test_the_beginning_is_a_step_as_well() -> None:
    shard, states = kept()
    states[0] = {}
    for rank in (0, 1):
        shard.say(rank, BACK)
        vote(shard, 10 + rank, (0,))
    for peer in (10, 11):
        shard.say(peer, Resume(step=0))
    assert [shard.told[peer][-1][0] for peer in (10, 11)] == [
        Welcome(send_values=True, step=0),
        Welcome(send_values=False, step=0),
    ]
    shard.give_values(10)
    shard.push(10, 0, shard.frames(0, 0))
    shard.push(11, 0, shard.frames(1, 0))
    assert shard.core.step == 1


def test_without_a_common_step_all_hear_who_has_what() -> None:
    shard, _ = kept(2)
    for rank in (0, 1):
        shard.say(rank, BACK)
        vote(shard, 10 + rank, (4 - rank, 1))
    expected = "the shard has 2; worker 0: 4 and 1; worker 1: 3 and 1. All of them need checkpoints"
    assert expected in str(shard.core.failed) and expected in str(shard.ended[10])


def test_without_any_checkpoint_shards_that_lost_nothing_go_on_as_they_are() -> None:
    """One may be ahead of the other: both then count as many updates."""
    behind, ahead = Shard(make_plan(2, state=True), min_workers=1), Shard(make_plan(2, state=True), min_workers=1)
    for step in range(3):
        ahead.step(step)
        behind.step(step)
    ahead.step(3)
    before = behind.bits()
    behind.push(0, 3, behind.frames(0, 3))  # forgotten: its worker begins anew
    for shard in (behind, ahead):
        for rank in (0, 1):
            shard.say(rank, BACK)
            vote(shard, 10 + rank, ())
        assert last(shard, 10) == Offer(steps=(), newest=shard.core.step)
        shard.say(10, Resume(step=4))
        assert len(shard.told[10]) == 1, "worker 1 has not chosen"
        shard.say(11, Resume(step=4))
        assert shard.core.step == 4 and isinstance(shard.told[10][1][0], Welcome)
    assert behind.bits() == before
    for shard in (behind, ahead):
        for peer, rank in ((10, 0), (11, 1)):
            shard.push(peer, 4, shard.frames(rank, 4))
        assert shard.core.step == 5 and shard.core.failed is None


def test_a_shard_goes_on_as_it_is_only_where_it_lost_nothing() -> None:
    states = Shard(make_plan(2), min_workers=1).core.state_dict()
    fresh, resumed = (Shard(make_plan(2), begin=False, min_workers=1) for _ in range(2))
    resumed.core.load_state_dict(states)
    for name, shard, votes, newest in (
        ("fresh", fresh, ((), ()), -1),
        ("resumed", resumed, ((), ()), -1),
        ("all updates are needed", Shard(make_plan(2)), ((), ()), -1),
        ("a worker has states", Shard(make_plan(2), min_workers=1), ((), (0,)), -1),
        ("nobody has any", Shard(make_plan(2), min_workers=1), ((), ()), 0),
    ):
        for rank, steps in enumerate(votes):
            if shard not in (fresh, resumed):
                shard.say(rank, BACK)
            vote(shard, 10 + rank, steps)
        assert last(shard, 10) == last(shard, 11) == Offer(steps=(0,), newest=newest), name


def test_who_wanted_to_go_back_alone_takes_part_in_the_update_that_waits_for_it() -> None:
    for pushed, begin, updates in ((False, 1, 1), (True, 2, 2)):
        shard = Shard(make_plan(2), min_workers=1)
        shard.step(0)
        shard.push(0, 1, shard.frames(0, 1))
        if pushed:  # of one table: what comes anew would be a second gradient for the same update
            weight = shard.frames(1, 1)
            shard.push(1, 1, {0: weight[0]})
        shard.say(1, BACK)
        shard.join(1, peer=11)
        welcome = shard.told[11][0][0]
        assert isinstance(welcome, Welcome) and welcome.begin == begin and shard.core.step == updates
        if not pushed:
            shard.push(11, 1, shard.frames(1, 1))
            assert shard.core.step == 2, "of both, not of the other alone"


def test_after_the_end_nobody_goes_back() -> None:
    """One that was given up comes after the others have left: it hears where they ended."""
    shard, _ = kept(2, 4, min_workers=1)
    shard.lose(0)
    shard.say(1, Leave())
    vote(shard, 10, (0,))
    assert shard.core.finished and shard.core.failed is None
    assert str(shard.ended[10]).startswith("worker 0 resumes at exchange 0, and the others go on at 5")


def test_with_enough_others_nobody_waits_for_ever() -> None:
    """Worker 2 died with the shard, and the one in its place was never there."""
    states = Shard(make_plan(3), min_workers=2).core.state_dict()
    shard = Shard(make_plan(3), begin=False, min_workers=2)
    shard.core.load_state_dict(states)
    for rank in (0, 1):
        vote(shard, 10 + rank, ())
    assert last(shard, 10) is None and shard.core.awaited == {2}
    shard.carry_out(shard.core.overdue(frozenset({2})))
    assert last(shard, 10) == last(shard, 11) == Offer(steps=(0,))
    for peer in (10, 11):
        shard.say(peer, Resume(step=0))
    for rank in (0, 1):
        shard.push(10 + rank, 0, shard.frames(rank, 0))
    assert shard.core.step == 1 and shard.core.awaited == frozenset()
    shard.say(10, BACK)
    assert shard.core.awaited == {0} and shard.core.overdue(frozenset({1})) == []


def test_at_the_beginning_the_workers_take_their_time() -> None:
    shard = Shard(make_plan(3), begin=False, min_workers=2)
    shard.join(0)
    shard.give_values(0)
    assert shard.core.awaited == frozenset()
    shard.push(0, 0, shard.frames(0, 0))
    assert shard.core.awaited == frozenset(), "a gradient that waits for them is no update without them"
    shard.join(1)
    shard.say(1, BACK)
    assert shard.core.awaited == {1}, "it was here, and is to come back"
    shard.join(1, peer=11)
    shard.push(11, 0, shard.frames(1, 0))
    assert shard.core.step == 0 and shard.core.awaited == frozenset()
    shard.join(2)
    shard.push(2, 0, shard.frames(2, 0))
    shard.say(2, BACK)
    assert shard.core.step == 1 and shard.core.awaited == {2}


def test_one_that_another_shard_refused_has_the_time_to_begin_anew() -> None:
    """Others go on at the other shard, where it hears of that: it closes this session, and joins in the plain way."""
    shard, _ = kept(2, 4)
    for peer in (10, 20):
        shard.say(0, BACK)
        vote(shard, peer, (4, 2))
        shard.carry_out(shard.core.closed(peer, None))
        assert shard.core.failed is None and shard.core.awaited == {0}
        assert shard.core.overdue(frozenset({1})) == []
        shard.join(0, peer=0)
        assert shard.core.awaited == frozenset()
    shard.push(1, 5, shard.frames(1, 5))
    shard.push(0, 5, shard.frames(0, 5))
    assert shard.core.step == 6 and shard.core.failed is None


def test_one_that_does_not_begin_anew_ends_the_training_once_the_time_is_over() -> None:
    shard, _ = kept(2)
    for rank in (0, 1):
        shard.say(rank, BACK)
        vote(shard, 10 + rank, ())
    shard.carry_out(shard.core.closed(10, None))
    assert 11 not in shard.ended
    shard.carry_out(shard.core.overdue(frozenset({0})))
    assert shard.ended[11] == "worker 0 went away before all had gone back to one step: it closed its session"
    assert shard.core.awaited == frozenset()


def test_where_enough_others_go_on_one_that_does_not_begin_anew_is_dropped() -> None:
    shard = Shard(make_plan(3, consistency="backup[b=1]"))
    shard.step(0)
    shard.say(0, BACK)
    vote(shard, 10, ())
    shard.carry_out(shard.core.closed(10, None))
    assert shard.core.awaited == {0}
    shard.carry_out(shard.core.overdue(frozenset({0})))
    for rank in (1, 2):
        shard.push(rank, 1, shard.frames(rank, 1))
    assert shard.core.step == 2 and shard.core.failed is None


def test_two_that_died_together_do_not_keep_each_other_from_going_back() -> None:
    """The shard still waits for their dead processes, for all that is known here."""
    shard = Shard(make_plan(3))
    states: dict[int, dict[str, Any]] = {0: {}}
    shard.core.checkpoints = states
    shard.step(0)
    for rank in (0, 1):
        shard.core.interrupted(rank)
    vote(shard, 30, ())
    assert "the others go on at 1" in str(shard.ended[30]), "nobody wants to go back so far"
    shard.say(2, BACK)
    vote(shard, 12, (0,))
    for peer in (10, 11):
        vote(shard, peer, ())
        assert peer not in shard.ended
    for peer in (10, 11, 12):
        assert last(shard, peer) == Offer(steps=(0,))
