"""The base of optimizers that replace the user's: they share its parameter groups, and take its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FunctionType
from typing import Any, Self

import torch

from thinwire.cautions import caution
from thinwire.errors import ConfigError
from thinwire.hooks.costs import TrainingCosts
from thinwire.hooks.report import Report
from thinwire.hooks.several import num_held
from thinwire.optimizers.options import ADDED
from thinwire.policies.local_updates import LocalUpdates


class HeldOptimizer(torch.optim.Optimizer):
    """Has the interface of the user's optimizer, which takes the steps or provides its groups to a server's.

    Args:
        optimizer: the user's. Both share one list of parameter groups, so that a scheduler of either changes the
            learning rate of both.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__([{"params": list(group["params"])} for group in optimizer.param_groups], optimizer.defaults)
        self.param_groups = optimizer.param_groups
        self._inner, self._held = optimizer, num_held(optimizer)
        self._stepping = False
        with suppress(AttributeError):  # an optimizer that never called torch's __init__ has no hooks
            optimizer.register_load_state_dict_post_hook(self._follow)
        HeldOptimizer._follow(self)
        _keep_out_of_graphs(type(self))

    def _check_held(self) -> None:
        if self._held != (held := num_held(self._inner)):
            raise ConfigError(
                f"the inner optimizer holds {held} parameters and tw.distribute was given {self._held}: {ADDED}"
            )

    def _check_rates(self, updates: LocalUpdates) -> None:
        learning_rates = [float(group["lr"]) for group in self.param_groups]
        if updates.outer_lr is None and len(set(learning_rates)) > 1:
            raise ConfigError(
                "with outer_lr=null the shared parameters move by the inner optimizer's learning rate, and its groups "
                f"have {learning_rates}: give all groups one learning rate, or set outer_lr"
            )

    def _unscale(self) -> None:
        """Divides the gradients by a GradScaler's scale, if it has set one."""
        if (scale := getattr(self, "grad_scale", None)) is not None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(1 / float(scale))

    def _inner_step(self, closure: Callable[[], Any] | None) -> Any:
        """Takes the user's optimizer's step on unscaled gradients, unless a GradScaler found an overflow."""
        overflow = getattr(self, "found_inf", None)
        if overflow is not None and bool(overflow):
            return None
        self._unscale()
        self._stepping = True
        try:
            return self._inner.step(closure) if closure is not None else self._inner.step()
        finally:
            self._stepping = False

    def _follow(self, *_: Any) -> None:
        """Puts the dicts that the inner optimizer creates when it loads a state into the list that schedulers hold."""
        groups = self.param_groups
        if groups is not self._inner.param_groups:
            groups[:], self._inner.param_groups = self._inner.param_groups, groups
        self.state = self._inner.state

    def _look_who_steps(self, *_: Any) -> None:
        if not (self._stepping or getattr(self, "closed", False)):
            caution(
                "the inner optimizer has taken a step by itself, which is not exchanged: call step() of the optimizer "
                "that tw.distribute returned (with a GradScaler, give scaler.step that optimizer)"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses the group: the tensors are fixed when the training begins.

        Raises:
            ConfigError: always, once the training has begun.
        """
        if hasattr(self, "_held"):
            raise ConfigError(
                "a parameter group that is added to a distributed optimizer would not be exchanged: give the optimizer "
                "all its groups before tw.distribute, frozen ones too"
            )
        super().add_param_group(param_group)

    def __enter__(self) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Refuses copies and pickles, which would belong to no training.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "what tw.distribute returned cannot be copied or pickled: it is one worker's part in a training. Save its "
            "state_dict(), and the model's"
        )


class JoinedOptimizer(HeldOptimizer):
    """A `HeldOptimizer` that has joined a training with other workers, until it is closed."""

    _step_supports_amp_scaling = True  # a GradScaler then announces itself, and calls `step` on overflows, too
    _costs: TrainingCosts

    def traffic(self) -> dict[str, float]:
        """Returns this worker's sums so far: payload and wire bytes sent (push) and received (pull), and seconds."""
        return self._costs.traffic()

    def report(self) -> Report:
        """Returns the exchanges' costs so far, and the share of the time that was left for computing; print it."""
        return self._costs.report()

    def sync(self) -> None:
        """Waits for all updates up to the last step and applies them: call it before evaluating or saving the model."""
        raise NotImplementedError

    def flush(self) -> None:
        """Exchanges pending updates; all workers call it after the same step, at the end."""
        raise NotImplementedError

    def _end_step(self) -> None:
        """Exchanges updates at the end of a step."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the training without an error; all workers call it. The model stays usable."""
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        """Ends the training on this worker: because of an error, or without one.

        A `SessionLostError`, after which all workers resume together, does not count as an error.
        """
        raise NotImplementedError

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        succeeded = isinstance(error, SystemExit) and not error.code  # exit code 0
        self._end(None if succeeded else error)


def _keep_out_of_graphs(kind: type) -> None:
    """Keeps torch.compile, also of a whole training step, from tracing into a class's public methods.

    Torch's optimizer constructor, called before, has wrapped `step` and imported the compiler.
    """
    disable: Any = torch.compiler.disable  # untyped in torch
    for base in kind.__mro__:
        for name, member in [*vars(base).items()] if issubclass(base, HeldOptimizer) else ():
            is_kept = getattr(member, "_torchdynamo_disable", False)
            if isinstance(member, FunctionType) and not name.startswith("_") and not is_kept:
                setattr(base, name, disable(member))


def own_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a parameter group's options, for a state."""
    return {key: value for key, value in group.items() if key != "params"}
