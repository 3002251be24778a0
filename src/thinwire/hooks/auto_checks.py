"""Checks of `tw.distribute` without a design: arguments, models, optimizers and states, and that all ranks agree."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from thinwire.cautions import caution
from thinwire.errors import ConfigError
from thinwire.hooks.auto_choice import SavedChoice
from thinwire.hooks.exchange.ranks import meet
from thinwire.hooks.quiet_ddp import check_can_disable_allreduce
from thinwire.hooks.several import class_names, parts
from thinwire.hooks.training_options import TrainingOptions
from thinwire.hooks.wrapping import inside_compiled, is_sharded, is_sharded_by_fsdp1
from thinwire.policies.adaptive import is_adaptive
from thinwire.policies.designs import design as find_design
from thinwire.runtime.peers import agree
from thinwire.states import read
from thinwire.transports.peers import PeerGroup

KEY = "auto"
"""The choice's key in a state, next to the optimizer's own state."""


def adapts(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer, or one of several, divides gradients by their magnitude, as Adam does."""
    return any(map(is_adaptive, parts(optimizer)))


def check_alone(asked: TrainingOptions, given: Mapping[str, Any]) -> None:
    """Raises ConfigError for arguments that set what `auto` chooses; the value None means not given."""
    options = {name: getattr(asked, name) for name in ("codec_down", "reduce", "overlap", "compression")}
    names = [name for name, value in {**given, **options}.items() if value is not None]
    if names:
        raise ConfigError(
            f"design='auto' decides {', '.join(names)} itself; leave {'it' if len(names) == 1 else 'them'} out, or "
            "name a design, as in design='local-sgd[h=4]'"
        )


def check_training(
    model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup, *, chooses: bool = True
) -> DistributedDataParallel | None:
    """Returns the script's DistributedDataParallel wrapper, if any; `chooses`: whether local updates may be chosen.

    Raises:
        ConfigError: a model or an optimizer that no choice can train.
    """
    if dist.get_rank(group) < 0:
        raise ConfigError("this process is not in the group that it was given")
    inside = inside_compiled(model)
    if is_sharded(model) or is_sharded_by_fsdp1(model):
        raise ConfigError(
            "the model is sharded by FSDP, and tw.distribute trains whole models: fsdp.compress(model, 'auto') of "
            "thinwire.hooks codes the gradients of FSDP2"
        )
    for each in parts(optimizer):
        if isinstance(getattr(each, "optimizer", None), torch.optim.Optimizer):
            raise ConfigError(
                f"a {type(each).__name__} is a framework's wrapper: write optimizer.optimizer = tw.distribute(model, "
                "optimizer.optimizer)"
            )
    if not any(each.requires_grad for each in model.parameters()):
        raise ConfigError("the model has no parameter that requires a gradient: there is nothing to train")
    if not isinstance(inside, DistributedDataParallel):
        return None
    ranks, reduced = (sorted(dist.get_process_group_ranks(each)) for each in (group, inside.process_group))
    if ranks != reduced:
        raise ConfigError(
            f"the model is wrapped in DistributedDataParallel over ranks {reduced}, and the training is over {ranks}: "
            "give both the same group, or leave DistributedDataParallel out"
        )
    if chooses and adapts(optimizer) and len(ranks) > 1:
        check_can_disable_allreduce(model, inside, group, find_design("local-sgd"))
    return inside


def check_state(state: Mapping[str, Any], optimizer: torch.optim.Optimizer, rank: int) -> SavedChoice:
    """Returns the part of a state that describes the choice.

    Raises:
        ConfigError: a damaged state, or one of another optimizer, design or rank.
    """
    if not isinstance(state, Mapping) or KEY not in state:
        raise ConfigError(
            "the state is of tw.distribute with a design: name that design"
            if "position" in state
            else "the state is one that torch's own optimizer returned: load it into that one, before tw.distribute"
        )
    saved = read(SavedChoice, state[KEY], "tw.distribute")
    if saved.optimizer != (here := class_names(optimizer)):
        raise ConfigError(
            f"the state is of {saved.optimizer}, and this optimizer is {here}: resume with the same class, or start "
            "from the model's weights"
        )
    if saved.ranks[0] != rank and saved.kind != "plain":
        raise ConfigError(
            f"the state is of rank {saved.ranks[0]}, and this is rank {rank}: each rank resumes from its own state, "
            "which contains its residuals"
        )
    return saved


def connect_and_agree(
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
    asked: TrainingOptions,
    saved: SavedChoice | None,
    settings: Mapping[str, Any],
) -> PeerGroup:
    """Returns the connections to the other ranks, once all ranks have equal settings; all ranks call it.

    Raises:
        ProtocolError: settings differ; the message names rank and setting.
        TransportError: a rank did not connect.
    """
    peers = meet(dist.get_process_group_ranks(group), timedelta(seconds=asked.timeout_s), asked.credentials)
    shapes = [list(parameter.shape) for each in optimizer.param_groups for parameter in each["params"]]
    own = {
        "optimizer": class_names(optimizer),
        "parameters": shapes,
        "resumes": "nothing" if saved is None else f"{saved.name} at step {saved.taken}",
        **{name: value if isinstance(value, int | float | str) else repr(value) for name, value in settings.items()},
    }
    agree(peers, own, when="call tw.distribute", wanted="all ranks must call tw.distribute with the same arguments")
    return peers


def warn_of_other_optimizers(inner: torch.optim.Optimizer) -> Callable[[], None]:
    """Warns once if another optimizer takes a step with the same parameters; returns a function that ends the watch."""
    ours, warned = weakref.ref(inner), False

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal warned
        mine = ours()
        if warned or mine is None or optimizer in parts(mine) or optimizer.param_groups is mine.param_groups:
            return
        held = {id(each) for group in mine.param_groups for each in group["params"]}
        if any(id(each) in held for group in optimizer.param_groups for each in group["params"]):
            warned = True
            caution(
                f"a {type(optimizer).__name__} has taken a step with parameters that tw.distribute trains with "
                f"{class_names(mine)}, and the step is not exchanged: close the optimizer that tw.distribute returned, "
                "and call tw.distribute with the new one"
            )

    stop: Callable[[], None] = register_optimizer_step_post_hook(after_step).remove
    return stop
