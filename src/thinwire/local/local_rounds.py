"""Local rounds of one worker: it exchanges fragments by the timetable, and continues from the averages. Sans-IO.

Methods that exchange are generators: with servers they yield sends and receives, among ranks nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec
import torch

from thinwire.errors import ConfigError, ProtocolError, check_keys
from thinwire.local.parameters import SharedParameters
from thinwire.local.rounds import Rounds
from thinwire.local.steering import Steering
from thinwire.policies.designs import Design
from thinwire.policies.differences import differences
from thinwire.states import check_sizes, read

T = TypeVar("T")
Procedure: TypeAlias = Generator[Any, None, T]


class Reducer(Protocol):
    """Averages what workers have changed, and moves the shared values by it."""

    def begin_exchange(self, fragments: Sequence[int]) -> Procedure[bool]:
        """Sends this worker's changes of some fragments; returns whether all of them are finite numbers."""

    def take_averages(self, fragments: Sequence[int]) -> Procedure[Sequence[int]]:
        """Waits for the averages of some fragments, and moves the shared values; returns fragments that all refused."""

    def end_round(self) -> None:
        """Called when every fragment was exchanged once more."""


class SavedLocalRounds(msgspec.Struct, frozen=True):
    """What `LocalRounds.state_dict` returned."""

    rounds: dict[str, Any]
    offsets: dict[str, torch.Tensor]
    local: dict[str, Any] | None = None
    coded: dict[str, Any] = {}


class LocalRounds:
    """The rounds of one worker.

    Args:
        design: of local updates.
        timetable: where it stands.
        shared: the parameters that all workers have in common.
        reducer: the way to the other workers.

    Attributes:
        timetable: the same.
        shared: the same.
        steering: leads the momenta of the worker's own optimizer at updates that this worker had a part in; None: they
            are left alone.
        forget: clears NaN and Inf from the state of the worker's own optimizer.
    """

    def __init__(self, design: Design, timetable: Rounds, shared: SharedParameters, reducer: Reducer) -> None:
        assert design.local is not None
        self.timetable, self.shared = timetable, shared
        self.steering: Steering | None = None
        self.forget: Callable[[], None] = lambda: None
        self._design, self._updates, self._reducer = design, design.local, reducer
        self._copies: dict[str, torch.Tensor] = {}

    @property
    def awaits_any(self) -> bool:
        """Whether averages are still to be taken into the local parameters."""
        return any(map(self.timetable.awaits, self.timetable.every))

    @property
    def are_weights_shared(self) -> bool:
        """Whether the model has the shared values, once all due averages are merged."""
        timetable, updates = self.timetable, self._updates
        waits = any(timetable.awaits(each) for each in timetable.every if each not in timetable.to_merge())
        keeps = updates.keep or (updates.keep_unsent and any(each.withheld for each in self.shared.tensors))
        ended = not (timetable.steps_in_round or waits or keeps or len(timetable.every) > 1)
        return self.shared.evaluating or timetable.is_flushed or ended

    def end_step(self) -> Procedure[None]:
        """Ends an inner step of the worker's own optimizer; sends the fragments that are due."""
        timetable = self.timetable
        if due := timetable.due():
            yield from self._begin(due)
        if timetable.ends_round:
            self._end_round()
            if self.steering is not None:
                self.steering.pushed()
        timetable.iteration += 1

    def continue_due(self) -> Procedure[None]:
        """Takes the averages that the next inner step needs into the local parameters."""
        if due := self.timetable.to_merge():
            yield from self.wait(due)

    def wait(self, fragments: Sequence[int]) -> Procedure[None]:
        """Waits for the averages of some fragments, and takes those that are due into the local parameters."""
        timetable = self.timetable
        due = [each for each in timetable.to_merge() if each in fragments]
        # Only updates that this worker had a part in tell where all workers went.
        steering = self.steering if due and not any(map(timetable.is_whole, due)) else None
        before = [] if steering is None else self._copy_shared(due)
        if refused := (yield from self._reducer.take_averages(fragments)):
            due = [each for each in due if each not in refused or timetable.is_whole(each)]
            timetable.merged([each for each in refused if each not in due])
            if not self.shared.is_finite():
                self._restart()
        elif steering is not None:
            steering.updated(self.shared.of(due), before)
        for fragment in due:
            keep, withhold = self._updates.keep, self._updates.keep_unsent
            self.shared.merge([fragment], *(0.0, 0.0) if timetable.is_whole(fragment) else (keep, withhold))
        timetable.merged(due)

    def flush(self) -> Procedure[None]:
        """Ends the round under way, early if need be, and exchanges the residuals as often as `settle` says.

        Every worker then has the same parameters, the shared ones.

        Raises:
            ProtocolError: the model has the shared values for now.
        """
        if self.shared.evaluating:
            raise ProtocolError("shared weights are for evaluation; call flush() outside the block")
        timetable = self.timetable
        if (left := timetable.flush()) is None:
            return
        if left:
            timetable.merge_now([each for each in left if timetable.awaits(each)], whole=False)
            yield from self._begin(left)
            self._end_round()
        if self._updates.keep_unsent:
            self.shared.put_back([each for each in timetable.every if not timetable.awaits(each)])
        yield from self._continue_whole()
        for _ in range(self._updates.settle):
            yield from self._begin(timetable.every)
            self._end_round()
            yield from self._continue_whole()
        if self.steering is not None:
            self.steering.pushed()  # flush has ended a round; its update steers no momentum

    def _copy_shared(self, fragments: Sequence[int]) -> list[torch.Tensor]:
        """Returns copies of shared values in memory that is kept: new pages cost more than the arithmetic."""
        for tensor in self.shared.of(fragments):
            if tensor.name not in self._copies:
                self._copies[tensor.name] = torch.empty_like(tensor.values)
            self._copies[tensor.name].copy_(tensor.values)
        return [self._copies[tensor.name] for tensor in self.shared.of(fragments)]

    def _begin(self, fragments: Sequence[int]) -> Procedure[None]:
        """Begins to average the changes of some fragments, or their residuals."""
        if awaited := [each for each in fragments if self.timetable.awaits(each)]:
            yield from self.wait(awaited)  # answers that no forward pass has waited for
        takes_part = yield from self._reducer.begin_exchange(fragments)
        self.timetable.exchanged(fragments)
        if not takes_part:
            self._restart()

    def _end_round(self) -> None:
        self.timetable.clock += 1
        self._reducer.end_round()

    def _continue_whole(self) -> Procedure[None]:
        """Waits for all averages; the local parameters are then the shared ones, whatever the updates keep."""
        self.timetable.merge_now(self.timetable.every, whole=True)
        yield from self.wait(self.timetable.every)

    def _restart(self) -> None:
        """Drops what local steps have changed anywhere in the model: NaN in one fragment is soon in all of them."""
        timetable = self.timetable
        awaited = [each for each in timetable.every if timetable.awaits(each)]
        timetable.merge_now(awaited, whole=True)  # no step before the answer
        self.shared.merge([each for each in timetable.every if each not in awaited])
        self.forget()

    def state_dict(self) -> dict[str, Any]:
        """Returns where the rounds stand, and of which design they are."""
        return {
            "rounds": self.timetable.state_dict(),
            "offsets": self.shared.offsets(),
            "local": asdict(self._updates),
            "coded": coded_by(self._design),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError where what `state_dict` returned is of other local updates, or lacks something."""
        saved = read(SavedLocalRounds, state, "local updates")
        check_same(state, self._design)
        self.timetable.check_state(saved.rounds)
        sizes = {each.name: each.values.numel() for each in self.shared.tensors if each.name in saved.offsets}
        check_sizes(saved.offsets, sizes, "offsets")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` returned, of which `check_state` said nothing."""
        self.timetable.load_state_dict(state["rounds"])
        self.shared.load_offsets(state["offsets"])


def coded_by(design: Design) -> dict[str, Any]:
    """Returns what a design codes exchanges by, for a state."""
    return {"codec": design.up.config(), "codec_down": design.down.config(), "compression": design.compression}


def check_same(state: Mapping[str, Any], design: Design) -> None:
    """Raises ConfigError where the position in a state is of other local updates than a design's."""
    if state.get("local") is None:
        raise ConfigError("the state is of a training without local updates: start from the model's weights")
    assert design.local is not None
    check_keys(state, ["coded"])
    for key, mine in (("local", asdict(design.local)), ("coded", coded_by(design))):
        check_keys(state[key], mine)
        if found := [(path[1:], there, here) for path, there, here in differences(state[key], mine, "")]:
            saved, wanted = (", ".join(f"{each[0]}={each[way]}" for each in found) for way in (1, 2))
            raise ConfigError(
                f"the state is of {saved} and this training has {wanted}: resume with the same, or start from the "
                "model's weights"
            )
