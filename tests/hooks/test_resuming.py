"""A worker that resumes is led to its place, or told where the shard is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import thinwire as tw
from tests.hooks.cluster import run_cluster
from tests.hooks.test_distribute import batch, equal, mlp, steps
from thinwire.errors import StepMismatchError
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.resuming import KeptSteps
from thinwire.runtime.metrics import Prometheus
from thinwire.server.core import ServerCore

torch.set_num_threads(1)


def saved(_rank: int, model: nn.Module, opt: DistributedOptimizer) -> Any:
    weights = steps(3)(_rank, model, opt)
    return weights, opt.state_dict()


def run(core: ServerCore | None, train: Any, **options: Any) -> tuple[Any, ServerCore]:
    [result], after = run_cluster(mlp, train, workers=1, core=core, **options)
    return result, after


def again(core: ServerCore) -> ServerCore:
    fresh = ServerCore()
    fresh.load_state_dict(core.state_dict())
    return fresh


@pytest.mark.parametrize("design", ["3lc[s=1.0]", "doublesqueeze-1bit"])
def test_weights_come_from_whoever_holds_the_model(design: str) -> None:
    """The model is not loaded here: the shard's copy, or the one in the state, must be enough."""
    (weights, state), core = run(None, saved, design=design)
    assert state["position"]["clock"] == 3 and ("values" in state["position"]) == (design != "3lc[s=1.0]")

    def look(_rank: int, model: nn.Module, opt: DistributedOptimizer) -> dict[str, torch.Tensor]:
        assert opt.steps_done == opt.clock == 3
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    found, _ = run(again(core), look, design=design, resume=state)
    assert equal(found, weights)


def test_a_worker_and_a_shard_of_different_steps() -> None:
    (_, state), core = run(None, saved, codec="3lc")
    with pytest.raises(tw.ConfigError, match="resumes at exchange 3, and shard 0 is at 0: resume all"):
        run(None, saved, codec="3lc", resume=state)
    other = {**state, "position": {**state["position"], "clock": 2}}
    with pytest.raises(tw.ConfigError, match="resumes at exchange 2, and shard 0 is at 3"):
        run(again(core), saved, codec="3lc", resume=other)


def test_the_ports_and_files_of_one_that_cannot_join_are_free_for_its_next_try() -> None:
    """As where it was away, the others went on, and it joins them by its state of before."""
    (_, state), _ = run(None, saved, codec="3lc")
    writer = Prometheus(0)
    with pytest.raises(StepMismatchError):
        run(None, saved, codec="3lc", resume=state, metrics=[writer])
    Prometheus(writer.port).close()


def test_a_worker_without_its_state_at_shards_that_have_theirs_says_so() -> None:
    (weights, state), core = run(None, saved, codec="3lc")

    def look(_rank: int, model: nn.Module, opt: DistributedOptimizer) -> float:
        assert opt.clock == opt.steps_done == 3 and equal(dict(model.named_parameters()), weights)
        return opt.counters["residuals_lost"]

    with pytest.warns(UserWarning, match="worker 0 has no state of its own and goes on with exchange 3"):
        lost, _ = run(again(core), look, codec="3lc")
    assert lost == sum("residual" in context for context in state["contexts"].values()) > 0


@pytest.mark.parametrize("at", [1, 2, 3])
def test_where_every_push_is_an_update_nothing_is_applied_twice(at: int) -> None:
    """A worker's state of exchange 2 and a shard's of another: what the shard lacks is lost, and no more."""
    states: dict[int, Any] = {}

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        for clock in (1, 2, 3):
            steps(1)(rank, model, opt)
            states[clock] = opt.state_dict(), again(core).state_dict()

    core, options = ServerCore(), {"codec": "3lc", "consistency": "asp"}
    run(core, train, **options)
    mine, fresh = states[2][0], ServerCore()
    fresh.load_state_dict(states[at][1])

    def look(rank: int, model: nn.Module, opt: DistributedOptimizer) -> Any:
        values = [torch.from_numpy(table.downlink.values.copy()) for table in fresh.tables]
        assert all(map(torch.equal, values, [p.detach() for p in model.parameters()])), "the shard's own values"
        assert opt.clock == opt.steps_done == max(at, 2)
        residuals = [context["residual"] for context in opt.state_dict()["contexts"].values() if "residual" in context]
        lost = {name: opt.counters[name] for name in ("updates_lost", "residuals_lost")}
        steps(1)(rank, model, opt)
        return residuals, lost

    tables = len(core.tables)
    if at == 2:
        [(residuals, lost)] = [run(fresh, look, resume=mine, **options)[0]]
    else:
        said = rf"goes on with exchange {max(at, 2)}: the shards lack {tables * (at == 1)} of its gradients, and "
        said += rf"{tables * (at == 3)} residuals"
        with pytest.warns(UserWarning, match=said):
            [(residuals, lost)] = [run(fresh, look, resume=mine, **options)[0]]
    assert lost == {"updates_lost": tables * (at == 1), "residuals_lost": tables * (at == 3)}
    kept = [context["residual"] for context in mine["contexts"].values() if "residual" in context]
    assert residuals and any(bool(each.any()) for each in kept)
    for before, after in zip(kept, residuals, strict=True):
        assert torch.equal(after, torch.zeros_like(before) if at == 3 else before)
    assert fresh.step == at + 1, "the next exchange is applied once"


def test_a_state_with_the_model_in_it_is_of_its_shards_and_its_model() -> None:
    (_, state), core = run(None, saved, design="doublesqueeze-1bit")
    position = state["position"]
    twice = {**state, "position": {**position, "versions": 2 * position["versions"]}}
    with pytest.raises(tw.ConfigError, match=r"state is of a training with 2 shards, this one has 1"):
        run(again(core), saved, design="doublesqueeze-1bit", resume=twice)
    other = {**position["values"], "0.bias": torch.zeros(7)}
    changed = {**state, "position": {**position, "values": other}}
    with pytest.raises(tw.ConfigError, match=r"of another model: '0.bias' has 7 values in it, and 40 here"):
        run(again(core), saved, design="doublesqueeze-1bit", resume=changed)


def test_a_batch_with_nan_is_accumulated_in_no_tensor() -> None:
    def train(poisoned: bool) -> Any:
        def go_on(_rank: int, model: nn.Module, opt: DistributedOptimizer) -> dict[str, torch.Tensor]:
            for step in range(8 + poisoned):
                x, y = batch(0, step - (poisoned and step > 1))
                opt.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                if poisoned and step == 1:
                    [*_, last] = model.parameters()
                    assert last.grad is not None
                    last.grad[0] = torch.nan
                    with pytest.raises(tw.NonFiniteError, match="hold NaN or Inf; nothing was changed"):
                        opt.step()
                else:
                    opt.step()
            opt.sync()
            return {name: p.detach().clone() for name, p in model.named_parameters()}

        return go_on

    runs = [run(None, train(poisoned), codec="3lc", consistency="local[steps=4]")[0] for poisoned in (False, True)]
    assert equal(*runs)


@pytest.mark.parametrize("cut", [1, 3, 5])
@pytest.mark.parametrize(
    "options",
    [
        {"codec": "3lc", "consistency": "local[steps=4]"},
        {"codec": "3lc", "consistency": "ssp[3]"},
        {"design": "entropy[consistency=local[4]]"},
    ],
    ids=str,
)
def test_a_round_that_nothing_was_exchanged_in_goes_on_where_it_was(options: dict[str, str], cut: int) -> None:
    def train(until: int) -> Any:
        def go_on(_rank: int, model: nn.Module, opt: DistributedOptimizer) -> Any:
            began = opt.steps_done
            while opt.steps_done < until:
                x, y = batch(0, opt.steps_done)
                opt.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                opt.step()
            opt.sync()
            return began, {name: p.detach().clone() for name, p in model.named_parameters()}, opt.state_dict()

        return go_on

    (_, whole, _), _ = run(None, train(9), **options)
    (_, _, state), core = run(None, train(cut), **options)
    (began, resumed, _), _ = run(again(core), train(9), resume=state, **options)
    assert began == cut and equal(resumed, whole)


def test_torchs_own_helper_returns_no_state_that_would_not_resume() -> None:
    """It makes a state of what torch's optimizers keep, without residuals and position: docs/recovery.md."""

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        steps(2)(rank, model, opt)
        with pytest.raises(KeyError, match="state"):
            get_optimizer_state_dict(model, opt)
        assert steps(2)(rank, model, opt) and opt.steps_done == 4, "the training goes on"

    run(None, train, codec="3lc")


def test_a_state_of_another_rank_is_refused() -> None:
    (_, state), core = run(None, saved, codec="3lc")
    assert state["rank"] == 0
    with pytest.raises(tw.ConfigError, match="the state is of rank 1, and this is rank 0: each resumes from its own"):
        run(again(core), saved, codec="3lc", resume={**state, "rank": 1})
    for key in ("rank", "position", "optimizer" if "optimizer" in state else "contexts"):
        lacking = {name: value for name, value in state.items() if name != key}
        with pytest.raises(tw.ConfigError, match=f"the state lacks '{key}'"):
            run(again(core), saved, codec="3lc", resume=lacking)


@pytest.mark.parametrize("design", ["3lc", "fp32", "doublesqueeze-1bit", "update"])
def test_statistics_are_the_workers_own_and_not_the_shards(design: str) -> None:
    """A shard has buffers as they were sent last, which is once in fifty exchanges."""

    def normed(rank: int) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(12), mlp(rank))

    def whole(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[Any, Any, Any]:
        steps(3)(rank, model, opt)
        opt.sync()
        there = {name: each.clone() for name, each in model.state_dict().items()}, opt.state_dict(), again(core)
        steps(3)(rank, model, opt)
        opt.sync()
        return *there, {name: each.clone() for name, each in model.state_dict().items()}  # type: ignore[return-value]

    core = ServerCore()
    [(weights, state, then, wanted)], _ = run_cluster(normed, whole, workers=1, core=core, design=design)

    def resumed(rank: int) -> nn.Module:
        model = normed(rank)
        model.load_state_dict(weights)
        return model

    def rest(rank: int, model: nn.Module, opt: DistributedOptimizer) -> dict[str, torch.Tensor]:
        steps(3)(rank, model, opt)
        opt.sync()
        return {name: each.clone() for name, each in model.state_dict().items()}

    [found], _ = run_cluster(resumed, rest, workers=1, core=then, design=design, resume=state)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("design", ["3lc", "update"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_going_back_to_the_beginning_is_to_its_weights(design: str, dtype: torch.dtype) -> None:
    """A shard was lost before its first checkpoint, and workers keep a copy beside the model: it goes back as well."""

    def trained(losses: int) -> list[torch.Tensor]:
        model = mlp(0).to(dtype)
        kept = KeptSteps(model)

        def train(rank: int, _: nn.Module, opt: DistributedOptimizer) -> list[torch.Tensor]:
            for step in range(3):
                x, y = batch(rank, step)
                opt.zero_grad()
                nn.functional.cross_entropy(model(x.to(dtype)).float(), y).backward()  # type: ignore[no-untyped-call]
                opt.step()
            opt.sync()
            return [each.detach().clone() for each in model.parameters()]

        for _ in range(1 + losses):
            [weights], _ = run_cluster(lambda _: model, train, workers=1, design=design, resume=kept)
        return list(weights)

    assert all(map(torch.equal, trained(0), trained(2)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # where torch looks
@pytest.mark.parametrize("design", ["3lc[s=1.0]", "doublesqueeze-1bit", "terngrad[ema=0.9]", "local-sgd[h=2]"])
def test_a_state_fits_the_model_compiled_and_not_compiled(design: str) -> None:
    def plain(rank: int) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(12), mlp(rank))

    def compiled(rank: int) -> nn.Module:
        return torch.compile(plain(rank), backend="eager")  # type: ignore[return-value]

    def leave_out(name: str, shape: tuple[int, ...]) -> bool:
        asked.add(name)
        return False

    def cut(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[Any, Any]:
        steps(3)(rank, model, opt)
        plain_model: Any = getattr(model, "_orig_mod", model)
        weights = {name: each.clone() for name, each in plain_model.state_dict().items()}
        return weights, copy.deepcopy(opt.state_dict())

    def rest(rank: int, model: nn.Module, opt: DistributedOptimizer) -> list[torch.Tensor]:
        steps(3)(rank, model, opt)
        opt.flush()
        return [each.detach().clone() for each in model.parameters()]

    found: list[list[torch.Tensor]] = []
    options: dict[str, Any] = {"design": design, "min_numel": 1, "exclude": leave_out}
    for make, other in ((plain, plain), (plain, compiled), (compiled, plain)):
        asked: set[str] = set()
        core = ServerCore()
        [(weights, state)], _ = run_cluster(make, cut, workers=1, core=core, **options)
        shard = core.state_dict()
        names = {name for name, _ in plain(0).named_parameters()} | {name for name, _ in plain(0).named_buffers()}
        assert asked <= names

        def resumed(rank: int, other: Any = other, weights: Any = weights) -> nn.Module:
            model = other(rank)
            getattr(model, "_orig_mod", model).load_state_dict(weights)
            return model  # type: ignore[no-any-return]

        fresh = ServerCore()
        fresh.load_state_dict(shard)
        [after], _ = run_cluster(resumed, rest, workers=1, core=fresh, resume=state, **options)
        found.append(after)
    for after in found[1:]:
        assert all(map(torch.equal, found[0], after))
