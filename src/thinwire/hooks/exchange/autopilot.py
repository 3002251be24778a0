"""`codec="auto"` in a hook: measures every step, tells the others, asks the controller, and changes the codec.

Ranks tell each other of step k on the messages of step k + 1, and decide before step k + 2: all of them have the same
numbers by then. While steps are all-reduced, notes go the more seldom the longer nothing has changed: on DDP's first
gradients where these are small, else by themselves, and nobody waits for them before the next step begins. A step of
which nobody will be told is not measured.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import torch
import torch.distributed as dist

from thinwire.collective.core import Collective
from thinwire.errors import ConfigError, ProtocolError
from thinwire.hooks.exchange.alarm import WAIT_NBYTES, Alarm, AlarmState, pack_wait, unpack_wait
from thinwire.hooks.exchange.flush import Flush
from thinwire.hooks.exchange.measures import ExchangeMeter, log_norm, workload
from thinwire.hooks.exchange.piggyback import Piggyback
from thinwire.policies.autopilot.levels import Level, residual_codec
from thinwire.policies.autopilot.memory import Hex, Memory, SavedState
from thinwire.policies.autopilot.notes import NOTE_NBYTES, StepNote, pack_note, unpack_note
from thinwire.policies.autopilot.pilot import Pilot, Target
from thinwire.policies.autopilot.probing import PROBE_ENOUGH_S, probe
from thinwire.runtime.collective import CollectiveDriver
from thinwire.runtime.peers import Gathering, agree, measure_link

LOOK_EVERY = 4
"""Notes from one look at the lag, which changes as seldom, and at the norm where s is 1, to the next."""
_log = logging.getLogger(__name__)


class _AutopilotState(SavedState):
    """What travels with a checkpoint beside the residuals."""

    pilot: str
    level: int
    told_level: int
    since_note: int
    arrived: list[Hex]
    alarm: AlarmState = msgspec.field(default_factory=AlarmState)
    changed_at: int = 0


def _decoded(text: str) -> tuple[_AutopilotState, Memory, list[bytes]]:
    """Returns what a state holds, the controller's memory, and notes that have arrived. Raises ConfigError."""
    saved = _AutopilotState.from_state(text)
    if least := min(saved.level, saved.told_level, 0):
        raise ConfigError(f"the state of {saved.asked_as} cannot be read: it has setting {least}")
    return saved, Memory.from_state(saved.pilot), [bytes.fromhex(note) for note in saved.arrived]


class ExchangeAutopilot:
    """The settings of one rank's hook, step by step.

    Call `begin_step` with a step's first gradients, `bucket_ready` with each, and where a step is uncompressed
    `flush.add` before and `reduced` after each all-reduce.

    Args:
        levels: the settings; see `policies.autopilot.levels`.
        core: this rank's part in the exchange, its contexts made for `residual_codec(levels)`.
        driver: of the same exchange.
        lag_limit, target: of the controller.
        start_step: steps before it are uncompressed.
        blocking: whether the backward pass waits for every uncompressed reduction.

    Attributes:
        base: the codec that stands for whichever is in use.
        pilot: the controller.
        level: index of the setting of the step under way.
        changed_at: the step since which it is in use.
        watched: whether the step under way is measured.
        flush: takes what waits in residuals into the next uncompressed step.
        piggyback: bytes for an uncompressed step's first gradients; None where nobody listens.
    """

    def __init__(
        self,
        levels: tuple[Level, ...],
        core: Collective,
        driver: CollectiveDriver,
        *,
        lag_limit: float,
        target: Target,
        start_step: int = 0,
        blocking: bool = False,
    ) -> None:
        self._core, self._driver = core, driver
        self._blocking = blocking
        self.base = base = residual_codec(levels)
        self._contexts = [context for context in core.residuals.contexts.values() if context.codec == base]
        self._start_step = start_step
        self.pilot = Pilot(levels, workload(core, base), lag_limit=lag_limit, target=target)
        self.level = self.changed_at = 0
        self._told_level = 0
        self._since_note = 0
        self._arrived: list[bytes] = []
        self._gathering: Gathering | None = None
        self.flush = Flush(core, driver)
        self.watched = False
        self._first_ready = self._last_ready = self._reduced_at = self._busy_s = 0.0
        self._meter = ExchangeMeter(driver)
        self._lag = 0.0
        self._looked_at = -1
        self._alarm: Alarm | None = None
        self.piggyback: Piggyback | None = None
        self._compared = False

    def listen(self, group: dist.ProcessGroup, tensors: list[torch.Tensor]) -> None:
        """Has ranks tell each other what unmeasured steps wait for; where gradients are small, on their all-reduces.

        Call it on all of them or on none.

        Args:
            group: all-reduces uncompressed steps.
            tensors: like what it reduces; on GPUs nobody sees what is waited for.
        """
        if Alarm.possible(group, tensors):
            self._alarm = Alarm(group)
            self.piggyback = Piggyback(group.rank(), group.size())

    @property
    def compressed(self) -> bool:
        """Whether the step under way is compressed."""
        return self.setting.codec is not None

    @property
    def setting(self) -> Level:
        """Of the step under way."""
        return self.pilot.levels[self.level]

    def measure(self) -> float:
        """Measures the link at once, on all ranks, in place of before the first step; returns bits per second."""
        probe(self.pilot, self._measure_link)
        return self.pilot.memory.link_bps

    def begin_step(self, step: int, gradient: torch.Tensor) -> None:
        """Decides the step's setting, on all ranks alike.

        Args:
            step: of the training.
            gradient: the first that is ready, for a look at its norm.

        Raises:
            TransportError: a rank is gone.
            ProtocolError: at the first step, ranks begin from different states.
        """
        if not self._compared:
            self._compare(step)
        now = time.perf_counter()
        self.settle()
        if self._arrived:
            self._take()
        uncompressed = step < self._start_step
        if self._alarm is not None and not uncompressed:
            self._alarm.report(self.pilot, self.level)
        if self.pilot.wants_probe and not uncompressed:
            probe(self.pilot, self._measure_link)
            if self._alarm is not None:
                self._alarm.forget()
        level = 0 if uncompressed else self.pilot.memory.level
        self._since_note += 1
        travels = self.pilot.levels[level].codec is not None  # a note then costs nothing
        note = None
        if self.watched and (travels or self._since_note >= self.pilot.note_every):
            note = b"" if travels and self._ordinary(gradient) else pack_note(self._note(now, gradient))
            self._told_level, self._since_note = self.level, 0
        self._set(level, step)
        warned_s = self._alarm.due(self.pilot) if self._alarm is not None and not (travels or uncompressed) else None
        self._send(note, warned_s, gradient)
        self.watched = travels or self._since_note + 1 >= self.pilot.note_every
        if self.watched:
            self._first_ready = time.perf_counter()
            self._busy_s = self._reduced_at = 0.0
        if travels:
            self.flush.expect_all()
            self._meter.begin()
        else:
            self._meter.forget()

    def bucket_ready(self, *, last: bool) -> None:
        """Notes when gradients were ready."""
        if last and (self.watched or self._alarm is not None):
            self._last_ready = time.perf_counter()

    # ---- uncompressed steps

    def reduced(self, begun: float, averaged: torch.Tensor) -> None:
        """Takes an all-reduce that began at `begun` and has just ended."""
        now = time.perf_counter()
        if not averaged.is_cuda:  # else this is when the work was queued
            self._busy_s += max(0.0, now - max(begun, self._reduced_at))
        self._reduced_at = now
        self.flush.reduced(averaged)

    def waited(self) -> None:
        """Says that a step which nobody measures has its averages."""
        if self._alarm is not None:
            self._alarm.waited(time.perf_counter() - self._last_ready)

    def settle(self) -> None:
        """Ends what the last step has left under way; between two steps."""
        self.flush.settle()
        if self._gathering is not None:
            gathering, self._gathering = self._gathering, None
            self._arrived = gathering.wait()
        elif self._core.notes:
            self._arrived = self._core.notes
        self._core.notes = []
        if self._alarm is not None:
            self._alarm.end_reduce()
            self._unload()

    # ---- checkpoints and reports

    def state(self) -> str:
        """Returns the controller's state, for an exact resume; call it between two steps."""
        self.settle()
        arrived = [note.hex() for note in self._arrived]
        saved = _AutopilotState(
            self.pilot.state(), self.level, self._told_level, self._since_note, arrived, changed_at=self.changed_at
        )
        if self._alarm is not None:
            saved.alarm = self._alarm.state
        return saved.state()

    @contextmanager
    def loading(self, text: str) -> Iterator[None]:
        """Takes `state()` back, on all ranks, once what is inside has loaded residuals.

        Before them, bounds on the lag are asked for as much as any setting asks: they are cut to that as they are
        loaded, and the setting in use may be another than the state's.

        Args:
            text: empty where residuals are of a run with a fixed codec.

        Raises:
            ConfigError: it cannot be that; nothing has been loaded.
        """
        self.settle()
        saved = _decoded(text) if text else None
        largest = max(setting.sparsity for setting in self.pilot.levels)
        for context in self._contexts:
            if context.lag_bound is not None:
                context.lag_bound.ask(largest)
        try:
            yield
            if saved is not None:
                self._load(*saved)
            self.flush.expect_all()
        finally:
            self._apply()

    def _load(self, saved: _AutopilotState, memory: Memory, arrived: list[bytes]) -> None:
        strongest = len(self.pilot.levels) - 1  # where a smaller lag_limit leaves out what the state had in use
        self.pilot.load(memory)
        self.level, self.changed_at = min(saved.level, strongest), saved.changed_at
        self._told_level, self._since_note = min(saved.told_level, strongest), saved.since_note
        self._arrived = arrived if len(arrived) == self._core.residuals.world else []
        if self._alarm is not None:
            self._alarm.state = saved.alarm
        self.watched, self._looked_at = False, -1
        self._meter.forget()

    def __str__(self) -> str:
        return self.pilot.describe(self.level, self.changed_at, "step")

    # ---- a step

    def _compare(self, step: int) -> None:
        """Compares with the other ranks what their messages go by: a state may have been loaded on some of them alone.

        A compressed exchange says so by itself; an all-reduce of another size ends the process, in gloo's own thread.
        """
        pilot = hashlib.blake2b(self.pilot.state().encode(), digest_size=8).hexdigest()
        since = {"note": self._since_note, "alarm": 0 if self._alarm is None else self._alarm.state.since}
        settings = {"setting": self.level, "told": self._told_level, "since": since, "controller": pilot}
        wanted = "load the state of one step on every rank, or on none"
        agree(self._driver.peers, {"step": step} | settings, when="take the first step", wanted=wanted)
        self._compared = True

    def _take(self) -> None:
        """Takes what all ranks have told of a step: of an ordinary one, not all have."""
        told, self._arrived = self._arrived, []
        if lengths := sorted({len(note) for note in told} - {0, NOTE_NBYTES}):
            raise ProtocolError(f"a rank sent a note of {lengths[0]} bytes; expected are {NOTE_NBYTES}, or none")
        if all(told):
            self.pilot.take([unpack_note(note) for note in told], self._told_level)
        else:
            self.pilot.pass_by(self._told_level, asked=2 * told.count(b"") <= len(told))

    def _ordinary(self, gradient: torch.Tensor) -> bool:
        """Whether the step that has ended, a compressed one, is not worth a note."""
        if not self.compressed or self.level != self.pilot.memory.level:
            return False
        norm = log_norm(gradient) if self.setting.sparsity > 1 else math.nan
        return self.pilot.ordinary(self._meter.waited_s, norm)

    def _note(self, now: float, gradient: torch.Tensor) -> StepNote:
        """Returns the note of the step that has ended: what the codec takes is the mean since the last note."""
        compressed, memory = self.compressed, self.pilot.memory
        codec_s, sent_nbytes = self._meter.read() if compressed else (0.0, 0.0)
        look = self._looked_at < 0 or memory.notes - self._looked_at >= LOOK_EVERY
        if look:
            self._looked_at = memory.notes
            bounds = [context.lag_bound.lag for context in self._contexts if context.lag_bound is not None]
            self._lag = max(bounds, default=0.0)
        exposed_s = max(0.0, (self._driver.completed if compressed else self._reduced_at) - self._last_ready)
        overlap_s = self._last_ready - self._first_ready
        if self._blocking and not compressed:  # the backward pass stood still meanwhile
            exposed_s, overlap_s = self._busy_s, 0.0
        if self._alarm is not None and not compressed:
            self._alarm.waited(exposed_s)
        return StepNote(
            step_s=now - self._first_ready,
            exposed_s=exposed_s,
            overlap_s=overlap_s,
            link_s=self._meter.waited_s if compressed else self._busy_s,
            codec_s=codec_s,
            sent_nbytes=sent_nbytes,
            lag=self._lag if compressed else 0.0,
            norm=log_norm(gradient) if look or self.setting.sparsity > 1 else math.nan,
        )

    def _measure_link(self, least_nbytes: int) -> float:
        """Measures the link once."""
        return measure_link(self._driver.peers, enough_s=PROBE_ENOUGH_S, least_nbytes=least_nbytes)

    def _set(self, level: int, step: int) -> None:
        if level != self.level:
            self.level, self.changed_at = level, step
            if self._alarm is not None:
                self._alarm.forget()
            self._apply()
        if self._core.residuals.rank == 0:
            for line in self.pilot.news():
                _log.info("auto, step %d: %s", step, line)

    def _apply(self) -> None:
        setting = self.setting
        self._driver.release_buffers()
        if setting.codec is None:
            return
        for context in self._contexts:
            if context.lag_bound is not None:
                context.lag_bound.ask(setting.sparsity)
        self._core.recode(self._contexts, setting.codec)

    def _send(self, note: bytes | None, warned_s: float | None, gradient: torch.Tensor) -> None:
        """Sends a note and a warning: with the step's gradients where these are compressed or small, else alone.

        Args:
            note: None where none is due, on any rank.
            warned_s: of an uncompressed step; None likewise.
            gradient: the step's first.
        """
        self._core.note = note if self.compressed else None
        if self.compressed or (note is None and warned_s is None):
            return
        if self.piggyback is not None and self.piggyback.fits(gradient):
            self.piggyback.put((note or b"") + (b"" if warned_s is None else pack_wait(warned_s)))
            return
        if note is not None:
            peers = self._driver.peers
            self._gathering = Gathering(peers, note, [NOTE_NBYTES] * peers.size)
        if self._alarm is not None and warned_s is not None:
            self._alarm.begin_reduce(warned_s)

    def _unload(self) -> None:
        """Takes what has come with gradients: of all ranks a note, or what they waited for, or both."""
        if self.piggyback is None or self._alarm is None or not (came := self.piggyback.take()):
            return
        if len(came[0]) >= NOTE_NBYTES:
            self._arrived = [data[:NOTE_NBYTES] for data in came]
        if len(came[0]) % NOTE_NBYTES:
            self._alarm.take(min(unpack_wait(data[-WAIT_NBYTES:]) for data in came))
