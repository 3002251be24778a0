"""`fsdp.compress`, and the exchanges that replace FSDP2's reductions.

With replicas (HSDP) FSDP reduce-scatters gradients inside a site, and the exchange averages them across sites, both
passes coded, among the ranks that hold the same shard. Without replicas every rank sends the other ranks their shards
of its gradient, coded, and averages its own: only the push pass.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from thinwire.codecs import Codec
from thinwire.collective.core import Bucket
from thinwire.collective.cut import shards_of
from thinwire.collective.residuals import Residuals
from thinwire.collective.trained import TrainedTensor
from thinwire.errors import ConfigError
from thinwire.hooks.exchange.options import ExchangeOptions
from thinwire.hooks.exchange.ranks import check_floating
from thinwire.hooks.fsdp.gathering import CodedAllGather
from thinwire.hooks.fsdp.parameter_groups import (
    ParameterGroup,
    ReduceScatter,
    in_order,
    parameter_groups,
    ranks_of,
)
from thinwire.hooks.fsdp.passes import Passes
from thinwire.hooks.fsdp.state import Ready, ShardedState
from thinwire.hooks.guards import Gradients, Place, StepGuard
from thinwire.policies.compression import PLAIN, ByShape, Choice, as_codec, select

_ALONE: WeakKeyDictionary[dist.ProcessGroup | None, dist.ProcessGroup] = WeakKeyDictionary()
"""The group with only this rank, for each default process group."""


def compress(
    model: nn.Module, codec: str | Codec = "3lc", *, gather: str | Codec | None = None, **options: Any
) -> ShardedState:
    """Compresses the gradients that an FSDP2 model exchanges, with error feedback.

    Call it on every rank of the mesh, after `fully_shard` and before the first backward pass. The script needs no other
    change, with one exception: gradients that no optimizer uses must not be exchanged
    (`model.set_requires_gradient_sync(False)`), because every other backward pass is a step. On a mesh of two
    dimensions (HSDP) the exchange between replicas is compressed, both ways; FSDP is unchanged inside a replica. On a
    mesh of one dimension the gradients that each rank sends to the shards' owners are compressed.

    Args:
        model: with `fully_shard` applied, all with one mesh.
        codec: an id with its options, a codec, or `"auto"`.
        gather: codec of the parameters that are gathered for a forward pass, such as `"int8"`; None: FSDP gathers them.
            All ranks then compute with the decoded values, and the owners keep the exact ones. Only without replicas.
        **options: those of the codec, such as `sparsity=1.0`, and all of `fsdp.ExchangeOptions` but `reduce`, such as
            `start_step=50`: `help(fsdp.ExchangeOptions)` describes them.

    Returns:
        The state: save its `state_dict()` with every checkpoint, and print `fsdp.report(state)`.

    Raises:
        ConfigError: not an FSDP2 model, compressed already, a mesh of other dimensions, or invalid arguments.
        ProtocolError: ranks with different models, settings or tokens; the message names rank and setting.
        TransportError: a rank did not connect.

    Example::

        mesh = init_device_mesh("cuda", (sites, ranks_of_a_site), mesh_dim_names=("replicate", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        state = fsdp.compress(model, codec="3lc", sparsity=1.0)       # the one line
    """
    asked = ExchangeOptions.of(codec, options, without=("reduce",))
    groups = parameter_groups(model)
    first, mesh = groups[0], groups[0].mesh
    if not first.replicated and asked.codec_down is not None:
        raise ConfigError(
            "codec_down codes averages for replicas, and a mesh of one dimension has none: every shard's owner keeps "
            "its average to itself; leave codec_down out"
        )
    if first.replicated and gather is not None:
        raise ConfigError("gather codes parameters on a mesh of one dimension; inside a replica FSDP gathers them")
    gather_codec = None if gather is None else replace(as_codec(gather, {}), error_feedback=False, nonfinite="raise")
    parameters = in_order(model, groups)
    cuts = {name: parameter.cut for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        check_floating(name, parameter.dtype)
    settings = asked.settings({first.device})
    choices = asked.choices({name: cut.shape for name, cut in cuts.items()}, settings)
    if not first.replicated:
        choices = {name: Choice(choice.up, PLAIN) for name, choice in choices.items()}
    wholes = [
        TrainedTensor(name, cut.numel(1, 0), parameters[name].dtype, choices[name], first.device)
        for name, cut in cuts.items()
    ]

    outermost, ranks = mesh.get_group(0), ranks_of(mesh)
    everyone = asked.meet([rank for site in ranks for rank in site], outermost)
    asked.agree(
        everyone,
        wholes,
        {
            "codec": asked.agreement(settings),
            "mesh": list(mesh.mesh.shape),
            "gather": None if gather_codec is None else gather_codec.config(),
            "parameter groups": [[parameter.name for parameter in group.parameters] for group in groups],
        },
    )
    replica, replicas = 0, None
    if first.replicated:
        replica, replicas = next(i for i, site in enumerate(ranks) if dist.get_rank() in site), len(ranks)
        peers = asked.meet([site[first.shard] for site in ranks], outermost) if first.shards > 1 else everyone
        core = asked.core(shards_of(wholes, cuts, first.shards, first.shard), peers)
    else:
        peers = everyone
        partitions = {name: cut.partitions(first.shards) for name, cut in cuts.items()}
        core = asked.core(wholes, peers, partitions=partitions, pulls=False)
    coded = {}
    if gather_codec is not None:  # selects the parameters as for gradients, whatever the gradients' codec
        gathers = asked.compression or ByShape(
            up=gather_codec, down=PLAIN, min_numel=asked.min_numel, exclude=asked.exclude
        )
        shapes = {name: cut.shape for name, cut in cuts.items()}
        selected = select(shapes, gathers, codecs=asked.codecs, last_layer=asked.last_layer)
        coded = {name: gather_codec for name, choice in selected.items() if choice.up != PLAIN}
    places: dict[str, Place] = {n: (weakref.ref(each.param), "sharded_param") for n, each in parameters.items()}
    coded_names = [whole.name for whole in wholes if not whole.uncompressed]
    guard = StepGuard(
        model,
        gradients=Gradients({name: places[name] for name in coded_names}),
        reduced=places.values(),
        few_bits=asked.few_bits(choices, settings, everyone.rank),
    )
    state = ShardedState(
        core=core,
        peers=peers,
        options=asked,
        model=model,
        settings=settings,
        guard=guard,
        blocking=True,
        ranks=everyone.names,
        everyone=everyone,
        buckets={group: _bucket(group, core.residuals) for group in groups},
        wholes=wholes,
        cuts=cuts,
        replica=replica,
        replicas=replicas,
        shard=first.shard,
        shards=first.shards,
        shard_group=mesh.get_group(1 if first.replicated else 0) if first.shards > 1 else None,
        gathered=str(as_codec(gather, {})) if gather is not None and coded else "",
    )
    alone = _alone() if first.replicated else None
    passes = Passes(model, state.begin_forward, state.end_step)
    for number, group in enumerate(groups):
        if alone is not None:
            group.replace_all_reduce(alone, partial(_all_reduce, state))
            continue
        _CodedReduceScatter(state, group)  # replaces the group's own
        if coded:
            group.replace_all_gather(CodedAllGather(group, number, coded, peers, state.gathers, passes))
    return state


def _alone() -> dist.ProcessGroup:
    """Returns a process group with only this rank, on every device of the default group.

    The group is made once: torch keeps a group, with its threads and sockets, until all groups are destroyed.
    """
    world = dist.group.WORLD
    if world not in _ALONE:
        _ALONE[world] = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return _ALONE[world]


def _all_reduce(state: ShardedState, group: ParameterGroup, flat: torch.Tensor) -> None:
    """Exchanges a parameter group's gradient shard, reduced inside the site, in place of an all-reduce."""
    if state.begin(group, flat):
        state.gradient_ready(Ready(group, *group.take_all_reduce(flat, state.compute_dtype(group))))
        return
    begun = time.perf_counter()
    group.all_reduce(flat)
    state.reduced(begun, flat)
    state.gradient_ready(Ready(group, None, 1.0))


class _CodedReduceScatter(ReduceScatter):
    """Exchanges a parameter group's gradients of all ranks' shards, in place of a reduce-scatter."""

    def __init__(self, state: ShardedState, group: ParameterGroup) -> None:
        self._state = state
        self._group = group
        self._uncompressed = group.replace_reduce_scatter(self)

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        state, own = self._state, self._group
        if state.begin(own, input_tensor):
            taken = own.take_reduce_scatter(output_tensor, input_tensor, state.compute_dtype(own))
            state.gradient_ready(Ready(own, *taken))
            return None
        state.gradient_ready(Ready(own, None, 1.0))
        begun = time.perf_counter()
        work = self._uncompressed(output_tensor, input_tensor, group, op, async_op)
        if work is None:
            state.reduced(begun, output_tensor)
        return work


def _bucket(group: ParameterGroup, residuals: Residuals) -> Bucket:
    offsets = tuple(
        (parameter.name, offset)
        for parameter, offset in zip(group.parameters, group.offsets, strict=True)
        if parameter.name in residuals.tensors
    )
    stride = 0 if group.replicated else group.stride
    return Bucket(offsets, 4 * group.stride * (1 if group.replicated else group.shards), stride)
