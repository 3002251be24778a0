"""What a comparison may be asked to be: plain values with their defaults, which a command line can show.

Nothing here knows which values can be, so that `thinwire compare --help` imports no torch; `compare.Comparison` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire_lab.jobs.options import RecipeOptions

SHORT_STEPS = 100


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions(RecipeOptions):
    """The choices of one comparison.

    Args:
        designs: names, options in brackets; the first is what the others are measured against.
        links: rates, as in `10mbit`; `none` is no limit.
        models: names; all train on the same data.
        data: the data set's name.
        seeds: how many runs of each, with seeds 0, 1, ….
        workers: how many workers train.
        servers: how many shards.
        servers_on_workers: a shard on every worker's node, behind the same link; `servers` is left at 1 then.
        steps: of a full run; None takes each recipe's.
        short_steps: of a run that only measures seconds per step. Designs whose frames change in size take a tenth
            of a full run if that is more, and every design ends with an exchange, unless a full run is too
            short for one period. A warm-up, whose steps all exchange, is shorter in it, as the run is.
        batch, lr, final, schedule, optimizer, momentum, weight_decay, dropout, segments: of every run; see
            `RecipeOptions`.
        consistency, placement, compression, transmission: in place of every design's own.
        data_root: where the data set lies, if not in its usual place.
        device: of every worker's model.
        in_process: `train` makes runs without a link in one process, and their seconds say nothing.
        shaping: who makes the links thin; see `choose_links`.
    """

    designs: Sequence[str] = ("fp32", "int8", "3lc[s=1.0]", "3lc[s=1.75]")
    links: Sequence[str] = ("10mbit", "100mbit", "1gbit")
    models: Sequence[str] = ("mlp",)
    data: str = "digits"
    seeds: int = 1
    workers: int = 4
    servers: int = 1
    servers_on_workers: bool = False
    steps: int | None = None
    short_steps: int = SHORT_STEPS
    consistency: str | None = None
    placement: str | None = None
    compression: str | None = None
    transmission: str | None = None
    data_root: str | None = None
    device: str = "cpu"
    shaping: str = "auto"
    in_process: bool = False
