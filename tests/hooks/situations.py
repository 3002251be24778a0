"""Models, loops and columns of `test_situations.py`: a loop that does something besides, trained in each mode."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune, weight_norm
from torch.utils.checkpoint import checkpoint

from tests.hooks.several_optimizers import HOOKS

COLUMNS = (*HOOKS, "group", "server")
LOCAL = "streaming-diloco[h=4,fragments=2,delay=1]"
CODED = {
    **dict.fromkeys(COLUMNS, "3lc"),
    **dict.fromkeys(("group", "server, local"), LOCAL),
    "server, sparse": "sparseloco[h=2]",
    "server, demo": "demo[inner=any]",
    "server, votes": "terngrad",
}
"""Designs with a codec that loses something, by column."""


class Plain(nn.Module):
    """Two layers; a model's output is its loss.

    Attributes:
        wrap: options of DistributedDataParallel.
    """

    wrap: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.first(x).relu()).pow(2).mean()
        return found


class Odd(Plain):
    """Parameters without values, with one, and with columns that lie together; one that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(32, 8)
        self.again.weight = self.last.weight
        self.empty, self.scale = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.tensor(1.0))
        self.turned = nn.Parameter(torch.randn(6, 8).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        x = (self.last(x) + self.again(x)) * self.scale @ self.turned
        return x.pow(2).mean() + self.empty.sum()


class Typed(Odd):
    """The same, of another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.scale.dtype))


class Convolved(Plain):
    """Images whose channels lie together."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(2, 16, 2), nn.ReLU(), nn.Conv2d(16, 4, 1))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x.view(-1, 2, 2, 2)).pow(2).mean()
        return found


class Borrows(Plain):
    """Uses a weight whose layer is called later, and that of a layer which is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.lent = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = nn.functional.linear(nn.functional.linear(x, self.lent.weight), self.first.weight)
        return super().forward(x) + early.pow(2).mean()


class Follows(Plain):
    """Has a frozen encoder, which is to be like the one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.key = copy.deepcopy(self.first).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().forward(x) + (self.first(x) - self.key(x)).pow(2).mean()
        return found


class Viewed(Plain):
    wrap: ClassVar[dict[str, Any]] = {"gradient_as_bucket_view": True}


class Branched(Plain):
    """Some batches take a branch."""

    wrap: ClassVar[dict[str, Any]] = {"find_unused_parameters": True}

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        return found + self.branch(x).pow(2).mean() if x[0, 0] > 0 else found


class Checkpointed(Plain):
    """Computes a layer once more in the backward pass."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self.last, self.first(x).relu(), use_reentrant=self.use_reentrant)
        return found.pow(2).mean()


def normed() -> nn.Module:
    """A hook computes the weight of one layer."""
    net = Plain()
    weight_norm(net.first)
    return net


def pruned() -> nn.Module:
    net = Plain()
    prune.random_unstructured(net.first, "weight", amount=0.3)  # type: ignore[no-untyped-call]
    return net


class Complex(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.complex64))


# ---- what a loop does besides


@dataclass(frozen=True)
class Step:
    """A step that was taken: the model as a script calls it and bare, its optimizer, the batch, and the rank."""

    number: int
    model: Any
    net: nn.Module
    optimizer: Any
    x: torch.Tensor
    rank: int


def nothing(_: object) -> None:
    pass


def infer(step: Step) -> None:
    with torch.inference_mode():
        step.model(step.x)


def copy_and_pickle(step: Step) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing of the hook's state is kept
        for each in (copy.deepcopy(step.net), pickle.loads(pickle.dumps(step.net)), copy.deepcopy(step.model)):
            each(step.x).backward()
            torch.optim.SGD(each.parameters(), lr=1.0).step()


def sync(step: Step) -> None:
    """As a script does before it reads weights between steps."""
    if hasattr(step.optimizer, "sync"):
        step.optimizer.sync()


def follow(step: Step) -> None:
    """The frozen encoder follows the trained one."""
    sync(step)
    key, first = map(step.net.get_submodule, ("key", "first"))
    for mine, own in zip(key.parameters(), first.parameters(), strict=True):
        mine.lerp_(own.detach(), 0.1)


def meet_in_backward(step: Step) -> None:
    """The next backward pass has a collective of the script's own."""
    [parameter, *_] = step.net.parameters()

    def meet(gradient: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(torch.ones(1))
        handle.remove()
        return gradient

    handle = parameter.register_hook(meet)  # type: ignore[no-untyped-call]


def freeze(step: Step) -> None:
    """A parameter is trained no more, from the fourth step on."""
    if step.number == 3:
        step.net.get_parameter("first.weight").requires_grad_(False)


def write_own_rate(step: Step) -> None:
    """Rank 1's rate and momentum are its own."""
    if step.rank:
        step.optimizer.param_groups[0].update(lr=0.5, momentum=0.1)


# ---- how gradients come


def once(model: Any, optimizer: Any, x: torch.Tensor, share: float) -> None:
    (model(x) * share).backward()


def twice(model: Any, optimizer: Any, x: torch.Tensor, share: float) -> None:
    """Two passes over one graph."""
    loss = model(x) * share / 2
    loss.backward(retain_graph=True)
    loss.backward()


def twice_apart(model: Any, optimizer: Any, x: torch.Tensor, share: float) -> None:
    """Two passes over one graph, of which the last exchanges."""
    blocks, loss = getattr(optimizer, "no_sync", nullcontext), model(x) * share / 2
    switch = getattr(model, "set_requires_gradient_sync", lambda on: None)
    switch(False)
    with blocks():
        loss.backward(retain_graph=True)
    switch(True)
    loss.backward()


def accumulated(model: Any, optimizer: Any, x: torch.Tensor, share: float) -> None:
    """Two forward passes, of which the last exchanges."""
    blocks = getattr(optimizer, "no_sync", getattr(model, "no_sync", nullcontext))
    with blocks():
        once(model, optimizer, x[:2], share / 2)
    once(model, optimizer, x[2:], share / 2)


def in_bfloat16(model: Any, optimizer: Any, x: torch.Tensor, share: float) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x) * share
    loss.backward()


def clip(net: nn.Module) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 0.01)


# ---- optimizers


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    *rest, last = net.parameters()
    groups: list[dict[str, Any]] = [{"params": rest}, {"params": [last], "weight_decay": 0.01}]
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True)


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.01)


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


@dataclass(frozen=True)
class Situation:
    """A loop's model, what happens after each step, and how gradients come.

    Attributes:
        change: of gradients before the step.
        set_to_none: whether gradients are dropped, in place of zeroed.
        columns: where it can be.
        unchanged: where the weights are those of the loop without it, bit for bit.
    """

    make: Callable[[], nn.Module] = Plain
    besides: Callable[[Step], None] = nothing
    backward: Callable[[Any, Any, torch.Tensor, float], None] = once
    change: Callable[[nn.Module], None] = nothing
    set_to_none: bool = True
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    columns: tuple[str, ...] = COLUMNS
    unchanged: tuple[str, ...] = tuple(CODED)
