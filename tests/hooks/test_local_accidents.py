"""Local updates where something goes wrong on the way: NaN in one step, a flush too early, steps of the wrong one."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.hooks.cluster import run_cluster, start_server
from tests.hooks.local_runs import adamw, alone, batch, inner_step, mlp, resume, steps, values
from thinwire.errors import ConfigError, ProtocolError, TransportError
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.policies.designs import design as find_design
from thinwire.server.core import ServerCore

WORKERS = 2


@pytest.mark.parametrize(
    "design",
    ["streaming-diloco[h=6,fragments=3,delay=1]", "streaming-diloco[h=6,fragments=2,delay=0]", "diloco[h=6,delay=2]"],
)
def test_one_step_of_nan_costs_one_exchange_in_whatever_fragment(design: str) -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[torch.Tensor, float, int]:
        lost = 0
        for step in range(36):
            x, y = batch(rank, step)
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            lost += not bool(loss.isfinite())
            (loss * (torch.nan if (rank, step) == (1, 7) else 1.0)).backward()  # type: ignore[no-untyped-call]
            opt.step()
        opt.flush()
        return values(model), opt.traffic().get("void_rounds", 0), lost

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "worker 1: .* holds NaN or Inf", UserWarning)
        [one, other], _ = run_cluster(mlp, train, workers=WORKERS, optimizer=adamw, design=design)
    assert torch.equal(one[0], other[0]) and bool(one[0].isfinite().all())
    assert (one[1], other[1]) == (0, 1) and one[2] == 0 and other[2] <= 4, "until the next fragment is due"


@pytest.mark.parametrize("design", ["streaming-diloco[h=6,fragments=3,delay=1]", "local-sgd[h=4]"])
@pytest.mark.parametrize("at", [8, 9, 11])
def test_a_flush_in_the_middle_of_a_training_ends_a_round_early(design: str, at: int) -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[torch.Tensor, torch.Tensor]:
        early = torch.empty(0)
        for step in range(20):
            inner_step(model, opt, rank, step)
            if step == at:
                opt.flush()
                early = values(model)
        opt.flush()
        return early, values(model)

    [one, other], _ = run_cluster(mlp, train, workers=WORKERS, optimizer=adamw, design=design)
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1]) and not torch.equal(one[0], one[1])


def test_who_joins_in_the_round_of_a_flush_and_the_others_do_not_wait_for_each_other() -> None:
    """Those who have flushed are in the middle of a round, and who joins is at the beginning of one."""
    server, address = start_server(ServerCore(min_workers=WORKERS), "memory")
    met, joined, found = threading.Barrier(WORKERS + 1), threading.Event(), list[torch.Tensor]()

    def live(rank: int) -> None:
        model, at = mlp(rank), 8
        if rank == WORKERS:
            met.wait(20)
        place: dict[str, Any] = {"server": address(), "rank": rank, "workers": WORKERS, "timeout_s": 15}
        with tw.distribute(model, adamw(model), design="streaming-diloco[h=6]", **place) as opt:
            if rank == WORKERS:
                assert (opt.steps_done, opt.clock) == (12, 2)
                joined.set()
            while opt.clock < 5:
                if rank < WORKERS and opt.steps_done == at:
                    at = -1
                    met.wait(20)
                    joined.wait(20)
                    opt.flush()
                inner_step(model, opt, rank, opt.steps_done)
            opt.flush()
            found.append(values(model))

    with server, ThreadPoolExecutor(WORKERS + 1) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for future in [pool.submit(live, rank) for rank in range(WORKERS + 1)]:
            future.result()
    assert all(torch.equal(each, found[0]) for each in found)


def test_sums_are_of_changes_and_statistics_are_averaged_all_the_same() -> None:
    found = {}
    for reduce in ("mean", "sum"):
        rate = 1.0 if reduce == "mean" else 1 / WORKERS
        design = f"local-sgd[h=4,codec=fp32,codec_down=fp32,small=fp32,steer=0,reduce={reduce},outer_lr={rate}]"
        found[reduce], _ = run_cluster(mlp, steps(8), workers=WORKERS, optimizer=adamw, design=design)
    torch.testing.assert_close(found["sum"][0], found["mean"][0], rtol=1e-4, atol=1e-5)


def test_momenta_are_led_by_means_alone() -> None:
    local = find_design("local-sgd[h=4,reduce=sum]").local
    assert local is not None and local.steer == 0
    with pytest.raises(ConfigError, match=r"reduce='sum' with steer: momenta are led by the mean"):
        find_design("local-sgd[h=4,reduce=sum,steer=0.5]")


def test_shared_weights_are_not_flushed_in_place_of_this_workers() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        for step in range(6):
            inner_step(model, opt, rank, step)
        with opt.shared_weights(), pytest.raises(ProtocolError, match=r"call flush\(\) outside the block"):
            opt.flush()
        opt.flush()
        return values(model)

    found, _ = run_cluster(mlp, train, workers=WORKERS, optimizer=adamw, design="local-sgd[h=4]")
    undisturbed, _ = run_cluster(mlp, steps(6), workers=WORKERS, optimizer=adamw, design="local-sgd[h=4]")
    assert all(torch.equal(*pair) for pair in zip(found, undisturbed, strict=True))


def test_who_steps_the_inner_optimizer_is_told_that_nothing_is_exchanged() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        inner = opt._inner
        inner_step(model, opt, rank, 0)
        with pytest.warns(UserWarning, match="has taken a step by itself, which counts for no exchange"):
            inner.step()
        inner.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        with pytest.raises(ConfigError, match=r"holds 6 parameters and tw\.distribute was given 5"):
            inner_step(model, opt, rank, 1)

    run_cluster(mlp, train, workers=1, optimizer=adamw, design="local-sgd[h=4]")


def test_a_state_without_its_models_weights_is_not_gone_on_from() -> None:
    design = "diloco[h=4]"

    def first(rank: int, model: nn.Module, opt: DistributedOptimizer) -> dict[str, Any]:
        for step in range(6):
            inner_step(model, opt, rank, step)
        opt.sync()
        return {"model": copy.deepcopy(model.state_dict()), "opt": opt.state_dict()}

    def load(saved: dict[str, Any], *, late: bool) -> str:
        def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
            if late:
                model.load_state_dict(saved["model"])
            inner_step(model, opt, rank, 6)
            opt.flush()
            return values(model)

        fresh = {**saved, "model": mlp(0).state_dict()}
        try:
            resume([fresh], core, design, range(6, 7), train=train)
        except ConfigError as error:
            return str(error)
        return "went on"

    [saved], core = run_cluster(mlp, first, workers=1, optimizer=adamw, design=design)
    assert "the model's parameters are not those that the state was saved with" in load(saved, late=False)
    assert load(saved, late=True) == "went on"


@pytest.mark.filterwarnings("ignore:worker 1. '3.weight' holds NaN or Inf after inner step")
def test_moments_that_are_not_finite_are_forgotten_together() -> None:
    """A gradient of 1e25 has a finite first moment, and an infinite second one."""

    def overflowing(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        for step in range(12):
            x, y = batch(rank, step)
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            if (rank, step) == (1, 5):
                for name, value in (("0.weight", 1e25), ("3.weight", torch.nan)):
                    gradient = model.get_parameter(name).grad
                    assert gradient is not None
                    gradient[0, 0] = value
            opt.step()
        opt.flush()
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    for found in run_cluster(mlp, overflowing, workers=2, optimizer=adamw, design="local-sgd[h=2]")[0]:
        assert found.abs().max() < 2


@pytest.mark.parametrize("design", ["local-sgd[h=4]", "3lc"])
def test_states_are_taken_of_what_is_there_where_an_exchange_cannot_be_waited_for(design: str) -> None:
    with alone(design) as (model, _, opt):
        for step in range(4):
            inner_step(model, opt, 0, step)
        assert not opt._worker.idle, "an answer is on its way"
        opt._driver._runner = threading.get_ident()  # a signal's handler, while this thread waits for a message
        before = values(model)
        model.state_dict()
        assert torch.equal(values(model), before)
        opt._driver._runner = None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(opt._driver, "run", _lost)
            for each in (model, opt):
                with pytest.warns(UserWarning, match=r"the state is of before the last exchange, .*: worker 1 is gone"):
                    each.state_dict()
        model.state_dict()
        assert not any(map(opt._worker.awaits, opt._worker.model.tensors))
        for step in range(4, 8):
            inner_step(model, opt, 0, step)
    assert opt.state_dict()["step"] == 8, "and of one that is closed"


def _lost(procedure: Generator[Any, Any, Any]) -> Any:
    procedure.close()
    raise TransportError("worker 1 is gone")
