"""Training on a GPU with real ranks, all of them on the one GPU, over gloo: exchanges run beside the backward pass.

A race of streams shows in the bits: two runs of the same steps, and one resumed in the middle, must end at the same.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.hooks.cluster import run_cluster
from tests.hooks.ddp_ranks import ddp, run_ranks
from thinwire.hooks import fsdp

pytestmark = [pytest.mark.gpu, pytest.mark.cuda]

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


def local(model: nn.Module) -> list[torch.Tensor]:
    """This rank's values, or shards, of all parameters."""
    return [(each.to_local() if isinstance(each, DTensor) else each).detach() for each in model.parameters()]


def trained_again(
    rank: int, start: Callable[[], tuple[Any, Any, torch.optim.Optimizer]], *, own: bool = True, count: int = 12
) -> dict[str, Any]:
    """Trains twice from the same start, once more from a state in the middle; `own` slices' averages may be encoded."""
    ends, losses = [], []
    for _ in range(2):
        model, state, optimizer = start()
        losses.append(steps(model, optimizer, rank, range(count // 2)))
        saved = copy.deepcopy((local(model), optimizer.state_dict(), state.state_dict()))
        losses[-1] += steps(model, optimizer, rank, range(count // 2, count))
        ends.append([each.clone() for each in local(model)])
        state.close()
    model, state, optimizer = start()
    for mine, values in zip(local(model), saved[0], strict=True):
        mine.copy_(values)
    optimizer.load_state_dict(saved[1])
    state.load_state_dict(saved[2])
    steps(model, optimizer, rank, range(count // 2, count))
    contexts = state.core.residuals.contexts.items()
    return {
        "losses": losses[0],
        "weights": torch.cat([each.cpu().reshape(-1) for each in ends[0]]),
        "again": all(map(torch.equal, ends[0], ends[1])) and losses[0] == losses[1],
        "resumed": all(map(torch.equal, ends[0], local(model))),
        "on_host": [context.on_host for (_, part), context in contexts if own or part.server != rank],
    }


def hooked(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    warnings.simplefilter("error")

    def start() -> tuple[Any, Any, torch.optim.Optimizer]:
        model = DistributedDataParallel(mlp(), bucket_cap_mb=4)
        return model, ddp.compress(model, measure_link=False, **options), sgd(model)

    return trained_again(rank, start)


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


def updates(rank: int, design: str, count: int = 24) -> dict[str, Any]:
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


def sharded(rank: int, kind: str, options: dict[str, Any], last: bool) -> dict[str, Any]:
    """Where passes are said not to be the `last`, FSDP does not wait for its streams at their end."""
    mesh = mesh_of(kind)

    def start() -> tuple[Any, Any, torch.optim.Optimizer]:
        model: Any = mlp()
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.set_is_last_backward(last)
        return model, fsdp.compress(model, measure_link=False, **options), sgd(model)

    return trained_again(rank, start, own=kind == "hsdp")


KERNELS: dict[str, dict[str, Any]] = {
    "3lc": {"codec": "3lc"},
    "3lc, lag": {"codec": "3lc", "sparsity": 1.5, "lag": 5},
    "3lc, zstd": {"codec": "3lc", "entropy": "zstd"},
    "int8": {"codec": "int8"},
    "onebit": {"codec": "onebit"},
    "topk": {"codec": "topk", "fraction": 0.01},
}


def agree(ranks: list[dict[str, Any]]) -> None:
    """All ranks hold the same weights, and have learnt something."""
    assert all(torch.equal(ranks[0]["weights"], each["weights"]) for each in ranks[1:])
    for each in ranks:
        assert sum(each["losses"][-3:]) < sum(each["losses"][:3]), each["losses"]


@pytest.mark.parametrize("options", KERNELS.values(), ids=KERNELS)
def test_ddp_hook_repeats_bit_identical(options: dict[str, Any]) -> None:
    ranks = run_ranks(2, hooked, options)
    agree(ranks)
    for each in ranks:
        assert each["again"] and each["resumed"]
        assert torch.cuda.is_available() != any(each["on_host"])


def test_lossless_frames_train_as_plain_ddp() -> None:
    assert all(each["off by"] < 1e-4 for each in run_ranks(2, plain))


def test_mixed_precision_with_a_scaler() -> None:
    agree(run_ranks(2, scaled))


def test_auto_makes_same_choice_on_all_ranks() -> None:
    ranks = run_ranks(2, automatic)
    agree(ranks)
    assert len({each["setting"] for each in ranks}) == 1


@pytest.mark.parametrize(
    "design",
    [
        "update[codec=3lc]",
        "local-sgd[h=4,codec=3lc]",
        "diloco[h=6,codec=blocktopk]",
        "streaming-diloco[h=6,fragments=2,delay=1]",
        "sparseloco[h=6]",
    ],
)
def test_local_updates_in_a_group(design: str) -> None:
    ranks = run_ranks(2, updates, design)
    agree(ranks)
    assert all(each["again"] for each in ranks)


def test_ddp_over_nccl() -> None:
    [each, _] = run_ranks(2, one_rank_of_nccl)
    assert sum(each["losses"][-3:]) < sum(each["losses"][:3])
    assert each["backend"] == ("nccl" if torch.cuda.is_available() else "gloo")


@pytest.mark.parametrize("design", ["3lc", "doublesqueeze-1bit", "terngrad", "topk-sgd"])
def test_workers_of_a_server(design: str) -> None:
    def train(rank: int, model: Any, optimizer: Any) -> dict[str, Any]:
        losses = steps(model, optimizer, rank, range(12))
        optimizer.sync()
        return {"losses": losses, "weights": weights(model)}

    options: dict[str, Any] = {"codec": design} if design == "3lc" else {"design": design}
    ranks, _ = run_cluster(lambda rank: mlp(), train, transport="grpc", optimizer=sgd, **options)
    agree(ranks)


@pytest.mark.parametrize(
    ("kind", "options", "last"),
    [
        ("hsdp", {"codec": "3lc"}, True),
        ("hsdp", {"codec": "3lc"}, False),
        ("hsdp", {"codec": "int8", "codec_down": "3lc"}, True),
        ("fsdp", {"codec": "3lc", "gather": "int8"}, True),
    ],
)
def test_fsdp2_hook_repeats_bit_identical(kind: str, options: dict[str, Any], last: bool) -> None:
    ranks = run_ranks(2, sharded, kind, options, last)
    assert all(each["again"] and each["resumed"] for each in ranks)
    for each in ranks:
        assert sum(each["losses"][-3:]) < sum(each["losses"][:3]), each["losses"]
        assert torch.cuda.is_available() != any(each["on_host"])
    if kind == "hsdp":
        assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
