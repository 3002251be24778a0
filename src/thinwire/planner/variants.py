"""What is planned where a codec is left open: a design for every setting that `codec=auto` may take, and its choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from thinwire.codecs import Codec
from thinwire.codecs.registry import codec
from thinwire.policies.auto_codec import AutoCodec
from thinwire.policies.autopilot.estimates import wanted
from thinwire.policies.autopilot.levels import Level
from thinwire.policies.designs import Design


def variants(made: Design) -> dict[str | None, Design]:
    """Returns the designs that stand for one: itself, or those of all settings of `codec=auto`, by their names.

    Example:
        >>> from thinwire.policies.designs import design
        >>> [each.name for each in variants(design("update[codec=auto,lag_limit=1]")).values()]
        ['update[codec=auto,lag_limit=1]: bf16', 'update[codec=auto,lag_limit=1]: int8']
        >>> variants(design("update"))[None].name
        'update'
    """
    if made.auto is None:
        return {None: made}
    found: dict[str | None, Design] = {}
    for level in made.auto.settings():
        fixed = fixed_codec(level)
        found[level.name] = replace(made, name=f"{made.name}: {level.name}", auto=None, up=fixed, down=fixed)
    return found


def choice(
    auto: AutoCodec, settings: Sequence[Level], step_s: Callable[[int], float], bits: Callable[[int], float]
) -> int:
    """Returns the place of the setting that a controller finds, where all is as predicted.

    Args:
        auto: says what is to be least.
        settings: of the controller.
        step_s: the predicted seconds of a step with the setting at a place.
        bits: likewise what a value takes, both ways.
    """
    places = range(len(settings))
    if auto.target == "bytes":
        return min(places, key=bits)
    return wanted([settings[place].cost_s(step_s(place)) for place in places])


def fixed_codec(level: Level) -> Codec:
    """Returns a setting that compresses as a codec by itself: what s it may reach is the setting's, where the
    controller tells contexts."""
    assert level.codec is not None  # as of the uncompressed setting, which local updates do not have
    config = level.codec.config()
    return codec(**config | ({"sparsity": level.sparsity} if "sparsity" in config else {}))
