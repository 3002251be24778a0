"""The contributions of learners, from arrival to merge (Decoupled DiLoCo, arXiv 2604.21428).

Every learner has at most one contribution waiting for each tensor: a newer one is added to it. A tensor is **due** when
a quorum has contributed, and either all learners have or the grace window is over. The window begins with the quorum.
It ends before the fastest contributor's next contribution is expected, by measured intervals: waiting longer would
delay a merge that this learner could use.

    weight = examples · (examples / steps) · (1 + s)^-discount        s: versions since the learner's own

Weights are normalised over the contributions that are merged. The mean is then scaled by the share of the live learners
that contributed: many merges of a few learners each move the model as far as few merges of all.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.codecs.flats import Flats
from thinwire.codecs.tensor_set import Checked, TensorSet
from thinwire.codecs.tensors import FloatArray
from thinwire.errors import FrameError
from thinwire.policies.consistency import Quorum

ENTRY = np.dtype(
    [
        ("waits", np.bool_),  # whether a contribution waits
        ("examples", np.float64),  # of those that wait
        ("steps", np.float64),  # of those that wait
        ("base", np.int64),  # the oldest version that one of them started from
        ("step", np.int64),  # inner steps of the newest one that came; -1 before
        ("at", np.float64),  # when that came, in seconds
        ("interval", np.float64),  # seconds between the last two; infinite before the second
        ("ended", np.bool_),  # whether the learner has ended its steps
    ]
)
"""One learner and one tensor."""
NOTHING_CAME = (False, 0.0, 0.0, 0, -1, 0.0, np.inf, False)


class Merge(NamedTuple):
    """The contributions in one tensor's mean.

    Args:
        ranks: whose contributions, in ascending order.
        steps: for each, the inner steps that the learner had taken.
        weights: of each.
        num_merged: how many contributions, those of processes that are gone included.
        share: of the live learners, how many contributed.
        ended: whether all learners have ended their steps.
    """

    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    weights: tuple[float, ...]
    num_merged: int
    share: float
    ended: bool


@dataclass(slots=True, eq=False)
class Learner:
    """One learner.

    Args:
        rank: its number.
        gradients: its newest contribution to each tensor, while it waits.

    Attributes:
        is_known: whether the process that contributed still trains; only that one must know what was merged.
        rates: the outer optimizer's learning rates, as it sent them last.
        sums: by tensor, the sum of what waited before `gradients`.
    """

    rank: int
    gradients: list[Checked]
    is_known: bool = True
    rates: tuple[float, ...] = ()
    sums: dict[int, FloatArray] = field(default_factory=dict)


class Contributions:
    """The contributions to one shard's tensors. Places in the set name them, in ascending order.

    Args:
        policy: the quorum, the grace window and the weights.
        tensors: the received tensors.
        sums: where merged means are written.
        radial: for each tensor whether directions and lengths are averaged apart.

    Attributes:
        examples: that each tensor's versions hold so far.
    """

    def __init__(self, policy: Quorum, tensors: TensorSet, sums: Sequence[FloatArray], radial: Sequence[bool]) -> None:
        size = len(sums)
        self.examples = np.zeros(size)
        self._policy, self._tensors, self._sums, self._radial = policy, tensors, sums, radial
        self._learners: list[Learner] = []
        self._entries = np.zeros((0, size), ENTRY)
        """By learner and tensor."""
        self._until = np.full(size, np.inf)
        """When each tensor's grace window ends; infinite before the quorum."""
        self._over = np.zeros(size, np.bool_)
        """Tensors whose last version was merged."""

    def newest_step(self, rank: int) -> NDArray[np.int64]:
        """Returns by tensor the inner steps of a learner's newest contribution; -1 before."""
        row = self._row(rank)  # which may add one
        steps: NDArray[np.int64] = self._entries["step"][row]
        return steps

    def begin(self, rank: int) -> None:
        """Another process has a rank now. The contributions of the one before still count."""
        row = self._row(rank)
        self._learners[row].is_known = False
        self._drop_gone()

    def receive(
        self,
        rank: int,
        places: Sequence[int],
        gradients: Sequence[Checked],
        *,
        step: int,
        steps: int,
        examples: float,
        bases: Sequence[int],
        rates: tuple[float, ...],
        ended: bool,
        now: float,
    ) -> None:
        """Takes one learner's contribution.

        Args:
            rank: of the learner.
            places: of the tensors.
            gradients: one for each, as `TensorSet.add` takes them; None for no change.
            step, steps, examples, bases, rates, ended: as in a `Contribution`.
            now: in seconds.
        """
        row, at = self._row(rank), np.asarray(places, np.int64)
        learner, entries = self._learners[row], self._entries[row]
        learner.rates = rates
        for place, gradient, base in zip(places, gradients, bases, strict=True):
            if gradient is None:
                continue
            if entries["waits"][place]:
                learner.sums[place] = self._decoded(learner, place)
                base = min(base, int(entries["base"][place]))
            learner.gradients[place] = gradient
            entries["base"][place], entries["waits"][place] = base, True
            entries["steps"][place] += steps
            entries["examples"][place] += examples
        later = at[entries["step"][at] >= 0]
        entries["interval"][later] = now - entries["at"][later]
        entries["at"][at], entries["step"][at], entries["ended"][at] = now, step, ended
        if not ended:
            self._over[at] = False

    def due(self, live: Collection[int], now: float) -> list[int]:
        """Returns the places of the tensors to merge now.

        Args:
            live: the ranks that are expected to contribute.
            now: in seconds.
        """
        has_quorum, has_all, ended = self._state(live)
        begins = has_quorum & np.isinf(self._until)
        if begins.any():
            self._until[begins] = now + self._window(now)[begins]
        self._until[~has_quorum] = np.inf
        is_due = (has_quorum & (has_all | (self._until <= now))) | (ended & ~self._over)
        places: list[int] = np.flatnonzero(is_due).tolist()
        return places

    @property
    def next_at(self) -> float | None:
        """When the first grace window ends, in seconds; None where none has begun."""
        first = float(self._until.min(initial=np.inf))
        return None if np.isinf(first) else first

    def rates_of(self, places: Sequence[int]) -> tuple[float, ...] | None:
        """Returns the learning rates of the lowest rank that contributed to one of some tensors; None without any."""
        waits = self._entries["waits"][:, list(places)].max(1, initial=False).tolist()
        return next((learner.rates for learner, is_in in zip(self._learners, waits, strict=True) if is_in), None)

    def merge(self, places: Sequence[int], versions: Sequence[int], live: Collection[int]) -> list[Merge]:
        """Writes the weighted means of some tensors' contributions, and forgets these.

        Args:
            places: of the tensors.
            versions: that they have.
            live: as for `due`.

        Raises:
            FrameError: a contribution holds a damaged payload; the text says whose.
        """
        at = np.asarray(places, np.int64)
        *_, ended = self._state(live)
        entries = self._entries[:, at]
        behind = np.maximum(np.asarray(versions) - entries["base"], 0)
        speed = entries["examples"] / np.maximum(entries["steps"], 1)
        raw = np.where(entries["waits"], entries["examples"] * speed * (1.0 + behind) ** -self._policy.discount, 0.0)
        shares = raw / np.maximum(raw.sum(0), np.finfo(np.float64).tiny)
        merges = []
        for index, place in enumerate(places):
            rows = np.flatnonzero(entries["waits"][:, index]).tolist()
            here = [(self._learners[row], float(shares[row, index])) for row in rows]
            share = min(1.0, len(rows) / max(1, len(live)))
            self._average(place, here, scale=share)
            known = [row for row in rows if self._learners[row].is_known]
            merges.append(
                Merge(
                    tuple(self._learners[row].rank for row in known),
                    tuple(entries["step"][known, index].tolist()),
                    tuple(shares[known, index].tolist()),
                    len(rows),
                    share,
                    bool(ended[place]),
                )
            )
        self.examples[at] += np.where(entries["waits"], entries["examples"], 0.0).sum(0)
        self._entries["waits"][:, at] = False
        self._entries["steps"][:, at] = self._entries["examples"][:, at] = 0
        self._until[at], self._over[at] = np.inf, ended[at]
        self._drop_gone()
        return merges

    def _row(self, rank: int) -> int:
        """Returns the row of the learner that has a rank now."""
        for row, learner in enumerate(self._learners):
            if learner.rank == rank and learner.is_known:
                return row
        row = sum(learner.rank <= rank for learner in self._learners)
        self._learners.insert(row, Learner(rank, [None] * len(self._sums)))
        self._entries = np.insert(self._entries, row, np.array(NOTHING_CAME, ENTRY), axis=0)
        return row

    def _drop_gone(self) -> None:
        """Forgets learners without a process and without a waiting contribution."""
        if all(learner.is_known for learner in self._learners):
            return
        waits = self._entries["waits"].max(1, initial=False).tolist()
        kept = [row for row, each in enumerate(self._learners) if each.is_known or waits[row]]
        self._learners, self._entries = [self._learners[row] for row in kept], self._entries[kept]

    def _state(self, live: Collection[int]) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
        """Returns by tensor whether a quorum has contributed, whether all have, and whether all have ended."""
        alive = frozenset(live)
        here = [row for row, each in enumerate(self._learners) if each.is_known and each.rank in alive]
        waits, ended = self._entries["waits"], self._entries["ended"]
        num_in = waits.sum(0)
        num_missing = (~(waits | ended)[here]).sum(0) + len(live) - len(here)
        has_quorum = (num_in > 0) & (num_in >= np.minimum(self._policy.k, num_in + num_missing))
        return has_quorum, num_missing == 0, (ended[here].sum(0) == len(live)) & (len(live) > 0)

    def _window(self, now: float) -> NDArray[np.float64]:
        """Returns by tensor how long a grace window that begins now is, in seconds."""
        known = np.array([[learner.is_known] for learner in self._learners], np.bool_)
        contributes = self._entries["waits"] & ~self._entries["ended"] & known
        next_at = np.where(contributes, self._entries["at"] + self._entries["interval"], np.inf).min(0, initial=np.inf)
        window: NDArray[np.float64] = np.clip(next_at - now, 0.0, self._policy.grace)
        return window

    def _average(self, place: int, here: Sequence[tuple[Learner, float]], *, scale: float) -> None:
        """Writes one tensor's mean, times `scale`."""
        total, length = self._sums[place], 0.0
        total[...] = 0
        for learner, share in here:
            change = self._decoded(learner, place)
            if self._radial[place]:
                norm = float(np.linalg.norm(change))
                length += share * norm
                change /= max(norm, float(np.finfo(np.float32).tiny))
            change *= np.float32(share if self._radial[place] else share * scale)
            total += change
        if self._radial[place] and (norm := float(np.linalg.norm(total))) > 0:
            total *= np.float32(scale * length / norm)

    def _decoded(self, learner: Learner, place: int) -> FloatArray:
        """Returns the sum of one learner's contributions to a tensor, and drops them."""
        before = learner.sums.pop(place, None)
        change = np.zeros_like(self._sums[place]) if before is None else before
        newest, learner.gradients[place] = learner.gradients[place], None
        try:
            self._tensors.at([place]).add([newest], Flats.of([change]))
        except FrameError as error:
            raise FrameError(f"the contribution of worker {learner.rank}: {error}") from error
        return change
