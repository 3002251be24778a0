"""A learner: what it contributes, and what a new version makes of its parameters. Real cores, no threads."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.policies.designs import design as find_design
from thinwire.runtime.serving import serving
from thinwire.server.core import ServerCore
from thinwire.transports.memory import MemoryServer

EXACT = "codec=fp32,outer_lr=1.0,outer_momentum=0.0,nesterov=false"


def made(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 1)).to(dtype)


def batches(seed: int, dtype: torch.dtype = torch.float32) -> Generator[tuple[torch.Tensor, torch.Tensor], None, None]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(16, 12, generator=generator)
        yield x.to(dtype), x.mean(1, keepdim=True).tanh().to(dtype)


def inner_step(model: nn.Module, opt: Any, batch: tuple[torch.Tensor, torch.Tensor], **given: Any) -> None:
    opt.zero_grad()
    (model(batch[0]) - batch[1]).square().mean().backward()
    opt.step(**given)


def flat(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_learner_trains_as_it_would_alone(dtype: torch.dtype) -> None:
    alone, model = made(dtype), made(dtype)
    adam, ours = (torch.optim.AdamW(each.parameters(), lr=3e-3) for each in (alone, model))
    for batch, _ in zip(batches(1, dtype), range(50), strict=False):
        inner_step(alone, adam, batch)
    with MemoryServer(serving(ServerCore())) as server:
        design = f"decoupled[h=6,fragments=2,{EXACT}]"
        opt: Any = tw.distribute(model, ours, server=server.connect(), rank=0, workers=1, design=design)
        with opt:
            for batch, _ in zip(batches(1, dtype), range(50), strict=False):
                inner_step(model, opt, batch, examples=16)
            with opt.shared_weights():
                before = flat(model)
            opt.flush()
            assert opt.examples_merged == 50 * 16 and not torch.equal(before, flat(model))
    assert torch.allclose(flat(model), flat(alone), atol=1e-6 if dtype == torch.float32 else 2e-2)


class Two(ExitStack):
    """Two learners of one shard, in one thread: the script says who steps."""

    def __init__(self, design: str) -> None:
        super().__init__()
        self.design, self.server = design, self.enter_context(MemoryServer(serving(ServerCore(min_workers=1))))
        self.data = [batches(0), batches(1)]
        self.models, self.opts = dict[int, nn.Sequential](), dict[int, Any]()
        for rank in range(2):
            self.join(rank)
        self.callback(lambda: [opt.close() for opt in self.opts.values()])

    def join(self, rank: int) -> None:
        model = self.models[rank] = made()
        adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
        where: dict[str, Any] = {"server": self.server.connect(), "rank": rank, "workers": 2}
        self.opts[rank] = tw.distribute(model, adam, design=self.design, timeout=20, **where)

    def step(self, rank: int, times: int = 1) -> None:
        for _ in range(times):
            inner_step(self.models[rank], self.opts[rank], next(self.data[rank]), examples=16)

    def shared(self, rank: int) -> torch.Tensor:
        with self.opts[rank].shared_weights():
            return flat(self.models[rank])


def test_learner_counts_no_progress_twice_and_loses_none() -> None:
    with Two(f"decoupled[h=4,fragments=1,quorum=2,grace=0.0,{EXACT}]") as two:
        start = two.shared(0)
        two.step(0, 4)
        progress = flat(two.models[0]) - start
        two.step(1, 4)
        two.opts[0].sync()
        moved = two.shared(0) - start
        assert (moved - progress / 2).norm() > 0.1 * progress.norm(), "half of it is the other learner's"
        assert torch.equal(two.shared(0), two.shared(1)), "one version, one set of bits"
        assert torch.allclose(flat(two.models[0]), two.shared(0), atol=1e-6), "its own progress is in the version"
        two.step(0, 2)
        private = flat(two.models[0]) - two.shared(0)
        assert private.norm() > 0, "what it has done since stays"
        two.step(1, 4)
        two.opts[0].sync()
        assert torch.allclose(flat(two.models[0]) - two.shared(0), private, atol=1e-6), "and no version changes it"


def test_step_takes_no_version_that_has_not_come() -> None:
    with Two("decoupled[h=4,quorum=2,grace=100.0]") as two:
        two.step(0, 40)
        assert two.opts[0].steps_done == 40 and two.opts[0].last_merge is None, "below the quorum it goes on"
        two.step(1, 4)
        two.opts[0].sync()
        assert getattr(two.opts[0].last_merge, "ranks", None) == (0, 1)


def test_learner_that_comes_back_contributes_after_h_steps() -> None:
    with Two("decoupled[h=4,fragments=2,quorum=1,grace=0.0]") as two:
        two.step(0, 8)
        two.opts[1].close()
        version = two.opts[0].last_merge.version
        two.join(1)
        assert torch.equal(flat(two.models[1]), two.shared(0)), "it begins with the shared parameters"
        two.step(1, 3)
        two.opts[0].sync()
        assert two.opts[0].last_merge.version == version
        two.step(1)
        two.opts[0].sync()
        assert two.opts[0].last_merge.version == version + 1


def test_nan_drops_a_learner_s_progress_alone() -> None:
    with Two("decoupled[h=4,quorum=1,grace=0.0]") as two:
        two.step(0, 3)
        with torch.no_grad():
            two.models[0][0].weight[0, 0] = math.nan  # type: ignore[operator]
        with pytest.warns(UserWarning, match="holds NaN or Inf after inner step"):
            two.step(0)
        assert torch.isfinite(flat(two.models[0])).all()
        two.step(1, 4)
        two.step(0, 4)
        two.opts[1].sync()
        assert two.opts[1].last_merge.ranks == (0,) and torch.isfinite(two.shared(1)).all()


@pytest.mark.parametrize("examples", [0, -1.0, math.nan, math.inf, "many"])
def test_examples_that_are_no_count_are_refused(examples: Any) -> None:
    model = made()
    with (
        MemoryServer(serving(ServerCore())) as server,
        tw.distribute(
            *(model, torch.optim.AdamW(model.parameters())), server=server.connect(), design="decoupled"
        ) as opt,
    ):
        before = flat(model)
        with pytest.raises(tw.ConfigError, match="number of examples"):
            inner_step(model, opt, next(batches(0)), examples=examples)
        assert torch.equal(before, flat(model)) and opt.steps_done == 0


@pytest.mark.parametrize(
    ("design", "named"),
    [
        ("decoupled[quorum=-1]", "quorum is -1"),
        ("decoupled[grace=-0.5]", "grace is -0.5"),
        ("decoupled[merge=median]", "merge='median'"),
        ("decoupled[discount=-1]", "discount is -1"),
        ("decoupled[delay=2]", "delay is of workers that exchange in step"),
        ("decoupled[keep=0.5]", "keep is of workers that exchange in step"),
        ("decoupled[codec_down=qsgd]", "draws random numbers on pulls"),
        ("3lc[consistency=quorum[2]]", "take a design such as decoupled"),
    ],
)
def test_designs_that_cannot_be_are_refused_by_name(design: str, named: str) -> None:
    with pytest.raises(tw.ConfigError, match=named.replace("[", r"\[")):
        find_design(design)


def test_quorum_above_the_workers_is_refused() -> None:
    model = made()
    with pytest.raises(tw.ConfigError, match="quorum of 2 workers"):
        tw.distribute(
            *(model, torch.optim.AdamW(model.parameters())),
            server="grpc://127.0.0.1:1",
            rank=0,
            workers=2,
            design="decoupled[quorum=3]",
        )
