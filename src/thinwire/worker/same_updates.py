"""Whether a state is of the same local updates as a training that goes on from it: timetable and codecs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from thinwire.errors import ConfigError, check_keys
from thinwire.policies.designs import Design
from thinwire.policies.differences import differences


def coded_by(design: Design) -> dict[str, Any]:
    """Returns what a design codes exchanges by, for a state."""
    return {"codec": design.up.config(), "codec_down": design.down.config(), "compression": design.compression}


def check_same(state: Mapping[str, Any], design: Design) -> None:
    """Raises ConfigError where the position in a state is of other local updates than a design's."""
    if state.get("local") is None:
        raise ConfigError("the state is of a training without local updates: start from the model's weights")
    assert design.local is not None
    check_keys(state, ["coded"])
    for key, mine in (("local", asdict(design.local)), ("coded", coded_by(design))):
        check_keys(state[key], mine)
        if found := [(path[1:], there, here) for path, there, here in differences(state[key], mine, "")]:
            saved, wanted = (", ".join(f"{each[0]}={each[way]}" for each in found) for way in (1, 2))
            raise ConfigError(
                f"the state is of {saved} and this training has {wanted}: resume with the same, or start from the "
                "model's weights"
            )
