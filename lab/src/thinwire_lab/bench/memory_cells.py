"""What `thinwire bench memory` measures, and the role of one of its ranks, without importing torch's distributed."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from thinwire.engines.events import Event
from thinwire_lab.bench.fsdp_cells import KINDS
from thinwire_lab.bench.harness import Role, Stage
from thinwire_lab.bench.hook_cells import hook

ALONE = "alone"
"""A training that exchanges nothing."""
STATUS = Path("/proc/self/status")
"""Where Linux tells a process's memory."""
WIDTH = 1024
"""Of the linear layers that the model consists of: a million parameters each."""
STEPS = 6
EXCHANGES = 3
"""Steps, and exchanges of local updates, at least; after that nothing more is allocated."""


@dataclass(frozen=True, slots=True)
class MemoryCell:
    """One method, with models of two sizes.

    Args:
        method: `alone`, a DDP hook or a design of local updates as `hook` knows them, or FSDP with a codec.
        ranks: how many train.
        layers: of the smaller and of the larger model.
        device: where they are; ranks share a GPU.
        seed: of weights, inputs and random codecs.
    """

    method: str
    ranks: int
    layers: tuple[int, int]
    seed: int
    device: str = "cpu"

    def __str__(self) -> str:
        return self.method

    @property
    def steps(self) -> int:
        """How many are taken."""
        period = 1 if self.method == ALONE or self.method.startswith(KINDS) else hook(self.method).period
        return max(STEPS, EXCHANGES * period)


class Held(Event, frozen=True, kw_only=True):
    """What a rank's process has of memory, in bytes.

    Attributes:
        numel: parameters of the model.
        held: after the last step, with its gradients: tensors on the GPU, or else the process's anonymous memory.
        peak: at most so far: tensors on the GPU, or else the process's resident memory.
        host: of a rank on a GPU, the process's anonymous and pinned memory; 0 of others.
    """

    numel: int
    held: int
    peak: int
    host: int = 0


class MemoryRank(Role, frozen=True, kw_only=True):
    """One rank of a cell.

    Attributes:
        cell: what is measured.
        layers: of this model.
        rank: this rank.
        master: host and port of rank 0.
    """

    cell: MemoryCell
    layers: int
    rank: int
    master: str

    def play(self, stage: Stage) -> None:
        """Trains as one rank."""
        import_module("thinwire_lab.bench.memory_rank").train(self, stage)
