"""Joins the ranks of a group in a training with local updates, which they average over gloo."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire.collective.trained import TrainedTensor
from thinwire.errors import ConfigError
from thinwire.hooks.exchange.options import ExchangeOptions
from thinwire.hooks.exchange.ranks import described
from thinwire.hooks.exchange.saved import row_major
from thinwire.hooks.exchange.state import ExchangeState
from thinwire.hooks.group_optimizer import GroupOptimizer
from thinwire.hooks.planning import check_inner, exchanged_buffers, frozen, trained
from thinwire.hooks.quiet_ddp import check_wrapper, disable_ddp_allreduce, reducing
from thinwire.hooks.resuming import Resumable, known_buffers, load_agreed
from thinwire.hooks.training_options import TrainingOptions
from thinwire.local.parameters import LocalTensor, SharedParameters, move
from thinwire.policies.compression import NARROW, PLAIN, Choice
from thinwire.policies.consistency import consistency
from thinwire.policies.designs import Design
from thinwire.runtime import peers as ranks
from thinwire.runtime.metrics import MetricsWriter
from thinwire.schema import Settings
from thinwire.transports.peers import PeerGroup
from thinwire.version import VERSION

_TOGETHER = {
    "when": "call tw.distribute",
    "wanted": "all ranks must call tw.distribute with the same model and arguments",
}
_REFUSED = "one that cannot be taken"
"""The beginning of a rank's description of its state, if it cannot load the state."""


def check_ranks_can(design: Design, **given: object) -> None:
    """Raises ConfigError if a design needs servers.

    Args:
        design: of the training.
        **given: arguments that need servers; None means not given.
    """
    needs = [f"{name}=…" for name, value in given.items() if value is not None]
    if design.local is None and consistency(design.consistency).id != "bsp":
        needs.append(f"consistency={design.consistency}")
    if design.local is not None and design.local.quorum:
        needs.append("learners that come, go and never wait")
    if design.downlink == "weights":
        needs.append("downlink=weights")
    if design.share_scales:
        needs.append("votes and shared scales")
    if design.ema:
        needs.append("ema")
    if "senders" in design.reduce and design.local is None:
        needs.append(f"reduce={design.reduce}")
    if needs:
        raise ConfigError(
            f"design {design.name!r} has {', '.join(needs)}, for which there have to be servers: give server=… in "
            "place of group=… (`thinwire server` starts one), or take a design without, as local-sgd[h=4] or 3lc"
        )


def join_group(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    design: Design,
    group: dist.ProcessGroup,
    asked: TrainingOptions,
    *,
    metrics: Sequence[MetricsWriter],
    settings: Settings,
    resume: Mapping[str, Any] | Resumable | None,
) -> GroupOptimizer:
    """Returns the optimizer that trains a model with local updates; all ranks call it, as they do `tw.distribute`."""
    if dist.get_rank(group) < 0:
        raise ConfigError("this process is not in the group that it was given")
    wrapped = reducing(model, group)
    if wrapped is not None:
        check_wrapper(model, wrapped, group, design)
        model = wrapped.module
    state = load_agreed(resume, group)
    exchange = ExchangeOptions(measure_link=False, **asked.of_ranks(design))
    try:
        opt = _local(model, optimizer, design, group, exchange, resume=resume, state=state, settings=settings)
    except BaseException:
        for each in metrics:  # there is no optimizer to close them, and a script that tries again opens them anew
            with suppress(Exception):
                each.close()
        raise
    if metrics:
        opt.exchange.record_to(*metrics, every=1)
    if wrapped is not None:
        disable_ddp_allreduce(wrapped, opt)
    return opt


def _local(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    design: Design,
    group: dist.ProcessGroup,
    asked: ExchangeOptions,
    *,
    resume: Mapping[str, Any] | Resumable | None,
    state: Mapping[str, Any] | None,
    settings: Settings,
) -> GroupOptimizer:
    assert design.local is not None
    check_inner(design.local, optimizer)
    tensors, exchanged = _tensors(model, optimizer, design, asked, known_buffers(resume))
    outer = design.local.outer_groups(inner_lr=optimizer.param_groups[0]["lr"])
    if asked.reduce == "sum":
        outer[1]["lr"] /= dist.get_world_size(group)  # buffers are averaged all the same
    shared = SharedParameters(tensors, design.local.fragments, move)
    peers = asked.meet(dist.get_process_group_ranks(group), group)
    compared: dict[str, Any] = asdict(design.local)
    if state is None:
        compared |= frozen(model, [each for each in model.parameters() if each.requires_grad])
    compared |= {"thinwire": VERSION, "nonfinite": asked.nonfinite, "reduce": asked.reduce, **settings}
    ranks.agree(peers, {**compared, **described(exchanged)}, **_TOGETHER)
    core = asked.core(exchanged, peers)
    for tensor in tensors:
        for part, context in core.residuals.pushes(tensor.travels_as).items():
            if context.residual is not None:
                tensor.withheld.append((part.start, part.stop, context.residual.view(-1)))
    layouts = row_major({each.travels_as: each.parameter for each in tensors})
    exchange = ExchangeState(core=core, peers=peers, options=asked, layouts=layouts)
    opt = GroupOptimizer(model, optimizer, design, exchange, shared, outer)
    try:
        _begin(opt, shared, peers, state)
    except BaseException:
        ranks.leave(peers, ranks.FAREWELL)
        opt.leave()
        raise
    return opt


def _tensors(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    design: Design,
    asked: ExchangeOptions,
    buffers: Collection[str] | None,
) -> tuple[list[LocalTensor], list[TrainedTensor]]:
    """Returns the model's tensors, and the tensors that are sent for them.

    Floating-point buffers of the model's state are averaged uncompressed, in the exchange that ends a round; each rank
    keeps its other buffers. Tensors in bfloat16 of a fragment share a frame.
    """
    assert design.local is not None
    parameters = [(name, each) for name, each in trained(model, optimizer) if each.numel()]
    choices = asked.choices({name: tuple(each.shape) for name, each in parameters})
    fragments = design.local.assign([each.numel() for _, each in parameters])
    coded: list[LocalTensor] = []
    narrow: list[LocalTensor] = []
    chosen: dict[str, Choice] = {}
    for (name, each), fragment in zip(parameters, fragments, strict=True):
        is_narrow = choices[name] == Choice(NARROW, NARROW)
        travels_as = f"{NARROW.id} of fragment {fragment} on {each.device}" if is_narrow else name
        some = choices[name].up.scheme.sends_some
        tensor = LocalTensor(name, each, fragment, some, travels_as=travels_as)
        (narrow if is_narrow else coded).append(tensor)
        chosen[travels_as] = choices[name]
    tensors = [*coded, *narrow]
    for name, buffer in exchanged_buffers(model, buffers):
        tensors.append(LocalTensor(name, buffer, design.local.fragments - 1, group=1, travels_as=name))
        chosen[name] = Choice(PLAIN, PLAIN)
    sizes = Counter[str]()
    devices = {each.travels_as: each.parameter.device for each in tensors}
    for tensor in tensors:
        sizes[tensor.travels_as] += tensor.parameter.numel()
    shapes = {
        each.travels_as: tuple(each.parameter.shape)
        for each in coded
        if getattr(chosen[each.travels_as].up.scheme, "layout", "") == "tiles"
    }
    return tensors, [
        TrainedTensor(name, size, torch.float32, chosen[name], devices[name], shapes.get(name, ()))
        for name, size in sizes.items()
    ]


def _begin(opt: GroupOptimizer, shared: SharedParameters, peers: PeerGroup, state: Mapping[str, Any] | None) -> None:
    """Resumes from a state of every rank, or begins with rank 0's parameters and buffers.

    Raises:
        ConfigError: on all ranks, if one has no state, a damaged one, or one of another rank or exchange.
    """
    mine = "none" if state is None else _load(opt, state)
    states = [each.decode() for each in ranks.gather(peers, mine.encode())]
    for rank, each in enumerate(states):
        if each.startswith(_REFUSED):
            raise ConfigError(f"the state that rank {rank} of {peers.size} resumes from is {each}")
    if len(set(states)) > 1:
        raise ConfigError(
            "the ranks resume from different states, "
            + ", ".join(f"rank {rank}: {each}" for rank, each in enumerate(states))
            + ". Give all of them resume=… of the newest exchange that every rank has"
        )
    if state is None:
        own = b"".join(tensor.local.cpu().numpy().tobytes() for tensor in shared.tensors) if peers.rank == 0 else b""
        values = torch.frombuffer(bytearray(ranks.from_first(peers, own)), dtype=torch.float32)
        sizes = [tensor.values.numel() for tensor in shared.tensors]
        for tensor, of_rank_0 in zip(shared.tensors, torch.split(values, sizes), strict=True):
            tensor.values.copy_(of_rank_0)
        shared.merge(shared.every)


def _load(opt: GroupOptimizer, state: Mapping[str, Any]) -> str:
    """Loads a state; returns its description, or the error's, for the other ranks. It does not raise: they wait."""
    try:
        opt.load_state_dict(state)
    except (ConfigError, KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        return f"{_REFUSED} ({type(error).__name__}: {error})"
    return f"exchange {opt.clock} at step {opt.steps_done}"
