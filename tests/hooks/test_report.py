"""What exchanges cost a worker, as it says itself after a training."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import adamw, inner_step, mlp
from thinwire.collective.residuals import Residuals, TrainedTensor
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.exchange.state import ExchangeState
from thinwire.hooks.report import TrainingReport
from thinwire.policies.compression import Choice, codec_by_name


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
        assert (after.steps, after.void_rounds) == (4, 0), "two exchanges, with the step that takes the second's answer"
        assert (after.warm_up, after.compiling) == (5, False) and after.warm_up_s > 0
        assert re.search(r"\n  left out         the first 5 steps, with [0-9.]+ m?s each of exchanging", str(after))
        assert after.uncompressed_nbytes >= 4 * values
        assert after.sent_nbytes > 0 and after.received_nbytes > 0 and after.ratio > 1
        assert 0 < after.compute_share < 1
        assert after.compute_s + after.encode_s + after.decode_s + after.wait_s <= after.seconds * (1 + 1e-6)
        assert after.compute_share == pytest.approx(after.compute_s / after.seconds)


def test_what_is_sent_is_held_against_the_tensors_own_dtypes() -> None:
    """Plain DDP sends a bf16 gradient in 2 bytes a value; 1 byte a value is then half of it, not a quarter."""
    choice = Choice(codec_by_name("int8"), codec_by_name("int8"))
    for dtype, itemsize in ((torch.bfloat16, 2), (torch.float16, 2), (torch.float32, 4), (torch.float64, 8)):
        tensors = [TrainedTensor("weight", 1000, dtype, choice)]
        residuals = Residuals(tensors, 0, 4, mean=True, seed=0)
        for pulls, passes in ((True, 2), (False, 1)):
            hook = SimpleNamespace(core=SimpleNamespace(residuals=residuals, pulls=pulls))
            nbytes = ExchangeState.__dict__["uncompressed_nbytes"].fget(hook)
            assert nbytes == passes * 3 / 4 * 1000 * itemsize, dtype
