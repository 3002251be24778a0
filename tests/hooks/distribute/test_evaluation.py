"""Models that are evaluated (shared or averaged weights, inference mode) or wrapped in DistributedDataParallel."""

from __future__ import annotations

import copy
import io
import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import thinwire as tw
from tests.hooks.cluster import run_cluster
from tests.hooks.ddp_ranks import refusal, run_cases
from tests.hooks.local_runs import adamw, batch, inner_step, mlp, values, weights
from tests.hooks.server_runs import Weights, equal, loss_of, run, steps, weights_of
from tests.hooks.server_runs import mlp as layers
from thinwire.errors import ConfigError
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.policies.designs import Design
from thinwire.policies.designs import design as find_design


def test_averaged_weights_equal_if_shared_and_differ_if_local() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> list[torch.Tensor]:
        decay: Any = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
        averages = [AveragedModel(model, multi_avg_fn=decay) for _ in range(2)]
        for step in range(14):
            inner_step(model, opt, rank, step)
            averages[1].update_parameters(model)
            if step % 4 == 3:
                with opt.shared_weights():
                    averages[0].update_parameters(model)
        return [weights(average) for average in averages]

    (shared, own), (other, others_own) = run_cluster(mlp, train, optimizer=adamw, design="local-sgd[h=4]")[0]
    assert torch.equal(shared, other) and not torch.equal(own, others_own)
    with pytest.raises(ConfigError, match="ema averages the weights of all steps"):
        replace(find_design("diloco[h=4]"), ema=0.9)


FP32 = tw.codec("fp32")


def make_norm(rank: int) -> nn.Module:
    first, relu, last = layers(rank).children()
    return nn.Sequential(first, nn.BatchNorm1d(40), relu, last)


def averaging(rank: int, model: nn.Module, opt: DistributedOptimizer) -> Weights:
    """Trains beside torch's average; a checkpoint in the middle holds the average so far."""
    average: Any = get_ema_multi_avg_fn(0.75)  # type: ignore[no-untyped-call]
    expected = AveragedModel(make_norm(0), multi_avg_fn=average, use_buffers=True)
    for step in range(5):
        if step == 3:
            state = opt.state_dict()
            opt.load_state_dict({**state, "averages": {}})
            opt.load_state_dict(state)
        opt.zero_grad()
        loss = loss_of(model, rank, step)
        expected.update_parameters(model)
        loss.backward()  # type: ignore[no-untyped-call]
        opt.step()
    opt.sync()
    trained = weights_of(model)
    expected.update_parameters(model)
    with opt.averaged_weights():
        averaged = weights_of(model)
    assert equal(weights_of(model), trained)
    for name, value in expected.module.state_dict().items():
        assert torch.equal(value, averaged[name]) or name.endswith("num_batches_tracked"), name
    assert not torch.equal(averaged["0.weight"], trained["0.weight"])
    return trained


def test_averaged_weights_equal_torch_averaged_model() -> None:
    for policy in ("bsp", "ssp[2,mode=aggressive]"):
        averages = Design(name="fp32", up=FP32, down=FP32, ema=0.75, consistency=policy)
        [trained, _], _ = run(averaging, model=make_norm, design=averages)
        if policy == "bsp":
            [plain, _], _ = run(steps(5), model=make_norm, design=replace(averages, ema=0.0))
            assert all(torch.equal(trained[name], value) for name, value in plain.items())
    with pytest.raises(tw.ConfigError, match="'3lc' averages no weights"):
        run(averaging, model=make_norm, workers=1, design="3lc")


STEPS = 10
DESIGNS = ("local-sgd[h=4,codec=3lc]", "update")


def trained(model: Any, rank: int, design: str, *, accumulates: bool = False) -> torch.Tensor:
    """The parameters at the end; a first backward pass of every step may be under `no_sync`."""
    wrapped = isinstance(model, DistributedDataParallel)
    module = model.module if wrapped else model
    with tw.distribute(model, adamw(module), group=dist.group.WORLD, design=design) as optimizer:
        for step in range(STEPS):
            if accumulates:
                with model.no_sync() if wrapped else nullcontext():
                    model(torch.ones(4, 12)).square().mean().backward()
            inner_step(model, optimizer, rank, step)
        optimizer.flush()
        return torch.cat([values(module), module.get_buffer("1.running_mean")])


def heard(call: Any) -> str:
    """The warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return " ".join(str(each.message) for each in caught)


def refused(model: Any, group: Any) -> str:
    return refusal(partial(tw.distribute, model, adamw(model), group=group, design="update"))


def called_by_other(rank: int, design: str) -> list[str]:
    """Of a bare model that was given to `tw.distribute`: called by a wrapper, called bare, and by one after the end."""
    model = mlp(rank)
    x = batch(rank, 0)[0]
    found: list[str] = []
    with tw.distribute(model, adamw(model), group=dist.group.WORLD, design=design):
        copied, wrapper = copy.deepcopy(model), DistributedDataParallel(model)
        found += [refusal(partial(each, x)) for each in (wrapper, DistributedDataParallel(copied), model)]
    return [*found, refusal(partial(wrapper, x))]


def run_wrapped(rank: int, design: str) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = DistributedDataParallel(mlp(rank))
        found: dict[str, Any] = {
            "plain": trained(mlp(rank), rank, design),
            "wrapped": trained(model, rank, design),
            "accumulated": trained(DistributedDataParallel(mlp(rank)), rank, design, accumulates=True),
            "over": heard(lambda: model(torch.ones(4, 12)).sum().backward()),
        }
        torch.save(model, io.BytesIO())
        for way, again in (("again", model), ("copied", copy.deepcopy(model))):
            again.module.load_state_dict(mlp(rank).state_dict())
            found[way] = trained(again, rank, design)
        alone = [dist.new_group([each]) for each in range(2)][rank]
        found["alone"] = refused(DistributedDataParallel(mlp(rank)), alone)
        found["unknown"] = {given: called_by_other(rank, given) for given in (design, "int8", "auto")}
        unused = DistributedDataParallel(mlp(rank), find_unused_parameters=True)
        begin = partial(tw.distribute, unused, adamw(unused), group=dist.group.WORLD, design=design)
        found["unused"] = heard(lambda: begin().close())
    return found


@pytest.fixture(scope="module")
def ranks() -> dict[str, list[Any]]:
    return run_cases(2, {design: (run_wrapped, design) for design in DESIGNS})


def test_ddp_wrapper_changes_no_bit_and_warns_after_training(ranks: dict[str, list[Any]]) -> None:
    for design in DESIGNS:
        for found in ranks[design]:
            assert all(torch.equal(found["plain"], found[way]) for way in ("wrapped", "again", "copied"))
            assert not torch.equal(found["plain"], found["accumulated"])
            assert "every rank trains by itself" in found["over"]
            assert found["alone"] == "nothing", "a rank alone exchanges nothing"
            assert "ddp_find_unused_parameters=False" in found["unused"]
            for told, *others in found["unknown"].values():
                assert "wrap the model before tw.distribute" in told and others == ["nothing"] * 3
        for way in ("plain", "wrapped", "accumulated"):
            one, other = (found[way][:-40] for found in ranks[design])
            assert torch.equal(one, other), "but buffers, which are worker 0's after a while alone"
