"""Designs: complete configurations that a study compares, by name, as in `3lc[s=1.75]`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from thinwire.codecs import Codec
from thinwire.codecs.registry import codec
from thinwire.errors import ConfigError
from thinwire.policies.compression import MIN_NUMEL, ByShape

_FORM = re.compile(r"^(?P<id>[\w.-]+)(?:\[(?P<options>[^\[\]]*)\])?$")
_SHORT = {"s": "sparsity"}


@dataclass(frozen=True, kw_only=True)
class Design:
    """One way to train: what travels up, what travels down, and what is left uncompressed.

    Args:
        name: as it was asked for, options included.
        up: codec of the pushes.
        down: codec of the pulls.
        min_numel: tensors with fewer values travel uncompressed, as do biases and norm layers.
        cite: where it comes from.
    """

    name: str
    up: Codec
    down: Codec
    min_numel: int = MIN_NUMEL
    cite: str = ""

    def compression(self) -> ByShape:
        """Returns the policy that decides for each tensor."""
        return ByShape(up=self.up, down=self.down, min_numel=self.min_numel)


_CITATIONS = {
    "fp32": "no compression (3LC §4.2, 32-bit float)",
    "fp16": "half precision",
    "bf16": "bfloat16",
    "int8": "255 levels (3LC §4.2, 8-bit int)",
    "3lc": "3-value quantisation with sparsity multiplication, base-3⁵, zero runs, both ways with residuals (3LC §3)",
}


def designs() -> dict[str, str]:
    """Returns the ids of all designs, with what each is."""
    return dict(_CITATIONS)


def design(name: str) -> Design:
    """Returns a design by name; options in brackets go to its codec, `s` is short for `sparsity`.

    Raises:
        ConfigError: an unknown design or option, listing what there is.

    Example:
        >>> design("3lc[s=1.75,entropy=zstd]").up.config()["sparsity"]
        1.75
    """
    match = _FORM.match(name)
    if match is None:
        raise ConfigError(f"design {name!r}; expected an id with options in brackets, as in 3lc[s=1.75]")
    if match["id"] not in _CITATIONS:
        raise ConfigError(f"unknown design {match['id']!r}; there are {', '.join(_CITATIONS)}")
    both = codec(match["id"], **_options(name, match["options"]))
    return Design(name=name, up=both, down=both, cite=_CITATIONS[match["id"]])


def _options(name: str, text: str | None) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in (text or "").split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"design {name!r}: {part!r} is not option=value")
        key = _SHORT.get(key.strip(), key.strip())
        if key == "id" or key in options:
            raise ConfigError(f"design {name!r}: {key!r} is given twice")
        options[key] = _value(value.strip())
    return options


def _value(text: str) -> Any:
    """Numbers, true, false and null as in JSON; anything else is a string."""
    try:
        return json.loads(text.lower())
    except json.JSONDecodeError:
        return text
