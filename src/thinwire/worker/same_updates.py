"""Whether a state is of the same local updates as a training that goes on from it: timetable and codecs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from thinwire.errors import ConfigError, check_keys
from thinwire.policies.designs import Design
from thinwire.policies.differences import differences
from thinwire.policies.local_updates import option_of

Differing = list[tuple[str, Any, Any]]
"""An option's name, what the state has, and what this training has."""


def coded_by(design: Design) -> dict[str, Any]:
    """Returns what a design codes exchanges by, for a state."""
    return {"codec": design.up.config(), "codec_down": design.down.config(), "compression": design.compression}


def check_same(state: Mapping[str, Any], design: Design) -> None:
    """Raises ConfigError where the position in a state is of other local updates than a design's."""
    if state.get("local") is None:
        raise ConfigError("the state is of a training without local updates: start from the model's weights")
    check_keys(state, ["coded"])
    if differing := _planned_otherwise(state["local"], design) or _coded_otherwise(state["coded"], design):
        raise ConfigError(
            "the state is of "
            + ", ".join(f"{name}={there}" for name, there, _ in differing)
            + " and this training has "
            + ", ".join(f"{name}={here}" for name, _, here in differing)
            + ": resume with the same, or start from the model's weights"
        )


def _planned_otherwise(saved: Mapping[str, Any], design: Design) -> Differing:
    assert design.local is not None
    mine = asdict(design.local)
    check_keys(saved, mine)
    return [(option_of(key), saved[key], mine[key]) for key in mine if saved[key] != mine[key]]


def _coded_otherwise(saved: Mapping[str, Any], design: Design) -> Differing:
    mine = coded_by(design)
    check_keys(saved, ["codec", "compression"])
    return [(path.removeprefix("."), there, here) for path, there, here in differences(saved, mine, "")]
