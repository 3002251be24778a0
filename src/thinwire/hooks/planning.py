"""From a torch model and optimizer to what all workers and servers agree on: one plan for each shard.

A **tensor** of the model is one parameter or buffer; placement cuts it into **partitions**, and each partition is a
table of its own on one shard, with its own context and scale. A tensor in one piece keeps its name and shape.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from thinwire.cautions import caution
from thinwire.codecs import Codec
from thinwire.errors import ConfigError
from thinwire.hooks.several import class_names, parts
from thinwire.hooks.wrapping import check_dense
from thinwire.optimizers.options import portable_options
from thinwire.optimizers.runner import ALLOWED
from thinwire.policies.assignment import Assignment, Partition, Sized
from thinwire.policies.compression import PLAIN, Compression, Exclude, select
from thinwire.policies.consistency import Consistency, name_of
from thinwire.policies.consistency import consistency as find_consistency
from thinwire.policies.designs import Design
from thinwire.policies.local_updates import LocalUpdates
from thinwire.policies.placement import Placement, check_none_idle
from thinwire.policies.placement import placement as find_placement
from thinwire.runtime.digests import bits_digest
from thinwire.schema import FROZEN, Plan, Settings, TableSpec
from thinwire.schema.tensor_names import plain_name
from thinwire.worker.model import PlannedTensor


@dataclass(frozen=True, slots=True)
class Planned:
    """One plan per shard, the model's tensors, and where everything lives."""

    plans: tuple[Plan, ...]
    tensors: tuple[PlannedTensor, ...]
    assignment: Assignment


def make_plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    design: Design,
    *,
    workers: int,
    shards: int = 1,
    compression: Compression | None = None,
    exclude: Exclude | None = None,
    consistency: Consistency | None = None,
    placement: Placement | None = None,
    state_interval: int = 50,
    settings: Settings | None = None,
    buffers: Collection[str] | None = None,
    begins: bool = True,
) -> Planned:
    """Places the model's trained parameters on the shards, and its statistics (buffers) on the first of them.

    Tensors go by their `plain_name`.

    Args:
        model: any module.
        optimizer: over its parameters, one that servers run.
        design: names every choice that is not given below.
        workers: how many workers train together.
        shards: how many servers there are.
        compression: in place of the design's.
        exclude: tensors to leave uncompressed besides those of the design's compression.
        consistency: in place of the design's.
        placement: in place of the design's.
        state_interval: buffers travel after every so many exchanges.
        settings: what else must be equal on all workers.
        buffers: names of those that travel, in a training that goes on; None: what their values say now.
        begins: whether this worker has no state to go on from: then frozen parameters must be equal as well, which a
            model may change while it trains, as a teacher that follows the trained ones.

    Raises:
        ConfigError: an optimizer that servers do not run, or that has a state which they would lose; a parameter that
            it does not hold, or that the model does not; an embedding with sparse gradients; a server without a table.
    """
    local = design.local
    name = class_names(optimizer) if local is None else local.outer
    if local is None and ALLOWED.get(name) is not type(optimizer):
        told = f"{type(optimizer).__module__}.{name}" if name in ALLOWED else name
        one = "; it runs one for all: give one optimizer with parameter groups" if " and " in name else ""
        raise ConfigError(
            f"the server runs {', '.join(ALLOWED)}; {told} is none of them{one}. A design of local updates, such as "
            "'update', runs any optimizer at the workers"
        )
    if local is None:
        check_dense(model)
        _check_fresh(optimizer)
    else:
        check_inner(local, optimizer)
    parameters = trained(model, optimizer)
    choices = select(
        {key: tuple(parameter.shape) for key, parameter in parameters},
        **design.choosing(compression, exclude),
    )
    placing = placement or find_placement(design.placement)
    assignment = placing.place([Sized(key, p.numel(), 4.0 * p.numel()) for key, p in parameters], shards)
    codecs: list[dict[str, Any]] = []

    def index_of(codec: Codec) -> int:
        """The place of a codec's configuration in the plan, where each stands once."""
        config = codec.config()
        if config not in codecs:
            codecs.append(config)
        return codecs.index(config)

    tables: list[list[TableSpec]] = [[] for _ in range(shards)]
    sends_some = [False] * shards
    tensors = []
    group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    for (key, parameter), partitions in zip(parameters, assignment.partitions, strict=True):
        up, down = index_of(choices[key].up), index_of(choices[key].down)
        placed = []
        for part in partitions or (Partition(0, 0, 0),):
            whole = part.stop - part.start == parameter.numel()
            spec = TableSpec(
                name=key if whole else f"{key}[{part.start}:{part.stop}]",
                shape=tuple(parameter.shape) if whole else (part.stop - part.start,),
                up=up,
                down=down,
                group=group_of[id(parameter)] if local is None else 0,
                dtype=_named(parameter.dtype),
            )
            placed.append((part, len(tables[part.server])))
            tables[part.server].append(spec)
            sends_some[part.server] |= choices[key].up.scheme.sends_some
        tensors.append(PlannedTensor(key, parameter, False, choices[key].up, tuple(placed), local is not None))
    check_none_idle(placing, assignment)
    plain = index_of(PLAIN)
    for key, buffer in exchanged_buffers(model, buffers):
        placed = [(Partition(0, 0, buffer.numel()), len(tables[0]))]
        # After local steps everybody's statistics count; after a common step, worker 0's are as good as any.
        state, group = (True, 0) if local is None else (False, 1)
        # Updates change a copy: a buffer whose own memory they changed could not be resized by its module.
        tensors.append(PlannedTensor(key, buffer, state, PLAIN, tuple(placed), local=True))
        shape, dtype = tuple(buffer.shape), _named(buffer.dtype)
        tables[0].append(TableSpec(name=key, shape=shape, up=plain, down=plain, group=group, state=state, dtype=dtype))
    given = optimizer.param_groups if local is None else local.outer_groups()
    known = optimizer.defaults if local is None else given[0]
    groups = tuple(portable_options(group, known) for group in given)
    policy = consistency or find_consistency(design.consistency)
    policy.terms(workers)  # refuses impossible answers of another package's policy
    agreed = {**(frozen(model, [parameter for _, parameter in parameters]) if begins else {}), **(settings or {})}
    plans = tuple(
        Plan(
            workers=workers,
            tables=tuple(specs),
            codecs=tuple(codecs),
            optimizer=name,
            groups=groups,
            # Of a shard all of whose tensors are too small for a codec that sends some of the values, it is the mean.
            reduce=design.reduce if some or "senders" not in design.reduce else "mean",
            state_interval=state_interval,
            consistency=name_of(policy),
            downlink="momentum" if local is not None and local.nesterov else design.downlink,
            local="" if local is None else local.agreement(),
            settings=agreed,
        )
        for specs, some in zip(tables, sends_some, strict=True)
    )
    return Planned(plans, tuple(tensors), assignment)


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def exchanged_buffers(model: nn.Module, known: Collection[str] | None) -> list[tuple[str, torch.Tensor]]:
    """Returns the buffers that are exchanged, by their plain names: numbers that belong to the model's state.

    Every other buffer stays each worker's own: one that is not persistent, such as a table of rotary positions, which
    every process makes anew; one with Inf, such as an attention mask, which has no mean; one that begins empty, with a
    warning, as the model resizes it later; and those that a script has DistributedDataParallel ignore
    (`_set_params_and_buffers_to_ignore_for_model`). NaN are damage, which the first exchange refuses.

    Args:
        model: of the training.
        known: the names of those that are exchanged, in a training that goes on; None: what their values say now.
    """
    named = [(plain_name(name), buffer) for name, buffer in model.named_buffers()]
    if known is not None:
        return [(name, buffer) for name, buffer in named if name in known]
    constants = {id(module._buffers[name]) for module in model.modules() for name in module._non_persistent_buffers_set}
    ignored = {plain_name(name) for name in getattr(model, "_ddp_params_and_buffers_to_ignore", ())}
    numbers = [
        (name, buffer)
        for name, buffer in named
        if buffer.is_floating_point() and id(buffer) not in constants and name not in ignored
    ]
    if empty := [name for name, buffer in numbers if not buffer.numel()]:
        caution(
            f"buffers that begin empty are not exchanged, and stay each worker's own: {', '.join(empty[:4])}"
            f"{', …' if len(empty) > 4 else ''}"
        )
    return [
        (name, buffer)
        for name, buffer in numbers
        if buffer.numel() and (buffer.isnan().any() or not buffer.isinf().any())
    ]


def check_inner(local: LocalUpdates, optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigError where an optimizer cannot take local steps; warns where they often end in nothing."""
    local.check_inner(class_names(optimizer), optimizer.param_groups)
    if text := local.caution_for(class_names(optimizer)):
        caution(text)
    for each in parts(optimizer):
        _check_devices(each)


def _check_devices(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigError where one of torch's optimizers has its moments on another device than the parameter."""
    if ALLOWED.get(type(optimizer).__name__) is not type(optimizer):
        return  # it may keep them elsewhere on purpose
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            # A step's count, a single value, may be on the CPU.
            if isinstance(value, torch.Tensor) and value.ndim and value.device != parameter.device:
                raise ConfigError(
                    f"the optimizer's {name!r} of a parameter of shape {tuple(parameter.shape)} is on {value.device} "
                    f"and the parameter on {parameter.device}: move the model before the optimizer is made, or load "
                    "the optimizer's state again with load_state_dict, which moves it"
                )


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    """Returns the parameters that need a gradient, by their plain names. Raises ConfigError where one cannot be."""
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found = [(plain_name(name), each) for name, each in model.named_parameters() if each.requires_grad]
    if not found:
        raise ConfigError("the model has no parameter that needs a gradient")
    for what, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for key, tensor in tensors:
            if is_lazy(tensor):
                raise ConfigError(
                    f"{what} {plain_name(key)!r} of a lazy module has no shape yet: run one forward pass before the "
                    "optimizer is made"
                )
    for key, parameter in found:
        if parameter.is_meta:
            raise ConfigError(
                f"parameter {key!r} is on the meta device, without values: call to_empty() and fill it first"
            )
        if hasattr(parameter, "device_mesh"):
            raise ConfigError(
                f"parameter {key!r} is sharded over ranks (a DTensor), and tw.distribute exchanges whole parameters: "
                "thinwire.hooks.fsdp.compress is for models that fully_shard has sharded"
            )
        if id(parameter) not in known:
            raise ConfigError(
                f"parameter {key!r} needs a gradient and the optimizer does not hold it: give it to the optimizer or "
                "freeze it (requires_grad_(False)); with a design of local updates a list of several optimizers may "
                "hold the model's parameters together"
            )
        if not parameter.is_floating_point():
            raise ConfigError(f"parameter {key!r} has dtype {parameter.dtype}; only floating-point tensors are trained")
        if parameter.layout != torch.strided:
            raise ConfigError(f"parameter {key!r} is sparse; dense tensors alone are supported")
    own = {id(parameter) for parameter in model.parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad and id(parameter) not in own:
                raise ConfigError(
                    f"the optimizer's group {index} holds a parameter of shape {tuple(parameter.shape)} that the model "
                    "does not have: it would not be exchanged. Register it with the model, as in model.scale = "
                    "nn.Parameter(…), give a module that holds both, or leave it to an optimizer of its own"
                )
    return found


def frozen(model: nn.Module, trained: Sequence[nn.Parameter]) -> Settings:
    """Returns a digest of the frozen parameters, as a setting that all workers share; nothing where there are none.

    A quantised base (a parameter of a class of its own) and one in shards are left out, as their bits may rightly
    differ by rank. So is a parameter that shares its memory with a trained one, and gets that one's values.
    """
    sent = {parameter.untyped_storage().data_ptr() for parameter in trained}
    plain = [
        parameter.detach().resolve_conj().resolve_neg()
        for parameter in model.parameters()
        if not parameter.requires_grad
        and type(parameter) is nn.Parameter
        and not parameter.is_meta
        and not parameter.is_nested
        and parameter.layout == torch.strided
        and parameter.untyped_storage().data_ptr() not in sent
    ]
    return {FROZEN: bits_digest(plain)} if plain else {}


def _check_fresh(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigError where servers, which begin anew, would lose what an optimizer has: a state, or hooks."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ConfigError(
            "the optimizer has hooks for its steps, and with this design the servers take them: remove the hooks, or "
            "take a design of local updates, such as 'update', whose workers call them"
        )
    for state in optimizer.state.values():
        kept = [n for n, value in state.items() if isinstance(value, torch.Tensor) and n != "step" and value.any()]
        if kept and ("step" not in state or float(state["step"]) > 0):
            raise ConfigError(
                f"the optimizer has a state ({', '.join(kept)}), and with this design the servers run the optimizer "
                "and begin its state anew: give it one that has taken no step and loaded no state, or a design of "
                "local updates, such as 'update', whose workers go on from that state"
            )
