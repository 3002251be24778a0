"""The process group of a benchmark's ranks, each of which computes on one thread."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


def join(master: str, *, rank: int, ranks: int, silence_s: float) -> None:
    """Joins the group, and leaves this process one thread to compute on."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{master}", rank=rank, world_size=ranks, timeout=timedelta(seconds=silence_s)
    )
