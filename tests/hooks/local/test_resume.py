"""Local updates that resume: bit for bit in the middle of a round too, with several optimizers too, or refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import (
    Optimizers,
    adamw,
    assert_resumes,
    inner_step,
    mlp,
    resume,
    saving,
    steps,
    values,
    wide,
)
from thinwire.errors import ConfigError, ProtocolError
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.several import Several, as_one
from thinwire.policies.designs import design as find_design


def test_resume_in_mid_round_is_bit_identical() -> None:
    cases: list[tuple[str, int]] = [
        ("update", 8),
        ("diloco[h=5]", 8),
        ("diloco[h=2,codec=3lc[s=1.75,lag=9]]", 9),
        ("local-sgd[h=4,warmup=5]", 7),
        ("diloco[h=3,keep=0.5]", 9),
        ("streaming-diloco[h=6,delay=2]", 12),
        ("sparseloco[h=5]", 8),
        ("demo[h=3]", 7),
    ]
    for design, stop in cases:
        _, core = assert_resumes(design, stop, 15)
        assert core.plan is not None
        codecs = {core.plan.codecs[spec.up]["id"] for spec in core.plan.tables}
        assert find_design(design).up.id in codecs, "the matrices are too small for what is tested"


def muon(model: nn.Module) -> Optimizers:
    matrices, rest = ([p for p in model.parameters() if (p.ndim == 2) is wanted] for wanted in (True, False))
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


def test_resume_with_several_optimizers_is_bit_identical() -> None:
    for design in ["update", "local-sgd[h=4]", "diloco[h=3]"]:
        saved, _ = assert_resumes(design, 5, 9, mlp, muon)
        assert ("steering" in saved[0]["opt"]) == (design == "local-sgd[h=4]"), "AdamW's half steers"


@pytest.mark.parametrize("stop", [6, 8])
def test_resume_keeps_learning_rates_of_pending_steps(stop: int) -> None:
    """In the middle of a round, and at the end of one, with a decreasing learning rate, which steers momenta."""

    def falling(model: nn.Module, opt: Any, rank: int, step: int) -> None:
        opt.param_groups[0]["lr"] = 0.02 / (1 + step)
        inner_step(model, opt, rank, step)

    saved, _ = assert_resumes("local-sgd[h=4]", stop, 15, mlp, step=falling)
    assert saved[0]["opt"]["steering"]["rates"] == ([0.02 / 5 + 0.02 / 6] if stop == 6 else [0.0])


# ---- what is refused


def test_resume_with_other_settings_raises_with_difference() -> None:
    [saved], core = run_cluster(wide, saving(4), workers=1, optimizer=adamw, design="sparseloco[h=2]")
    cases: list[tuple[str, int, type[Exception], str]] = [
        ("sparseloco[h=4,steer=0]", 1, ConfigError, "state is of h=2 .* has h=4"),
        ("sparseloco[h=2,outer_lr=0.5]", 1, ConfigError, "state is of outer_lr=0.65 and"),
        ("sparseloco[h=2,reduce=mean,codec=3lc]", 1, ConfigError, "codec.id='blocktopk'.* codec.id='3lc'"),
        ("sparseloco[h=2,k=65]", 1, ConfigError, "codec.k=64, codec_down.k=74 and"),
        ("sparseloco[h=2,small=bf16]", 1, ConfigError, "compression='by-shape"),
        ("sparseloco[h=2,reduce=mean]", 1, ProtocolError, "reduce: .* 'mean', the others 'clipped-mean"),
        ("sparseloco[h=2]", 2, ProtocolError, "expects 2 workers, the others 1"),
    ]
    for design, workers, kind, differs in cases:
        with pytest.raises(kind, match=differs):
            resume([saved] * workers, core, design, range(4, 5), wide)
    assert torch.isfinite(resume([saved], core, "sparseloco[h=2]", range(4, 5), wide)[0]).all(), "nothing was lost"


def test_resume_without_model_weights_raises_config_error() -> None:
    [saved], core = run_cluster(mlp, saving(6), workers=1, optimizer=adamw, design="diloco[h=4]")
    fresh = {**saved, "model": mlp(0).state_dict()}

    def late(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        model.load_state_dict(saved["model"])
        return steps(7, first=6)(rank, model, opt)

    with pytest.raises(ConfigError, match="the model's parameters are not those"):
        resume([fresh], core, "diloco[h=4]", range(6, 7))
    assert resume([fresh], core, "diloco[h=4]", range(6, 7), train=late)[0].isfinite().all()


def test_states_of_another_optimizer_raise_before_any_change() -> None:
    model = mlp(0)
    plain = adamw(model)
    inner_step(model, plain, 0, 0)

    def loading(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        own = opt.state_dict()
        inner = {**own["inner"], "param_groups": [{**own["inner"]["param_groups"][0], "params": [0]}]}
        cases: list[tuple[dict[str, Any], str]] = [
            (plain.state_dict(), r"load it into that one, before tw\.distribute"),
            ({**own, "step": 7, "param_groups": []}, "has 0 parameter groups, and this optimizer 1"),
            ({**own, "step": 7, "outer_groups": []}, "has 0 parameter groups, and this optimizer 2"),
            ({**own, "step": 7, "inner": inner}, "a group of 1 parameters; here it has 5"),
            ({key: value for key, value in own.items() if key != "inner"}, "lacks 'inner'"),
        ]
        for state, named in cases:
            with pytest.raises(ConfigError, match=named):
                opt.load_state_dict(state)
        assert opt.steps_done == 0
        return steps(5)(rank, model, opt)

    found, usual = (
        run_cluster(mlp, train, optimizer=adamw, design="local-sgd[h=4]")[0] for train in (loading, steps(5))
    )
    assert torch.equal(found[0], usual[0]), "nothing was changed"


# ---- saving where an exchange cannot be waited for


def both(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Momentum for matrices, AdamW for the rest: an optimizer with a state, and one that steers."""
    matrices, rest = ([p for p in model.parameters() if (p.ndim == 2) is wanted] for wanted in (True, False))
    return [torch.optim.SGD(matrices, lr=0.05, momentum=0.9), torch.optim.AdamW(rest, lr=0.01)]


def halves(model: nn.Module) -> list[torch.optim.Optimizer]:
    first, *others = model.parameters()
    return [torch.optim.AdamW(each, lr=0.01, weight_decay=0.1) for each in ([first], others)]


def train(model: nn.Module, optimizer: Any, those: range) -> None:
    for step in those:
        inner_step(model, optimizer, 0, step)


def test_several_optimizers_state_loads_whole_or_by_part() -> None:
    whole, stopped = mlp(0), mlp(0)
    expected, one = as_one(both(whole)), as_one(both(stopped))
    train(whole, expected, range(9))
    train(stopped, one, range(5))
    twin_model, twin = copy.deepcopy((stopped, one))
    weights, saved = copy.deepcopy((stopped.state_dict(), one.state_dict()))
    parts = copy.deepcopy([each.state_dict() for each in one.optimizers])  # type: ignore[attr-defined]
    for loads in ("whole", "parts"):
        again = mlp(0)
        again.load_state_dict(weights)
        own = both(again)
        several = Several(own)
        groups = several.param_groups
        if loads == "whole":
            several.load_state_dict(copy.deepcopy(saved))
        else:
            for each, part in zip(own, parts, strict=True):
                each.load_state_dict(copy.deepcopy(part))
        assert several.param_groups[0] is own[0].param_groups[0]
        assert groups is several.param_groups
        train(again, several, range(5, 9))
        assert torch.equal(values(again), values(whole)), loads
    train(twin_model, twin, range(5, 9))
    assert torch.equal(values(twin_model), values(whole)), "a copy is made of copies"
    assert not {id(each) for each in stopped.parameters()} & {id(p) for g in twin.param_groups for p in g["params"]}


@pytest.mark.parametrize("design", ["local-sgd[h=4,steer=0]", "local-sgd[h=2,codec=fp32,steer=0.6]"])
def test_two_adamw_optimizers_train_as_one(design: str) -> None:
    one, two = (run_cluster(mlp, steps(9), optimizer=optimizer, design=design)[0] for optimizer in (adamw, halves))
    assert all(map(torch.equal, one, two))
