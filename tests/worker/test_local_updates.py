"""A worker that trains by itself between exchanges: to whom it speaks first."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import pytest
import torch

from thinwire.errors import ConfigError
from thinwire.hooks.planning import make_plan
from thinwire.local.local_rounds import check_same, coded_by
from thinwire.optimizers.options import ParameterGroups
from thinwire.policies.designs import design
from thinwire.policies.designs import design as find_design
from thinwire.schema import Push
from thinwire.worker.effects import Send
from thinwire.worker.local_updates import LocalWorker

WORKERS = 4


def made(rank: int, shards: int) -> LocalWorker:
    model = torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(WORKERS)))
    design = find_design("local-sgd[h=2,codec=fp32]")
    planned = make_plan(model, torch.optim.AdamW(model.parameters()), design, workers=WORKERS, shards=shards)
    assert design.local is not None
    outer = design.local.outer_groups()
    groups = ParameterGroups("SGD", outer, outer[0])
    return LocalWorker(planned.plans, planned.tensors, design, groups, rank=rank, now=lambda: 0.0)


def pushed(worker: LocalWorker) -> list[int]:
    """Takes the steps of a round; returns the shards that were sent to."""
    timetable = worker.rounds.timetable
    timetable.merged(timetable.every)
    effects = [*worker.end_step(), *worker.end_step()]
    assert all(isinstance(each, Send) and isinstance(each.message, Push) for each in effects)
    return [each.shard for each in effects]


def test_every_rank_begins_with_the_next_ones_shard_and_ends_with_its_own() -> None:
    orders = [pushed(made(rank, WORKERS)) for rank in range(WORKERS)]
    assert orders == [[1, 2, 3, 0], [2, 3, 0, 1], [3, 0, 1, 2], [0, 1, 2, 3]]
    for at_once in zip(*orders, strict=True):
        assert len({*at_once}) == WORKERS, "no shard gets two workers' messages while another gets none"
    assert [pushed(made(rank, 2)) for rank in (0, 1, 6)] == [[1, 0], [0, 1], [1, 0]], "fewer shards are shared evenly"


def position(name: str) -> dict[str, Any]:
    of = design(name)
    assert of.local is not None
    return {"local": asdict(of.local), "coded": coded_by(of)}


def test_what_differs_is_told_by_the_options_of_a_design() -> None:
    for saved, here, told in (
        ("local-sgd[h=4]", "local-sgd[h=8]", "the state is of h=4 and this training has h=8: resume with the same"),
        ("local-sgd[h=4]", "local-sgd[h=4,s=1.5]", "codec.sparsity=1.0, codec_down.sparsity=1.0 and"),
        ("diloco", "diloco[small=bf16]", "compression='by-shape[small=bf16]'"),
    ):
        check_same(position(saved), design(saved))
        with pytest.raises(ConfigError, match=re.escape(told)):
            check_same(position(saved), design(here))
    with pytest.raises(ConfigError, match="the state is of a training without local updates"):
        check_same({}, design("diloco"))
