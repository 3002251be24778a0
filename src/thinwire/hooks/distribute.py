"""`tw.distribute`: an unmodified model and optimizer, trained through a parameter server.

The wrapped optimizer keeps its interface; its arithmetic runs on the server. A parameter's gradient is encoded and
pushed as soon as the backward pass has produced it; the forward pass waits for a layer's delta and applies it when it
first reaches that layer (3LC §4.1, "incremental pull"). Thus communication runs while the model computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire.codecs import Codec
from thinwire.errors import ConfigError
from thinwire.hooks.auto_checks import check_alone
from thinwire.hooks.auto_optimizer import AutoOptimizer
from thinwire.hooks.groups import check_ranks_can, join_group
from thinwire.hooks.joining import join_servers
from thinwire.hooks.optimizer import DistributedOptimizer
from thinwire.hooks.quiet_ddp import refuse_other_wrapper
from thinwire.hooks.resuming import Resumable
from thinwire.hooks.several import as_one
from thinwire.hooks.training_options import TrainingOptions
from thinwire.policies.auto.levels import AUTO
from thinwire.policies.consistency import Consistency
from thinwire.policies.consistency import consistency as find_consistency
from thinwire.policies.designs import Design
from thinwire.policies.placement import Placement
from thinwire.policies.placement import placement as find_placement
from thinwire.runtime.metrics import MetricsWriter
from thinwire.runtime.model_places import check_free
from thinwire.schema import Settings
from thinwire.transports.base import Connection

__all__ = ["AutoOptimizer", "DistributedOptimizer", "TrainingOptions", "distribute"]


def distribute(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    server: str | Connection | Sequence[str | Connection] | None = None,
    group: dist.ProcessGroup | None = None,
    rank: int | None = None,
    workers: int | None = None,
    design: str | Design | None = None,
    codec: str | Codec | None = None,
    consistency: str | Consistency | None = None,
    placement: str | Placement | None = None,
    metrics: Sequence[MetricsWriter] = (),
    resume: Mapping[str, Any] | Resumable | None = None,
    settings: Settings | None = None,
    **options: Any,
) -> DistributedOptimizer | Any:
    """Joins a training and returns an optimizer to use in place of `optimizer`.

    In a script under torchrun `tw.distribute(model, optimizer)` is enough: all ranks train together, and thinwire
    chooses the exchange; see `AutoOptimizer`.

    Every worker calls it with the same model and the same arguments, except `rank`. All workers copy worker 0's trained
    weights; frozen ones are not sent, and must be equal from the beginning. The optimizer's class and options are sent
    to the server, which runs it; the learning rate is read from `param_groups` at every step, so any scheduler works.

    Args:
        model: any module; with local updates in a group, also one that a framework has wrapped in
            DistributedDataParallel, which then sends no gradients. Its parameters may be of any floating dtype, on any
            device. The shared weights are float32: float64 values are rounded, the initial ones too.
        optimizer: a stock torch optimizer over the model's parameters; with a design of local updates, any optimizer,
            or a list of several that share no parameter, as Muon for matrices and AdamW for the rest.
        server: `grpc://host:port`, or an open connection; a list of them for several shards.
        group: in place of `server`, `rank` and `workers`: the ranks of this process group average among themselves.
            Gradients that a design codes are averaged within the backward pass, as by `ddp.compress`, and the user's
            optimizer takes the step. By default, and without `server`, the group of all ranks.
        rank: this worker's number, 0 … workers − 1; larger for a worker that joins an elastic server
            (`--min-workers`) in addition.
        workers: number of workers that begin the training; without this and `rank` one trains alone.
        design: a complete configuration, as in `"terngrad"`; the arguments below override all but its codecs.
            `"auto"`, the default in a group without a codec, chooses by the optimizer and the link, and refuses
            arguments that it chooses itself.
        codec: of the pushes, in place of a design; an id with its options, or a codec; with servers by default `"3lc"`.
        consistency: when gradients are exchanged, as in `"ssp[staleness=5]"`; by default bulk-synchronous.
        placement: the shard of each tensor, as in `"uniform"`; by default largest first onto the least loaded.
        metrics: receive a record of every table at every step, in a group at every exchange; closed with the optimizer,
            and if this worker cannot join, so that their files and ports are free when it tries again.
        resume: the result of `opt.state_dict()` after `opt.sync()`; the model has the weights of the same step, and
            the shards were started with their checkpoints of that step. In a group every rank resumes from its own
            state, all of one step. Or several states (`hooks.resuming`), as in `KeptSteps`: all workers and shards
            agree on the newest step that all of them have.
        settings: further values that must be equal on all workers, by name, as in `{"batch": 32, "steps": 1000}`; a
            worker with another value is refused, and the message names it. The seed is always compared, and at the
            start of a training the values of frozen parameters.
        **options: those of the codec, such as `sparsity=1.0`, and those of `TrainingOptions`, such as `overlap=False`
            or `credentials=…`: `help(thinwire.hooks.distribute.TrainingOptions)` describes them.

    Returns:
        With servers a `DistributedOptimizer`; in a group a `GroupOptimizer` for a design of local updates, else an
        `AutoOptimizer`, which has `chosen`. All have the methods of the example.

    Raises:
        ConfigError: invalid arguments; a design that exchanges once an epoch; a model that an earlier result of
            `tw.distribute` still trains.
        DeadlineError: no server at that address.
        TransportError: the server does not admit this worker.
        ProtocolError: the server refuses this worker, for instance for a tensor of another shape.

    Example:
        A server in this process replaces `server="grpc://10.0.0.1:7070"`:

        >>> from thinwire.runtime.serving import serving
        >>> from thinwire.server.core import ServerCore
        >>> from thinwire.transports.memory import MemoryServer
        >>> model = nn.Linear(100, 10)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with MemoryServer(serving(ServerCore())) as server:
        ...     with distribute(model, sgd, server=server.connect(), rank=0, workers=1, codec="3lc") as opt:
        ...         for _ in range(3):
        ...             opt.zero_grad()
        ...             model(torch.ones(4, 100)).square().mean().backward()
        ...             opt.step()
        ...         opt.sync()  # before the model is evaluated or saved
        >>> opt.steps_done
        3
    """
    asked, of_codec = TrainingOptions.of(options)
    servers = [server] if isinstance(server, str | Connection) else list(server or ())
    group = group if servers else _group(group)
    rank, workers = _place(rank, workers, server=server, group=group)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"a {type(model).__name__} is no model: the model comes first, then its optimizer")
    check_free(model)
    optimizer = as_one(optimizer)
    common: dict[str, Any] = {
        "metrics": metrics,
        "resume": resume,
        "settings": {"seed": asked.seed, **(settings or {})},
    }
    policies = {"consistency": consistency, "placement": placement}
    if design == AUTO or (group is not None and design is None and codec is None):
        if group is None:
            raise ConfigError(
                "design='auto' is for ranks of a group, without servers: name a design, or leave server out"
            )
        check_alone(asked, {"codec": codec, **policies, **of_codec})
        opt: Any = AutoOptimizer(model, optimizer, group, asked, **common)
        refuse_other_wrapper(model, group)
        return opt
    names = {name: given for name, given in policies.items() if isinstance(given, str)}
    chosen = asked.design(design, codec, of_codec, **names)
    if group is not None:
        check_ranks_can(chosen, **policies)
        if chosen.local is None:
            opt = AutoOptimizer(model, optimizer, group, asked, design=chosen, **common)
        else:
            opt = join_group(model, optimizer, chosen, group, asked, **common)
        refuse_other_wrapper(model, group)
        return opt
    if twice := sorted({each for each in servers if isinstance(each, str) and servers.count(each) > 1}):
        raise ConfigError(f"{twice[0]} is given twice: every server is one shard, and has a part of the model")
    if consistency is None:
        chosen.check_counts_steps()
    return join_servers(
        *(model, optimizer, chosen, servers, asked),
        rank=rank,
        workers=workers,
        consistency=find_consistency(chosen.consistency if consistency is None else consistency),
        placement=find_placement(chosen.placement if placement is None else placement),
        **common,
    )


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Returns the group, or that of all ranks. Raises ConfigError if there is none."""
    found = group or (dist.group.WORLD if dist.is_available() and dist.is_initialized() else None)
    if found is None:
        raise ConfigError(
            "no process group is initialised, and no server=… is given: write "
            'torch.distributed.init_process_group("gloo") '
            "before tw.distribute (torchrun sets what it reads), or give server=… (addresses of shards)"
        )
    return found


def _place(
    rank: int | None, workers: int | None, *, server: object, group: dist.ProcessGroup | None
) -> tuple[int, int]:
    """Returns the worker's rank and the number of workers; 0 and 1 with a group, which knows its own.

    Raises:
        ConfigError: one without the other, an invalid number, or both servers and a group.
    """
    if group is not None and any(each is not None for each in (server, rank, workers)):
        raise ConfigError(
            "group=… (a process group whose ranks exchange) says which rank this is and how many workers there are, "
            "without servers: leave out server, rank and workers, or give server=… (addresses of shards) without group"
        )
    if rank is None and workers in (None, 1):
        return 0, 1
    whole = all(isinstance(each, int) and not isinstance(each, bool) for each in (rank, workers))
    if rank is None or workers is None or not whole or rank < 0 or workers < 1:
        raise ConfigError(
            f"rank={rank!r} with workers={workers!r}: give both as whole numbers, as in rank=0, workers=4; ranks are "
            "0 … workers − 1"
        )
    return rank, workers
