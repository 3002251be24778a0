"""From a model to one plan for each shard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from thinwire.codecs import codec
from thinwire.errors import ConfigError
from thinwire.hooks.planning import Planned, make_plan
from thinwire.policies.assignment import Partition
from thinwire.policies.designs import Design
from thinwire.policies.designs import design as find_design
from thinwire.policies.placement import placement

UP, DOWN = codec("3lc", sparsity=1.5), codec("int8")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 30)
        self.norm = nn.BatchNorm1d(30)
        self.last = nn.Linear(30, 10)


DESIGN = Design(name="mine", up=UP, down=DOWN, min_numel=200, consistency="ssp[2]")


def plan(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **others: Any) -> Planned:
    sgd = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    return make_plan(model, sgd, DESIGN, workers=4, state_interval=7, **others)


def test_one_shard_holds_everything_in_the_models_order_and_codecs_by_their_number() -> None:
    planned = plan(Model())
    [only] = planned.plans
    names = [spec.name for spec in only.tables]
    assert names[:6] == ["first.weight", "first.bias", "norm.weight", "norm.bias", "last.weight", "last.bias"]
    assert names[6:] == ["norm.running_mean", "norm.running_var"], "whole numbers (num_batches_tracked) stay at home"
    assert [spec.state for spec in only.tables] == [False] * 6 + [True] * 2
    assert [tensor.name for tensor in planned.tensors] == names
    assert {spec.dtype for spec in only.tables} == {"float32"}
    assert only.consistency == "ssp[staleness=2,mode=passive]"
    assert (only.workers, only.reduce, only.state_interval, only.optimizer) == (4, "mean", 7, "SGD")
    assert only.codecs == (UP.config(), DOWN.config(), codec("fp32").config())
    by_name = {spec.name: (only.codecs[spec.up]["id"], only.codecs[spec.down]["id"]) for spec in only.tables}
    assert by_name["first.weight"] == by_name["last.weight"] == ("3lc", "int8")
    assert {by_name[name] for name in ("first.bias", "norm.weight", "norm.running_mean")} == {("fp32", "fp32")}


def test_a_tensor_in_pieces_is_as_many_tables() -> None:
    planned = plan(Model(), shards=3, placement=placement("uniform[min=16]"))
    first = next(tensor for tensor in planned.tensors if tensor.name == "first.weight")
    assert [part for part, _ in first.placed] == [Partition(0, 0, 200), Partition(1, 200, 400), Partition(2, 400, 600)]
    for part, table in first.placed:
        spec = planned.plans[part.server].tables[table]
        assert spec.name == f"first.weight[{part.start}:{part.stop}]" and spec.shape == (200,)
        assert planned.plans[part.server].codecs[spec.up]["id"] == "3lc", "chosen by the whole tensor's shape"


def test_every_value_has_one_place_and_buffers_are_on_shard_0() -> None:
    for policy in ["round-robin", "greedy", "heuristic", "uniform[min=8]"]:
        for shards in (1, 2, 6):
            planned = plan(Model(), shards=shards, placement=placement(policy))
            seen = [(part.server, table) for tensor in planned.tensors for part, table in tensor.placed]
            assert len({*seen}) == len(seen) == sum(len(each.tables) for each in planned.plans)
            for tensor in planned.tensors:
                ends = [0, *(part.stop for part, _ in tensor.placed)]
                assert [part.start for part, _ in tensor.placed] == ends[:-1] and ends[-1] == tensor.tensor.numel(), (
                    policy
                )
                assert not tensor.state or {part.server for part, _ in tensor.placed} == {0}
            assert all(each.groups == planned.plans[0].groups for each in planned.plans)


def test_a_server_that_would_hold_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"1 of 7 servers .*'greedy'"):
        plan(Model(), shards=7, placement=placement("greedy"))
    assert all(each.tables for each in plan(Model(), shards=12, placement=placement("uniform[min=1]")).plans)


def test_groups_travel_with_their_options_and_without_frozen_parameters() -> None:
    model = Model()
    model.last.weight.requires_grad_(False)
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False))
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.5}, {"params": vectors}]
    sgd = torch.optim.SGD(groups, lr=0.1, momentum=0.25)
    [only] = plan(model, sgd).plans
    assert [group["weight_decay"] for group in only.groups] == [0.5, 0]
    assert all(group["momentum"] == 0.25 and "lr" not in group and "params" not in group for group in only.groups)
    assert {spec.name: spec.group for spec in only.tables if not spec.state} == {
        name: int(each.ndim == 1) for name, each in model.named_parameters() if each.requires_grad
    }


def frozen(model: Model) -> torch.optim.Optimizer:
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return sgd


class MySGD(torch.optim.SGD):
    """Not the one that servers run."""


def test_models_and_optimizers_that_servers_cannot_run_are_refused_by_name() -> None:
    refused: list[tuple[Any, str]] = [
        (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS is none of them"),
        (lambda m: MySGD(m.parameters(), lr=0.1), "MySGD is none of them"),
        (lambda m: type("SGD", (MySGD,), {})(m.parameters(), lr=0.1), r"test_planning\.SGD is none of them"),
        (lambda m: torch.optim.SGD(m.first.parameters(), lr=0.1), "'norm.weight' needs a gradient and the optimizer"),
        (frozen, "no parameter that needs a gradient"),
    ]
    sparse = nn.Embedding(9, 4, sparse=True)
    with pytest.raises(ConfigError, match="sparse=False"):
        plan(sparse, torch.optim.SGD(sparse.parameters(), lr=0.1))
    for optimizer, text in refused:
        model = Model()
        with pytest.raises(ConfigError, match=text):
            plan(model, optimizer(model))
    model = Model()
    hooked = torch.optim.SGD(model.parameters(), lr=0.1)
    hooked.register_step_post_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="hooks"):
        plan(model, hooked)
    make_plan(model, hooked, find_design("update"), workers=2)  # each worker runs its own
