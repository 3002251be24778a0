"""What local updates refuse: designs that cannot be, workers that do not agree, states that are of something else."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import adamw, disagree, inner_step, mlp, resume, sgd, steps, values, wide
from thinwire.errors import ConfigError, ProtocolError
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.policies.designs import design as find_design


def test_designs_say_what_is_wrong_with_their_options() -> None:
    for name, expected in (
        ("diloco[h=0]", "h is 0; it must be a whole number of at least 1"),
        ("diloco[h=4,fragments=5]", "fragments is 5; it must be a whole number in 1 … 4"),
        ("diloco[h=4,delay=4]", "delay is 4; it must be a whole number in 0 … 3"),
        ("streaming-diloco[h=6,warmup=2]", "its steps exchange everything at once; fragments=1 and delay=0 go with it"),
        ("diloco[keep=1.0]", "keep is 1.0"),
        ("local-sgd[keep_unsent=1.5]", "keep_unsent is 1.5; it is a number from 0 to 1"),
        ("update[settle=-1]", "settle is -1; it must be a whole number of at least 0"),
        ("diloco[settle=1]", "settle: signs and momentum of the outer optimizer would step once more"),
        ("demo[settle=1]", "settle: signs and momentum of the outer optimizer would step once more"),
        ("local-sgd[steer=1]", "steer is 1; it is a number of at least 0 and below 1"),
        ("local-sgd[h=4,fragments=2,steer=0.3]", "steer: an update tells what all workers did .* outer=SGD"),
        ("diloco[steer=0.3]", "outer_momentum=0, fragments=1 and delay=0 go with it"),
        ("diloco[outer_lr=0]", "outer_lr is 0"),
        ("diloco[outer=Adam]", "outer is 'Adam'; there are SGD and SignSGD"),
        (
            "diloco[outer_speed=3]",
            "unknown option 'outer_speed'; local updates have h, .*outer, outer_lr, .*and their codec 3lc has .*spars",
        ),
        ("local-sgd[h=2,nesterov=true]", "nesterov needs an outer_momentum"),
        ("local-sgd[h=4,codec=3lc,lag_limit=5]", "only codec=auto takes lag_limit, and the codec here is 3lc"),
    ):
        with pytest.raises(ConfigError, match=expected):
            find_design(name)
    with pytest.raises(ConfigError, match="trains locally for 4 steps: its consistency is"):
        find_design("local-sgd[h=4]", consistency="bsp")


def test_workers_agree_on_the_timetable() -> None:
    for other, expected in (
        (
            "diloco[h=4]",
            r"h, inner steps between exchanges: this worker plans local\[steps=[34]\], the others local\[steps=[34]\]",
        ),
        ("diloco[h=3,fragments=2]", "local: this worker plans 'fragments="),
        ("diloco[h=3,outer_lr=0.5]", ""),
        ("diloco[h=3,settle=2,outer_momentum=0,nesterov=false]", "settle=2"),
    ):
        like = ",outer_momentum=0,nesterov=false" if "settle" in other else ""
        errors = disagree(f"diloco[h=3{like}]", other)
        if expected:
            assert any(isinstance(e, ProtocolError) and re.search(expected, str(e)) for e in errors), (other, errors)
        else:  # the outer rate is worker 0's at every exchange, as any rate is
            assert errors == [None, None], errors


def test_a_resumed_worker_with_other_settings_is_told_what_differs() -> None:
    def first(rank: int, model: nn.Module, opt: DistributedOptimizer) -> dict[str, Any]:
        steps(4)(rank, model, opt)
        return {"model": model.state_dict(), "opt": opt.state_dict()}

    [saved], core = run_cluster(wide, first, workers=1, optimizer=adamw, design="sparseloco[h=2]")
    cases: list[tuple[str, int, type[Exception], str]] = [
        ("sparseloco[h=4,steer=0]", 1, ConfigError, "state is of h=2 and this training has h=4: resume with"),
        ("sparseloco[h=2,fragments=2]", 1, ConfigError, "state is of fragments=1 and this training has fragments=2"),
        ("sparseloco[h=2,outer_lr=0.5]", 1, ConfigError, "state is of outer_lr=0.65 and this training has"),
        (
            "sparseloco[h=2,reduce=mean,codec=auto]",
            1,
            ConfigError,
            "state is of codec=blocktopk and this training has codec=auto: ",
        ),
        (
            "sparseloco[h=2,reduce=mean,codec=int8]",
            1,
            ConfigError,
            "state is of codec.id='blocktopk', codec_down.id='blocktopk', ",
        ),
        ("sparseloco[h=2,k=65]", 1, ConfigError, "state is of codec.k=64, codec_down.k=74 and this training has codec"),
        (
            "sparseloco[h=2,small=bf16]",
            1,
            ConfigError,
            "state is of compression='by-shape.small=3lc.* has compression=",
        ),
        ("sparseloco[h=2,reduce=mean]", 1, ProtocolError, "reduce: this worker plans 'mean', the others 'clipped-mean"),
        (
            "sparseloco[h=2]",
            2,
            ProtocolError,
            "expects 2 workers, the others 1: a training goes on, and resumes, with",
        ),
    ]
    for design, workers, kind, expected in cases:
        with pytest.raises(kind, match=expected):
            resume([saved] * workers, core, design, range(4, 5), wide)
    assert torch.isfinite(resume([saved], core, "sparseloco[h=2]", range(4, 5), wide)[0]).all(), "nothing was lost"


def test_an_outer_momentum_that_sgd_does_not_bear_is_warned_of() -> None:
    def nothing(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        del rank, model, opt

    for design in ("diloco[h=3]", "streaming-diloco[h=6]", "diloco[h=3,codec=fp32]"):
        with pytest.warns(UserWarning, match=r"0\.9 moves the model 7 times as far as SGD .* Take outer_momentum=0\.6"):
            run_cluster(mlp, nothing, workers=1, optimizer=sgd, design=design)
        run_cluster(mlp, nothing, workers=1, optimizer=adamw, design=design)  # a warning would be an error here
    run_cluster(mlp, nothing, workers=1, optimizer=sgd, design="diloco[h=3,outer_momentum=0.6]")


def test_optimizer_state_on_another_device_that_nothing_moves() -> None:
    model = mlp(0)
    optimizer = adamw(model)
    inner_step(model, optimizer, 0, 0)
    moments = optimizer.state[next(model.parameters())]
    moments["exp_avg"] = moments["exp_avg"].to("meta")
    with pytest.raises(
        ConfigError, match=r"'exp_avg' of a parameter of shape \(40, 12\) is on meta and the parameter on cpu"
    ):
        tw.distribute(model, optimizer, server="grpc://127.0.0.1:1", design="update")


@pytest.mark.parametrize("design", ["local-sgd[h=4]", "update"])
def test_a_group_that_comes_later_is_refused_and_the_training_goes_on(design: str) -> None:
    def added(rank: int, model: nn.Module, opt: DistributedOptimizer) -> int:
        inner_step(model, opt, rank, 0)
        with pytest.raises(ConfigError, match=r"all its groups before tw\.distribute"):
            opt.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        for step in range(1, 5):
            inner_step(model, opt, rank, step)
        opt.flush()
        return len(opt.param_groups)

    assert run_cluster(mlp, added, workers=2, optimizer=adamw, design=design)[0] == [1, 1]


def _other_memory(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def _other_parameters(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("design", ["local-sgd[h=4]", "update", "3lc"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (nn.Module.double, r"'0.weight' was moved after tw\.distribute: it is float64 on cpu .* float32 on cpu"),
        (_other_memory, r"'0.weight' was moved .* change values in place"),
        (_other_parameters, r"another parameter in place of '0.weight' .* without assign=True"),
    ],
)
def test_a_model_that_is_moved_later_is_refused_where_updates_would_not_reach_it(
    design: str, change: Callable[[nn.Module], None], expected: str
) -> None:
    def moved(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        inner_step(model, opt, rank, 0)
        opt.sync()
        change(model)
        with pytest.raises(ConfigError, match=expected):
            opt.step()

    run_cluster(mlp, moved, workers=2, optimizer=sgd, design=design)


def test_memory_that_is_shared_with_other_processes_later_is_the_models_still() -> None:
    def shared(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        model.share_memory()
        return steps(5)(rank, model, opt)

    found = run_cluster(mlp, shared, workers=2, optimizer=adamw, design="local-sgd[h=4]")[0]
    usual = run_cluster(mlp, steps(5), workers=2, optimizer=adamw, design="local-sgd[h=4]")[0]
    assert torch.equal(found[0], usual[0])
    assert torch.equal(found[1], usual[0])


def test_a_state_of_torchs_own_optimizer_is_told_where_it_belongs() -> None:
    model = mlp(0)
    plain = adamw(model)
    inner_step(model, plain, 0, 0)

    def loading(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        with pytest.raises(ConfigError, match=r"load it into that one, before tw\.distribute"):
            opt.load_state_dict(plain.state_dict())
        with pytest.raises(ConfigError, match="the state has 0 parameter groups, and this optimizer 1"):
            opt.load_state_dict({**opt.state_dict(), "param_groups": []})
        without = {key: value for key, value in opt.state_dict().items() if key != "inner"}
        with pytest.raises(ConfigError, match=r"the state lacks 'inner'; .* with and without local updates"):
            opt.load_state_dict(without)
        own = opt.state_dict()
        with pytest.raises(ConfigError, match="the state has 0 outer groups, and this optimizer 2"):
            opt.load_state_dict({**own, "step": 7, "outer_groups": []})
        others = {**own["inner"], "param_groups": [{**own["inner"]["param_groups"][0], "params": [0]}]}
        with pytest.raises(
            ConfigError, match=r"inner optimizer has groups of \[1\] parameters, and this one's of \[5\]"
        ):
            opt.load_state_dict({**own, "step": 7, "inner": others})
        return steps(5)(rank, model, opt)

    found, _ = run_cluster(mlp, loading, workers=2, optimizer=adamw, design="local-sgd[h=4]")
    usual, _ = run_cluster(mlp, steps(5), workers=2, optimizer=adamw, design="local-sgd[h=4]")
    assert torch.equal(found[0], usual[0]), "nothing was changed"


def test_what_the_inner_optimizer_loads_by_itself_is_the_wrapped_ones_too() -> None:
    inner: dict[int, torch.optim.Optimizer] = {}

    def kept(model: nn.Module) -> torch.optim.Optimizer:
        return inner.setdefault(id(model), adamw(model))

    def loading(rank: int, model: nn.Module, opt: DistributedOptimizer) -> bool:
        own = inner[id(model)]
        for loads in (own, opt):
            inner_step(model, opt, rank, 0)
            opt.sync()
            loads.load_state_dict(loads.state_dict())
            if opt.param_groups is not own.param_groups or opt.state is not own.state:
                return False
        return True

    assert run_cluster(mlp, loading, workers=2, optimizer=kept, design="local-sgd[h=2]")[0] == [True, True]


def test_a_report_counts_no_steps_of_another_run() -> None:
    def earlier(rank: int, model: nn.Module, opt: DistributedOptimizer) -> dict[str, Any]:
        steps(20)(rank, model, opt)
        return opt.state_dict()

    states, _ = run_cluster(mlp, earlier, workers=2, optimizer=adamw, design="local-sgd[h=2]")

    def later(rank: int, model: nn.Module, opt: DistributedOptimizer) -> int:
        opt.load_state_dict(states[rank])
        for step in range(20, 30):
            inner_step(model, opt, rank, step)
        return opt.report().steps

    assert run_cluster(mlp, later, workers=2, optimizer=adamw, design="local-sgd[h=2]")[0][0] < 10


def test_the_outer_rate_may_change_while_training_runs_and_the_momentum_may_not() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        for step in range(11):
            opt.outer_groups[0]["lr"] = 0.7 / (1 + step // 3)
            inner_step(model, opt, rank, step)
        opt.outer_groups[0]["momentum"] = 0.5
        with pytest.raises(ConfigError, match="the rate alone may change; another momentum is the design's"):
            inner_step(model, opt, rank, 11)
        return values(model)

    [found] = run_cluster(mlp, train, workers=1, optimizer=adamw, design="diloco[h=3]")[0]
    assert torch.isfinite(found).all()
