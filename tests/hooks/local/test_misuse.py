"""Local updates refuse or warn: impossible designs, workers that plan otherwise, steps of the inner optimizer."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import adamw, disagree, inner_step, mlp, sgd
from thinwire.errors import ConfigError, ProtocolError
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.policies.designs import design as find_design


def test_options_of_a_design_that_cannot_be_are_refused_by_name() -> None:
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


def test_workers_that_plan_otherwise_are_told_which_option_differs() -> None:
    cases: list[tuple[str, str, str]] = [
        ("diloco[h=3]", "diloco[h=4]", r"h, .* plans local\[steps=[34]\], the others local\[steps=[34]\]"),
        ("diloco[h=3]", "diloco[h=3,fragments=2]", "local: this worker plans 'fragments="),
        ("local-sgd[h=3]", "local-sgd[h=3,settle=2]", "settle=2"),
    ]
    for design, other, differs in cases:
        errors = disagree(design, other)
        assert any(isinstance(e, ProtocolError) and re.search(differs, str(e)) for e in errors), errors


def test_workers_may_have_outer_rates_of_their_own() -> None:
    """It is worker 0's at every exchange, as any rate is."""
    assert disagree("diloco[h=3]", "diloco[h=3,outer_lr=0.5]") == [None, None]


def test_an_outer_momentum_that_sgd_does_not_bear_is_warned_of() -> None:
    def nothing(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        del rank, model, opt

    for design in ("diloco[h=3]", "streaming-diloco[h=6]", "diloco[h=3,codec=fp32]"):
        with pytest.warns(UserWarning, match=r"outer_momentum=0\.6"):
            run_cluster(mlp, nothing, workers=1, optimizer=sgd, design=design)
        run_cluster(mlp, nothing, workers=1, optimizer=adamw, design=design)  # a warning would be an error here
    run_cluster(mlp, nothing, workers=1, optimizer=sgd, design="diloco[h=3,outer_momentum=0.6]")


def test_a_step_of_the_inner_optimizer_is_warned_of_and_a_group_added_there_refused() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        inner = opt._inner
        inner_step(model, opt, rank, 0)
        with pytest.warns(UserWarning, match="has taken a step by itself"):
            inner.step()
        inner.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        with pytest.raises(ConfigError, match=r"holds 6 parameters .* given 5"):
            inner_step(model, opt, rank, 1)

    run_cluster(mlp, train, workers=1, optimizer=adamw, design="local-sgd[h=4]")
