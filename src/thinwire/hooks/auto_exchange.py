"""The exchange of `tw.distribute` without a design: first measured steps, then the chosen exchange."""

from __future__ import annotations

import logging
import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from thinwire.cautions import caution
from thinwire.errors import ConfigError
from thinwire.hooks import ddp
from thinwire.hooks.auto_checks import adapts, check_state, check_training, meet_alike
from thinwire.hooks.auto_choice import Choice, StepClock, choose
from thinwire.hooks.costs import sent_and_received
from thinwire.hooks.replicas import Replicas, broadcast, follow_rank_0, silence
from thinwire.hooks.several import class_names, parts
from thinwire.policies.adaptive import ROUNDS
from thinwire.runtime import peers as ranks
from thinwire.runtime.metrics import MetricsWriter
from thinwire.transports.peers import PeerGroup

_log = logging.getLogger(__name__)
_MEASURED = struct.Struct("<d??")
"""Measurements of a rank: seconds, whether all parameters are used, whether there is a GradScaler."""


class AutoExchange:
    """The exchange of one rank. All ranks make it, and call its methods, together.

    Args:
        model, inner, group, local, design: of `AutoOptimizer`.
        metrics: take records of every step, where the exchange has some.
        settings: must be equal on all ranks.
        compress: of `ddp.compress`.
        saved: the choice of a state, if there is one.

    Attributes:
        choice: of the exchange.
        clock: times the first steps.
        closed: whether it has ended.
        replicas: average gradients; None with local updates, and where there is one rank.
        exchange: the hook's state with coded gradients, the optimizer with local updates; else None.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        group: dist.ProcessGroup,
        *,
        local: Callable[[str, Mapping[str, Any] | None], Any] | None,
        design: str,
        metrics: Sequence[MetricsWriter],
        settings: Mapping[str, Any],
        compress: Mapping[str, Any],
        saved: Mapping[str, Any] | None,
    ) -> None:
        self._model, self._inner, self._group, self._local = model, inner, group, local
        self._metrics, self._compress = metrics, compress
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._wrapped = check_training(model, inner, group, chooses=not design)
        self.replicas: Replicas | None = None
        self.closed = False
        self.exchange: Any = None
        self.clock = StepClock()
        self._link_bps = 0.0
        self._peers: PeerGroup | None = None
        self._handles: list[Any] = []
        self._speak: Callable[[], None] = lambda: None
        self._who = who = class_names(inner)
        self.choice = Choice(
            kind="plain", name="nothing is exchanged", why=f"{design or 'auto'}: {who}, one rank alone"
        )
        if self._size == 1:
            _log.info("%s", self.choice.why)
            return
        self._peers = meet_alike(inner, group, compress, saved, settings)
        if design:
            self.begin(Choice(kind="gradients", name=design, why=f"{design}: {who}: gradients are coded"))
            return
        if not adapts(inner):
            self.begin(Choice(kind="gradients", name="ddp.compress, auto", why=f"auto: {who}: gradients are coded"))
            return
        self.choice = Choice(kind="measuring", name="nothing yet", why=f"auto: {who}, measuring the first steps")
        self._handles = [_tell_of_others(inner)]
        if self._wrapped is not None:
            self._speak = silence(self._wrapped, self)
        self._link_bps = ranks.measure_link(self._peers) if saved is None else float(saved["link_bps"])

    def begin(self, choice: Choice, state: Mapping[str, Any] | None = None) -> None:
        """Begins the chosen exchange; local updates resume from a state of theirs, if there is one."""
        measured, wrapped = self.choice.kind == "measuring", self._wrapped
        self.choice = choice
        self._speak()
        if choice.kind == "local":
            assert self._local is not None
            self.exchange = self._local(choice.name, state)
        else:
            self._stop_telling()  # gradients are averaged, whoever takes the step
            if choice.kind == "plain":
                self.follow_rank_0()
            unused = {} if self.clock.uses_all else {"find_unused_parameters": True}
            self.replicas = Replicas(self._model, self._group, wrapped, init_sync=not measured, **unused)
            if choice.kind == "gradients":
                inside = self._model if wrapped is not None else self.replicas.ddp
                self.exchange = ddp.compress(inside, **{"codec": "auto", **self._compress})
                if self._metrics:
                    self.exchange.record_to(*self._metrics)
        self._peers = None
        if self._rank == 0:
            _log.info("%s", choice.why)

    def decide(self) -> None:
        """Chooses, from the measurements of all ranks."""
        assert self._peers is not None
        mine = _MEASURED.pack(self.clock.step_s, self.clock.uses_all, self.clock.scaled)
        told = [_MEASURED.unpack(each) for each in ranks.gather(self._peers, mine)]
        self.clock.uses_all = all(uses_all for _, uses_all, _ in told)
        trained = [each for group in self._inner.param_groups for each in group["params"] if each.requires_grad]
        least = ROUNDS[0] if any(scaled for _, _, scaled in told) else 1
        slowest_s = max(seconds for seconds, _, _ in told)
        self.begin(choose(self._who, slowest_s, self._link_bps, self._size, trained, least=least))

    def follow_rank_0(self) -> None:
        """Gives all ranks rank 0's weights and moments."""
        if self._peers is not None:
            follow_rank_0(self._model, self._inner, self._peers, self._group)

    def follow_buffers(self) -> None:
        """Gives all ranks rank 0's buffers, as DistributedDataParallel does before every forward pass."""
        if self.replicas is not None:
            broadcast(self._model.buffers(), next(self._model.parameters()).device, self._group)

    def traffic(self) -> dict[str, float]:
        """Returns this rank's sums so far, as `TrainingCosts.traffic`."""
        if self.choice.kind == "local":
            found: dict[str, float] = self.exchange.traffic()
            return found
        return sent_and_received(self.exchange.counters()) if self.choice.kind == "gradients" else {}

    def report(self) -> Any:
        """Returns the costs of the exchange; None of a plain all-reduce, and while steps are measured."""
        kind = self.choice.kind
        return self.exchange.report() if kind == "local" else ddp.report(self.exchange) if kind == "gradients" else None

    def close(self) -> None:
        """Ends it. The model and its wrapper stay usable."""
        self.closed = True
        self._stop_telling()
        if self.choice.kind == "measuring":
            self._speak()
        if self.replicas is not None:
            self.replicas.close()
        if self.exchange is not None:
            self.exchange.close()
        else:
            for each in self._metrics:
                each.close()
        self._peers = None

    def _stop_telling(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def state_dict(self, taken: int) -> dict[str, Any]:
        """Returns the choice, the measurements and the state of the exchange.

        Args:
            taken: steps so far.
        """
        choice = self.choice
        return {
            "kind": choice.kind,
            "name": choice.name,
            "why": choice.why,
            "taken": taken,
            "optimizer": self._who,
            "ranks": [self._rank, self._size],
            "link_bps": self._link_bps,
            "clock": self.clock.state_dict(),
            "exchange": None if self.exchange is None else self.exchange.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], inner: dict[str, Any]) -> None:
        """Resumes from a state.

        Args:
            state: that `check` has returned.
            inner: of the user's optimizer.

        Raises:
            ConfigError: it is of another choice.
        """
        kind = "plain" if self._size == 1 and state["kind"] != "local" else state["kind"]
        if kind != self.choice.kind != "measuring":
            raise ConfigError(
                f"the state is of a training that has chosen {state['name']}, and this one has {self.choice.name}: "
                "give it as tw.distribute(…, resume=state)"
            )
        self.clock.load_state_dict(state["clock"])
        self._link_bps = float(state["link_bps"])
        begins, choice = kind != self.choice.kind, Choice(kind=kind, name=state["name"], why=state["why"])
        if kind != "local":
            self._inner.load_state_dict(inner)
        if begins:
            self.begin(choice, None if kind != "local" else {**state["exchange"], "inner": inner})
        elif kind == "local":
            self.exchange.load_state_dict({**state["exchange"], "inner": inner})
        elif kind == "gradients":
            self.exchange.load_state_dict(state["exchange"])

    def check(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the choice of a state. Raises ConfigError for a state of another kind."""
        return check_state(state, self._inner, self._rank)


def _tell_of_others(inner: torch.optim.Optimizer) -> Any:
    """Looks at every step of every optimizer, and warns once of another one of the same parameters."""
    ours, told = weakref.ref(inner), False

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal told
        mine = ours()
        if told or mine is None or optimizer in parts(mine) or optimizer.param_groups is mine.param_groups:
            return
        held = {id(each) for group in mine.param_groups for each in group["params"]}
        if any(id(each) in held for group in optimizer.param_groups for each in group["params"]):
            told = True
            caution(
                f"a {type(optimizer).__name__} has taken a step with parameters that tw.distribute trains with "
                f"{class_names(mine)}, and the step counts for no exchange: close what tw.distribute returned, and "
                "give it the new optimizer"
            )

    return register_optimizer_step_post_hook(look)
