"""Models, loops and columns of `test_situations.py`: a loop that does something besides, trained in each mode."""

from __future__ import annotations

import copy
import pickle
import socket
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from tests.hooks.ddp_ranks import Weights, same
from tests.hooks.several_optimizers import HOOKS, hooked, noise, whole
from thinwire.policies.designs import Design
from thinwire.runtime.serving import serving
from thinwire.server.core import ServerCore
from thinwire.transports.grpc import server as grpc_server

FP32 = tw.codec("fp32")
COLUMNS = (*HOOKS, "group", "server")
LOCAL = "streaming-diloco[h=4,fragments=2,delay=1]"
CODED = {
    "ddp": "3lc",
    "fsdp": "3lc",
    "group": LOCAL,
    "server": "3lc",
    "server, local": LOCAL,
    "server, votes": "terngrad",
}
LOSSLESS: dict[str, Any] = {
    **dict.fromkeys(CODED, "fp32"),
    **dict.fromkeys(("group", "server, local"), "update[codec=fp32]"),
    "server, votes": Design(name="late", up=FP32, down=FP32, downlink="gradient", transmission="traditional"),
}
STEPS = 8


class Plain(nn.Module):
    """Two layers; a model's output is its loss."""

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


class Convolved(nn.Module):
    """Images whose channels lie together."""

    def __init__(self) -> None:
        super().__init__()
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


def nothing(step: Step) -> None:
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


@dataclass(frozen=True)
class Situation:
    """A loop's model, what happens after each step, how gradients come, and whether they are zeroed or dropped.

    Attributes:
        columns: where it can be.
        unchanged: where the weights are those of the loop without it, bit for bit.
    """

    make: Callable[[], nn.Module] = Plain
    besides: Callable[[Step], None] = nothing
    backward: Callable[[Any, Any, torch.Tensor, float], None] = once
    set_to_none: bool = True
    columns: tuple[str, ...] = COLUMNS
    unchanged: tuple[str, ...] = tuple(CODED)


# ---- columns


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    *rest, last = net.parameters()
    groups: list[dict[str, Any]] = [{"params": rest}, {"params": [last], "weight_decay": 0.01}]
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True)


@contextmanager
def joined(
    rank: int, column: str, net: Any, design: str, *, group: Any = None, host: str = "127.0.0.1"
) -> Iterator[Any]:
    """A model as a script calls it, and its optimizer; what is shared is settled at the end."""
    if column in HOOKS:
        model, state = hooked(column, net, codec=design, sparsity=1.75 if design == "3lc" else None, group=group)
        try:
            yield model, sgd(net)
        finally:
            state.close()
        return
    with ExitStack() as stack:
        where: dict[str, Any] = {"group": group or dist.group.WORLD}
        if column != "group":
            address = [""]
            if rank == 0:
                server = stack.enter_context(grpc_server.serve(serving(ServerCore()), f"{host}:0"))
                stack.callback(dist.barrier)  # until the other worker has left
                address = [server.address]
            else:
                stack.callback(dist.barrier)
            dist.broadcast_object_list(address)
            where = {"server": f"grpc://{address[0]}", "rank": rank, "workers": 2, "timeout": 10}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "an outer rate")  # SGD ends in nothing, later
            opt = stack.enter_context(tw.distribute(net, sgd(net), design=design, min_numel=16, **where))
        yield net, opt
        opt.flush()


def train(
    model: Any, net: nn.Module, optimizer: Any, situation: Situation, ranks: Collection[int], steps: int = STEPS
) -> None:
    """Trains on the batches of these ranks together, with a scheduler of rates and momenta; later decays weights."""
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS)
    for step in range(steps):
        if step == STEPS // 2:
            optimizer.param_groups[0]["weight_decay"] = 0.02
        for rank in ranks:
            x = noise(rank, step, 4, 8)
            situation.backward(model, optimizer, x, 1 / len(ranks))
        optimizer.step()
        situation.besides(Step(step, model, net, optimizer, x, rank if len(ranks) == 1 else 0))
        scheduler.step()
        optimizer.zero_grad(set_to_none=situation.set_to_none)


def trained(rank: int, column: str, situation: Situation, design: str, **place: Any) -> Weights:
    net = situation.make()
    with joined(rank, column, net, design, **place) as (model, optimizer):
        train(model, net, optimizer, situation, [rank])
    return shared(net)


def by_hand(situation: Situation, ranks: Collection[int] = (0, 1)) -> Weights:
    """The same training by torch alone, in one process."""
    net = situation.make()
    train(net, net, sgd(net), situation, ranks)
    return shared(net)


def shared(net: nn.Module) -> Weights:
    """All but the encoder that follows, and is each rank's own."""
    return {name: each for name, each in whole(net).items() if not name.startswith("key.")}


def run_situation(rank: int, column: str, situation: Situation) -> tuple[Weights, bool, float]:
    """The weights, whether they are those of the loop without it, and how far a lossless codec is from torch alone."""
    found = trained(rank, column, situation, CODED[column])
    unchanged = column not in situation.unchanged or same(
        found, trained(rank, column, Situation(situation.make), CODED[column])
    )
    exact = trained(rank, column, situation, LOSSLESS[column])
    return found, unchanged, distance(exact, by_hand(situation))


def run_apart(rank: int, column: str) -> tuple[Weights, float]:
    """Ranks 0 and 2 train together, and rank 1 alone: the weights, and how far they are from torch alone."""
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1])]
    number = [0, 0, 1][rank]
    alone = {"ddp": "3lc", "group": "update"}[column]
    found = trained(number, column, Situation(), alone if rank == 1 else LOSSLESS[column], group=groups[rank % 2])
    return found, distance(found, by_hand(Situation(), [0] if rank == 1 else [0, 1]))


def distance(found: Weights, wanted: Weights) -> float:
    """The largest of all differences."""
    return float(torch.stack([(found[name] - each).abs().max() for name, each in wanted.items() if each.numel()]).max())


def run_anew(rank: int, column: str) -> list[Weights]:
    """A training before the process group is destroyed, and one after it was made anew, over IPv6."""
    first, port = trained(rank, column, Situation(), CODED[column]), [0]
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as free:
        port = [free.getsockname()[1]]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    address = f"tcp://[::1]:{port[0]}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    return [first, trained(rank, column, Situation(), CODED[column])]


# ---- a rank that is no longer there


def run_end(rank: int, column: str, how: str) -> str:
    """Rank 1 raises after three steps, or returns; what either rank hears, within some seconds."""
    net, began = Plain(), time.monotonic()
    try:
        with joined(rank, column, net, CODED[column]) as (model, optimizer):
            train(model, net, optimizer, Situation(), [rank], 3)
            if rank == 1 and how == "raises":
                raise OSError("no disk")
            if rank == 0:
                train(model, net, optimizer, Situation(), [rank])
    except (tw.ThinwireError, OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}" if time.monotonic() - began < 4 else "too late"
    return "nothing"


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.complex64))


def run_refused(rank: int, column: str, situation: Situation) -> str:
    """What is refused, and of a wrapper's warnings."""
    said = "nothing"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            trained(rank, column, situation, CODED[column])
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    return " ".join([said, *(str(each.message) for each in told)])
