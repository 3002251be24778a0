"""One rank of a measurement of memory: a model of linear layers under AdamW, and whichever method is measured."""

from __future__ import annotations

import ctypes

import torch
import torch.distributed as dist
from torch import nn

from thinwire_lab.bench.fsdp_cells import KINDS
from thinwire_lab.bench.fsdp_rank import shard
from thinwire_lab.bench.groups import join
from thinwire_lab.bench.harness import Stage
from thinwire_lab.bench.hook_cells import POWERSGD, HookCell, hook
from thinwire_lab.bench.memory_cells import ALONE, STATUS, WIDTH, Held, MemoryCell, MemoryRank
from thinwire_lab.bench.methods import Distributed, Hooked, Method
from thinwire_lab.bench.rank_events import SILENCE_S
from thinwire_lab.jobs.devices import wait_for

_LR = 1e-4
_ALL_MB = 1_000_000
_MMAP_THRESHOLD, _MMAP_NBYTES = -3, 128 * 1024  # malloc.h


def train(role: MemoryRank, stage: Stage) -> None:
    """Trains as one rank, and reports what its process holds."""
    cell = role.cell
    _return_what_is_freed()
    join(role.master, rank=role.rank, ranks=cell.ranks, silence_s=SILENCE_S)
    torch.manual_seed(cell.seed)
    device = torch.device(cell.device)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(role.layers))).to(device)
    numel = sum(each.numel() for each in model.parameters())
    method = _method(cell, model)
    inputs = torch.Generator().manual_seed(cell.seed + role.rank)
    for _ in range(cell.steps):
        method.optimizer.zero_grad()
        method.model(torch.randn(1, WIDTH, generator=inputs).to(device)).square().mean().backward()
        method.step()
    dist.barrier()
    stage.report(_held(numel, device))
    method.finish()
    dist.barrier()
    method.close()
    dist.destroy_process_group()


def _method(cell: MemoryCell, model: nn.Module) -> Method:
    if cell.method.startswith(KINDS):
        kind, _, codec = cell.method.partition(":")
        shard(model, kind, codec, seed=cell.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR)
    if cell.method == ALONE or cell.method.startswith(KINDS):
        return Method(model, optimizer)
    design = hook(cell.method).design
    if design is not None:
        return Distributed(model, optimizer, design, cell.seed)
    one_bucket = _ALL_MB if cell.method.startswith(POWERSGD) else None  # else it aborts, or hangs, on gloo
    hooked = HookCell(hook=cell.method, model="mlp", data="digits", seed=cell.seed, bucket_cap_mb=one_bucket)
    return Hooked(model, optimizer, hooked)


def _held(numel: int, device: torch.device) -> Held:
    if device.type == "cpu":
        return Held(numel=numel, held=_nbytes("RssAnon"), peak=_nbytes("VmHWM"))
    wait_for(device)
    return Held(
        numel=numel,
        held=torch.cuda.memory_allocated(device),
        peak=torch.cuda.max_memory_allocated(device),
        host=_nbytes("RssAnon") + _pinned_nbytes(),
    )


def _pinned_nbytes() -> int:
    """What torch holds of pinned memory, which the system does not count as the process's; 0 where it does not say."""
    stats = getattr(torch.cuda, "host_memory_stats", None)
    return 0 if stats is None else int(stats().get("allocated_bytes.current", 0))


def _return_what_is_freed() -> None:
    """Lets glibc give every freed tensor back to the system: else it keeps many of them for what comes next."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_MMAP_THRESHOLD, _MMAP_NBYTES)


def _nbytes(name: str) -> int:
    [line] = [line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])
