"""The server or rank on which training would place a planned model's values."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

import torch

from thinwire.collective.trained import Partitions, TrainedTensor, partition
from thinwire.planner.costs import choices
from thinwire.planner.profile import Profile
from thinwire.planner.step_time import TensorCosts
from thinwire.policies.assignment import Sized
from thinwire.policies.compression import NARROW, Choice
from thinwire.policies.designs import Design
from thinwire.policies.placement import check_none_idle, placement


def on_servers(profile: Profile, design: Design, servers: int) -> Partitions:
    """Returns which server holds which values of every tensor, by its name, as `tw.distribute` decides it.

    Raises:
        ConfigError: a server would hold nothing, which training refuses as well.
    """
    placing = placement(design.placement)
    # By trained values: placement on servers does not depend on codecs.
    sizes = [(each.name, math.prod(each.shape)) for each in profile.in_model_order]
    placed = placing.place([Sized(name, numel, 4.0 * numel) for name, numel in sizes], servers)
    check_none_idle(placing, placed)
    return dict(zip((name for name, _ in sizes), placed.partitions, strict=True))


def largest_share(profile: Profile, design: Design, costs: Mapping[str, TensorCosts], ranks: int) -> float:
    """Returns the share of the model's bytes, as they travel, on the rank that owns most of them."""
    chosen, tensors, nbytes = choices(profile, design), dict[str, TrainedTensor](), defaultdict[str, float](float)
    for each in profile.in_model_order:
        choice = chosen[each.name]
        whole = each.shape if getattr(choice.up.scheme, "layout", "") == "tiles" else ()
        # Local updates send all tensors in bfloat16 as one.
        name = NARROW.id if design.local is not None and choice == Choice(NARROW, NARROW) else each.name
        before = tensors[name].numel if name in tensors else 0
        tensors[name] = TrainedTensor(name, before + math.prod(each.shape), torch.float32, choice, shape=whole)
        nbytes[name] += costs[each.name].push_nbytes + costs[each.name].pull_nbytes
    held = [0.0] * ranks
    for name, parts in partition(list(tensors.values()), ranks).items():
        for part in parts:
            held[part.server] += nbytes[name] * part.numel / tensors[name].numel
    return max(1 / ranks, max(held) / sum(held)) if any(held) else 1 / ranks
