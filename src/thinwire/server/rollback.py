"""How all workers and shards go back to one step, after one of the shards was lost.

1. Every worker that lost a shard leaves the others, and joins all of them anew with the steps that it can go on from.
2. Once all workers of a shard have, nothing changes there any more: it offers them those steps that it has as well.
3. Every worker picks the newest that all shards offer. That is the same for all workers, since each shard has told all
   of them the same. The shard goes back to it once all have said so.

Where no worker has checkpoints, there may be no such step, although no shard was lost: all workers were away for too
long. Then every shard goes on with the parameters that it has, at the newest step of any of them.

So one worker alone can make nobody go back. One that goes and comes again meanwhile has the same offer, and the others
keep theirs: were they sent back for its sake, they would take their words back at the other shards, and so send it back
from there, and so on. An offer is void where a worker comes that cannot take it, or has chosen by another one; then all
come again.
"""

from __future__ import annotations

from collections.abc import Collection

from thinwire.errors import ProtocolError
from thinwire.schema import Offer, Resume
from thinwire.server.effects import Effect, Send, send_back
from thinwire.server.updates import CannotGoOn


class Rollback:
    """One round at one shard.

    Attributes:
        voters: the rank of every worker that has joined the round, by its peer.

    Example:
        >>> votes = Rollback()
        >>> votes.add(10, 0, (100, 75)) + votes.add(11, 1, ())  # rank 1 takes any step
        []
        >>> votes.offer((0, 1), {50, 75})
        [Send(peers=(10, 11), message=Offer(steps=(75,), newest=-1), frames=())]
        >>> votes.choose(10, Resume(step=75)) + votes.choose(11, Resume(step=75))
        []
        >>> votes.agreed((0, 1)), votes.step
        (True, 75)
    """

    def __init__(self) -> None:
        self.voters: dict[int, int] = {}
        self._steps: dict[int, tuple[int, ...]] = {}
        self._offered: Offer | None = None
        self._chosen: dict[int, Resume] = {}

    def add(self, peer: int, rank: int, steps: tuple[int, ...]) -> list[Effect]:
        """A worker says which steps it can go on from; none: from any. An offer that it cannot take is void."""
        offered = self._offered
        unable = offered is not None and steps and (offered.newest >= 0 or not set(offered.steps) <= set(steps))
        effects = self._void() if unable else []
        self.voters[peer] = rank
        self._steps[rank] = steps
        return effects if self._offered is None else [Send((peer,), self._offered)]

    def withdraw(self, peer: int) -> None:
        """A worker is no longer there. An offer stands for as long as anybody is there to whom it was made."""
        rank = self.voters.pop(peer)
        del self._steps[rank]
        self._chosen.pop(rank, None)
        if not self.voters:
            self._offered = None

    def _void(self) -> list[Effect]:
        voters = tuple(self.voters)
        self._steps, self.voters, self._offered, self._chosen = {}, {}, None, {}
        return send_back(voters)

    def offer(self, ranks: Collection[int], steps: Collection[int], newest: int = -1) -> list[Effect]:
        """Once the workers of all these ranks have come: tells them which of the shard's steps all of them have.

        Args:
            ranks: who is waited for.
            steps: that the shard can go back to.
            newest: the first step at which it may go on as it is, with workers that take any; −1: it may not.

        Raises:
            CannotGoOn: none.
        """
        if self._offered is not None or not self.voters or not set(ranks) <= self._steps.keys():
            return []
        common = set(steps).intersection(*(each for each in self._steps.values() if each))
        newest = -1 if any(self._steps.values()) else newest
        if not common and newest < 0:
            theirs = "; ".join(f"worker {rank}: {named(each) or 'any'}" for rank, each in sorted(self._steps.items()))
            raise CannotGoOn(
                f"there is no step that this shard and all workers can go back to: the shard has "
                f"{named(steps) or 'none'}; {theirs}. All of them need checkpoints, after the same steps"
            )
        self._offered = Offer(steps=tuple(sorted(common, reverse=True)), newest=newest)
        return [Send(tuple(self.voters), self._offered)]

    def choose(self, peer: int, chosen: Resume) -> list[Effect]:
        """Takes a worker's choice. Another than the others' was made by an offer that is void by now: all come again.

        Raises:
            ProtocolError: the step was not offered.
        """
        offered = self._offered or Offer(steps=())
        if chosen.step not in offered.steps and not 0 <= offered.newest <= chosen.step:
            steps = offered.steps or "none"
            raise ProtocolError(f"step {chosen.step} was chosen to go back to; offered were {steps}")
        if self._chosen and chosen.step != self.step:
            return self._void()
        self._chosen[self.voters[peer]] = chosen
        return []

    def agreed(self, ranks: Collection[int]) -> bool:
        """Whether the workers of all these ranks have chosen, and everybody else who has come."""
        return bool(self.voters) and {*ranks, *self.voters.values()} <= self._chosen.keys()

    @property
    def step(self) -> int:
        """The choice."""
        return next(iter(self._chosen.values())).step

    @property
    def as_it_is(self) -> bool:
        """Whether the choice is to go on with the parameters that the shard has."""
        return self._offered is not None and self.step not in self._offered.steps

    def have(self, rank: int) -> tuple[int, ...]:
        """The table versions that a worker has of the chosen step."""
        return self._chosen[rank].have


def named(steps: Collection[int]) -> str:
    """Steps in words.

    >>> named((75, 100)), named(())
    ('100 and 75', '')
    """
    return " and ".join(str(step) for step in sorted(steps, reverse=True))
