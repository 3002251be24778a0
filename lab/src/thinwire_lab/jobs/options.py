"""What one training run may be asked to be: plain values with their defaults, which a command line can show.

What replaces a recipe's own numbers stands by itself, for comparisons take it as single runs do. Nothing here knows
which values can be, so that `thinwire train --help` imports no torch; `jobs.job.Job` does.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """What a run trains with in place of its recipe; None leaves the recipe's.

    Args:
        batch: examples per worker and step.
        lr: the largest learning rate.
        final: the last learning rate as a share of the largest.
        schedule: how the rate falls.
        optimizer: SGD, Adam or AdamW.
        momentum: of SGD.
        weight_decay: of matrices and filters.
        dropout: share of the units behind hidden fully connected layers.
        segments: whether a worker's part of the data is `drawn` anew each epoch or `fixed`.
    """

    batch: int | None = None
    lr: float | None = None
    final: float | None = None
    schedule: str | None = None
    optimizer: str | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    dropout: float | None = None
    segments: str | None = None


@dataclass(frozen=True, kw_only=True)
class JobOptions(RecipeOptions):
    """The choices of one run of one design.

    Args:
        design: as in `3lc[s=1.75]`.
        model: a model's name.
        data: a data set's name.
        workers: how many workers train.
        steps: how many steps; None takes the recipe's, unless there is a time budget.
        seconds: a time budget in place of a number of steps; the rate then follows the clock.
        link: rate of every process's link, as in `10mbit`; None is unlimited.
        seed: of weights, batches and random codecs.
        eval_every: seconds between evaluations during the run, which are no part of its seconds; 0 evaluates at the
            end alone.
        eval_steps: steps between evaluations during the run, likewise; 0 evaluates at the end alone.
        data_root: where to look for data that is not on its usual place.
        device: of every worker's model: `cpu`, `cuda` or one of several, as in `cuda:1`; servers compute on the CPU.
        servers: how many shards, each a process of its own.
        servers_on_workers: a shard on every worker's node, behind the same link, as many as there are workers (Wu
            2018, §4.3); `servers` is left at 1 then.
        codec_up, codec_down, consistency, placement, compression, transmission: in place of the design's own choices.
    """

    design: str = "3lc[s=1.0]"
    model: str = "mlp"
    data: str = "digits"
    workers: int = 4
    steps: int | None = None
    seconds: float | None = None
    link: str | None = None
    seed: int = 0
    eval_every: float = 0.0
    eval_steps: int = 0
    data_root: str | None = None
    device: str = "cpu"
    servers: int = 1
    codec_up: str | None = None
    codec_down: str | None = None
    consistency: str | None = None
    placement: str | None = None
    compression: str | None = None
    transmission: str | None = None
    servers_on_workers: bool = False
