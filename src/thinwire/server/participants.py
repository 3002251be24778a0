"""Who takes part in a shard's training: who joins, goes away, comes back, and goes back with all others.

One that goes away is dropped: with enough others the training goes on, or waits for more; else it ends, and all hear
why.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from thinwire.errors import ConfigError, ProtocolError
from thinwire.quantities import moment_text
from thinwire.schema import Join, Leave, Message, Plan, Refused, Resume, Scalars, Welcome
from thinwire.server.agreement import check_plan, check_version, difference
from thinwire.server.effects import Close, Effect, Send, refused, send_back
from thinwire.server.rollback import Rollback, named
from thinwire.server.rounds import Digests, Maxima
from thinwire.server.standing import Standing
from thinwire.server.state import engine_of, state_of
from thinwire.server.update_engine import UpdateEngine
from thinwire.server.updates import CannotGoOn, Outgoing

MAX_WORKERS = 4096
CLOSED = "it closed its session"
NOT_BACK = "worker {} went away before all had gone back to one step: {}"


class Participants(Standing):
    """The workers of one shard. Args and attributes as for `Standing`."""

    # ---- who comes and goes

    def interrupted(self, peer: int) -> list[Effect]:
        """A peer's connection broke, and its session waits: another process may now take its rank."""
        if peer in self._rollback.voters:
            self._interrupted.add(peer)
        rank = self._ranks.get(peer)
        if rank is None:
            return []
        self._interrupted.add(peer)
        if self._min_workers is None:  # nobody is ever dropped for a short break, and most are short
            return []
        return self._tell_of_break(peer)

    def still_interrupted(self, peer: int) -> list[Effect]:
        """A peer that was interrupted is not back after a moment: the others hear of it, where they have not yet."""
        if self._min_workers is not None or self._failed is not None or peer not in self._ranks:
            return []
        return self._tell_of_break(peer)

    def _tell_of_break(self, peer: int) -> list[Effect]:
        reason = f"worker {self._ranks[peer]} lost its connection at {self.moment}"
        return self._tell(reason, but=peer, interrupted=True)

    def resumed(self, peer: int) -> None:
        """An interrupted peer is back."""
        self._interrupted.discard(peer)

    def closed(self, peer: int, error: str | None) -> list[Effect]:
        """A session is over. In the middle of training its worker is dropped, or the training ends for all."""
        self._interrupted.discard(peer)
        if (voter := self._rollback.voters.get(peer)) is not None and self._failed is None:
            if error is None and self._min_workers is None:
                # Another shard may have refused it, where others go on: it begins anew, and has the time for it.
                self._away.add(voter)
                return self._withdraw(peer, None)
            return self._withdraw(peer, error or CLOSED)
        rank = self._ranks.pop(peer, None)
        if rank is None or self._failed is not None:
            return []
        reason = f"worker {rank} went away at {self.moment}: {error or CLOSED}"
        too_few = self._min_workers is None and len(self._ranks) < self._least
        if not self._initialised or too_few or (self._left and not self._ranks):
            return self._fail(reason)
        return [*self._drop(rank, reason), *self._settle()]

    @property
    def awaited(self) -> frozenset[int]:
        """Who is to come back, where the others go on, or end, without those that do not.

        At the beginning nobody is missing but those who went to come back: the workers of the plan may take their time,
        until all have been here, or an update was made without them. In a training of a fixed number it is those who
        were about to go back, and went.
        """
        if self._failed is not None:
            return frozenset()
        if self._min_workers is None:
            return frozenset(self._away)
        if self._engine is None:
            return frozenset()
        missing = frozenset(self._engine.members.ranks) - self._here
        return missing if self._gathered or self.step > 0 else missing & self._returning

    def overdue(self, ranks: Collection[int]) -> list[Effect]:
        """The time is over for workers that were missing: those who still are, are dropped."""
        effects: list[Effect] = []
        for rank in sorted(gone := self.awaited.intersection(ranks)):
            self._away.discard(rank)
            if self._min_workers is None and len(self._ranks) < self._least:
                return self._fail(NOT_BACK.format(rank, CLOSED))
            self._returning.discard(rank)
            effects += self._drop(rank, f"worker {rank} has not come back at {self.moment}")
        if gone and self._left and not (self._ranks or self._rollback.voters or self.awaited):
            self.finished = True  # those who were here have left, and nobody else comes
        return [*effects, *self._settle()] if gone else []

    def _join(self, peer: int, join: Join) -> list[Effect]:
        if peer in self._ranks or peer in self._rollback.voters:
            raise ProtocolError("a second Join in one session")
        check_version(join.version)
        if self.plan is None:
            check_plan(join.plan)
        elif reason := difference(self.plan, join.plan, begun=self.step > 0):
            raise ProtocolError(reason)
        highest = join.plan.workers if self._min_workers is None else MAX_WORKERS
        if not 0 <= join.rank < highest:
            more = (
                ""
                if self._min_workers is not None
                else (f", as workers={join.plan.workers} says; with --min-workers the server takes more")
            )
            raise ProtocolError(f"rank {join.rank}; this training has ranks 0 … {highest - 1}{more}")
        if self._engine is None:
            self._engine = self._engine_of(join.plan)
            # A shard may hold nothing, where there are more of them than tables: then nobody has values to send.
            self._initialised = not self._engine.tables
        holders = (self._ranks | self._rollback.voters).items()
        holder = next((other for other, rank in holders if rank == join.rank), None)
        if holder is not None and holder not in self._interrupted:
            raise ProtocolError(f"rank {join.rank} is taken: every worker needs a rank of its own")
        if join.rank in self._left and self._min_workers is None:
            raise ProtocolError(f"worker {join.rank} has left this training, and it does not begin again")
        self._away.discard(join.rank)
        if join.steps is not None:
            return self._vote(peer, join.rank, join.steps, holder)
        if self._rollback.voters and not self._ranks:  # where others go on, who wants to go back waits in vain
            return send_back([peer])
        if self._initialised:
            self._engine.check_versions(join.rank, join.have)  # before anybody is replaced
        effects = [] if holder is None else self._replace(holder, join.rank)
        awaited = -1
        if join.rank in self._returning:  # to go back with the others; they have not, and it begins as a new one
            self._returning.discard(join.rank)
            if self._engine.awaits(join.rank) and self._maxima.untouched <= self.step:
                awaited = self.step or -1  # it takes part in the update under way: nothing of it is lost
                self._maxima.drop(join.rank)
                self._digests.drop(join.rank)
            else:
                effects += self._drop(join.rank, f"worker {join.rank} was away at {self.moment}")
        if effects and self._initialised:
            try:
                self._engine.check_versions(join.rank, join.have)
            except ProtocolError as error:  # the updates without the one before are made, and the others hear of them
                return [*effects, Close(peer, refused(str(error)))]
        begin = -1 if join.rank in self._engine.members.ranks else self._engine.admit(join.rank, self._maxima.untouched)
        self._left.discard(join.rank)
        effects += self._welcome(peer, join.rank, join.have, max(begin, awaited))
        if begin >= 0:
            # The others hear of it before the next update, for it says from when on they divide the data otherwise.
            effects += self._tell(f"worker {join.rank} is here from {moment_text(begin, self.steps_each)} on", but=peer)
            effects += self._address(self._engine.go_on())  # where it was one too few that the others waited for
        return effects

    def _engine_of(self, plan: Plan) -> UpdateEngine:
        """Begins a training. Its plan is of a peer: whatever comes of it must not end the server."""
        try:
            return UpdateEngine(plan, self._min_workers)
        except (ProtocolError, ConfigError):
            raise
        except Exception as error:
            raise ProtocolError(f"the plan cannot be served: {type(error).__name__}: {error}") from error

    def _welcome(self, peer: int, rank: int, have: Sequence[int], begin: int) -> list[Effect]:
        """Lets a worker in, and gives it what it lacks."""
        assert self._engine is not None
        values = self._engine.catch_up(rank, have) if self._initialised else []
        self._engine.begin(rank)
        self._ranks[peer] = rank
        self._gathered = self._gathered or self._here >= {*self._engine.members.ranks}
        ask = rank == 0 and not self._initialised
        final = self._engine.final
        history = self._engine.members.history
        welcome = Welcome(
            send_values=ask,
            step=self.step,
            final=-1 if final is None else final,
            begin=begin,
            elastic=self._min_workers is not None,
            memberships=() if history == ((0, tuple(range(self._engine.plan.workers))),) else history,
            exchanges=tuple(self._engine.exchanges.get(rank, ())),
            skips_late=self._skips_late,
        )
        if begin < 0:  # one that begins late takes any step
            self._saved.let_in(rank, self.step)
        saved = self._saved.message()
        first = [] if saved is None else [Send((peer,), saved)]
        return [Send((peer,), welcome), *first, *self._address(values)]

    def _replace(self, holder: int, rank: int) -> list[Effect]:
        """Another process takes the rank of a worker whose connection is broken."""
        self._interrupted.discard(holder)
        over = Close(holder, refused(f"another process has taken rank {rank}, while this one was not connected"))
        if holder in self._rollback.voters:
            self._rollback.withdraw(holder)
            return [over]
        del self._ranks[holder]
        if not self._initialised:
            return [over]
        return [over, *self._drop(rank, f"worker {rank} was not connected at {self.moment}, and is replaced")]

    def _drop(self, rank: int, reason: str) -> list[Effect]:
        """Goes on without a worker, or waits for others, and tells those who are left."""
        assert self._engine is not None
        self._lost.add(rank)
        self._maxima.drop(rank)
        self._digests.drop(rank)
        self._saved.drop(rank)
        effects = self._address(self._engine.drop(rank))
        effects += [
            effect
            for step, largest in self._maxima.completed(self._engine.members.expected)
            for effect in self._address([Outgoing(Scalars(step=step, values=largest))])
        ]
        return [*effects, *self._tell(reason)]

    def _leave(self, peer: int, *, returning: bool) -> list[Effect]:
        assert self._engine is not None
        rank = self._ranks.pop(peer)
        if returning:  # to go back with all the others: nobody is dropped
            self._returning.add(rank)
            return [Close(peer), *self._settle()]
        self._left.add(rank)
        self.finished = not self._ranks and self._left >= set(self._engine.members.ranks)
        if not (self._initialised or self.finished):
            return [Close(peer), *self._fail("a worker left before the training had begun")]
        if self._min_workers is not None:
            # No word of it for people: at the end everybody leaves.
            return [Close(peer), *self._drop(rank, "")]
        scalars = self._maxima.unreachable(self._engine.members.expected, self._left)
        if reason := scalars or self._engine.unreachable(self._left):
            return [Close(peer), *self._fail(reason)]
        return [Close(peer)]

    # ---- going back

    def _vote(self, peer: int, rank: int, steps: tuple[int, ...], holder: int | None) -> list[Effect]:
        """A worker wants to go back: it waits for the others, unless they go on, or are at the end."""
        assert self._engine is not None
        # Where some wait already, a shard was lost, which everybody has to find: one that is cut off does not go on.
        lost = self._min_workers is None and bool(self._rollback.voters)
        others = self.finished or self._ranks.keys() - {holder, *(self._interrupted if lost else ())}
        # They went back without it, and may have removed what it has: it begins late, where shards have parameters.
        given_up = rank not in self._engine.members.ranks and self._engine.plan.downlink != "gradient"
        if (given_up or not self._loses_nothing) and rank not in self._returning and others:
            reason = (
                f"worker {rank} resumes at exchange {named(steps) or 'any'}, and the others go on at {self.step}: "
                "start it without its checkpoint, or resume all workers and shards from the same step"
            )
            return [Close(peer, Refused(reason=reason, step=self.step))]
        effects: list[Effect] = []
        if holder is not None:
            effects += self._replace(holder, rank) if holder in self._rollback.voters else send_back([holder])
            self._ranks.pop(holder, None)
        if self._loses_nothing:  # they joined a shard that was resumed
            effects += send_back(self._ranks)
            self._ranks.clear()
        effects += self._rollback.add(peer, rank, steps)
        return [*effects, *self._settle()]

    def _settle(self) -> list[Effect]:
        """Makes the offer once all are here, and goes back once all have chosen."""
        if self._engine is None or self._ranks:
            return []
        if self._rollback.agreed(self._engine.members.ranks):
            return self._go_back()
        own = {*self.checkpoints, *(() if self._progressed else (self.step,))}
        try:
            return self._rollback.offer(self._engine.members.ranks, own, self._newest)
        except CannotGoOn as unreachable:
            return self._fail(str(unreachable))

    @property
    def _newest(self) -> int:
        """The first step at which the shard may go on as it is; −1 where it may not.

        It must have the parameters, write no checkpoints, and not have lost any update. Workers lose what they had not
        sent, which they may where the training goes on without those that died.
        """
        assert self._engine is not None
        has_all = self._initialised and self._resumed_at < 0 and self._engine.plan.downlink != "gradient"
        return self._engine.newest if has_all and not self.checkpoints and self._min_workers is not None else -1

    def _voted(self, peer: int, message: Message) -> list[Effect]:
        """What a worker says before it is let in."""
        match message:
            case Resume():
                return [*self._rollback.choose(peer, message), *self._settle()]
            case Leave():
                gone = None if message.returning else message.failure or "it left"
                return [Close(peer), *self._withdraw(peer, gone)]
            case _:
                raise ProtocolError(f"{type(message).__name__} came from a worker that is about to go back")

    def _withdraw(self, peer: int, gone: str | None) -> list[Effect]:
        """A worker goes before it was let in; `gone`: for good, and why."""
        rank = self._rollback.voters[peer]
        if gone is not None and self._min_workers is None and len(self._ranks) < self._least:
            del self._rollback.voters[peer]
            return self._fail(NOT_BACK.format(rank, gone))
        self._rollback.withdraw(peer)
        if gone is None:
            return []
        self._returning.discard(rank)
        return [*self._drop(rank, f"worker {rank} went away at {self.moment}: {gone}"), *self._settle()]

    def _go_back(self) -> list[Effect]:
        """All have agreed: the shard becomes what it was at that step, and lets everybody in."""
        assert self._engine is not None
        agreed, step = self._rollback, self._rollback.step
        plan, least = self._engine.plan, self._min_workers
        if agreed.as_it_is:
            self._engine = engine_of(state_of(self._engine, step), least)
        elif self._progressed or step != self.step:
            try:
                self._engine = engine_of(self.checkpoints[step], least) if step else UpdateEngine(plan, least)
            except ConfigError as error:
                return self._fail(f"this shard cannot go back to step {step}: {error}")
            self._initialised = step > 0 or not self._engine.tables
        self._progressed = False
        if self._resumed_at >= 0:
            self._resumed_at = step
        self._rollback, self._maxima, self._digests = Rollback(), Maxima(), Digests()
        self._saved.went_back(step)
        self._returning.clear()
        self._left.clear()
        members = self._engine.members
        if away := set(members.ranks).difference(agreed.voters.values()):
            for rank in away:
                members.drop(rank)
            members.divide_data(self.step)
        for rank in members.ranks:  # where nothing had happened yet, one was to begin late that now does not
            if not members.expects(rank, self.step):
                members.admit(rank, self.step)
        begin = {rank: self._engine.admit(rank) for rank in set(agreed.voters.values()).difference(members.ranks)}
        effects: list[Effect] = []
        for peer, rank in agreed.voters.items():
            effects += self._welcome(peer, rank, agreed.have(rank), begin.get(rank, -1))
        return effects
