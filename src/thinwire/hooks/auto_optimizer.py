"""`tw.distribute(model, optimizer)`: one line that measures the step and the link, and then chooses the exchange.

SGD has its gradients coded, step by step as the link asks for it. An optimizer that divides gradients by their own size
takes local steps between exchanges, as many as the link asks for, or none where the link is fast enough for a plain
all-reduce. `policies/adaptive.py` has the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire.cautions import caution
from thinwire.errors import ConfigError
from thinwire.hooks.auto_checks import KEY, check_state
from thinwire.hooks.auto_choice import LinkWatch
from thinwire.hooks.auto_exchange import AutoExchange
from thinwire.hooks.held import HeldOptimizer
from thinwire.hooks.resuming import Resumable, load_agreed
from thinwire.runtime.metrics import MetricsWriter


@dataclass(frozen=True, kw_only=True)
class AutoReport:
    """The choice and its costs so far; print it.

    Attributes:
        choice: the chosen exchange and the figures that led to it, as a line of text.
        report: a `Report` of local updates, or a report of coded gradients as `ddp.report` returns; else None.

    Example:
        >>> print(AutoReport(choice="auto: AdamW, one rank: nothing is exchanged"))
        auto: AdamW, one rank: nothing is exchanged
    """

    choice: str
    report: Any = None

    def __str__(self) -> str:
        return self.choice if self.report is None else f"{self.choice}\n{self.report}"


class AutoOptimizer(HeldOptimizer):
    """The user's optimizer, with an exchange that fits it and the link. It is used in place of the optimizer.

    With SGD (and ASGD) gradients are exchanged from the first step, as `ddp.compress(model, "auto")` does, and the step
    is the user's optimizer's own. With every other optimizer, or a list of several of which one is another, the first
    four steps are taken without any exchange: one to warm up, and three that are timed. Then all ranks make the same
    choice, from the slowest rank's time and the slowest link:

    * **local updates**, `design="local-sgd[h=4]"`, or with 8, 16 or 32 steps, the first with which exchanges take a
      quarter of the time at most. All ranks take rank 0's weights at that point and give up the changes of their own
      measured steps; the moments stay each rank's own.
    * **a plain all-reduce** of all gradients, DistributedDataParallel without a hook, where that takes less than a
      tenth of a step. Weights and moments are rank 0's then.

    The choice stays. It is logged once by rank 0, and is in `report()`, `chosen` and `state_dict()`. One warning says
    what to write where the link has become much slower since.

    A bare model works as one in DistributedDataParallel does; it has to be called itself, and where some of its
    parameters have no gradient at some steps with SGD, wrap it with `find_unused_parameters=True`. With a GradScaler,
    whose scale each rank finds by itself while steps are measured, there are always local updates; for SGD and a
    GradScaler write `ddp.compress(model, "auto", nonfinite="skip", scaler=scaler)`. To train on with another optimizer,
    close this one and call `tw.distribute` again; a step of another optimizer causes one warning. Every rank saves
    its own `state_dict()` and resumes from it: it has moments of its own, and with local updates weights too.

    Args:
        model: bare, or in DistributedDataParallel.
        optimizer: the user's, or several as one.
        group: the ranks.
        compress: options of `ddp.compress`.
        local: makes the optimizer of a design of local updates, from its name and a state or None.
        design: the name of one whose gradients are coded, in place of a choice.
        metrics, settings, resume: of `tw.distribute`.

    Attributes:
        inner: the user's optimizer.
        chosen: the name of the choice.

    Raises:
        ConfigError: a model or an optimizer that cannot be trained so, or a state of something else.
        ProtocolError: ranks with other optimizers, settings or states; the message names rank and setting.
        TransportError: not all ranks came.

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
        *,
        compress: Mapping[str, Any],
        local: Callable[[str, Mapping[str, Any] | None], Any] | None = None,
        design: str = "",
        metrics: Sequence[MetricsWriter] = (),
        settings: Mapping[str, Any] | None = None,
        resume: Mapping[str, Any] | Resumable | None = None,
    ) -> None:
        super().__init__(optimizer)
        self.inner = optimizer
        self._steps, self._watch = 0, LinkWatch()
        self._follow()
        given = load_agreed(resume, group)
        self._auto = AutoExchange(
            model,
            optimizer,
            group,
            local=local,
            design=design,
            metrics=metrics,
            settings=settings or {},
            compress=compress,
            saved=None if given is None else check_state(given, optimizer, dist.get_rank(group)),
        )
        self.closed = False
        if given is not None:
            self.load_state_dict(given)

    def _follow(self, *_: Any) -> None:
        """Has the inner optimizer's own dicts, of which it makes new ones when it loads a state, and its step hooks."""
        super()._follow()
        with suppress(AttributeError):
            self._optimizer_step_pre_hooks = self.inner._optimizer_step_pre_hooks
            self._optimizer_step_post_hooks = self.inner._optimizer_step_post_hooks

    @property
    def _kind(self) -> str:
        return self._auto.choice.kind

    # ---- the optimizer's interface

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes a step of the user's optimizer, and exchanges gradients or updates that are due."""
        if self.closed:
            raise ConfigError("this optimizer is closed: its training is over")
        self._check_held()
        if self._kind == "local":
            loss = self._local_step(closure)
        elif self._kind == "measuring":
            loss = self._measured_step(closure)
        else:
            if self._auto.replicas is not None and closure is None:
                self._auto.replicas.check_called(self.inner)
            loss = self.inner.step() if closure is None else self.inner.step(closure)
        self._steps += 1
        if self._kind == "measuring" and self._auto.clock.step_ended(self._steps, self.inner):
            self._auto.decide()
            self._follow()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # for torch: the inner optimizer's own step calls all step hooks

    def _measured_step(self, closure: Callable[[], Any] | None) -> Any:
        called: Any = self.inner  # untyped in torch
        called._opt_called = True  # which a scheduler that was made for that one looks for
        clock = self._auto.clock
        clock.scaled = clock.scaled or "found_inf" in self.__dict__
        return self._inner_step(closure)

    def _local_step(self, closure: Callable[[], Any] | None) -> Any:
        optimizer = self._auto.exchange
        asked = {name: self.__dict__[name] for name in ("grad_scale", "found_inf") if name in self.__dict__}
        optimizer.__dict__.update(asked)
        try:
            loss = optimizer.step(closure)
        finally:
            for name in asked:
                optimizer.__dict__.pop(name, None)
        if optimizer.rank == 0 and (told := self._watch.step_ended(optimizer)):
            caution(told)
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler calls steps with overflows too, which ranks would count differently without."""
        return self._kind in ("measuring", "local")

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only accumulate gradients; forward passes belong inside, too, as with DDP."""
        if self._kind == "local":
            no_sync: AbstractContextManager[None] = self._auto.exchange.no_sync()
            return no_sync
        return nullcontext() if self._auto.replicas is None else self._auto.replicas.no_sync()

    def sync(self) -> None:
        """Waits for, and applies, everything up to the last step: call it before evaluating or saving the model."""
        if self._kind == "local":
            self._auto.exchange.sync()

    def flush(self) -> None:
        """Exchanges what waits, after which all ranks have the same weights and buffers; all call it after one step.

        While steps are measured all ranks take rank 0's weights and moments.
        """
        if self._kind == "local":
            self._auto.exchange.flush()
        elif self._kind == "measuring":
            self._auto.follow_rank_0()
        else:
            self._auto.follow_buffers()

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        """Inside the block the model has the parameters that all ranks share, while steps are measured its own."""
        with self._auto.exchange.shared_weights() if self._kind == "local" else nullcontext():
            yield

    @property
    def steps_done(self) -> int:
        """Steps taken so far, measured ones too."""
        return self._steps

    @property
    def chosen(self) -> str:
        """The name of the choice, as in `local-sgd[h=4]`."""
        return self._auto.choice.name

    def traffic(self) -> dict[str, float]:
        """Returns this rank's sums so far, of coded gradients or local updates; none of a plain all-reduce."""
        return self._auto.traffic()

    def report(self) -> AutoReport:
        """Returns the choice with its reason, and its costs so far."""
        return AutoReport(choice=self._auto.choice.why, report=self._auto.report())

    def close(self) -> None:
        """Ends the training here. The model and its wrapper stay usable; further steps are refused."""
        if not self.closed:
            self.closed = True
            self._auto.close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._kind == "local":
            self._auto.exchange.__exit__(kind, error, trace)
        self.close()

    def __getattr__(self, name: str) -> Any:
        """Looks up methods that local updates alone have, such as `outer_groups`, where they were chosen."""
        if not name.startswith("_") and "closed" in self.__dict__ and self._kind == "local":
            return getattr(self._auto.exchange, name)
        raise AttributeError(f"no {name!r}: of tw.distribute without a design, local updates alone may have it")

    # ---- its state

    def state_dict(self) -> dict[str, Any]:
        """Returns the user's optimizer's state, which that optimizer can load too, and the choice beside it.

        Together with the model's own, taken at the same time on every rank, `tw.distribute(…, resume=state)` resumes
        bit for bit, and measures nothing again.
        """
        state = self._auto.state_dict(self._steps)
        own = state["exchange"].pop("inner") if self._kind == "local" else self.inner.state_dict()
        return {**own, KEY: state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resumes from the `state_dict()` of this rank; all ranks call it together.

        Raises:
            ConfigError: it is of another optimizer, rank or choice.
        """
        state = self._auto.check(state_dict)
        self._auto.load_state_dict(state, {key: value for key, value in state_dict.items() if key != KEY})
        self._steps = int(state["taken"])
        self._follow()

    @property
    def clock(self) -> int:
        """The number by which `KeptSteps` finds a state: the steps taken so far."""
        return self._steps
