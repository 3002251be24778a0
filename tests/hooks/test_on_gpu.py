"""Training on a GPU with real ranks: exchanges run beside the backward pass, on threads and streams of their own.

A race of streams shows in the bits: two runs of the same steps, and one resumed in the middle, must end at the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.hooks import gpu_ranks
from tests.hooks.cluster import run_cluster
from tests.hooks.ddp_ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.cuda]

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
def test_the_hook_gives_the_same_bits_again(options: dict[str, Any]) -> None:
    ranks = run_ranks(2, gpu_ranks.hooked, options)
    agree(ranks)
    for each in ranks:
        assert each["again"] and each["resumed"]
        assert torch.cuda.is_available() != any(each["on_host"])


def test_frames_that_lose_nothing_train_as_plain_ddp_does() -> None:
    assert all(each["off by"] < 1e-4 for each in run_ranks(2, gpu_ranks.plain))


def test_mixed_precision_with_a_scaler() -> None:
    agree(run_ranks(2, gpu_ranks.scaled))


def test_auto_decides_alike_on_all_ranks() -> None:
    ranks = run_ranks(2, gpu_ranks.automatic)
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
    ranks = run_ranks(2, gpu_ranks.local, design)
    agree(ranks)
    assert all(each["again"] for each in ranks)


def test_ddp_over_nccl() -> None:
    [each, _] = run_ranks(2, gpu_ranks.one_rank_of_nccl)
    assert sum(each["losses"][-3:]) < sum(each["losses"][:3])
    assert each["backend"] == ("nccl" if torch.cuda.is_available() else "gloo")


@pytest.mark.parametrize("design", ["3lc", "doublesqueeze-1bit", "terngrad", "topk-sgd"])
def test_workers_of_a_server(design: str) -> None:
    def train(rank: int, model: Any, optimizer: Any) -> dict[str, Any]:
        losses = gpu_ranks.steps(model, optimizer, rank, range(12))
        optimizer.sync()
        return {"losses": losses, "weights": gpu_ranks.weights(model)}

    options: dict[str, Any] = {"codec": design} if design == "3lc" else {"design": design}
    ranks, _ = run_cluster(lambda rank: gpu_ranks.mlp(), train, transport="grpc", optimizer=gpu_ranks.sgd, **options)
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
def test_sharded_models_give_the_same_bits_again(kind: str, options: dict[str, Any], last: bool) -> None:
    ranks = run_ranks(2, gpu_ranks.sharded, kind, options, last)
    assert all(each["again"] and each["resumed"] for each in ranks)
    for each in ranks:
        assert sum(each["losses"][-3:]) < sum(each["losses"][:3]), each["losses"]
        assert torch.cuda.is_available() != any(each["on_host"])
    if kind == "hsdp":
        assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
