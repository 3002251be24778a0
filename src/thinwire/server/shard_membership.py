"""The members of a shard: workers join, die and leave, and all agree on one step from which they continue.

A worker says which states it holds (`Join`). Where others train, it is expected from the next clock. Elsewhere the
shard waits until all of its workers have joined, and offers them its steps (`Offer`); all choose the same one, load it
and confirm it (`Resume`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from thinwire.errors import ConfigError, ProtocolError
from thinwire.quantities import moment_text, plain_text
from thinwire.schema import MAX_WORKERS, Join, Leave, Offer, Plan, Resume, Scalars, Welcome
from thinwire.server.agreement import check_plan, check_version, difference
from thinwire.server.effects import Close, Effect, Send, Tell, refused
from thinwire.server.merge_engine import make_engine
from thinwire.server.rounds import Digests, Maxima
from thinwire.server.shard_state import Peer, Presence, ShardState
from thinwire.server.state import engine_of, state_of
from thinwire.server.update_engine import UpdateEngine
from thinwire.server.updates import CannotGoOn, Outgoing

CLOSED = "it closed its session"


class ShardMembership(ShardState):
    """The workers of one shard. Args and attributes as for `ShardState`."""

    # ---- connections and time

    def interrupted(self, peer: int) -> list[Effect]:
        """A peer's connection broke, and its session waits: another process may now take its rank."""
        if peer not in self._peers:
            return []
        self._peers[peer].interrupted = True
        # Without min_workers no worker is dropped for a short break, and most are short.
        return [] if self._min_workers is None else self._tell_of_break(peer)

    def still_interrupted(self, peer: int) -> list[Effect]:
        """A peer that was interrupted is not back after a moment: tells the other workers, unless they know."""
        if self._min_workers is not None or self._failed is not None or peer not in self._peers:
            return []
        return self._tell_of_break(peer)

    def _tell_of_break(self, peer: int) -> list[Effect]:
        reason = f"worker {self._peers[peer].rank} lost its connection at {self.moment}"
        return self._tell(reason, but=peer, interrupted=True)

    def resumed(self, peer: int) -> None:
        """An interrupted peer is back."""
        if peer in self._peers:
            self._peers[peer].interrupted = False

    def closed(self, peer: int, error: str | None) -> list[Effect]:
        """A session is over. In the middle of training its worker is dropped, or the training ends for all."""
        rank = self._forget(peer)
        return [] if rank is None or self._failed is not None else self._gone(rank, error or CLOSED)

    @property
    def awaited(self) -> frozenset[int]:
        """Workers that are to come back: after a time the others continue, or end, without them.

        Workers that have never joined have no time limit until all have joined once; in a training of a fixed number,
        none later either.
        """
        if self._failed is not None or self._engine is None:
            return frozenset()
        waits = {Presence.RETURNING}
        if (self._began or self.step > 0) and self._min_workers is not None:
            waits.add(Presence.EXPECTED)
        members = self._engine.members.ranks
        return frozenset(rank for rank in members if self._presence.get(rank, Presence.EXPECTED) in waits)

    def overdue(self, ranks: Collection[int]) -> list[Effect]:
        """The time is over for workers that were awaited: those who still are, are dropped."""
        effects: list[Effect] = []
        for rank in sorted(gone := self.awaited.intersection(ranks)):
            reason = f"worker {rank} has not come back at {self.moment}"
            self._presence[rank] = Presence.LOST
            if self._too_few:
                return self._fail(reason)
            effects += self._drop(rank, reason)
        if gone and self.left and not (self._peers or self.awaited):
            self.finished = True  # those who were here have left, and no other comes
        return [*effects, *self._gather()]

    # ---- who joins

    def _join(self, peer: int, join: Join) -> list[Effect]:
        rank = join.rank
        if peer in self._peers:
            raise ProtocolError("a second Join in one session")
        check_version(join.version)
        effects: list[Effect] = []
        try:
            self._check_join(join)
        except ProtocolError:
            if self._trained or not all(each.interrupted for each in self._peers.values()):
                raise
            # Only broken connections hold this plan, and before the first gradient: this worker brings its own.
            effects = self._fail("another training began here while this worker was not connected")
            self._check_join(join)
        engine = self._engine or self._engine_of(join.plan)
        if self._engine is None:
            # A shard may hold nothing, where there are more of them than tables: there are no values to send then.
            self._engine, self._initialised = engine, not engine.tables
        holder = next((other for other, each in self._peers.items() if each.rank == rank), None)
        if holder is not None and not self._peers[holder].interrupted:
            raise ProtocolError(f"rank {rank} is taken: every worker needs a rank of its own")
        if self._presence.get(rank) is Presence.LEFT and self._min_workers is None:
            raise ProtocolError(f"worker {rank} has left this training, and it does not begin again")
        others = self._ranks_that_are(Presence.TRAINING, Presence.LEFT) - {rank}
        goes_on = bool(others) or not engine.terms.has_common_clock
        if holder is not None:
            self._forget(holder)
            reason = f"another process has taken rank {rank}, while this one was not connected"
            effects.append(Close(holder, refused(reason), told=True))
        self._peers[peer] = Peer(rank, join.steps)
        self._presence[rank] = Presence.JOINED
        return [*effects, *(self._admit(peer, rank) if goes_on else self._gather())]

    def _check_join(self, join: Join) -> None:
        """Raises ProtocolError where a worker's plan or rank is not of this training."""
        if self.plan is None:
            check_plan(join.plan)
        elif reason := difference(self.plan, join.plan, begun=self.step > 0):
            raise ProtocolError(reason)
        elastic = self._min_workers is not None
        highest = MAX_WORKERS if elastic else join.plan.workers
        if not 0 <= join.rank < highest:
            more = f", as workers={join.plan.workers} says; with --min-workers the server takes more"
            raise ProtocolError(f"rank {join.rank}; this training has ranks 0 … {highest - 1}{'' if elastic else more}")

    def _engine_of(self, plan: Plan) -> UpdateEngine:
        """Begins a training. Its plan is of a peer: whatever comes of it must not end the server."""
        try:
            return make_engine(plan, self._min_workers, self._time)
        except (ProtocolError, ConfigError):
            raise
        except Exception as error:
            raise ProtocolError(f"the plan cannot be served: {type(error).__name__}: {error}") from error

    def _admit(self, peer: int, rank: int) -> list[Effect]:
        """Expects a worker that joins while others train, and tells it from which clock on."""
        assert self._engine is not None
        engine, effects = self._engine, list[Effect]()
        member = rank in engine.members.ranks
        if not engine.terms.has_common_clock:
            begin = 0
            if not member:
                engine.admit(rank)
        elif member and not self._initialised:
            begin = 0
        elif member and self._maxima.first_unbegun <= self.step and engine.awaits(rank):
            begin = self.step  # nothing of it is in the update under way, which waits for it
            self._maxima.drop(rank)
            self._digests.drop(rank)
        else:
            if member:
                effects += self._drop(rank, f"worker {rank} was away at {self.moment}")
            begin = engine.admit(rank, self._maxima.first_unbegun)
            # The others hear of it before the next update, for it says from when on they divide the data otherwise.
            effects += self._tell(f"worker {rank} is here from {moment_text(begin, self.steps_each)} on", but=peer)
            effects += self._address(engine.go_on())  # where it was one too few that the others waited for
        return [*effects, *self._offer([peer], Offer(begin=begin))]

    # ---- from where all continue

    def _gather(self) -> list[Effect]:
        """Once all workers have joined and none trains, offers them its steps; loads the step that all chose."""
        if self._engine is None or self._failed is not None or not self._peers or self.left:
            return []
        if not self._ranks_that_are(Presence.JOINED) >= {*self._engine.members.ranks, *self.here}:
            return []
        offer = self._possible(self._engine)
        changed = [peer for peer, each in self._peers.items() if each.offer != offer]
        for peer in changed:  # one that has chosen by another offer joins again
            self._peers[peer].choice = None
        chosen = {each.rank: each.choice for each in self._peers.values() if each.choice is not None}
        steps = {each.step for each in chosen.values()}
        if len(chosen) == len(self._peers) and len(steps) == 1:
            return self._go_back(step := steps.pop(), chosen, as_it_is=step not in offer.steps)
        return self._offer(changed, offer)

    def _possible(self, engine: UpdateEngine) -> Offer:
        """From where this shard can continue. Raises CannotGoOn where there is no such step."""
        own = {*self.checkpoints, *(() if self._progressed else (self.step,))}
        held = {step: sum(step in each.steps for each in self._peers.values()) for step in own}
        gives_model = engine.plan.downlink != "gradient"
        if not gives_model:
            own = {step for step in own if step == 0 or held[step] == len(self._peers)}
        keeps = self._progressed and not self.checkpoints and self._min_workers is not None and gives_model
        as_it_is = keeps or all(table.spec.state for table in self.tables)
        if not own and not as_it_is:
            said = sorted((f"worker {each.rank}", each.steps) for each in self._peers.values())
            have = "; ".join(f"{who}: {_named(steps)}" for who, steps in (("the shard", held), *said))
            raise CannotGoOn(
                f"there is no step that this shard and all workers can go back to: {have}. All of them need "
                "checkpoints, after the same steps"
            )
        steps = tuple(sorted(own, reverse=True))
        return Offer(steps=steps, held=tuple(held[step] for step in steps), newest=engine.newest if as_it_is else -1)

    def _offer(self, peers: Collection[int], offer: Offer) -> list[Effect]:
        for peer in peers:
            self._peers[peer].offer = offer
        return [Send(tuple(peers), offer)] if peers else []

    def _resume(self, peer: int, message: Resume) -> list[Effect]:
        """A worker says from where it continues: at once where others train, else once all have said the same."""
        assert self._engine is not None
        engine, rank, offer = self._engine, self._peers[peer].rank, self._peers[peer].offer
        if offer is None or self._presence[rank] is not Presence.JOINED:
            raise ProtocolError("Resume came without an offer")
        if offer.begin >= 0:
            if engine.terms.has_common_clock and message.step < offer.begin:
                raise ProtocolError(f"it continues from step {message.step}, and was expected from {offer.begin} on")
            if message.step > offer.begin and engine.terms.has_common_clock:  # another shard expects it later
                engine.members.admit(rank, message.step)
            return [*self._welcome(peer, message), *self._address(engine.go_on()), *self._complete_scalars()]
        if message.step not in offer.steps and not 0 <= offer.newest <= message.step:
            return []  # it was chosen by an earlier offer: the worker has been told, and joins again
        self._peers[peer].choice = message
        return self._gather()

    def _go_back(self, step: int, chosen: Mapping[int, Resume], *, as_it_is: bool) -> list[Effect]:
        """All have chosen: the shard loads its state of that step, and admits all workers."""
        assert self._engine is not None
        least = self._min_workers
        if as_it_is:
            self._engine = engine_of(state_of(self._engine, step), least, self._time)
        elif self._progressed or step != self.step:
            try:
                self._engine = (
                    engine_of(self.checkpoints[step], least, self._time) if step else self._engine_of(self._engine.plan)
                )
            except ConfigError as error:
                return self._fail(f"this shard cannot go back to step {step}: {error}")
            self._initialised = step > 0 or not self._engine.tables
        self._progressed, self._began = False, True
        self._maxima, self._digests = Maxima(), Digests()
        members = self._engine.members
        for rank in (away := set(members.ranks).difference(chosen)):
            members.drop(rank)
            self._presence[rank] = Presence.LOST
        if away:
            members.divide_data(self.step)
        for rank in members.ranks:  # where nothing had happened yet, one was to begin late that now does not
            members.admit(rank, self.step)
        for rank in sorted(chosen.keys() - {*members.ranks}):
            self._engine.admit(rank)
        return [effect for peer, each in self._peers.items() for effect in self._welcome(peer, chosen[each.rank])]

    def _welcome(self, peer: int, resume: Resume) -> list[Effect]:
        """Admits a worker, and sends it the tables that it lacks."""
        assert self._engine is not None
        engine, rank = self._engine, self._peers[peer].rank
        values = engine.catch_up(rank, resume.have) if self._initialised else []
        engine.begin(rank)
        self._presence[rank] = Presence.TRAINING
        history = engine.members.history
        welcome = Welcome(
            send_values=rank == 0 and not self._initialised,
            step=self.step,
            final=-1 if engine.final is None else engine.final,
            elastic=self._min_workers is not None,
            memberships=() if history == ((0, tuple(range(engine.plan.workers))),) else history,
            exchanges=tuple(engine.exchanges.get(rank, ())),
        )
        return [Send((peer,), welcome), *self._address(values)]

    # ---- who goes

    def _forget(self, peer: int) -> int | None:
        """Forgets a session; returns its worker's rank, if it had joined."""
        gone = self._peers.pop(peer, None)
        return None if gone is None else gone.rank

    @property
    def _too_few(self) -> bool:
        """Whether a training of a fixed number cannot continue with the workers that are here, or about to be."""
        there = self._ranks_that_are(Presence.JOINED, Presence.TRAINING, Presence.RETURNING)
        return self._min_workers is None and len(there) < self._least

    def _gone(self, rank: int, why: str) -> list[Effect]:
        """A worker will not return: the others continue, or the training ends."""
        reason = f"worker {rank} went away at {self.moment}: {why}"
        trained, self._presence[rank] = self._presence[rank] is Presence.TRAINING, Presence.LOST
        if not self._began and (rank == 0 or self._min_workers is None):
            self._presence[rank] = Presence.EXPECTED  # the others wait for it, as for one that has never come
            return [Tell(f"{plain_text(reason)}, before the training had begun")]
        no_values = not self._initialised and (trained or rank == 0)
        if no_values or self._too_few or (self.left and not self._peers):
            return self._fail(reason)
        return [*self._drop(rank, reason), *self._gather()]

    def _drop(self, rank: int, reason: str) -> list[Effect]:
        """Continues without a worker, or waits for others, and informs the remaining ones."""
        assert self._engine is not None
        self._maxima.drop(rank)
        self._digests.drop(rank)
        effects = self._address(self._engine.drop(rank))
        return [*effects, *self._complete_scalars(), *self._tell(reason)]

    def _complete_scalars(self) -> list[Effect]:
        """Sends the maxima that no worker is waited for any more."""
        assert self._engine is not None
        done = self._maxima.completed(self._engine.members.expected)
        return self._address([Outgoing(Scalars(step=step, values=largest)) for step, largest in done])

    def _leave(self, peer: int, leave: Leave) -> list[Effect]:
        assert self._engine is not None
        trained = self._presence[self._peers[peer].rank] is Presence.TRAINING
        rank = self._forget(peer)
        assert rank is not None
        if leave.returning:
            self._presence[rank] = Presence.RETURNING
            return [Close(peer), *self._gather()]
        if leave.failure or not trained:
            return [Close(peer), *self._gone(rank, f"it failed with {leave.failure}" if leave.failure else "it left")]
        self._presence[rank] = Presence.LEFT
        self.finished = not self._peers and set(self.left) >= set(self._engine.members.ranks)
        if not (self._initialised or self.finished):
            return [Close(peer), *self._fail("a worker left before the training had begun")]
        if self._engine.terms.decoupled:
            self._engine.members.least = 1  # those who are left end their steps, too, however few they are
        if self._min_workers is not None or self._engine.terms.decoupled:
            # No word of it for people: at the end everybody leaves.
            return [Close(peer), *self._drop(rank, "")]
        scalars = self._maxima.unreachable(self._engine.members.expected, self.left)
        if reason := scalars or self._engine.unreachable(self.left):
            return [Close(peer), *self._fail(reason)]
        return [Close(peer)]


def _named(steps: Collection[int]) -> str:
    """Steps in words.

    >>> _named((75, 100)), _named(())
    ('100 and 75', 'none')
    """
    return " and ".join(str(step) for step in sorted(steps, reverse=True)) or "none"
