"""Where training would place a planned model's values: on which server, or on which rank."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from thinwire.collective.trained import Partitions, TrainedTensor, partition
from thinwire.planner.costs import choices
from thinwire.planner.profile import Profile
from thinwire.planner.step_time import TensorCosts
from thinwire.policies.assignment import Assignment, Sized
from thinwire.policies.designs import Design
from thinwire.policies.placement import check_none_idle, placement


def on_servers(profile: Profile, design: Design, servers: int) -> Partitions:
    """Returns which server holds which values of every tensor, by its name, as `tw.distribute` decides it.

    Raises:
        ConfigError: a server would hold nothing, which training refuses as well.
    """
    placed = _placed(profile, design, servers)
    check_none_idle(placement(design.placement), placed)
    return _by_name(placed)


def among_ranks(profile: Profile, design: Design, ranks: int) -> Partitions:
    """Returns which rank owns which values of every tensor, by its name.

    Args:
        profile: of the model.
        design: of local updates, whose policy `tw.distribute` follows; or of gradients, as the DDP hook owns them.
        ranks: how many there are.
    """
    if design.local is not None:
        return _by_name(_placed(profile, design, ranks))
    chosen = choices(profile, design)
    tensors = [
        TrainedTensor(each.name, math.prod(each.shape), torch.float32, chosen[each.name])
        for each in profile.in_model_order
    ]
    return partition(tensors, ranks)


def largest_share(owned: Partitions, costs: Mapping[str, TensorCosts], ranks: int) -> float:
    """Returns the share of the model's bytes, as they travel, on the rank that owns most of them.

    Example:
        >>> from thinwire.policies.assignment import Partition
        >>> costs = TensorCosts(push_nbytes=60, pull_nbytes=40)
        >>> owned = {"weight": (Partition(0, 0, 10), Partition(1, 10, 20)), "bias": (Partition(0, 0, 5),)}
        >>> largest_share(owned, {"weight": costs, "bias": costs}, 2)
        0.75
    """
    held = [0.0] * ranks
    for name, parts in owned.items():
        nbytes, numel = costs[name].push_nbytes + costs[name].pull_nbytes, sum(part.numel for part in parts)
        for part in parts:
            held[part.server] += nbytes * part.numel / numel
    return max(1 / ranks, max(held) / sum(held)) if any(held) else 1 / ranks


def _placed(profile: Profile, design: Design, places: int) -> Assignment:
    # By what is trained and not by what travels: placement of tables knows nothing of a codec.
    sizes = [(each.name, math.prod(each.shape)) for each in profile.in_model_order]
    return placement(design.placement).place([Sized(name, numel, 4.0 * numel) for name, numel in sizes], places)


def _by_name(placed: Assignment) -> Partitions:
    return dict(zip((table.name for table in placed.tables), placed.partitions, strict=True))
