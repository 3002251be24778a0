"""What the tests of training on a GPU run: on every rank, all of them on the one GPU, over gloo."""

from __future__ import annotations

import copy
import warnings
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.hooks.ddp_ranks import ddp
from thinwire.hooks import fsdp

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTHS = (64, 2048, 1024, 2048, 512, 8)
"""Four million parameters in matrices of very different sizes: many buckets, and kernels that take a while."""


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(WIDTHS):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).to(DEVICE)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(32, WIDTHS[0], generator=torch.Generator().manual_seed(1000 * (step % 2) + rank))
    return x.to(DEVICE), (x[:, :8] + x[:, 8:16]).argmax(1).to(DEVICE)


def steps(model: nn.Module, optimizer: Any, rank: int, those: range) -> list[float]:
    """Trains; nothing here waits for the GPU, so the exchange runs against a queue as long as it gets."""
    losses = []
    for number in those:
        x, y = batch(rank, number)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().cpu().reshape(-1) for each in model.parameters()])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def hooked(rank: int, options: dict[str, Any], count: int = 12) -> dict[str, Any]:
    """Trains twice from the same start, once more from a state in the middle."""
    warnings.simplefilter("error")
    ends, losses = [], []
    for _ in range(2):
        model = DistributedDataParallel(mlp(), bucket_cap_mb=4)
        state = ddp.compress(model, measure_link=False, **options)
        optimizer = sgd(model)
        losses.append(steps(model, optimizer, rank, range(count // 2)))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), state.state_dict()))
        losses[-1] += steps(model, optimizer, rank, range(count // 2, count))
        ends.append(weights(model))
    model = DistributedDataParallel(mlp(), bucket_cap_mb=4)
    state = ddp.compress(model, measure_link=False, **options)
    optimizer = sgd(model)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    state.load_state_dict(saved[2])
    steps(model, optimizer, rank, range(count // 2, count))
    contexts = state.core.residuals.contexts.values()
    return {
        "losses": losses[0],
        "weights": ends[0],
        "again": torch.equal(ends[0], ends[1]) and losses[0] == losses[1],
        "resumed": torch.equal(ends[0], weights(model)),
        "on_host": [context.on_host for context in contexts],
    }


def plain(rank: int, count: int = 12) -> dict[str, Any]:
    """Trains without thinwire, and with frames that lose nothing."""
    ends = []
    for compressed in (False, True):
        model = DistributedDataParallel(mlp(), bucket_cap_mb=4)
        if compressed:
            ddp.compress(model, "fp32", measure_link=False)
        steps(model, sgd(model), rank, range(count))
        ends.append(weights(model))
    return {"off by": float((ends[0] - ends[1]).abs().max())}


def scaled(rank: int, count: int = 30) -> dict[str, Any]:
    """Mixed precision with a GradScaler."""
    model = DistributedDataParallel(mlp(), bucket_cap_mb=4)
    scaler = torch.amp.GradScaler(DEVICE.type)
    ddp.compress(model, "3lc", measure_link=False, nonfinite="skip", scaler=scaler)
    optimizer, losses = sgd(model), []
    for number in range(count):
        x, y = batch(rank, number)
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, torch.float16 if DEVICE.type == "cuda" else torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss))
    return {"losses": losses, "weights": weights(model)}


def automatic(rank: int, count: int = 60) -> dict[str, Any]:
    warnings.simplefilter("error")
    model = DistributedDataParallel(mlp(), bucket_cap_mb=4)
    state = ddp.compress(model, "auto", lag_limit=4)
    losses = steps(model, sgd(model), rank, range(count))
    assert state.auto is not None
    return {"losses": losses, "weights": weights(model), "setting": state.auto.setting.name}


def local(rank: int, design: str, count: int = 24) -> dict[str, Any]:
    """Local updates in a group."""
    warnings.simplefilter("error")
    ends, losses = [], []
    for _ in range(2):
        model = mlp()
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        group = dist.group.WORLD
        with tw.distribute(model, inner, design=design, group=group) as optimizer:
            losses.append(steps(model, optimizer, rank, range(count)))
            optimizer.flush()
            ends.append(weights(model))
    return {"losses": losses[0], "weights": ends[0], "again": torch.equal(ends[0], ends[1])}


def one_rank_of_nccl(rank: int) -> dict[str, Any]:
    """A group of NCCL's: it takes one rank of a GPU."""
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    group = dist.new_group([rank], backend=backend)
    model = DistributedDataParallel(mlp(), process_group=group)
    ddp.compress(model, "3lc", measure_link=False)
    return {"losses": steps(model, sgd(model), rank, range(12)), "backend": dist.get_backend(group)}


def mesh_of(kind: str) -> DeviceMesh:
    """Two replicas of one shard each, or two shards.

    NCCL refuses two ranks on one GPU, and has nothing to do here: a rank's shard is the whole, or what goes between
    ranks is coded.
    """
    backend = "cpu:gloo,cuda:nccl" if DEVICE.type == "cuda" else "gloo"
    alone = [dist.new_group([rank], backend=backend) for rank in range(2)][dist.get_rank()]
    both = dist.new_group([0, 1], backend=backend)
    if kind == "fsdp":
        return DeviceMesh.from_group(both, DEVICE.type, mesh=[0, 1])
    names = ("replicate", "shard")
    return DeviceMesh.from_group([both, alone], DEVICE.type, mesh=[[0], [1]], mesh_dim_names=names)


def sharded(rank: int, kind: str, options: dict[str, Any], last: bool, count: int = 12) -> dict[str, Any]:
    """Trains with FSDP2 twice from the same start, once more from a state in the middle.

    Where passes are said not to be the `last`, FSDP has nobody wait for its streams at their end.
    """
    mesh, ends, losses = mesh_of(kind), [], []

    def start() -> tuple[Any, fsdp.ShardedState, torch.optim.Optimizer]:
        model: Any = mlp()
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.set_is_last_backward(last)
        return model, fsdp.compress(model, measure_link=False, **options), sgd(model)

    for _ in range(2):
        model, state, optimizer = start()
        losses.append(steps(model, optimizer, rank, range(count // 2)))
        saved = copy.deepcopy((shards(model), optimizer.state_dict(), state.state_dict()))
        losses[-1] += steps(model, optimizer, rank, range(count // 2, count))
        ends.append(shards(model))
        state.close()
    model, state, optimizer = start()
    with torch.no_grad():
        for parameter, values in zip(model.parameters(), saved[0], strict=True):
            parameter.to_local().copy_(values)
    optimizer.load_state_dict(saved[1])
    state.load_state_dict(saved[2])
    steps(model, optimizer, rank, range(count // 2, count))
    # Without replicas an owner keeps its average to itself: nothing is encoded of its own slices.
    contexts = [
        context for (_, part), context in state.core.residuals.contexts.items() if kind == "hsdp" or part.server != rank
    ]
    return {
        "losses": losses[0],
        "weights": torch.cat([each.cpu().reshape(-1) for each in ends[0]]),
        "again": all(map(torch.equal, ends[0], ends[1])) and losses[0] == losses[1],
        "resumed": all(map(torch.equal, ends[0], shards(model))),
        "on_host": [context.on_host for context in contexts],
    }


def shards(model: nn.Module) -> list[torch.Tensor]:
    """This rank's shards of all parameters."""
    parameters = list(model.parameters())
    assert all(isinstance(each, DTensor) for each in parameters)
    return [each.to_local().detach().clone() for each in parameters if isinstance(each, DTensor)]
