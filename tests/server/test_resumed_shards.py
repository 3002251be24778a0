"""A shard that was resumed takes whoever comes late back to its step, as long as no update was made."""

from __future__ import annotations

from tests.server.conversation import Shard
from tests.server.votes import kept, last, lost, vote
from thinwire.schema import Offer, Resume, Welcome


def test_who_has_joined_a_resumed_shard_in_the_plain_way_comes_again() -> None:
    shard, states = kept(2)
    fresh = Shard(shard.plan, begin=False)
    fresh.core.load_state_dict(states[2])
    fresh.join(1)
    vote(fresh, 10, (2,))
    assert lost(fresh, 1)
    fresh.join(1)
    assert lost(fresh, 1), "the others are about to go back"
    vote(fresh, 11, ())
    for peer in (10, 11):
        assert last(fresh, peer) == Offer(steps=(2,))
        fresh.say(peer, Resume(step=2))
    assert fresh.core.step == 2 and isinstance(fresh.told[10][1][0], Welcome)


def test_a_gradient_that_came_to_a_resumed_shard_before_the_others_did_is_given_up() -> None:
    shard, states = kept(2)
    fresh = Shard(shard.plan, begin=False)
    fresh.core.load_state_dict(states[2])
    fresh.core.checkpoints = states
    fresh.join(1)
    fresh.push(1, 2, fresh.frames(1, 2))
    vote(fresh, 10, (2,))
    assert lost(fresh, 1) and 10 not in fresh.ended
    vote(fresh, 11, ())
    for peer in (10, 11):
        fresh.say(peer, Resume(step=2))
    for step in range(2, 5):
        for rank in (0, 1):
            fresh.push(10 + rank, step, fresh.frames(rank, step))
    assert fresh.core.failed is None and fresh.bits() == shard.bits()
    fresh.core.interrupted(10)
    vote(fresh, 20, (2,))
    assert "the others go on at 5" in str(fresh.ended[20]), "they have made updates since"


def test_a_resumed_shard_that_went_back_further_has_made_updates_at_the_step_it_was_resumed_at() -> None:
    shard, states = kept(2, 4)
    fresh = Shard(shard.plan, begin=False)
    fresh.core.load_state_dict(states[4])
    fresh.core.checkpoints = states
    for rank in (0, 1):
        vote(fresh, 10 + rank, (2,))
    for peer in (10, 11):
        fresh.say(peer, Resume(step=2))
    for step in (2, 3):
        for rank in (0, 1):
            fresh.push(10 + rank, step, fresh.frames(rank, step))
    fresh.core.interrupted(10)
    vote(fresh, 20, (4,))
    assert "the others go on at 4" in str(fresh.ended[20]) and not lost(fresh, 11)
