"""`tw.distribute`: an unmodified model and optimizer, trained through a parameter server.

The wrapped optimizer keeps its interface; its arithmetic runs on the server. A parameter's gradient is encoded and
pushed as soon as the backward pass has produced it; a layer's delta is waited for and applied when the forward
pass first reaches that layer (3LC §4.1, "incremental pull"). So communication runs while the model computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire.codecs import Codec
from thinwire.errors import ConfigError
from thinwire.hooks.auto_checks import check_alone
from thinwire.hooks.auto_optimizer import AutoOptimizer
from thinwire.hooks.groups import check_ranks_can, join_group
from thinwire.hooks.joining import join, prepare
from thinwire.hooks.optimizer import DistributedOptimizer
from thinwire.hooks.resuming import Resumable
from thinwire.hooks.several import as_one
from thinwire.policies.auto.levels import AUTO
from thinwire.policies.compression import Compression, as_codec
from thinwire.policies.consistency import Consistency
from thinwire.policies.consistency import consistency as find_consistency
from thinwire.policies.designs import Design
from thinwire.policies.designs import design as find_design
from thinwire.policies.placement import Placement
from thinwire.runtime.clock import check_seconds
from thinwire.runtime.metrics import MetricsWriter
from thinwire.runtime.model_places import check_free
from thinwire.schema import Reduce, Settings
from thinwire.security import Credentials
from thinwire.transports.base import Connection

__all__ = ["AutoOptimizer", "DistributedOptimizer", "distribute"]


def distribute(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    server: str | Connection | Sequence[str | Connection] | None = None,
    group: dist.ProcessGroup | None = None,
    rank: int | None = None,
    workers: int | None = None,
    codec: str | Codec | None = None,
    codec_down: str | Codec | None = None,
    design: str | Design | None = None,
    consistency: str | Consistency | None = None,
    placement: str | Placement | None = None,
    min_numel: int | None = None,
    exclude: Callable[[str, tuple[int, ...]], bool] | None = None,
    compression: str | Compression | None = None,
    reduce: Reduce | None = None,
    overlap: bool | None = None,
    seed: int = 0,
    chunk_nbytes: int | None = None,
    state_interval: int = 50,
    timeout_s: float = 600.0,
    connect_timeout_s: float = 30.0,
    reconnect_s: float = 60.0,
    credentials: Credentials | None = None,
    metrics: Sequence[MetricsWriter] = (),
    resume: Mapping[str, Any] | Resumable | None = None,
    steps_per_epoch: int | None = None,
    settings: Settings | None = None,
    **options: Any,
) -> DistributedOptimizer | Any:
    """Joins a training and returns an optimizer to use in place of `optimizer`.

    In a script under torchrun `tw.distribute(model, optimizer)` is enough: all ranks train together, and thinwire
    chooses what they exchange (`AutoOptimizer` says how).

    Every worker calls it with the same model and the same arguments but `rank`. Worker 0's trained weights become
    everybody's; frozen ones are not sent, and must be the same from the beginning. The optimizer's class and options
    are sent to the server, which runs it; the learning rate is read from `param_groups` at every step, so any
    scheduler works.

    Args:
        model: any module; with local updates in a group, one that a framework has wrapped in DistributedDataParallel,
            too, which then sends no gradients. Its parameters may be of any floating dtype, on any device. What is
            shared is float32: values of float64 are rounded to it, the initial ones too.
        optimizer: a stock torch optimizer over the model's parameters; with a design of local updates, any optimizer,
            or a list of several that share no parameter, as Muon for matrices and AdamW for what is left.
        server: `grpc://host:port`, or an open connection; a list of them for several shards.
        group: in place of `server`, `rank` and `workers`: the ranks of this process group average among themselves.
            Gradients that a design codes are averaged within the backward pass, as by `ddp.compress`, and the user's
            optimizer takes the step. By default, and without `server`, the group of all ranks.
        rank: this worker's number, 0 … workers − 1; above, where it joins an elastic server (`--min-workers`) besides.
        workers: how many workers begin the training; without this and `rank` one trains alone.
        codec: of the pushes; an id with `**options`, or a codec; with servers by default `"3lc"`.
        codec_down: of the pulls; by default the same. `**options` are the other's; give `tw.codec(…)` with its own.
        design: a complete configuration in place of the codecs, as in `"terngrad"`; the arguments below override it.
            `"auto"`, the default in a group where no codec is given, chooses by the optimizer and the link, and takes
            no argument that it decides.
        consistency: when gradients are exchanged, as in `"ssp[staleness=5]"`; by default bulk-synchronous.
        placement: which shard holds what, as in `"uniform"`; by default largest first onto the least loaded.
        min_numel: tensors with fewer values travel uncompressed, as do biases and norm layers.
        exclude: further tensors to leave uncompressed, by name and shape.
        compression: which tensor takes which codec: a policy's name, or a policy that replaces codecs, `min_numel` and
            `exclude`.
        reduce: `mean` over the gradients that came, or their `sum` (not where weights or votes travel down); see
            `Design` for the means over those who sent a value. By default the design's, the mean unless it says so.
        overlap: False pushes and pulls at `step()`, which leaves room for gradient clipping between backward and step.
            Otherwise gradients leave as backward makes them, and `step()` refuses those that were changed since.
        seed: of random codecs; each rank derives its own stream.
        chunk_nbytes: a push to servers leaves as soon as so many bytes of frames are ready; by default 32 kB.
        state_interval: batch-norm statistics of worker 0 go to the others after every so many steps, by servers.
        timeout_s: how long the slowest worker may keep the others waiting, in seconds.
        connect_timeout_s: how long the server may take to appear, in seconds.
        reconnect_s: for how long a broken connection to an address is tried to be replaced, in seconds; 0 turns it off.
        credentials: this worker's certificate and token, and whom it trusts; None: it speaks in the clear. In a group
            messages are sealed with the first token without a rank.
        metrics: take a record of every table at every step, in a group at every exchange; closed with the optimizer,
            and where this worker cannot join, so that their files and ports are free when it joins again.
        resume: what `opt.state_dict()` returned after `opt.sync()`; the model has its weights of then, and the shards
            were started with their checkpoints of the same step. In a group every rank resumes from its own, all of
            one step. Or several states to go on from (`hooks.resuming`),
            as `KeptSteps` has them: all workers and shards agree on the newest that everybody has.
        steps_per_epoch: how many steps every worker takes in an epoch, for designs that exchange once an epoch.
        settings: what else must be equal on all workers, by name, as in `{"batch": 32, "steps": 1000}`; a worker that
            has another value is refused, and the message names it. The seed is always compared, and at the start of
            a training the values of frozen parameters.
        **options: of the codec, such as `sparsity=1.0`.

    Returns:
        With servers a `DistributedOptimizer`; in a group a `GroupOptimizer` for a design of local updates, else an
        `AutoOptimizer`, which has `chosen`. All have what the example uses.

    Raises:
        ConfigError: arguments that cannot be; a design that exchanges once an epoch, without `steps_per_epoch`; a
            model that another optimizer of ours trains, which is not closed.
        DeadlineError: no server at that address.
        TransportError: the server does not let this worker in.
        ProtocolError: the server refuses this worker, for instance for a tensor of another shape.

    Example:
        A server of this process stands for `server="grpc://10.0.0.1:7070"`:

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
    group = _group(group) if server is None else group
    rank, workers = _place(rank, workers, server=server, group=group)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"a {type(model).__name__} is no model: the model comes first, then its optimizer")
    if state_interval < 1 or (chunk_nbytes is not None and chunk_nbytes < 1):
        raise ConfigError(f"state_interval={state_interval} and chunk_nbytes={chunk_nbytes} must be at least 1")
    check_seconds(timeout_s=timeout_s, connect_timeout_s=connect_timeout_s, reconnect_s=reconnect_s)
    check_free(model)
    optimizer = as_one(optimizer)
    told: dict[str, Any] = {"metrics": metrics, "settings": {"seed": seed, **(settings or {})}}
    if design == AUTO or (group is not None and design is None and codec is None):
        if group is None:
            raise ConfigError(
                "design='auto' is for ranks of a group, without servers: name a design, or leave server out"
            )
        check_alone(
            {
                "codec": codec,
                "codec_down": codec_down,
                "consistency": consistency,
                "placement": placement,
                "reduce": reduce,
                "overlap": overlap,
                "compression": compression,
                "chunk_nbytes": chunk_nbytes,
                "steps_per_epoch": steps_per_epoch,
                **options,
            }
        )
        given: dict[str, Any] = {"seed": seed, "min_numel": min_numel, "exclude": exclude, "credentials": credentials}
        joins = partial(
            distribute,
            *(model, optimizer),
            group=group,
            timeout_s=timeout_s,
            metrics=metrics,
            settings=settings,
            **given,
        )
        compress = {**given, "timeout": timedelta(seconds=timeout_s)}
        return AutoOptimizer(
            *(model, optimizer, group),
            local=lambda name, state: joins(design=name, resume=state),
            compress={key: value for key, value in compress.items() if key != "min_numel" or value is not None},
            resume=resume,
            **told,
        )
    policy = None if consistency is None else find_consistency(consistency)
    chosen = find_design(
        _design(codec, codec_down, options) if design is None else _without_codecs(design, codec, codec_down, options),
        min_numel=min_numel,
        transmission=None if overlap is None else ("wait-free" if overlap else "traditional"),
        consistency=consistency if isinstance(consistency, str) else None,
        placement=placement if isinstance(placement, str) else None,
        reduce=reduce,
        compression=compression if isinstance(compression, str) else None,
    )
    of_compression = None if isinstance(compression, str) else compression
    if group is not None:
        check_ranks_can(chosen, consistency=consistency, placement=placement)
        return join_group(
            *(model, optimizer, chosen, group),
            compression=of_compression,
            exclude=exclude,
            seed=seed,
            timeout_s=timeout_s,
            credentials=credentials,
            resume=resume,
            **told,
        )
    if policy is None:
        chosen = chosen.with_epoch(steps_per_epoch)
    servers = [server] if isinstance(server, str | Connection) else list(server or ())
    if not servers:
        raise ConfigError("no server was given")
    if twice := sorted({each for each in servers if isinstance(each, str) and servers.count(each) > 1}):
        raise ConfigError(f"{twice[0]} is given twice: every server is one shard, and has a part of the model")
    prepared = prepare(
        model,
        optimizer,
        chosen,
        rank=rank,
        workers=workers,
        servers=len(servers),
        policy=policy,
        resume=resume,
        seed=seed,
        chunk_nbytes=chunk_nbytes,
        measures=bool(metrics),
        compression=of_compression,
        exclude=exclude,
        placement=placement if isinstance(placement, Placement) else None,
        state_interval=state_interval,
        settings=told["settings"],
    )
    return join(
        prepared,
        servers,
        metrics=metrics,
        credentials=credentials,
        timeout_s=timeout_s,
        connect_timeout_s=connect_timeout_s,
        reconnect_s=reconnect_s,
    )


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Returns the group, or that of all ranks. Raises ConfigError where there is none."""
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
    """Which of how many workers this is; a group says that by itself, later.

    Raises:
        ConfigError: one is said without the other, or cannot be, or both servers and a group are given.
    """
    if server is not None and group is not None:
        raise ConfigError(
            "give either server=… (addresses of shards) or group=… (a process group whose ranks exchange)"
        )
    if group is not None and (rank is not None or workers is not None):
        raise ConfigError("group=… says which rank this is and how many workers there are: leave out rank and workers")
    if rank is None and workers in (None, 1):
        return 0, 1
    whole = all(isinstance(each, int) and not isinstance(each, bool) for each in (rank, workers))
    if rank is None or workers is None or not whole or rank < 0 or workers < 1:
        raise ConfigError(
            f"rank={rank!r} with workers={workers!r}: give both as whole numbers, as in rank=0, workers=4; ranks are "
            "0 … workers − 1"
        )
    return rank, workers


def _design(codec: str | Codec | None, codec_down: str | Codec | None, options: dict[str, Any]) -> Design:
    """The design that codecs make."""
    up = as_codec("3lc" if codec is None else codec, options)
    down = up if codec_down is None else as_codec(codec_down, {})
    return Design(name=up.id, up=up, down=down)


def _without_codecs(
    design: str | Design, codec: str | Codec | None, codec_down: str | Codec | None, options: dict[str, Any]
) -> str | Design:
    """Returns the design. Raises ConfigError where codecs or their options are given besides."""
    if not options and codec is None and codec_down is None:
        return design
    name = design if isinstance(design, str) else design.name
    if codec is not None or codec_down is not None:
        would = "codec" if codec is not None else "codec_down"
        raise ConfigError(f"design={name!r} brings its codecs; {would}=… would change them: leave one of the two out")
    inside = ",".join(f"{key}={value}" for key, value in sorted(options.items()))
    ways = f"{name[:-1]},{inside}]" if name.endswith("]") else f"{name}[{inside}]"
    try:
        find_design(ways)
    except ConfigError as error:
        raise ConfigError(f"tw.distribute has no {', '.join(sorted(options))}, nor has the design: {error}") from error
    raise ConfigError(f"design={name!r} brings its codecs and their options; write design={ways!r}")
