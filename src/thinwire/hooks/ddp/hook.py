"""`ddp.compress` and the hook that DDP calls for every bucket.

This file leaves out `from __future__ import annotations`: DDP compares the hook's annotations with real types.
"""

import weakref
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.codecs import Codec
from thinwire.collective.trained import TrainedTensor
from thinwire.errors import ConfigError
from thinwire.hooks.ddp.state import BucketGradients, Reduction, ThinwireState
from thinwire.hooks.exchange.options import ExchangeOptions
from thinwire.hooks.exchange.ranks import check_floating
from thinwire.hooks.guards import StepGuard, places_of
from thinwire.hooks.wrapping import check_dense, inside_compiled
from thinwire.schema.tensor_names import plain_name


def compress(model: nn.Module, codec: str | Codec = "3lc", **options: Any) -> ThinwireState:
    """Compresses the gradients of a DistributedDataParallel model, both ways, with error feedback on both passes.

    Call it on every rank, after wrapping the model and before the first backward pass. The script needs no other
    change, with one exception: a backward pass with gradients that no optimizer uses belongs inside `model.no_sync()`,
    because every other backward pass is a step. Compressed bytes are sent over a separate gloo group.

    Args:
        model: wrapped in DistributedDataParallel, also compiled by `torch.compile`.
        codec: an id with its options, a codec, or `"auto"`.
        **options: those of the codec, such as `sparsity=1.0`, and all of `ddp.ExchangeOptions`, such as
            `start_step=50`: `help(ddp.ExchangeOptions)` describes them.

    Returns:
        The state: save its `state_dict()` with every checkpoint, and print `ddp.report(state)`.

    Raises:
        ConfigError: not a DDP model, a second hook, sparse gradients, or invalid arguments.
        ProtocolError: ranks with different models, settings or tokens; the message names rank and setting.
        TransportError: a rank did not connect.

    Example::

        model = DistributedDataParallel(model)
        state = ddp.compress(model, codec="3lc", sparsity=1.0)       # the one line
        state = ddp.compress(model, codec="auto")                    # or choose by measurement
    """
    wrapped = _wrapped(model)
    asked = ExchangeOptions.of(codec, options)
    parameters = _parameters(wrapped)
    settings = asked.settings({parameter.device for parameter in parameters.values()})
    choices = asked.choices({name: tuple(parameter.shape) for name, parameter in parameters.items()}, settings)
    tensors = [TrainedTensor(name, p.numel(), p.dtype, choices[name], p.device) for name, p in parameters.items()]
    drop_zeros = bool(wrapped.find_unused_parameters or wrapped.static_graph)
    peers = asked.meet(dist.get_process_group_ranks(wrapped.process_group), wrapped.process_group)
    own = {"codec": asked.agreement(settings), "find_unused_parameters or static_graph": drop_zeros}
    asked.agree(peers, tensors, own)
    core = asked.core(tensors, peers, drop_zeros=drop_zeros)
    places = places_of(wrapped.module)
    reduced = {name: place for name, place in places.items() if plain_name(name) in parameters}
    coded = {tensor.name for tensor in tensors if not tensor.uncompressed}
    compressed = {plain: at for name, at in reduced.items() if (plain := plain_name(name)) in coded}
    gradients = BucketGradients(compressed)
    guard = StepGuard(
        wrapped,
        gradients=gradients,
        reduced=reduced.values(),
        left_out={n: at for n, at in places.items() if n not in reduced and n not in wrapped.parameters_to_ignore},
        few_bits=asked.few_bits(choices, settings, peers.rank),
    )
    state = ThinwireState(
        core=core,
        peers=peers,
        options=asked,
        settings=settings,
        parameters=parameters,
        model=wrapped,
        guard=guard,
        gradients=gradients,
    )
    disable: Any = torch.compiler.disable  # untyped in torch; a compiled training step would compile hooks, too
    state.take_bucket = disable(_take_bucket)
    wrapped.register_comm_hook(state, thinwire_hook)
    return state


def thinwire_hook(state: ThinwireState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """DDP's communication hook: gives the bucket to the state's driver and returns at once.

    Example::

        model.register_comm_hook(state, thinwire_hook)     # what compress does
    """
    return state.take_bucket(state, bucket)


def _take_bucket(state: ThinwireState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    state.driver.check_open()
    state.driver.raise_failure()
    buffer, auto = bucket.buffer(), state.auto
    step, index, last = state.step, bucket.index(), bucket.is_last()
    if index == 0:
        state.under_way.clear()  # of an interrupted step
        state.check_divisor()
        state.between_steps()
        counts = _in_backward()  # outside, this rank has joined early, and has no step
        if counts:
            state.restore_discarded()
        state.begin_step()
        if counts and state.compresses:
            state.note_compressed()
    if auto is not None:
        auto.bucket_ready()
    compresses = state.compresses
    state.step += last
    if last:
        state.gradients.end_pass()
    if not compresses:
        if auto is not None and auto.flush.waiting:
            auto.flush.add(state.bucket(bucket), buffer)
        return _uncompressed(state, buffer, last=last)
    if last and _in_backward():
        # DDP would turn a failed future into an obscure error. A rank that joined early raises at its next bucket.
        torch.autograd.Variable._execution_engine.queue_callback(state.driver.wait_step)
    return state.driver.bucket_ready(state.bucket(bucket), buffer, step, index, last=last)


def _in_backward() -> bool:
    """A rank that joined early (DDP's join) calls the hook outside a backward pass, where no callback can be queued."""
    return torch._C._current_graph_task_id() != -1


def _uncompressed(state: ThinwireState, buffer: torch.Tensor, *, last: bool) -> torch.futures.Future[torch.Tensor]:
    """Reduces as DDP does without a hook: the same bits, at little extra cost."""
    if state.core.residuals.mean:
        buffer.mul_(1 / state.world_size)
    # dist.all_reduce would take twice as long, for looking up the group and logging.
    work = state.group.allreduce([buffer])
    auto, averages = state.auto, None
    if not (buffer.is_cuda or state.reduces_late) and _in_backward():
        # Python in gloo's thread, during the backward pass, would take longer than the rest of this function.
        averages = torch.futures.Future[torch.Tensor]()
        state.under_way.append(Reduction(work, buffer, averages))
    if last and state.under_way:  # this bucket or earlier ones; DDP queues its own wait right after this
        torch.autograd.Variable._execution_engine.queue_callback(state.finish_reductions)
    if last and auto is not None and _in_backward():
        # `check_finite` must run after DDP's own wait, which DDP queues right after this; hence a callback queues it.
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(engine.queue_callback, auto.flush.check_finite))
    if averages is not None:
        return averages

    # On a busy machine gloo's thread may hold the last reference to this function. A strong reference to `auto`, which
    # has the group, would then free the group in one of the group's own threads, which the group joins.
    watching = None if auto is None else weakref.ref(auto)

    def averaged(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        result, auto = done.value()[0], None if watching is None else watching()
        if auto is not None:
            auto.flush.reduced(result)
        return result

    future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
    return future.then(averaged)


def _wrapped(compiled: nn.Module) -> DistributedDataParallel:
    """Returns the DDP model, which `torch.compile` may have wrapped. Raises ConfigError if it cannot have a hook."""
    model = inside_compiled(compiled)
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"ddp.compress takes a DistributedDataParallel model, not {type(model).__name__}; "
            "wrap it first: model = DistributedDataParallel(model)"
        )
    if model.mixed_precision is not None:
        raise ConfigError(
            "DistributedDataParallel(mixed_precision=…) uses the communication hook itself: leave it out, and compute "
            "in low precision by torch.autocast, or with a model of that dtype"
        )
    if model._comm_hooks:
        raise ConfigError(
            f"the model has the hook {model._comm_hooks[0][0].__qualname__} already; DDP takes one: call ddp.compress "
            "or tw.distribute once, or wrap the model anew"
        )
    if model._use_python_reducer:
        raise ConfigError(
            'torch._dynamo.config.optimize_ddp is "python_reducer", which calls no communication hook as DDP does; '
            'set it to "ddp_optimizer" before the model is wrapped'
        )
    check_dense(model.module)
    return model


def _parameters(model: DistributedDataParallel) -> dict[str, torch.Tensor]:
    """Returns the parameters that DDP reduces, by their names in the unwrapped model."""
    ignored: set[str] = model.parameters_to_ignore
    found: dict[str, torch.Tensor] = {
        plain_name(name): parameter
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    }
    for name, parameter in found.items():
        check_floating(name, parameter.dtype)
    return found
