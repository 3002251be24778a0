"""What `thinwire bench fsdp` measures, and the role of one of its ranks, without importing FSDP."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module

from thinwire.codecs import codec
from thinwire.engines.events import Event
from thinwire.errors import ConfigError
from thinwire.policies.auto_codec import AUTO
from thinwire.policies.naming import parse_name
from thinwire_lab.bench.harness import Role, Stage
from thinwire_lab.workloads.recipe import Recipe, for_workers
from thinwire_lab.workloads.recipes import recipe

KINDS = ("fsdp:", "hsdp:")
"""What names begin with; a method follows."""
_OF_THE_HOOK = ("gather", "start_step")
SITES, RANKS = 2, 4
WARMUP = 2
"""Steps before the timed ones, without a limit."""


def check_method(name: str) -> None:
    """Raises ConfigError where a name is no kind and method, as in `hsdp:none` or `fsdp:3lc[s=1.0]`."""
    if not name.startswith(KINDS):
        raise ConfigError(f"{name!r}; expected hsdp:METHOD or fsdp:METHOD, as in hsdp:none or fsdp:3lc[s=1.0]")
    found, given = parse_name(name.partition(":")[2], "codec", short={"s": "sparsity"})
    if found == "none" and given:
        raise ConfigError(f"{name!r}: stock FSDP2 has no options; leave out {', '.join(given)}")
    if found not in ("none", AUTO):
        codec(found, **{option: value for option, value in given.items() if option not in _OF_THE_HOOK})


@dataclass(frozen=True, slots=True)
class FsdpCell:
    """One training.

    Args:
        kind: `hsdp`, two sites of two ranks, or `fsdp`, four ranks.
        method: `none` for stock FSDP2, or a codec with its options; `gather` among them codes the parameters.
        link: rate of every site's link, or of every rank's with `fsdp`; None for no limit.
        steps: of the whole training, which the loss comes from; all but the timed ones without a limit.
        timed: measured steps.
        warmup: steps before them.
    """

    kind: str
    method: str
    link: str | None
    model: str
    data: str
    steps: int
    timed: int
    batch: int
    lr: float
    seed: int
    warmup: int = WARMUP

    @property
    def hosts(self) -> int:
        """How many links there are."""
        return SITES if self.kind == "hsdp" else RANKS

    def __str__(self) -> str:
        return f"{self.kind} {self.method}, {self.link or 'unlimited'}"

    def recipe(self) -> Recipe:
        """Returns the recipe with this cell's own numbers in it, its rate the same at every step."""
        found = for_workers(recipe(self.model, self.data), RANKS)
        return replace(found, batch=self.batch, lr=self.lr, schedule="constant", warmup=0.0, steps=self.steps)


class Scored(Event, frozen=True, kw_only=True):
    """The trained model on the test set, and what `fsdp.report` says after the timed steps."""

    accuracy: float
    loss: float
    report: str


class FsdpRank(Role, frozen=True, kw_only=True):
    """One rank of a cell.

    Attributes:
        cell: what is measured.
        rank: this rank.
        master: host and port of rank 0.
        gate: a folder; the file `warm` in it starts the clock, `stopped` lets the rank train to the end.
    """

    cell: FsdpCell
    rank: int
    master: str
    gate: str

    def play(self, stage: Stage) -> None:
        """Trains as one rank."""
        # By name: FSDP takes a second to import, and every process of every benchmark knows all roles.
        import_module("thinwire_lab.bench.fsdp_rank").train(self, stage)
