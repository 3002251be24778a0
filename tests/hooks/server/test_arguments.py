"""Arguments of `tw.distribute` that cannot be: refused by name, before any connection is opened."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.hooks.local_runs import adamw, sgd
from tests.hooks.server_runs import mlp
from thinwire.policies.designs import design as find_design


def both(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, rest = ([p for p in model.parameters() if (p.ndim == 2) is wanted] for wanted in (True, False))
    return [torch.optim.SGD(matrices, lr=0.05, momentum=0.9), torch.optim.AdamW(rest, lr=0.01)]


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"codec": "4lc"}, "unknown codec"),
    ({"codec": "auto"}, "codec='auto' is of ddp.compress and fsdp.compress"),
    ({"design": "3lc", "codec": "int8"}, "design='3lc' brings its codecs"),
    ({"design": "3lc", "nonfinite": "skip"}, r"design='3lc\[nonfinite=skip\]'"),
    ({"design": "local-sgd[h=4]", "nonfinite": "skip"}, r"design='local-sgd\[h=4,nonfinite=skip\]'"),
    ({"design": "update", "s": 1.5}, r"design='update\[s=1\.5\]'"),
    ({"design": "3lc", "elastic": True}, "tw.distribute has no elastic"),
    ({"design": "entropy", "steps_per_epoch": 0}, "steps is 0"),
    ({"sparsity": 2.0}, "sparsity"),
    ({"sparsty": 1.0}, "did you mean 'sparsity'"),
    ({"reduce": "max"}, "reduce"),
    ({"exclude": "0.weight"}, "exclude='0.weight'"),
    ({"rank": -1, "workers": 4}, "rank"),
    ({"rank": 0}, "give both"),
    ({"workers": 2}, "give both"),
    ({"rank": "0", "workers": 2}, "give both as whole numbers"),
    ({"rank": True, "workers": 2}, "give both as whole numbers"),
    ({"server": "http://127.0.0.1:1"}, "grpc://"),
    ({"server": [f"grpc://127.0.0.1:{port}" for port in (1, 2, 1)]}, r"grpc://127\.0\.0\.1:1 is given twice"),
    *(
        ({option: seconds}, f"{option} is ")
        for option in ("timeout_s", "connect_timeout_s", "reconnect_s")
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


def test_options_that_cannot_be_are_refused_by_name() -> None:
    for options, named in OPTIONS:
        model = mlp(0)
        with pytest.raises(tw.ConfigError, match=named):
            distribute(model, sgd(model), **options)
    assert find_design("3lc[nonfinite=skip]").up.nonfinite == "skip"


def test_optimizers_that_cannot_be_are_refused_by_name() -> None:
    for make, options, named in OPTIMIZERS:
        model = mlp(0)
        with pytest.raises(tw.ConfigError, match=named):
            distribute(model, make(model), **options)
    model = mlp(0)
    with pytest.raises(tw.ConfigError, match="a SGD is no model"):
        distribute(sgd(model), model)
    with pytest.raises(tw.ConfigError, match=re.escape("transmission=traditional")):
        find_design("entropy", transmission="wait-free")


def test_optimizer_state_on_another_device_than_its_parameter_is_refused_by_name() -> None:
    model = mlp(0)
    optimizer = adamw(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    moments = optimizer.state[next(model.parameters())]
    moments["exp_avg"] = moments["exp_avg"].to("meta")
    with pytest.raises(tw.ConfigError, match=r"'exp_avg' of a parameter of shape \(40, 12\) is on meta"):
        distribute(model, optimizer, design="update")


def test_a_server_that_is_not_there_is_named() -> None:
    model = mlp(0)
    with pytest.raises(tw.DeadlineError, match=r"127\.0\.0\.1:9"):
        distribute(model, sgd(model), server="grpc://127.0.0.1:9", connect_timeout_s=0.5)
