"""Several shards: where values live changes no weight, whichever way they are placed."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

import thinwire as tw
from tests.designs.network import Actor, Network

torch.set_num_threads(1)

WORKERS = 2
STEPS = 5
PLACEMENTS = ["round-robin", "greedy", "heuristic", "uniform[min=16]"]


def make(rank: int) -> nn.Module:
    generator = torch.Generator().manual_seed(rank)
    model = nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def run(servers: int, placement: str = "heuristic", **options: Any) -> tuple[list[dict[str, torch.Tensor]], Network]:
    """Each worker's parameters and buffers at the end, and the network."""

    def work(actor: Actor) -> dict[str, torch.Tensor]:
        model = make(actor.rank)
        opt = tw.distribute(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3),
            server=actor.network.connect(actor),
            rank=actor.rank,
            workers=WORKERS,
            placement=placement,
            min_numel=1,
            state_interval=2,
            **options,
        )
        with opt:
            while max(opt.steps_done, opt.clock) < STEPS:
                generator = torch.Generator().manual_seed(1000 * opt.steps_done + actor.rank)
                x = torch.randn(16, 12, generator=generator)
                opt.zero_grad()
                nn.functional.cross_entropy(model(x), (x[:, :3] + x[:, 3:6]).argmax(1)).backward()  # type: ignore[no-untyped-call]
                opt.step()
            opt.sync()
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    network = Network(work, workers=WORKERS, servers=servers, chance=random.Random(servers))
    return network.run(), network


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], *, parameters_alone: bool = False) -> bool:
    names = [name for name in a if not (parameters_alone and ("running" in name or "num_batches" in name))]
    return all(torch.equal(a[name], b[name]) for name in names)


def test_codecs_of_single_values_do_not_see_the_shards() -> None:
    """Bit for bit, for tables in one piece and cut into partitions."""
    for codec in ("fp32", "bf16"):
        expected, _ = run(1, codec=codec)
        for servers, placement in enumerate(PLACEMENTS, 2):
            found, _ = run(servers, placement, codec=codec)
            assert equal(found[0], expected[0]) and equal(found[0], found[1]), (codec, placement, servers)


def test_whole_tables_do_not_see_the_shards_with_any_codec() -> None:
    for design in ("3lc[s=1.5]", "doublesqueeze-topk", "terngrad"):
        expected, _ = run(1, design=design)
        for placement in PLACEMENTS[:3]:
            found, _ = run(3, placement, design=design)
            assert equal(found[0], expected[0]) and equal(found[0], found[1]), (design, placement)


def test_partitions_have_scales_of_their_own_and_replicas_stay_equal() -> None:
    for design in ("3lc", "int8", "doublesqueeze-1bit"):
        found, network = run(3, "uniform[min=16]", design=design)
        whole, _ = run(1, design=design)
        assert equal(found[0], found[1]) and not equal(found[0], whole[0]), design
        names = [spec.name for core in network.cores for spec in (table.spec for table in core.tables)]
        assert {"0.weight[0:160]", "0.weight[160:320]", "0.weight[320:480]"} <= set(names)


def test_more_servers_than_tensors() -> None:
    for policy in ("bsp", "ssp[2,mode=aggressive]", "backup[1]", "asp", "adaptive[norm]"):
        found, network = run(9, "uniform[min=1]", codec="3lc", consistency=policy)
        if policy != "asp":
            assert equal(found[0], found[1], parameters_alone=policy != "bsp"), policy
        assert all(core.tables and core.finished and core.failed is None for core in network.cores), policy


def test_buffers_live_on_the_first_shard() -> None:
    for placement in PLACEMENTS:
        found, network = run(3, placement, codec="fp32")
        states = [[table.spec.name for table in core.tables if table.spec.state] for core in network.cores]
        assert states == [["1.running_mean", "1.running_var"], [], []], placement
        assert equal(found[0], found[1]), "worker 0's statistics, sent after steps 1, 3 and 5, are those of all"
        assert found[0]["1.running_mean"].abs().max() > 0
