"""What exchanges cost a worker, as it says itself after a training."""

from __future__ import annotations

import pytest
from torch import nn

from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import adamw, inner_step, mlp
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.report import TrainingReport


def test_a_training_tells_what_its_exchanges_took() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[TrainingReport, TrainingReport, int]:
        before = opt.report()
        for step in range(9):
            inner_step(model, opt, rank, step)
        after = opt.report()
        opt.flush()
        return before, after, sum(parameter.numel() for parameter in model.parameters())

    found, _ = run_cluster(mlp, train, optimizer=adamw, design="local-sgd[h=2]")
    for before, after, values in found:
        assert str(before) == "thinwire: no step yet after the first" and before.compute_share == 0
        assert (after.steps, after.void_rounds) == (8, 0), "the first step is not counted"
        assert after.values >= values
        assert after.sent_nbytes > 0 and after.received_nbytes > 0 and after.ratio > 1
        assert 0 < after.compute_share < 1
        assert after.compute_s + after.encode_s + after.decode_s + after.wait_s <= after.seconds * (1 + 1e-6)
        assert after.compute_share == pytest.approx(after.compute_s / after.seconds)
