"""A profile of one worker's step: seconds forward and backward of every tensor, and some of its gradients.

Forward seconds are measured between the begins of modules, backward seconds between ready gradients. Any model can be
profiled unchanged. A module's forward seconds are those of its first tensor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median, quantiles

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from thinwire.errors import ConfigError
from thinwire.hooks.exchange.ranks import check_floating
from thinwire.hooks.wrapping import inside_compiled
from thinwire.planner.optimizers import Trainer, trainer_of

WARM_UP = 2
"""Steps before the measured ones, in which memory is taken and kernels are chosen."""
STEPS = 32
"""Measured steps: residuals fill in two dozen of them."""
KEPT_NBYTES = 1 << 30
"""Gradients of the last steps are kept, as many as fit, and `STEPS` at most."""


@dataclass(frozen=True, kw_only=True)
class TensorSeconds:
    """One trained tensor.

    Attributes:
        name: of the parameter.
        shape: of the parameter.
        forward_s: of its module's forward pass; 0 where another tensor of the module has them.
        backward_s: from the gradient before it to its own.
        itemsize: bytes of one value, which it takes where it is not compressed.
        number: its place among the model's trained parameters, which says who holds it where tensors are equally large.
    """

    name: str
    shape: tuple[int, ...]
    forward_s: float
    backward_s: float
    itemsize: int = 4
    number: int = 0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measurements of one worker's steps without any exchange.

    Attributes:
        tensors: in the order of the forward pass; backward seconds count from the last to the first.
        step_s: of a whole step, in seconds.
        gradients: of some steps, each by name; float32 on the host.
        trainer: the optimizer that made the steps; where none of torch's own was seen, SGD with momentum.
        steps_s: of every measured step by itself, in seconds; `step_s` is their median.
        remarks: sentences on parts of the training that the profile leaves out.
    """

    tensors: tuple[TensorSeconds, ...]
    step_s: float
    gradients: tuple[dict[str, torch.Tensor], ...] = field(repr=False)
    trainer: Trainer = field(default_factory=Trainer, repr=False)
    steps_s: tuple[float, ...] = field(default=(), repr=False)
    remarks: tuple[str, ...] = ()

    @property
    def in_model_order(self) -> list[TensorSeconds]:
        """The tensors in the order of the model's parameters."""
        return sorted(self.tensors, key=lambda each: each.number)

    @property
    def other_s(self) -> float:
        """Seconds of a step outside the model: data, optimizer, zeroing gradients."""
        return max(0.0, self.step_s - sum(each.forward_s + each.backward_s for each in self.tensors))

    @property
    def middle_s(self) -> tuple[float, float]:
        """From how many seconds to how many the middle half of the steps took."""
        if len(self.steps_s) < 4:
            return self.step_s, self.step_s
        low, _, high = quantiles(self.steps_s, n=4)
        return low, high


def profile(model: nn.Module, step: Callable[[], object], *, steps: int = STEPS) -> Profile:
    """Measures some steps of a training.

    Args:
        model: whose parameters are trained. DDP's or FSDP's wrapping must be off: exchanges are what is to be planned.
        step: makes one step with the next batch: forward, backward and the rest of the loop.
        steps: that are measured, after two that are not.

    Raises:
        ConfigError: no trained parameter, one that cannot be exchanged, or a step without a backward pass.

    Example:
        >>> model = nn.Linear(20, 10)
        >>> measured = profile(model, lambda: model(torch.ones(4, 20)).sum().backward(), steps=3)
        >>> [each.name for each in measured.tensors], measured.step_s > 0, len(measured.gradients)
        (['weight', 'bias'], True, 3)
    """
    if not (isinstance(model, nn.Module) and callable(step)):
        kinds = f"{type(model).__name__} and {type(step).__name__}"  # type: ignore[unreachable]
        raise ConfigError(f"expected a torch.nn.Module and a function that makes a step; {kinds} came")
    watch = Watch(model, steps)
    with watch.watching():
        while not watch.done:
            watch.begin()
            step()
            watch.end()
    return watch.profile()


def _check_exchanged(name: str, parameter: nn.Parameter) -> None:
    """Raises ConfigError for a parameter that has no values here, or none that are exchanged."""
    if is_lazy(parameter):
        raise ConfigError(f"parameter {name!r} of a lazy module has no shape yet: run one forward pass first")
    if parameter.is_meta:
        raise ConfigError(
            f"parameter {name!r} is on the meta device, without values, and steps are measured: call to_empty() and "
            "fill it first"
        )
    if hasattr(parameter, "device_mesh"):
        raise ConfigError(
            f"parameter {name!r} is sharded over ranks (a DTensor), and what sharded models exchange cannot be left "
            "out of their steps: leave out fully_shard while the model is profiled"
        )
    check_floating(name, parameter.dtype)


@dataclass
class _Step:
    """The times of one step's events, in seconds."""

    begin_s: float
    end_s: float = 0.0
    forward_end_s: float = 0.0
    begun: list[tuple[str, float]] = field(default_factory=list)
    ready: dict[str, float] = field(default_factory=dict)
    accumulated: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def forward_over_s(self) -> float:
        """The end of the model's forward pass; where its parts are called one by one, the last one's begin."""
        return self.forward_end_s or max((when for _, when in self.begun), default=self.begin_s)

    def forward_s(self, name: str) -> float:
        """From the begin of each visit to the tensor's module to the next module's, or to the end."""
        times = [*(when for _, when in self.begun), self.forward_over_s]
        return sum(max(0.0, times[at + 1] - when) for at, (who, when) in enumerate(self.begun) if who == name)

    def backward_s(self, name: str) -> float:
        """From the gradient that was ready before, or the end of the forward pass."""
        if name not in self.ready:
            return 0.0
        before = [when for when in self.ready.values() if when < self.ready[name]]
        return self.ready[name] - max(before, default=min(self.forward_over_s, self.ready[name]))


class Watch:
    """Notes step by step when modules begin and when gradients are ready.

    Args:
        model: whose parameters are trained.
        steps: that are measured, after two that are not.
        called: the modules that the training calls where it does not call the model itself, such as wrappers.

    Raises:
        ConfigError: no trained parameter, one that cannot be exchanged, or no step to measure.
    """

    def __init__(self, model: nn.Module, steps: int = STEPS, called: Sequence[nn.Module] = ()) -> None:
        self._trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        for name, each in self._trained.items():
            _check_exchanged(name, each)
        if not any(each.numel() for each in self._trained.values()):
            raise ConfigError("the model has no trained parameter that holds a value; there is nothing to exchange")
        if steps < 1:
            raise ConfigError(f"{steps} steps to measure; at least 1 is needed")
        self._model, self._steps, self._called = model, steps, list(called) or [model]
        self.remarks: list[str] = []
        self._cuda = [each.device for each in self._trained.values() if each.device.type == "cuda"][:1]
        fitting = KEPT_NBYTES // (4 * sum(each.numel() for each in self._trained.values()))
        self._kept = max(2, min(STEPS, fitting))
        self._step = _Step(0.0)
        self._left_out, self._found = 0, list[_Step]()
        self._names = {id(each): name for name, each in self._trained.items()}
        self._trainer: Trainer | None = None

    def parameters(self) -> list[nn.Parameter]:
        """The trained ones."""
        return list(self._trained.values())

    @property
    def done(self) -> bool:
        """Whether all steps are measured."""
        return len(self._found) >= self._steps

    def begin(self) -> None:
        """Says that a step begins."""
        self._step = _Step(self._now())

    def end(self) -> None:
        """Says that the step is over. Gradients may have been set to None since, as zero_grad does."""
        noted = self._step
        noted.end_s = self._now()
        if self._left_out < WARM_UP:
            self._left_out += 1
            return
        there = {name: each.grad for name, each in self._trained.items() if each.grad is not None}
        there = noted.accumulated | there
        noted.gradients = {name: there[name].detach().float().cpu().clone() for name in self._trained if name in there}
        noted.accumulated.clear()
        self._found.append(noted)
        if len(self._found) > self._kept:
            self._found[-self._kept - 1].gradients.clear()

    def profile(self) -> Profile:
        """Returns the measurements.

        Raises:
            ConfigError: no step made a gradient, one holds NaN, or all were zeroed before their step was over.
        """
        found, kept = self._found, [each.gradients for each in self._found[-self._kept :]]
        if not any(kept):
            raise ConfigError(
                "no step made a gradient: each must call loss.backward(), and train the model it is given"
            )
        for name, gradient in (each for step in kept for each in step.items()):
            if gradient.layout != torch.strided:
                raise ConfigError(
                    f"{name} makes sparse gradients, which have no fixed values to compress; build its embedding with "
                    "sparse=False"
                )
            if not gradient.isfinite().all():
                raise ConfigError(f"the gradient of {name} holds NaN or Inf; codecs are measured on it: lower the rate")
        if not any(gradient.any() for step in kept for gradient in step.values()):
            raise ConfigError(
                "every gradient is 0 at the end of its step, and codecs are measured on them: call zero_grad() before "
                "loss.backward(), or without set_to_none=False"
            )
        steps_s = tuple(each.end_s - each.begin_s for each in found)
        numbers = {name: number for number, name in enumerate(self._trained)}
        # Modules in the order of the forward pass, each with its own tensors.
        heads = dict.fromkeys([*(name for name, _ in found[-1].begun), *self._trained])
        order = dict.fromkeys(name for head in heads for name in self._siblings(head))
        return Profile(
            tensors=tuple(
                TensorSeconds(
                    name=name,
                    shape=tuple(self._trained[name].shape),
                    forward_s=median(each.forward_s(name) for each in found),
                    backward_s=median(each.backward_s(name) for each in found),
                    itemsize=self._trained[name].element_size(),
                    number=numbers[name],
                )
                for name in order
                if any(name in each for each in kept)  # without a kept gradient nothing could be coded
            ),
            step_s=median(steps_s),
            gradients=tuple(kept),
            trainer=self._trainer or Trainer(),
            steps_s=steps_s,
            remarks=tuple(self.remarks),
        )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, the model's modules and gradients are noted."""
        handles = [each.register_forward_hook(self._forward_ends) for each in self._called]
        for name, each in self._trained.items():
            handle = each.register_post_accumulate_grad_hook(self._ready(name))  # type: ignore[no-untyped-call]
            handles.append(handle)
        for outer in self._called:
            # Modules inside a graph are not seen to begin: the first tensor of one stands for all that are in it.
            held = {id(parameter) for parameter in outer.parameters()}
            first = next((name for name, mine in self._trained.items() if id(mine) in held), None)
            if first is not None and any(inside_compiled(part) is not part for part in outer.modules()):
                handles.append(outer.register_forward_pre_hook(self._begins(first)))
        for prefix, module in self._model.named_modules():
            own = [f"{prefix}.{name}".lstrip(".") for name, _ in module.named_parameters(recurse=False)]
            if own := [name for name in own if name in self._trained]:
                handles.append(module.register_forward_pre_hook(self._begins(own[0])))
        handles.append(register_optimizer_step_pre_hook(self._steps_by))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _siblings(self, head: str) -> list[str]:
        prefix = head.rpartition(".")[0]
        return [head, *(name for name in self._trained if name.rpartition(".")[0] == prefix)]

    def _now(self) -> float:
        for device in self._cuda:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def _begins(self, name: str) -> Callable[..., None]:
        def note(*_: object) -> None:
            if not torch.compiler.is_compiling():  # reading the clock would break the graph in two
                self._step.begun.append((name, self._now()))

        return note

    def _ready(self, name: str) -> Callable[[torch.Tensor], None]:
        def note(trained: torch.Tensor) -> None:
            self._step.ready[name] = self._now()
            if trained.grad is not None:
                self._step.accumulated[name] = trained.grad

        return note

    def _forward_ends(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self._step.forward_end_s = self._now()

    def _steps_by(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Keeps the first optimizer that trains the model, and prefers torch's own to its wrapper."""
        if self._trainer is None or self._trainer.own:
            self._trainer = trainer_of(optimizer, self._names) or self._trainer
