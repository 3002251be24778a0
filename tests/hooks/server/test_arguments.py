"""Arguments and designs that cannot be are refused by name; a model becomes one plan for each shard."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import adamw, disagree, inner_step, sgd
from tests.hooks.local_runs import mlp as normed
from tests.hooks.server_runs import mlp
from thinwire.codecs import codec
from thinwire.errors import ConfigError, ProtocolError
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.planning import Planned, make_plan
from thinwire.policies.designs import Design
from thinwire.policies.designs import design as find_design
from thinwire.policies.placement import placement


def both(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, rest = ([p for p in model.parameters() if (p.ndim == 2) is wanted] for wanted in (True, False))
    return [torch.optim.SGD(matrices, lr=0.05, momentum=0.9), torch.optim.AdamW(rest, lr=0.01)]


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"codec": "4lc"}, "unknown codec"),
    ({"codec": "auto"}, "codec='auto' is of ddp.compress and fsdp.compress"),
    ({"design": "3lc", "codec": "int8"}, "design='3lc' brings its codecs"),
    ({"design": "3lc", "nonfinite": "skip"}, r"design='3lc\[nonfinite=skip\]'"),
    ({"design": "update", "s": 1.5}, r"design='update\[s=1\.5\]'"),
    ({"design": "3lc", "elastic": True}, "tw.distribute has no elastic"),
    ({"design": "entropy"}, r"consistency='local\[steps=100\]'"),
    ({"sparsity": 2.0}, "sparsity"),
    ({"sparsty": 1.0}, "did you mean 'sparsity'"),
    ({"reduce": "max"}, "reduce"),
    ({"exclude": "0.weight"}, "exclude='0.weight'"),
    ({"rank": -1, "workers": 4}, "rank"),
    ({"rank": 0}, "give both"),
    ({"rank": "0", "workers": 2}, "give both as whole numbers"),
    ({"server": "http://127.0.0.1:1"}, "grpc://"),
    ({"server": [f"grpc://127.0.0.1:{port}" for port in (1, 2, 1)]}, r"grpc://127\.0\.0\.1:1 is given twice"),
    *(
        ({option: seconds}, f"{option} is ")
        for option in ("timeout", "connect_timeout_s", "reconnect_s")
        for seconds in (float("inf"), float("nan"), 1e10, -1.0)
    ),
]
OPTIMIZERS: list[tuple[Any, dict[str, Any], str]] = [
    (lambda m: torch.optim.LBFGS(m.parameters()), {}, "LBFGS"),
    (lambda m: [], {"design": "update"}, "an empty list of optimizers"),
    (lambda m: iter(both(m)), {"design": "update"}, "a list_iterator is no torch optimizer"),
    (lambda m: [adamw(m), adamw(m)], {"design": "update"}, r"0 and 1 both hold a parameter of shape \(40, 12\)"),
    (lambda m: [adamw(m), list(m.parameters())], {"design": "update"}, "a list, which is no torch optimizer"),
    (lambda m: [torch.optim.LBFGS([m[0].weight]), *both(m)], {"design": "update"}, "LBFGS"),
    (lambda m: both(m)[:1], {"design": "update"}, "parameter '0.bias' needs"),
    (both, {}, "SGD and AdamW is none of them"),
    (both, {"design": "demo"}, "given SGD and AdamW"),
    (adamw, {"design": "demo"}, "given AdamW"),
    (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), {"design": "demo"}, "given SGD with momentum"),
]


def distribute(model: Any, optimizer: Any, **options: Any) -> None:
    tw.distribute(model, optimizer, **{"server": "grpc://127.0.0.1:1", **options})


def test_invalid_options_raise_config_error_with_name() -> None:
    for options, named in OPTIONS:
        model = mlp(0)
        with pytest.raises(ConfigError, match=named):
            distribute(model, sgd(model), **options)
    assert find_design("3lc[nonfinite=skip]").up.nonfinite == "skip"


def test_unsupported_optimizers_raise_config_error_with_name() -> None:
    for make, options, named in OPTIMIZERS:
        model = mlp(0)
        with pytest.raises(ConfigError, match=named):
            distribute(model, make(model), **options)
    model = mlp(0)
    with pytest.raises(ConfigError, match="a SGD is no model"):
        distribute(sgd(model), model)
    with pytest.raises(ConfigError, match=re.escape("transmission=traditional")):
        find_design("entropy", transmission="wait-free")


def test_optimizer_state_on_another_device_raises_config_error() -> None:
    model = mlp(0)
    optimizer = adamw(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    moments = optimizer.state[next(model.parameters())]
    moments["exp_avg"] = moments["exp_avg"].to("meta")
    with pytest.raises(ConfigError, match=r"'exp_avg' of a parameter of shape \(40, 12\) is on meta"):
        distribute(model, optimizer, design="update")


def test_absent_server_raises_deadline_error_with_address() -> None:
    model = mlp(0)
    with pytest.raises(tw.DeadlineError, match=r"127\.0\.0\.1:9"):
        distribute(model, sgd(model), server="grpc://127.0.0.1:9", connect_timeout_s=0.5)


def test_invalid_design_options_raise_config_error_with_name() -> None:
    cases: list[tuple[str, str]] = [
        ("diloco[h=0]", "h is 0"),
        ("diloco[h=4,fragments=5]", "fragments is 5"),
        ("diloco[h=4,delay=4]", "delay is 4"),
        ("streaming-diloco[h=6,warmup=2]", "fragments=1 and delay=0"),
        ("diloco[keep=1.0]", "keep is 1.0"),
        ("local-sgd[keep_unsent=1.5]", "keep_unsent is 1.5"),
        ("update[settle=-1]", "settle is -1"),
        ("diloco[settle=1]", "settle: "),
        ("demo[settle=1]", "settle: "),
        ("local-sgd[steer=1]", "steer is 1"),
        ("local-sgd[h=4,fragments=2,steer=0.3]", "steer: .* outer=SGD"),
        ("local-sgd[h=4,reduce=sum,steer=0.5]", "reduce='sum' with steer"),
        ("diloco[steer=0.3]", "outer_momentum=0, fragments=1 and delay=0"),
        ("diloco[outer_lr=0]", "outer_lr is 0"),
        ("diloco[outer=Adam]", "outer is 'Adam'; there are SGD and SignSGD"),
        ("diloco[outer_speed=3]", "unknown option 'outer_speed'"),
        ("local-sgd[h=2,nesterov=true]", "nesterov needs an outer_momentum"),
        ("update[codec=auto,lag_limit=8]", "codec='auto' is of ddp.compress"),
        ("streaming-diloco[codec_down=auto]", r"takes a codec by its name, .* chooses H by itself"),
        ("local-sgd[h=4,consistency=bsp]", "consistency"),
    ]
    for name, wrong in cases:
        with pytest.raises(ConfigError, match=wrong):
            find_design(name)


def test_different_plans_raise_protocol_error_with_option() -> None:
    cases: list[tuple[str, str, str]] = [
        ("diloco[h=3]", "diloco[h=4]", r"h, .* plans local\[steps=[34]\], the others local\[steps=[34]\]"),
        ("diloco[h=3]", "diloco[h=3,fragments=2]", "local: this worker plans 'fragments="),
        ("local-sgd[h=3]", "local-sgd[h=3,settle=2]", "settle=2"),
    ]
    for design, other, differs in cases:
        errors = disagree(design, other)
        assert any(isinstance(e, ProtocolError) and re.search(differs, str(e)) for e in errors), errors


def test_outer_momentum_with_sgd_warns() -> None:
    def nothing(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        del rank, model, opt

    for design in ("diloco[h=3]", "streaming-diloco[h=6]", "diloco[h=3,codec=fp32]"):
        with pytest.warns(UserWarning, match=r"outer_momentum=0\.6"):
            run_cluster(normed, nothing, workers=1, optimizer=sgd, design=design)
        run_cluster(normed, nothing, workers=1, optimizer=adamw, design=design)  # a warning would be an error here
    run_cluster(normed, nothing, workers=1, optimizer=sgd, design="diloco[h=3,outer_momentum=0.6]")


def test_inner_optimizer_step_warns_and_added_group_raises() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        inner = opt._inner
        inner_step(model, opt, rank, 0)
        with pytest.warns(UserWarning, match="has taken a step by itself"):
            inner.step()
        inner.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        with pytest.raises(ConfigError, match=r"holds 6 parameters .* given 5"):
            inner_step(model, opt, rank, 1)

    run_cluster(normed, train, workers=1, optimizer=adamw, design="local-sgd[h=4]")


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


def test_plan_of_one_shard_has_model_order_and_codec_numbers() -> None:
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


def test_plan_places_every_value_once_and_buffers_on_shard_0() -> None:
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


def test_shard_without_tables_raises_config_error() -> None:
    with pytest.raises(ConfigError, match=r"1 of 7 servers .*'greedy'"):
        plan(Model(), shards=7, placement=placement("greedy"))
    assert all(each.tables for each in plan(Model(), shards=12, placement=placement("uniform[min=1]")).plans)


def test_plan_includes_group_options_without_frozen_parameters() -> None:
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


def test_models_and_optimizers_unsupported_by_servers_raise_config_error() -> None:
    refused: list[tuple[Any, str]] = [
        (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS is none of them"),
        (lambda m: MySGD(m.parameters(), lr=0.1), "MySGD is none of them"),
        (lambda m: type("SGD", (MySGD,), {})(m.parameters(), lr=0.1), r"test_arguments\.SGD is none of them"),
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
