"""Saving and loading the state of a hook."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from thinwire.collective.core import Collective
from thinwire.collective.snapshot import Snapshot
from thinwire.errors import ConfigError, check_keys
from thinwire.hooks.exchange.auto import ExchangeAuto
from thinwire.hooks.exchange.saved import FORMAT, Layout, check_saved
from thinwire.hooks.guards import StepGuard
from thinwire.runtime.collective import CollectiveDriver

_NOTHING = (
    "this was copied or pickled as an object, and nothing of the hook's state is in it: save state.state_dict(), and "
    "give it to load_state_dict of what compress returns"
)
_log = logging.getLogger(__name__)


class Checkpoints(ABC):
    """The part of `ExchangeState` that saves and loads checkpoints.

    Attributes:
        step: steps taken so far; backward passes that only accumulate gradients are part of the next one.
        resumed: the result of the last `load_state_dict`, as text; empty before.
    """

    core: Collective
    driver: CollectiveDriver
    auto: ExchangeAuto | None
    step: int
    resumed: str
    _first: int
    _group: str
    _guard: StepGuard | None
    _layouts: Mapping[str, Layout]
    _before: Snapshot | None
    _scaler: Any
    _loss_scale: float

    @property
    def rank(self) -> int:
        """This rank."""
        return self.core.residuals.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.core.residuals.world

    @abstractmethod
    def between_steps(self) -> None:
        """Adds the step that has ended to warm-up and records."""

    @abstractmethod
    def _end_records(self) -> None:
        """Records the step that has ended, if it was measured."""

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of this rank's state: save it on every rank, because residuals differ between ranks.

        The state contains only tensors, numbers and strings, under a key with this rank's number: `torch.save` into a
        file for each rank and `torch.distributed.checkpoint` into one folder both save all of it. The latter needs
        keys that depend only on the model and the compressed tensors, so `auto` exists, empty, with a fixed codec, too.
        """
        self.driver.wait_step()
        part = {**self.core.residuals.state_dict(), "auto": "" if self.auto is None else self.auto.state()}
        return self._saved(self.layout(), {self.rank: part}, self.step, self._loss_scale)

    def _saved(
        self, layout: Mapping[str, int], ranks: Mapping[int, Mapping[str, Any]], step: int = 0, loss_scale: float = 1.0
    ) -> dict[str, Any]:
        """Returns a state with these ranks' parts and the layout of each tensor."""
        parts = {
            str(rank): {**part, "layouts": {name: self._layouts[name].tensor() for name in part["residuals"]}}
            for rank, part in ranks.items()
        }
        return {
            "format": FORMAT,
            **layout,
            "step": step,
            "loss_scale": loss_scale,
            "reduce": self._reduce,
            "group": self._group,
            "ranks": parts,
        }

    @property
    def _reduce(self) -> str:
        return "mean" if self.core.residuals.mean else "sum"

    def layout(self) -> dict[str, int]:
        """Returns the division into ranks: a state of the same division is loaded without resizing."""
        return {"world_size": self.world_size}

    def blank_state_dict(self, world_size: int) -> dict[str, Any]:
        """Returns a state of all ranks of a `world_size`-rank run, filled with zeros.

        `torch.distributed.checkpoint.load` fills a given state in place. Give it this to read a checkpoint that
        another number of ranks wrote, and pass the result to `load_state_dict`.
        """
        blank = self.core.residuals.blank_state_dict
        return self._saved(
            {"world_size": world_size}, {r: {"auto": "", **blank(world_size)} for r in range(world_size)}
        )

    def load_resized(self, state: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> None:
        """Loads the residuals of another number of ranks."""
        self.core.residuals.load_resized(ranks)

    def load_state_dict(self, state: Mapping[str, Any]) -> str:
        """Loads a state; call it on every rank.

        Args:
            state: this rank's own `state_dict()`, or a `merge` of all ranks'. A state of another number of ranks, or of
                a run that trained or compressed other tensors, needs all ranks' parts, because ranks owned other
                slices: by parameter name, residuals are summed over the old ranks and divided over the new ones.

        Returns:
            A description of the result; also in `resumed` and in the report.

        Raises:
            ConfigError: the state is of another model, other compressed tensors or other ranks of the job, or lacks
                ranks.
        """
        if isinstance(state, Copied):
            raise ConfigError(_NOTHING)
        check_saved(state)
        first: dict[str, list[int]] = {}
        for rank, part in state["ranks"].items():
            for name, saved in part["layouts"].items():
                if first.setdefault(name, saved.tolist()) != saved.tolist():
                    raise ConfigError(f"states of different runs: rank {rank} held {name!r} in another layout")
                if name in self._layouts:
                    self._layouts[name].check(name, saved.tolist())
        if ("replicas" in state) != ("replicas" in self.layout()):
            was, here = ("FSDP", "DDP") if "replicas" in state else ("DDP", "FSDP")
            raise ConfigError(f"the state is of a model under {was}, and this one is under {here}: shards differ")
        if (reduce := state.get("reduce", "mean")) != self._reduce:
            raise ConfigError(
                f"the state has reduce={reduce!r} and this run {self._reduce!r}: residuals are in other units"
            )
        self._check_group(state)
        controller = self._controller_of(state)
        self.driver.wait_step()
        self._end_records()
        with nullcontext() if self.auto is None else self.auto.loading(controller):
            self._load_residuals(state)
        if self._guard is not None:
            self._guard.forget()
        self._before = None
        self._first += int(state["step"]) - self.step
        self.step, self._loss_scale = int(state["step"]), float(state["loss_scale"])
        if self._scaler is None and self._loss_scale not in (0.0, 1.0):
            self.core.residuals.scale(1 / self._loss_scale)
            self._loss_scale = 1.0
        self.between_steps()
        return self.resumed

    def _controller_of(self, state: Mapping[str, Any]) -> str:
        """Returns a state's text of `codec="auto"`, with FSDP2 this rank's own; empty if its codec is fixed."""
        part = state["ranks"].get(str(self.rank) if self._has_same_layout(state) else "0")
        if part is None:
            return ""
        check_keys(part, ["auto"])
        return str(part["auto"])

    def _has_same_layout(self, state: Mapping[str, Any]) -> bool:
        """Whether the run that saved a state was divided into ranks as this one is."""
        return all(state.get(key) == value for key, value in self.layout().items())

    def _owned_alike(self, part: Mapping[str, Any]) -> bool:
        """Whether ranks owned the same slices as here, according to this rank's part of a state."""
        return self.core.residuals.owned_alike(part)

    def _check_group(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError for a state of another group of a larger job, which trains another model or shard."""
        group = state.get("group", "")
        if group and self._group and group != self._group and int(state["world_size"]) == self.world_size:
            raise ConfigError(
                f"the state is of the ranks {group}, and this model is trained by the ranks {self._group}, with other "
                "residuals. In torch.distributed.checkpoint every group needs a separate key, as in "
                "{f'ddp-{min(ranks)}': state.state_dict()}; if ranks were only renumbered, remove 'group' from the "
                "state"
            )

    def _load_residuals(self, state: Mapping[str, Any]) -> None:
        ranks, old, same_layout = state["ranks"], int(state["world_size"]), self._has_same_layout(state)
        if same_layout and str(self.rank) not in ranks:
            raise ConfigError(
                f"the state is of rank {', '.join(ranks)} and this is rank {self.rank}: every rank has its own "
                "residuals; save state_dict() on every rank and load each one's"
            )
        if same_layout and self._owned_alike(ranks[str(self.rank)]):
            self.core.residuals.load_state_dict(ranks[str(self.rank)])
            self.resumed = f"resumed at step {state['step']} with this rank's own residuals, bit for bit"
        else:
            if missing := [other for other in range(old) if str(other) not in ranks]:
                why = (
                    "the state was saved where other tensors were trained or compressed, or tensors were cut along "
                    "other dimensions, and ranks owned other slices"
                    if same_layout
                    else f"the state was saved by {old} ranks and this run has {self.world_size}"
                )
                raise ConfigError(f"{why}; the states of ranks {missing} are missing: pass merge([…]) of all states")
            self.load_resized(state, [ranks[str(other)] for other in range(old)])
            how = "with other owners of slices" if same_layout else f"from {old} ranks on {self.world_size}"
            self.resumed = (
                f"resumed at step {state['step']} {how}: residuals were summed over "
                "the old ranks by parameter name and divided over the new ones"
            )
            if self.rank == 0:  # the same on all ranks
                _log.warning("%s", self.resumed)


class Copied:
    """Replaces the hook's state in a copied model: torch copies the state, and gives the copy no hook."""

    def state_dict(self) -> dict[str, Any]:
        """Raises ConfigError: a copy has no state."""
        raise ConfigError(_NOTHING)

    def load_state_dict(self, state: Mapping[str, Any]) -> str:
        """Raises ConfigError: a copy has no state."""
        raise ConfigError(_NOTHING)
