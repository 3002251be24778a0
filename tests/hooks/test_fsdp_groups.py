"""Process groups that HSDP is given: torch keeps each, with its threads and sockets, until all are destroyed."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.hooks.ddp_ranks import run_ranks
from thinwire.hooks import fsdp


def _steps(rank: int) -> list[int]:
    """How many groups there are after each of some models, compressed one after another."""
    mesh, counts = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")), []
    for _ in range(3):
        model = nn.Linear(16, 64)
        fully_shard(model, mesh=mesh)
        state = fsdp.compress(model, "3lc", measure_link=False)
        model(torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))).sum().backward()
        assert state.step == 1
        state.close()
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


def run_anew(rank: int, folder: str) -> list[list[int]]:
    """The same under one default group, and under another when that is destroyed."""
    before = _steps(rank)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=2)
    return [before, _steps(rank)]


def test_one_group_of_a_rank_alone_serves_all_models(tmp_path: Path) -> None:
    for found in run_ranks(2, run_anew, str(tmp_path)):
        assert found == [3 * [found[0][0]]] * 2, "made once, and again under the next default group"
