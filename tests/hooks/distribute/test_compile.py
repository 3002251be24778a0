"""`torch.compile` with `tw.distribute`: one graph, whichever comes first, and the same bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

import thinwire as tw
from tests.hooks.cluster import run_cluster
from tests.hooks.ddp_ranks import run_cases
from tests.hooks.local_runs import batch, inner_step, mlp, sgd, steps, values
from thinwire.hooks.distribute import DistributedOptimizer

# torch looks there
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
DESIGNS = ("local-sgd[h=2]", "3lc")


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("when", ["before", "called before", "in place", "late"])
def test_compiled_model_is_one_graph_with_same_bits(design: str, when: str) -> None:
    def compiled(rank: int) -> Any:
        model: Any = mlp(rank)
        if when == "before":
            return torch.compile(model, backend="eager")
        if when == "called before":
            model = torch.compile(model, backend="eager")
            before = copy.deepcopy(model.state_dict())
            model(batch(0, 0)[0])
            model.load_state_dict(before)  # statistics
        if when == "in place":
            model.compile(backend="eager")
        return model

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        called: Any = torch.compile(model, backend="eager") if when == "late" else model
        for step in range(6):
            inner_step(called, opt, rank, step)
        opt.flush()
        return values(model)

    torch._dynamo.reset()
    counters.clear()
    found, _ = run_cluster(compiled, train, workers=1, optimizer=sgd, design=design)
    usual, _ = run_cluster(mlp, steps(6), workers=1, optimizer=sgd, design=design)
    assert torch.equal(found[0], usual[0])
    # With a break before it, torch 2.9 and earlier make no graph at all.
    breaks = when in ("late", "in place")
    assert counters["stats"]["unique_graphs"] <= 1, "no layer's hook cuts it"
    assert breaks or counters["stats"]["unique_graphs"] == 1
    assert (sum(counters["graph_break"].values()) > 0) == breaks


def compiled_steps(rank: int, model: nn.Module, opt: Any, backend: str) -> torch.Tensor:
    def taken(step: int) -> None:
        inner_step(model, opt, rank, step)

    whole: Any = torch.compile(taken, backend=backend) if backend else taken
    for step in range(6):
        whole(step)
    opt.flush()
    return values(model)


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_training_step_has_the_same_bits(design: str, backend: str) -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        return compiled_steps(rank, model, opt, backend)

    torch._dynamo.reset()
    found, _ = run_cluster(mlp, train, workers=1, optimizer=sgd, design=design)
    usual, _ = run_cluster(mlp, steps(6), workers=1, optimizer=sgd, design=design)
    assert torch.equal(found[0], usual[0])


def among_ranks(rank: int, design: str, backend: str) -> torch.Tensor:
    torch._dynamo.reset()
    model = mlp(rank)
    with tw.distribute(model, sgd(model), group=dist.group.WORLD, design=design) as opt:
        return compiled_steps(rank, model, opt, backend)


def test_compiled_training_step_has_the_same_bits_among_ranks() -> None:
    backends = ("", "eager", "aot_eager")
    cases: dict[str, tuple[Any, ...]] = {f"{d} {b}": (among_ranks, d, b) for d in DESIGNS for b in backends}
    found = run_cases(2, cases)
    for design in DESIGNS:
        for backend in backends:
            for each in found[f"{design} {backend}"]:
                assert torch.equal(each, found[f"{design} "][0]), (design, backend)
