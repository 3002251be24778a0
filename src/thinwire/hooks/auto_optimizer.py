"""`tw.distribute(model, optimizer)`: one line that measures the step and the link, and then chooses the exchange.

With SGD, gradients are coded at every step, as strongly as the link requires. An adaptive optimizer, such as AdamW,
takes local steps between exchanges, as many as the link requires, or none if the link is fast enough for a plain
all-reduce. `policies/adaptive.py` has the rules.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from thinwire.cautions import caution
from thinwire.errors import ConfigError
from thinwire.hooks import ddp
from thinwire.hooks.auto_checks import KEY, adapts, check_state, check_training, connect_and_agree
from thinwire.hooks.auto_checks import warn_of_other_optimizers as warn_of_others
from thinwire.hooks.auto_choice import AutoReport, Choice, LinkWatch, SavedChoice, StepClock, choose
from thinwire.hooks.costs import sent_and_received
from thinwire.hooks.group_optimizer import GroupOptimizer
from thinwire.hooks.groups import join_group
from thinwire.hooks.held import HeldOptimizer
from thinwire.hooks.replicas import Replicas, broadcast, follow_rank_0, suspend_allreduce
from thinwire.hooks.resuming import Resumable, load_agreed
from thinwire.hooks.several import class_names
from thinwire.hooks.training_options import TrainingOptions
from thinwire.policies.adaptive import ROUNDS
from thinwire.policies.designs import Design
from thinwire.runtime import peers as ranks
from thinwire.runtime.metrics import MetricsWriter
from thinwire.schema import Settings
from thinwire.states import loaded
from thinwire.transports.peers import PeerGroup

_log = logging.getLogger(__name__)
_MEASURED = struct.Struct("<d??")
"""A rank's measurements: seconds a step, whether all parameters are used, whether there is a GradScaler."""


class AutoOptimizer(HeldOptimizer):
    """The user's optimizer, with an exchange that fits it and the link. Scripts use it in place of the optimizer.

    With SGD (and ASGD) gradients are exchanged from the first step, as `ddp.compress(model, "auto")` does, and the
    user's optimizer takes the step. With every other optimizer, or a list that contains another, the first four steps
    are taken without an exchange: one to warm up, and three that are timed. Then all ranks make the same choice, from
    the slowest rank's time and the slowest link:

    * **local updates**, `design="local-sgd[h=4]"`, or with 8, 16 or 32 steps, the smallest number with which exchanges
      take at most a quarter of the time. All ranks then copy rank 0's weights, without the changes of the other ranks'
      measured steps; each rank keeps its moments.
    * **a plain all-reduce** of all gradients, DistributedDataParallel without a hook, if that takes less than a
      tenth of a step. All ranks then copy rank 0's weights and moments.

    The choice stays. Rank 0 logs it once, and it is in `report()`, `chosen` and `state_dict()`. If the link becomes
    much slower, one warning names a better design.

    A bare model works as one in DistributedDataParallel does. Call the model itself, not a part of it; if some
    parameters have no gradient at some steps with SGD, wrap it with `find_unused_parameters=True`. With a GradScaler
    the choice is always local updates, because each rank finds its own scale while steps are measured; for SGD and a
    GradScaler write `ddp.compress(model, "auto", nonfinite="skip", scaler=scaler)`. To continue with another optimizer,
    close this one and call `tw.distribute` again; a step of another optimizer causes one warning. Every rank saves
    its own `state_dict()` and resumes from it, because ranks differ in moments and, with local updates, in weights.

    Args:
        model: bare, or in DistributedDataParallel.
        optimizer: the user's, or several as one.
        group: the ranks.
        asked: the script's other options.
        design: codes gradients, in place of a choice.
        metrics, settings, resume: of `tw.distribute`; metrics receive the exchange's records, if it has any.

    Attributes:
        inner: the user's optimizer.
        choice: of the exchange, with its reason; `chosen` is its name.

    Raises:
        ConfigError: a model or an optimizer that cannot be trained in this way, or a state that does not fit.
        ProtocolError: ranks with different optimizers, settings or states; the message names rank and setting.
        TransportError: a rank did not connect.

    Example::

        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4)
        optimizer = tw.distribute(model, optimizer)      # the one line
        for x, y in batches:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
        optimizer.flush()                                # all ranks now have the same parameters
        print(optimizer.report())
        optimizer.close()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup,
        asked: TrainingOptions,
        *,
        design: Design | None = None,
        metrics: Sequence[MetricsWriter] = (),
        settings: Settings,
        resume: Mapping[str, Any] | Resumable | None = None,
    ) -> None:
        super().__init__(optimizer)
        self.inner, self.closed = optimizer, False
        self._model, self._group, self._asked, self._design = model, group, asked, design
        self._metrics, self._settings = metrics, settings
        self._steps, self._step_clock, self._watch = 0, StepClock(), LinkWatch()
        self._replicas: Replicas | None = None
        self._coded: ddp.ThinwireState | None = None
        self._local: GroupOptimizer | None = None
        self._peers: PeerGroup | None = None
        self._link_bps, self._rank, self._size = 0.0, dist.get_rank(group), dist.get_world_size(group)
        self._stop_watching: Callable[[], None] = _nothing
        self._resume_allreduce: Callable[[], None] = _nothing
        self._follow()
        given = load_agreed(resume, group)
        saved = None if given is None else check_state(given, optimizer, self._rank)
        self._wrapped = check_training(model, optimizer, group, chooses=design is None)
        who, wanted = class_names(optimizer), "auto" if design is None else design.name
        self.choice = Choice(kind="plain", name="nothing is exchanged", why=f"{wanted}: {who}, one rank alone")
        if self._size == 1:
            _log.info("%s", self.choice.why)
        else:
            self._peers = connect_and_agree(optimizer, group, asked, saved, settings)
            if design is None and adapts(optimizer):
                self._measure(known_bps=None if saved is None else saved.link_bps)
            else:
                name = "ddp.compress, auto" if design is None else wanted
                self._begin(Choice(kind="gradients", name=name, why=f"{wanted}: {who}: gradients are coded"))
        if given is None:
            return
        try:
            self.load_state_dict(given)
        except BaseException:
            self.close()
            raise

    def _follow(self, *_: Any) -> None:
        """Uses the inner optimizer's dicts, which it replaces when it loads a state, and its step hooks."""
        super()._follow()
        with suppress(AttributeError):
            self._optimizer_step_pre_hooks = self.inner._optimizer_step_pre_hooks
            self._optimizer_step_post_hooks = self.inner._optimizer_step_post_hooks

    # ---- the choice

    def _measure(self, known_bps: float | None) -> None:
        """Begins to time the first steps, and measures the link unless its bits per second are known."""
        assert self._peers is not None
        why = f"auto: {class_names(self.inner)}, measuring the first steps"
        self.choice = Choice(kind="measuring", name="nothing yet", why=why)
        self._stop_watching = warn_of_others(self.inner)
        if self._wrapped is not None:
            self._resume_allreduce = suspend_allreduce(self._wrapped, self)
        self._link_bps = ranks.measure_link(self._peers) if known_bps is None else known_bps

    def _decide(self) -> None:
        """Chooses the exchange from the measurements of all ranks."""
        assert self._peers is not None
        clock = self._step_clock
        mine = _MEASURED.pack(clock.step_s, clock.uses_all, clock.scaled)
        measured = [_MEASURED.unpack(each) for each in ranks.gather(self._peers, mine)]
        clock.uses_all = all(uses_all for _, uses_all, _ in measured)
        trained = [each for group in self.param_groups for each in group["params"] if each.requires_grad]
        least = ROUNDS[0] if any(scaled for _, _, scaled in measured) else 1
        slowest_s = max(seconds for seconds, _, _ in measured)
        self._begin(choose(class_names(self.inner), slowest_s, self._link_bps, self._size, trained, least=least))

    def _begin(self, choice: Choice, state: Mapping[str, Any] | None = None) -> None:
        """Begins the chosen exchange; local updates resume from `state`, if given."""
        measured, wrapped = self._kind == "measuring", self._wrapped
        self.choice = choice
        self._resume_allreduce()
        if choice.kind == "local":
            design = self._asked.design(choice.name, None, {})
            given: dict[str, Any] = {"metrics": self._metrics, "resume": state, "settings": self._settings}
            self._local = join_group(self._model, self.inner, design, self._group, self._asked, **given)
        else:
            self._stop_watching()  # averaged gradients serve any optimizer
            if choice.kind == "plain":
                self._follow_rank_0()
            unused = {} if self._step_clock.uses_all else {"find_unused_parameters": True}
            self._replicas = Replicas(self._model, self._group, wrapped, init_sync=not measured, **unused)
            if choice.kind == "gradients":
                inside = self._model if wrapped is not None else self._replicas.ddp
                self._coded = ddp.compress(inside, **self._asked.of_ranks(self._design))
                if self._metrics:
                    self._coded.record_to(*self._metrics)
        self._peers = None
        if self._rank == 0:
            _log.info("%s", choice.why)

    def _follow_rank_0(self) -> None:
        """Gives all ranks rank 0's weights and moments."""
        if self._peers is not None:
            follow_rank_0(self._model, self.inner, self._peers, self._group)

    @property
    def _kind(self) -> str:
        return self.choice.kind

    @property
    def exchange(self) -> ddp.ThinwireState | GroupOptimizer | None:
        """The hook's state with coded gradients, the optimizer with local updates; else None."""
        return self._coded or self._local

    # ---- the optimizer's interface

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes a step of the user's optimizer, and exchanges gradients or updates that are due."""
        if self.closed:
            raise ConfigError("this optimizer is closed: its training is over")
        self._check_held()
        if self._local is not None:
            loss = self._local_step(self._local, closure)
        elif self._kind == "measuring":
            loss = self._measured_step(closure)
        else:
            if self._replicas is not None and closure is None:
                self._replicas.check_called(self.inner)
            loss = self.inner.step() if closure is None else self.inner.step(closure)
        self._steps += 1
        if self._kind == "measuring" and self._step_clock.step_ended(self._steps, self.inner):
            self._decide()
            self._follow()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # for torch: the inner optimizer's own step calls all step hooks

    def _measured_step(self, closure: Callable[[], Any] | None) -> Any:
        called: Any = self.inner  # untyped in torch
        called._opt_called = True  # for a scheduler that was made for the inner optimizer
        clock = self._step_clock
        clock.scaled = clock.scaled or "found_inf" in self.__dict__
        return self._inner_step(closure)

    def _local_step(self, optimizer: GroupOptimizer, closure: Callable[[], Any] | None) -> Any:
        theirs, mine = vars(optimizer), vars(self)
        asked = [name for name in ("grad_scale", "found_inf") if name in mine]
        theirs |= {name: mine[name] for name in asked}
        try:
            loss = optimizer.step(closure)
        finally:
            for name in asked:
                del theirs[name]
        if optimizer.rank == 0 and (warning := self._watch.step_ended(optimizer)):
            caution(warning)
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler calls `step` on overflows, too; otherwise ranks would count different steps."""
        return self._kind in ("measuring", "local")

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only accumulate gradients; forward passes belong inside, too, as with DDP."""
        return nullcontext() if self._replicas is None else self._replicas.no_sync()

    def sync(self) -> None:
        """Waits for all updates up to the last step and applies them: call it before evaluating or saving the model."""
        if self._local is not None:
            self._local.sync()

    def flush(self) -> None:
        """Exchanges pending updates: all ranks then have the same weights and buffers. All call it after the same step.

        While steps are measured, all ranks copy rank 0's weights and moments.
        """
        if self._local is not None:
            self._local.flush()
        elif self._kind == "measuring":
            self._follow_rank_0()
        elif self._replicas is not None:  # as DistributedDataParallel does before every forward pass
            broadcast(self._model.buffers(), next(self._model.parameters()).device, self._group)

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        """Inside the block the model has the parameters that all ranks share; its own while steps are measured."""
        with nullcontext() if self._local is None else self._local.shared_weights():
            yield

    @property
    def steps_done(self) -> int:
        """Steps taken so far, measured ones too."""
        return self._steps

    @property
    def chosen(self) -> str:
        """The name of the choice, as in `local-sgd[h=4]`."""
        return self.choice.name

    def traffic(self) -> dict[str, float]:
        """Returns this rank's sums so far, of coded gradients or local updates; empty for a plain all-reduce."""
        if self._local is not None:
            return self._local.traffic()
        return {} if self._coded is None else sent_and_received(self._coded.counters())

    def report(self) -> AutoReport:
        """Returns the choice with its reason, and its costs so far."""
        coded = None if self._coded is None else ddp.report(self._coded)
        return AutoReport(choice=self.choice.why, report=coded if self._local is None else self._local.report())

    def close(self) -> None:
        """Ends the training here. The model and its wrapper stay usable; further steps are refused."""
        if self.closed:
            return
        self.closed = True
        self._stop_watching()
        if self._kind == "measuring":
            self._resume_allreduce()
        if self._replicas is not None:
            self._replicas.close()
        for each in self._metrics if self.exchange is None else [self.exchange]:
            each.close()
        self._peers = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._local is not None:
            self._local.__exit__(kind, error, trace)
        self.close()

    def __getattr__(self, name: str) -> Any:
        """Looks up attributes of local updates, such as `outer_groups`, if those were chosen."""
        if not name.startswith("_") and self.__dict__.get("_local") is not None:
            return getattr(self._local, name)
        raise AttributeError(f"no {name!r}: without a design, the optimizer has it only if local updates were chosen")

    # ---- its state

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the user's optimizer, which that optimizer can load too, with the choice added.

        With this state and the model's, taken at the same time on every rank, `tw.distribute(…, resume=state)` resumes
        bit for bit, without new measurements.
        """
        exchange = None if self.exchange is None else self.exchange.state_dict()
        own = self.inner.state_dict() if exchange is None or self._local is None else exchange.pop("inner")
        clock = self._step_clock
        saved = SavedChoice(
            **msgspec.structs.asdict(self.choice),
            taken=self._steps,
            optimizer=class_names(self.inner),
            ranks=(self._rank, self._size),
            link_bps=self._link_bps,
            seconds=list(clock.seconds),
            uses_all=clock.uses_all,
            scaled=clock.scaled,
            exchange=exchange,
        )
        return {**own, KEY: msgspec.structs.asdict(saved)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resumes from the `state_dict()` of this rank; all ranks call it together.

        Raises:
            ConfigError: the state is of another optimizer, rank or choice.
        """
        state = check_state(state_dict, self.inner, self._rank)
        inner = {key: value for key, value in state_dict.items() if key != KEY}
        kind = "plain" if self._size == 1 and state.kind != "local" else state.kind
        if kind != self._kind != "measuring":
            raise ConfigError(
                f"the state is of a training that has chosen {state.name}, and this one has {self.chosen}: "
                "give it as tw.distribute(…, resume=state)"
            )
        exchange = state.exchange or {}
        local = {**exchange, "inner": inner} if kind == "local" else None
        with nullcontext() if local is not None else loaded(self.inner, inner, "the optimizer"):
            if kind != self._kind:
                self._begin(Choice(kind=kind, name=state.name, why=state.why), local)
            elif self.exchange is not None:
                self.exchange.load_state_dict(local or exchange)
        # The time between saving and resuming belongs to no step.
        self._step_clock = StepClock(seconds=list(state.seconds), uses_all=state.uses_all, scaled=state.scaled)
        self._link_bps, self._steps = state.link_bps, state.taken
        self._follow()

    @property
    def clock(self) -> int:
        """The steps taken so far, by which `KeptSteps` identifies a state."""
        return self._steps


def _nothing() -> None:
    """Does nothing."""
