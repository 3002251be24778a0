"""What `thinwire bench updates` measures, and the role of one of its ranks, without importing torch's distributed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module

from thinwire.engines.events import Event
from thinwire_lab.bench.harness import Role, Stage
from thinwire_lab.workloads.recipe import Recipe, for_workers
from thinwire_lab.workloads.recipes import recipe

ALONE, DDP, EXCHANGED = "alone", "plain DDP", "design"
"""The ways to train, in the order of their turns: without any exchange, with torch's own, with the design."""
TRAINING, SHARD, OTHERS = "training thread", "shard's thread", "others"

WARM_UP_STEPS = 2
"""At least so many before those that are counted."""

Spent = dict[str, dict[str, float]]
"""CPU milliseconds of a step, by way and thread."""


@dataclass(frozen=True, slots=True)
class UpdatesCell:
    """One model with one design.

    Args:
        model, data, batch, seed: of the training; a batch of each rank.
        design: of local updates, by name.
        ranks: how many train.
        steps: of a block, in which all ranks train one way.
        warm_up: before them, which are not counted.
        blocks: of each way, in turn.
    """

    model: str
    data: str
    design: str
    ranks: int
    steps: int
    warm_up: int
    blocks: int
    batch: int
    seed: int

    def __str__(self) -> str:
        return f"{self.model}, {self.design}"

    def recipe(self) -> Recipe:
        """Returns the recipe for so many ranks, with this cell's batch."""
        return replace(for_workers(recipe(self.model, self.data), self.ranks), batch=self.batch)


class BlockEnded(Event, frozen=True, kw_only=True):
    """Rank 0 has ended a turn of all ways."""

    number: int


class Counted(Event, frozen=True, kw_only=True):
    """A rank has trained.

    Attributes:
        spent: medians over the blocks.
        weights: a digest of the parameters that the design has led to.
    """

    spent: Spent
    weights: str


class UpdatesRank(Role, frozen=True, kw_only=True):
    """One rank of a cell.

    Attributes:
        cell: what is measured.
        rank: this rank.
        master: host and port of rank 0.
    """

    cell: UpdatesCell
    rank: int
    master: str

    def play(self, stage: Stage) -> None:
        """Trains as one rank."""
        import_module("thinwire_lab.bench.updates_rank").train(self, stage)
