"""`codec="auto"` in a hook: measures steps, exchanges measurements, asks the controller, and changes the codec.

Every few steps each rank sends the others a note of 24 bytes during the next step, and all ranks decide before the step
after that. DDP or FSDP2 reduces the gradients of uncompressed steps.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from thinwire.cautions import caution
from thinwire.collective.core import Collective
from thinwire.hooks.exchange.flush import Flush
from thinwire.hooks.guards import StepGuard
from thinwire.policies.auto.controller import NOTE_NBYTES, SETTLING, Controller, Memory, Note, Workload
from thinwire.policies.auto.levels import Level, Limits, residual_codec
from thinwire.runtime.collective import CollectiveDriver
from thinwire.runtime.peers import Gathering, agree, measure_link

PROBE_TRIES = 3
"""Most measurements of a link that seems slower than before: busy processors make a link look slower, never faster."""
EARLY_NOTES = 3
"""The first notes name the optimizer that uses the gradients; the step that sends them waits for them."""
_log = logging.getLogger(__name__)


class ExchangeAuto:
    """Chooses the setting of every step of one rank's hook.

    Call `begin_step` with a step's first gradients and `bucket_ready` with each; in an uncompressed step, `flush.add`
    before each reduction and `exposed` after the backward pass has waited for it.

    Args:
        levels: the settings; see `policies.auto.levels`.
        limits: of the controller.
        core: this rank's part in the exchange, with contexts made for `residual_codec(levels)`.
        driver: of the same exchange.
        guard: knows the optimizer that uses the gradients.
        start_step: steps before it are uncompressed.
        blocking: whether the backward pass waits for every uncompressed reduction, as FSDP2's does.

    Attributes:
        base: the codec in the tensors' choices, which represents the codec in use.
        controller: chooses the setting.
        flush: adds residuals to the next uncompressed step.
    """

    def __init__(
        self,
        levels: tuple[Level, ...],
        limits: Limits,
        core: Collective,
        driver: CollectiveDriver,
        *,
        guard: StepGuard,
        start_step: int = 0,
        blocking: bool = False,
    ) -> None:
        self._core, self._driver, self._guard = core, driver, guard
        self._start_step, self._blocking = start_step, blocking
        self.base = residual_codec(levels)
        self._contexts = [context for context in core.residuals.contexts.values() if context.codec == self.base]
        self.controller = Controller(levels, _workload(core, self, blocking=blocking), limits)
        self.flush = Flush(core, driver)
        self._gathering: tuple[Gathering, int] | None = None
        self._samples: list[tuple[float, ...]] = []
        self._settling = SETTLING
        self._began = self._last_ready = self._exposed_s = 0.0
        self._spent = (0.0, 0.0)
        self._compared = self._warned = False

    @property
    def level(self) -> int:
        """The index of the setting of the step under way."""
        return self.controller.memory.used

    @property
    def setting(self) -> Level:
        """The setting of the step under way."""
        return self.controller.levels[self.level]

    @property
    def compressed(self) -> bool:
        """Whether the step under way is compressed."""
        return self.setting.codec is not None

    def measure(self) -> float:
        """Measures the link, on all ranks; returns bits per second."""
        best, known = 0.0, self.controller.memory.link_bps
        for _ in range(PROBE_TRIES):
            best = max(best, measure_link(self._driver.peers))
            if best >= 0.8 * known:
                break
        if 0 < best < math.inf:
            self.controller.take_link(best)
        return best

    def begin_step(self, step: int) -> None:
        """Chooses the step's setting, the same on all ranks.

        Raises:
            TransportError: a rank is gone.
            ProtocolError: at the first step, ranks begin from different states.
        """
        if not self._compared:
            self._compare(step)
        self._sample()
        self.settle()
        uncompressed = step < self._start_step
        if not uncompressed:
            self._send_note()
            if self.controller.wants_probe:
                self.measure()
            self.controller.begin_step()
        self._set(0 if uncompressed else self.controller.memory.level, step)
        if self.compressed:
            self.flush.expect_all()
        self._began, self._exposed_s = time.perf_counter(), 0.0

    def bucket_ready(self) -> None:
        """Records the time at which some gradients of the step are ready."""
        self._last_ready = time.perf_counter()

    def exposed(self, begun: float = 0.0) -> None:
        """Records that the backward pass waited for averages until now, since `begun` or its last gradients."""
        self._exposed_s += max(0.0, time.perf_counter() - (begun or self._last_ready))

    def settle(self) -> None:
        """Completes the last step's flush and notes; called between two steps."""
        self.flush.settle()
        if self._gathering is not None:
            (gathering, level), self._gathering = self._gathering, None
            self.controller.take([Note.unpack(data) for data in gathering.wait()], level)

    # ---- checkpoints and reports

    def state(self) -> str:
        """Returns the controller's memory as text; call it between two steps."""
        self.settle()
        return self.controller.memory.state()

    @contextmanager
    def loading(self, text: str) -> Iterator[None]:
        """Restores `state()`, on all ranks, after the block has loaded residuals.

        Before the block, the largest sparsity of all settings is requested: loaded multipliers are clamped to the
        requested sparsity, and the setting in use may differ from the state's.

        Args:
            text: empty if residuals are of a run with a fixed codec.

        Raises:
            ConfigError: an invalid text; no part has been loaded.
        """
        self.settle()
        memory = Memory.from_state(text) if text else None
        self._request_sparsity(max(setting.sparsity for setting in self.controller.levels))
        try:
            yield
            if memory is not None:
                self.controller.load(memory)
            self.flush.expect_all()
        finally:
            self._apply()
        self._compared = False
        self._forget_samples()

    def costs_s(self) -> tuple[float, float] | None:
        """Returns the seconds of a step at the setting in use and uncompressed; None before a step was measured."""
        if not self.controller.memory.compute_s:
            return None
        costs_s = self.controller.costs_s()
        return costs_s[self.level], costs_s[0]

    def __str__(self) -> str:
        return str(self.controller)

    # ---- a step

    def _compare(self, step: int) -> None:
        """Compares step and controller with the other ranks: a state may have been loaded only on some.

        A compressed exchange would raise an error; an all-reduce of another size would end the process, in gloo's
        thread.
        """
        own = {"step": step, "controller": self.state()}
        wanted = "load the state of one step on every rank, or on none"
        agree(self._driver.peers, own, when="take the first step", wanted=wanted)
        self._compared = True

    def _sample(self) -> None:
        """Measures the step that has ended."""
        spent, before = self._driver.spent(), self._spent
        self._spent = spent
        if not self._began or self._settling > 0:
            self._settling -= 1 if self._began else 0
            return
        step_s, overlap_s = time.perf_counter() - self._began, self._last_ready - self._began
        if self.compressed:
            codec_s, sent_nbytes = (now - then for now, then in zip(spent, before, strict=True))
            self._samples.append((step_s, 0.0, overlap_s, codec_s, sent_nbytes))
        else:
            overlap_s -= self._exposed_s if self._blocking else 0.0
            self._samples.append((step_s, self._exposed_s, max(0.0, overlap_s), 0.0, 0.0))

    def _send_note(self) -> None:
        """Sends the other ranks a note, if one is due."""
        memory = self.controller.memory
        memory.since_note += 1
        if memory.since_note < self.controller.note_every:
            return
        medians = [median(column) for column in zip(*self._samples, strict=True)]
        note = Note(*medians)._replace(optimizer=self._guard.optimizer)
        self._samples, memory.since_note = [], 0
        memory.notes += 1
        peers = self._driver.peers
        self._gathering = Gathering(peers, note.pack(), [NOTE_NBYTES] * peers.size), self.level
        if memory.notes <= EARLY_NOTES:
            self.settle()

    def _set(self, level: int, step: int) -> None:
        if level != self.level:
            self.controller.memory.used, self.controller.memory.changed_at = level, step
            self._forget_samples()
            self._apply()
        if self._core.residuals.rank == 0:
            for line in self.controller.news():
                _log.info("auto, step %d: %s", step, line)
            if self.controller.held_back and not self._warned:
                self._warned = True
                caution(
                    "codec='auto' stays within 8 bits, because the optimizer is adaptive and fewer bits would cost "
                    "accuracy. On this link local updates are faster: "
                    "optimizer = tw.distribute(model, optimizer) in place of ddp.compress"
                )

    def _forget_samples(self) -> None:
        self._samples, self._settling = [], SETTLING

    def _apply(self) -> None:
        self._driver.release_buffers()
        if self.setting.codec is not None:
            self._request_sparsity(self.setting.sparsity)
            self._core.recode(self._contexts, self.setting.codec)

    def _request_sparsity(self, sparsity: float) -> None:
        for context in self._contexts:
            if context.lag_bound is not None:
                context.lag_bound.limit_sparsity(sparsity)


def _workload(core: Collective, auto: ExchangeAuto, *, blocking: bool) -> Workload:
    tensors = core.residuals.tensors.values()
    coded = sum(tensor.numel for tensor in tensors if tensor.choice.up == auto.base)
    whole = sum(tensor.numel for tensor in tensors)
    return Workload(
        coded=coded,
        plain=whole - coded,
        ranks=core.residuals.world,
        groups=max(1, math.ceil(4 * whole / core.group_nbytes)) if core.group_nbytes else 1,
        uncompressed_nbytes=sum(tensor.nbytes for tensor in tensors),
        pulls=core.pulls,
        blocking=blocking,
    )
