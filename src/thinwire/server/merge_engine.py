"""The tables of learners that never wait: an update merges the contributions that have come (`contributions.py`).

Learners count their own steps. Versions are common to all: every update is encoded once and sent to all learners.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from thinwire.errors import ProtocolError
from thinwire.optimizers.options import Settings
from thinwire.optimizers.outer_momentum import Part, part_of
from thinwire.packets import EncodedTensor, portions
from thinwire.policies.consistency import Quorum, consistency
from thinwire.schema import Contribution, Merged, Plan
from thinwire.server.contributions import Contributions, Merge
from thinwire.server.downlinks import ModelMomentum
from thinwire.server.update_engine import MAX_STEP, UpdateEngine
from thinwire.server.updates import Outgoing

MAX_EXAMPLES = 2.0**53
"""That one contribution, or one training, can count exactly."""


def make_engine(plan: Plan, least: int | None, now: Callable[[], float]) -> UpdateEngine:
    """Returns the engine of a plan's consistency policy. Args and errors as for `UpdateEngine`; `now` in seconds."""
    policy = consistency(plan.consistency)
    return MergeEngine(plan, least, policy, now) if isinstance(policy, Quorum) else UpdateEngine(plan, least)


class MergeEngine(UpdateEngine):
    """The tables of a plan with the policy `Quorum`.

    Args:
        plan, least: as for `UpdateEngine`.
        policy: the plan's.
        now: returns a time in seconds.
    """

    def __init__(self, plan: Plan, least: int | None, policy: Quorum, now: Callable[[], float]) -> None:
        super().__init__(plan, least)
        self._policy, self._now = policy, now
        radial = [policy.merge == "radial" and table.spec.group == 0 for table in self._trained]
        self.contributions = Contributions(policy, self._pushes, [table.sum for table in self._trained], radial)

    @property
    def merges_at(self) -> float | None:
        """When `go_on` is to be called next, in seconds; None where nothing waits for a time."""
        return self.contributions.next_at if len(self.members.ranks) >= self.members.least else None

    def begin(self, rank: int) -> None:
        super().begin(rank)
        self.contributions.begin(rank)

    def contribute(self, rank: int, message: Contribution, frames: tuple[EncodedTensor, ...]) -> list[Outgoing]:
        """Takes one learner's contribution; returns the merges to send.

        Args:
            rank: of the learner.
            message: the contribution.
            frames: one for each of its tables.

        Raises:
            ProtocolError: it is not one that the plan and the policy allow; nothing has changed.
        """
        places = self._check_contribution(rank, message, frames)
        checked, refused = self._check(places, frames)
        if refused:
            raise ProtocolError(f"the contribution to {self._trained[refused[0]].spec.name!r} holds NaN or Inf")
        self.contributions.receive(
            rank,
            places,
            checked,
            step=message.step,
            steps=message.steps,
            examples=message.examples,
            bases=message.bases,
            rates=message.rates,
            ended=message.ended,
            now=self._now(),
        )
        return self.go_on()

    def go_on(self) -> list[Outgoing]:
        """Merges the tables that are due; returns the merges to send."""
        live = self.members.ranks
        if len(live) < self.members.least:
            return []
        due = self.contributions.due(live, self._now())
        return self._merge(due) if due else []

    def _check_contribution(self, rank: int, message: Contribution, frames: tuple[EncodedTensor, ...]) -> list[int]:
        """Returns the places of a contribution's tables. Raises ProtocolError where it is not allowed."""
        tables = message.tables
        if not len(tables) == len(frames) == len(message.bases):
            raise ProtocolError(
                f"a contribution of {len(tables)} tables, {len(message.bases)} versions and {len(frames)} frames"
            )
        if any(index not in self._places for index in tables) or list(tables) != sorted({*tables}):
            raise ProtocolError(f"a contribution to tables {tables[:8]}; they ascend, below {len(self.tables)}")
        if not 1 <= message.step < MAX_STEP or not 0 <= message.steps <= message.step:
            raise ProtocolError(f"a contribution of {message.steps} steps came after step {message.step}")
        counted = 0 < message.examples <= MAX_EXAMPLES and message.steps > 0  # not NaN either
        if any(len(frame) for frame in frames) and not counted:
            raise ProtocolError(
                f"a contribution of {message.examples} examples in {message.steps} steps; both are above 0"
            )
        if not (message.ended or all(len(frame) for frame in frames)):
            raise ProtocolError("a contribution without values; they are left out where a learner has ended alone")
        if len(message.rates) != len(self.plan.groups) or not all(map(math.isfinite, message.rates)):
            raise ProtocolError(
                f"learning rates {message.rates} came for {len(self.plan.groups)} parameter groups of finite ones"
            )
        places = [self._places[index] for index in tables]
        last = self.contributions.newest_step(rank)
        for index, place, base in zip(tables, places, message.bases, strict=True):
            table, before = self.tables[index], int(last[place])
            if not 0 <= base <= table.version:
                raise ProtocolError(
                    f"a contribution to {table.spec.name!r} started from version {base}, which was never published: "
                    f"the newest is {table.version}"
                )
            least = before + (1 if message.ended else self._policy.h)
            if before >= 0 and message.step < least and len(frames[tables.index(index)]):
                raise ProtocolError(
                    f"a contribution to {table.spec.name!r} came at step {message.step}, after that of step {before}: "
                    f"h={self._policy.h} inner steps lie between two"
                )
        return places

    def _merge(self, places: Sequence[int]) -> list[Outgoing]:
        """Makes one new version of each of some tables, for all learners."""
        tables = [self._trained[place] for place in places]
        rates = self.contributions.rates_of(places)
        merges = self.contributions.merge(places, [table.version for table in tables], self.members.ranks)
        changed = [place for place, each in zip(places, merges, strict=True) if each.num_merged]
        if changed:
            assert rates is not None
            self._step([self._trained[place] for place in changed], Settings(rates, self.plan.groups))
        for table, each in zip(tables, merges, strict=True):
            if isinstance(table.downlink, ModelMomentum):
                table.downlink.part = part_of(self.plan.momentum_of(table.spec), each.share)
        made = self._encode_together(changed, None)
        messages: dict[tuple[int, Merge, Part], list[tuple[int, EncodedTensor]]] = {}
        for place, table, each in zip(places, tables, merges, strict=True):
            sent = table.publish(table.sum if each.num_merged else None, made=made.get(place))
            part = table.downlink.part if isinstance(table.downlink, ModelMomentum) else ()
            messages.setdefault((table.version, each, part), []).append((self._indices[place], sent))
        outgoing: list[Outgoing] = []
        for (version, each, momentum), frames in messages.items():
            frames.sort(key=lambda pair: pair[0])
            for span in portions([frame for _, frame in frames]):
                message = Merged(
                    version=version,
                    tables=tuple(index for index, _ in frames[span]),
                    ranks=each.ranks,
                    steps=each.steps,
                    weights=each.weights,
                    momentum=momentum,
                    examples=float(self.contributions.examples[self._places[frames[span][0][0]]]),
                    ended=each.ended,
                )
                outgoing.append(Outgoing(message, tuple(frame for _, frame in frames[span])))
        return outgoing

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "examples": self.contributions.examples.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.contributions.examples[:] = np.array(state["examples"], np.float64)
