"""The columns of `test_situations.py`: each trains a situation in its way, and compares the weights."""

from __future__ import annotations

import socket
import time
import warnings
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from tests.hooks.ddp_ranks import Weights, same
from tests.hooks.several_optimizers import HOOKS, hooked, noise, whole
from tests.hooks.situations import CODED, Plain, Situation, Step, sgd
from thinwire.policies.designs import Design
from thinwire.runtime.serving import serving
from thinwire.server.core import ServerCore
from thinwire.transports.grpc import server as grpc_server

STEPS = 8
FP32 = tw.codec("fp32")
LOSSLESS: dict[str, Any] = {
    **dict.fromkeys(CODED, "fp32"),
    **dict.fromkeys(("group", "server, local", "server, sparse", "server, demo"), "update[codec=fp32]"),
    "server, votes": Design(name="late", up=FP32, down=FP32, downlink="gradient", transmission="traditional"),
}


@contextmanager
def joined(
    rank: int, column: str, net: Any, design: str, make: Any = sgd, *, group: Any = None, host: str = "127.0.0.1"
) -> Iterator[Any]:
    """A model as a script calls it, and its optimizer; what is shared is settled at the end."""
    if column in HOOKS:
        wrap = {**net.wrap, "process_group": group}
        model, state = hooked(column, net, wrap=wrap, codec=design, sparsity=1.75 if design == "3lc" else None)
        try:
            yield model, make(net)
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
        opt = stack.enter_context(tw.distribute(net, make(net), design=design, min_numel=16, **where))
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
        situation.change(net)
        optimizer.step()
        scheduler.step()
        situation.besides(Step(step, model, net, optimizer, x, rank if len(ranks) == 1 else 0))
        optimizer.zero_grad(set_to_none=situation.set_to_none)


def trained(rank: int, column: str, situation: Situation, design: str, **place: Any) -> Weights:
    net = situation.make()
    with joined(rank, column, net, design, situation.optimizer, **place) as (model, optimizer):
        train(model, net, optimizer, situation, [rank])
    return shared(net)


def by_hand(situation: Situation, ranks: Collection[int] = (0, 1)) -> Weights:
    """The same training by torch alone, in one process."""
    net = situation.make()
    train(net, net, situation.optimizer(net), situation, ranks)
    return shared(net)


def shared(net: nn.Module) -> Weights:
    """All but the encoder that follows, and is each rank's own."""
    return {name: each for name, each in whole(net).items() if not name.startswith("key.")}


def run_situation(rank: int, column: str, situation: Situation) -> tuple[Weights, bool, float]:
    """The weights, whether they are those of the loop without it, and how far a lossless codec is from torch alone."""
    bare = Situation(situation.make)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of optimizers that do not fit the codec
        found, unchanged = trained(rank, column, situation, CODED[column]), True
        if column in situation.unchanged and situation != replace(bare, columns=situation.columns):
            unchanged = same(found, trained(rank, column, bare, CODED[column]))
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
    """The largest of all differences, in units of the dtype's precision, or that of float32."""
    precision = max(torch.finfo(each.dtype).eps for each in (*wanted.values(), torch.ones(1)))
    return float(max((found[name] - each).abs().max() for name, each in wanted.items() if each.numel()) / precision)


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
    net, began = Plain(), 0.0
    try:
        with joined(rank, column, net, CODED[column]) as (model, optimizer):
            train(model, net, optimizer, Situation(), [rank], 3)
            began = time.monotonic()
            if rank == 1 and how == "raises":
                raise OSError("no disk")
            if rank == 0:
                train(model, net, optimizer, Situation(), [rank])
    except (tw.ThinwireError, OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}" if time.monotonic() - began < 4 else "too late"
    return "nothing"


def run_refused(rank: int, column: str, situation: Situation) -> str:
    """Returns the error and all warnings, as one text."""
    said = "nothing"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            trained(rank, column, situation, CODED[column])
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    return " ".join([said, *(str(each.message) for each in told)])
