"""One worker's NaN, policy `skip`: everybody skips the step together, and nothing else is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.hooks.cluster import run_cluster
from tests.hooks.server_runs import batch, mlp
from torch import nn

import thinwire as tw
from thinwire.hooks.distribute import DistributedOptimizer


def train(poisoned: set[tuple[int, int]]) -> Any:
    """Returns a training in which some (rank, step) see a NaN; it reports weights and residuals after each step."""

    def run(rank: int, model: nn.Module, opt: DistributedOptimizer) -> list[dict[str, torch.Tensor]]:
        seen = []
        for step in range(6):
            x, y = batch(rank, step)
            if (rank, step) in poisoned:
                x[0, 0] = float("nan")
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            opt.step()
            opt.sync()
            contexts = opt.state_dict()["contexts"]
            seen.append(
                {name: p.detach().clone() for name, p in model.named_parameters()}
                | {f"residual {name}": state["residual"] for name, state in contexts.items() if "residual" in state}
            )
        return seen

    return run


def test_a_step_with_nan_is_skipped_by_all() -> None:
    codec = tw.codec("3lc", nonfinite="skip")
    for policy in ("bsp", "backup[0]"):
        results, core = run_cluster(mlp, train({(1, 3)}), workers=3, codec=codec, consistency=policy)
        for seen in results:
            for name, value in seen[3].items():
                assert torch.equal(value, seen[2][name]), f"{policy}: {name} changed in the step that was to be skipped"
            assert not torch.equal(seen[4]["0.weight"], seen[3]["0.weight"]), "the training goes on"
            assert all(bool(torch.isfinite(value).all()) for value in seen[5].values())
        for name in ("0.weight", "2.weight"):
            assert torch.equal(results[0][5][name], results[1][5][name]), policy
        assert core.finished


def test_without_nan_skip_changes_nothing() -> None:
    plain, _ = run_cluster(mlp, train(set()), workers=2, codec="3lc")
    skips, _ = run_cluster(mlp, train(set()), workers=2, codec=tw.codec("3lc", nonfinite="skip"))
    assert all(torch.equal(plain[0][5][name], skips[0][5][name]) for name in plain[0][5])


def test_shared_scales_skip_too() -> None:
    results, _ = run_cluster(mlp, train({(0, 2)}), workers=2, design="terngrad[nonfinite=skip]")
    for seen in results:
        assert torch.equal(seen[2]["0.weight"], seen[1]["0.weight"])
        assert not torch.equal(seen[3]["0.weight"], seen[2]["0.weight"])


@pytest.mark.parametrize("policy", ["local[4]", "ssp[staleness=3,mode=passive]"])
@pytest.mark.parametrize(("step", "lost"), [(1, 0.5), (3, 1.0)])
def test_a_window_of_gradients_loses_the_step_with_nan_alone(policy: str, step: int, lost: float) -> None:
    """Every gradient is −1: the weights count them. In the middle of a window one worker's is left out of the sum."""

    def count(rank: int, model: nn.Module, opt: DistributedOptimizer) -> float:
        for number in range(8):
            opt.zero_grad()
            loss = -model(torch.ones(1, 40)).sum() * (torch.nan if (rank, number) == (1, step) else 1)
            loss.backward()
            opt.step()
        opt.flush()
        opt.sync()
        return float(model.get_parameter("weight").detach().mean())

    def zeros(rank: int) -> nn.Linear:
        layer = nn.Linear(40, 40, bias=False)
        nn.init.zeros_(layer.weight)
        return layer

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1.0)

    codec = tw.codec("3lc", nonfinite="skip")
    found, _ = run_cluster(zeros, count, workers=2, optimizer=sgd, codec=codec, consistency=policy)
    assert found == [8.0 - lost] * 2
