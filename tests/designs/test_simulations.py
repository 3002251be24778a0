"""Every design, run through server, workers and hooks, beside its plain simulation: equal step by step."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.designs import simulations as sim
from tests.designs.simulations import Course, Setting, Weights
from tests.hooks.cluster import run_cluster
from tests.hooks.server_runs import mlp
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.policies.designs import designs
from thinwire.policies.local_updates import KINDS as LOCAL_KINDS
from thinwire.server.core import ServerCore

torch.set_num_threads(1)

WORKERS = 3
ITERATIONS = 8
SEED = 0


def loss_of(model: nn.Module, rank: int, iteration: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * iteration + rank)
    x = torch.randn(16, 12, generator=generator)
    y = (x[:, :3] + x[:, 3:6]).argmax(1)
    loss: torch.Tensor = nn.functional.cross_entropy(model(x), y)
    return loss


def weights_of(model: nn.Module) -> Weights:
    return {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}


def gradients(weights: Weights, rank: int, iteration: int) -> Weights:
    model = mlp(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(weights[name]))
    loss_of(model, rank, iteration).backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


def setting(*compressed: str, iterations: int = ITERATIONS, momentum: float = 0.9) -> Setting:
    names = frozenset(compressed or ("0.weight", "2.weight"))
    return Setting(weights_of(mlp(0)), gradients, WORKERS, iterations, names, momentum=momentum)


def run(design: str, s: Setting, **options: Any) -> tuple[list[list[Weights]], ServerCore]:
    """Each worker's model after each iteration, and the server."""

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> list[Weights]:
        models = []
        for iteration in range(s.iterations):
            opt.zero_grad()
            loss_of(model, rank, iteration).backward()  # type: ignore[no-untyped-call]
            opt.step()
            opt.sync()
            models.append(weights_of(model))
        return models

    return run_cluster(
        mlp,
        train,
        workers=WORKERS,
        design=design,
        min_numel=1,
        seed=SEED,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=s.rate, momentum=s.momentum, weight_decay=s.decay),
        **options,
    )


def compare(design: str, found: list[list[Weights]], expected: Course, tolerance: float = 2e-5) -> None:
    for models in found:
        assert len(models) == len(expected.models)
        for iteration, (model, wanted) in enumerate(zip(models, expected.models, strict=True)):
            for name in wanted:
                np.testing.assert_allclose(
                    model[name],
                    wanted[name],
                    rtol=0,
                    atol=tolerance,
                    err_msg=f"{design}: {name} after iteration {iteration}",
                )


ServerSide = tuple[sim.Rule, bool, bool]
SERVER_UPDATES: dict[str, ServerSide] = {
    "fp32": (sim.plain, False, False),
    "int8": (sim.eight_bits, False, False),
    "stoch3": (sim.random_signs, False, False),
    "mqe1": (sim.two_means, True, True),
    "sparse5": (sim.from_threshold_up(0.05), True, True),
    "3lc": (sim.three_values(1.0), True, True),
    "3lc[s=1.75]": (sim.three_values(1.75), True, True),
    "3lc[error_feedback=false]": (sim.three_values(1.0), False, False),
}


def test_designs_whose_server_updates() -> None:
    for design, (rule, residual_up, residual_down) in SERVER_UPDATES.items():
        s = setting()
        expected = sim.server_updates(s, rule, rule, residual_up=residual_up, residual_down=residual_down)
        found, core = run(design, s)
        compare(design, found, expected)
        for table in core.tables:
            np.testing.assert_allclose(table.values.numpy(), expected.server[table.spec.name], rtol=0, atol=2e-5)


def test_local2_and_mps_send_every_so_many_steps_what_accumulated() -> None:
    s = setting()
    expected = sim.server_updates(s, sim.plain, sim.plain, residual_up=False, residual_down=False, every=2)
    compare("local2", run("local2", s)[0], expected)
    s = setting(iterations=13, momentum=0.0)
    found, core = run("mps", s)
    rule = sim.largest(0.01)
    compare("mps", found, sim.server_updates(s, rule, rule, residual_up=True, residual_down=True, every=6))
    assert core.step == 2


Average = tuple[sim.Rule, sim.Rule, bool, bool]
WORKERS_UPDATE: dict[str, Average] = {
    "doublesqueeze-1bit": (sim.one_scale, sim.one_scale, True, True),
    "doublesqueeze-topk": (sim.largest(1 / 32), sim.largest(1 / 32), True, True),
    "mem-sgd-1bit": (sim.one_scale, sim.plain, True, False),
    "mem-sgd-topk": (sim.largest(1 / 32), sim.plain, True, False),
    "topk-sgd": (sim.largest(1 / 32), sim.plain, False, False),
    "qsgd-ds": (sim.random_signs_of_equal_norm, sim.plain, False, False),
}


def test_designs_whose_workers_update() -> None:
    for design, (up, down, residual_up, residual_down) in WORKERS_UPDATE.items():
        for momentum in (0.0, 0.9):
            s = setting(momentum=momentum)
            expected = sim.workers_update(s, up, down, residual_up=residual_up, residual_down=residual_down)
            compare(design, run(design, s)[0], expected)


def test_terngrad() -> None:
    s = setting("0.weight")  # the last layer travels as it is
    compare("terngrad", run("terngrad", s)[0], sim.terngrad(s))
    compare("terngrad[clip=0]", run("terngrad[clip=0]", s)[0], sim.terngrad(s, clip=float("inf")))


def test_entropy_averages_decoded_weights() -> None:
    for design, c in (("entropy", 6.0), ("entropy[preset=size]", 5.0)):
        s = setting(iterations=7)
        found, _ = run(design, s, consistency="local[3]")
        expected = sim.workers_alone(s, sim.bins(c), every=3)
        compare(design, [found[0]], expected)
        for iteration in (2, 5):
            for models in found:
                for name in s.start:
                    np.testing.assert_array_equal(models[iteration][name], found[0][iteration][name])
        assert any((found[0][3][name] != found[1][3][name]).any() for name in s.start), "in between they are alone"


def test_every_design_is_simulated() -> None:
    covered = {name.partition("[")[0] for name in (*SERVER_UPDATES, *WORKERS_UPDATE)}
    by_hand = LOCAL_KINDS.keys()  # with plain torch optimizers, in tests/hooks/local/test_training.py
    assert covered | {"local2", "mps", "terngrad", "entropy"} | {"fp16", "bf16"} | by_hand == set(designs())


def test_half_precision_both_ways() -> None:
    for design, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        rule = partial(_rounded, dtype)
        s = setting()
        expected = sim.server_updates(s, rule, rule, residual_up=False, residual_down=False)
        compare(design, run(design, s)[0], expected, 1e-3)


def _rounded(dtype: torch.dtype, v: sim.Array, u: sim.Array) -> sim.Array:
    half: sim.Array = torch.from_numpy(v).to(dtype).float().numpy()
    return half


def test_the_comparison_would_notice_another_design() -> None:
    """A residual less on the way down, and the simulation is another one."""
    s = setting()
    rule = sim.three_values(1.0)
    others = {
        "3lc": sim.server_updates(s, rule, rule, residual_up=True, residual_down=False),
        "doublesqueeze-1bit": sim.workers_update(
            s, sim.one_scale, sim.one_scale, residual_up=True, residual_down=False
        ),
    }
    for design, other in others.items():
        with pytest.raises(AssertionError, match="after iteration"):
            compare(design, run(design, s)[0], other)
