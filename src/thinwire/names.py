"""Parses names: an id with options in brackets, as in `3lc[s=1.75]` or `diloco[h=30,codec=3lc[s=1.5]]`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from thinwire.errors import ConfigError

_EXAMPLES = {
    "design": "3lc[s=1.75]",
    "codec": "topk[fraction=0.01]",
    "placement": "uniform[min=1024]",
    "compression": "by-shape",
}
_FORM = re.compile(r"^(?P<id>[\w.-]+)(?:\[(?P<options>(?:[^\[\]]|(?<=[a-z0-9])\[[^\[\]]*\])*)\])?$")
MAX_NAME = 2000
"""The most characters of a name."""
_COMMA = re.compile(r",(?![^\[]*\])")
"""A comma between options, not one within the brackets of an option's value, as in `diloco[codec=topk[k=2,seed=1]]`."""


SHORT = {"s": "sparsity"}
"""Short names of options that codecs and designs take."""

DESIGNS = frozenset(
    {
        *(
            "decoupled",
            "demo",
            "diloco",
            "doublesqueeze-1bit",
            "doublesqueeze-topk",
            "local-sgd",
            "local2",
            "mem-sgd-1bit",
        ),
        *("mem-sgd-topk", "mps", "sparseloco", "streaming-diloco", "topk-sgd", "update"),
    }
)
"""Ids of shipped designs that are not codec ids: where a codec is expected, the error names the call that takes it."""


def parse_name(
    name: str, what: str, *, short: Mapping[str, str] = SHORT, bare: str | None = None
) -> tuple[str, dict[str, Any]]:
    """Returns the id and the options of a name.

    Args:
        name: of a codec, design or policy.
        what: the kind of name, for messages.
        short: abbreviations of option names; by default those of codecs and designs.
        bare: the option of a value without a name, as in `backup[1]`.

    Raises:
        ConfigError: the name has another form.

    Example:
        >>> parse_name("ssp[staleness=5,mode=passive]", "consistency")
        ('ssp', {'staleness': 5, 'mode': 'passive'})
        >>> parse_name("backup[1]", "consistency", bare="spare")
        ('backup', {'spare': 1})
        >>> parse_name("diloco[h=30,codec=3lc[s=1.5,entropy=zstd]]", "design")
        ('diloco', {'h': 30, 'codec': '3lc[s=1.5,entropy=zstd]'})
    """
    if isinstance(name, str) and len(name) > MAX_NAME:  # a peer may have written it
        raise ConfigError(
            f"{what} {name[:60]!r}…: a name of {len(name):,} characters; at most {MAX_NAME:,} are possible"
        )
    match = _FORM.match(name) if isinstance(name, str) else None
    if match is None:
        raise ConfigError(
            f"{what} {name!r}; expected an id with options in brackets, as in {_EXAMPLES.get(what, 'ssp[staleness=5]')}"
        )
    options: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in _COMMA.split(match["options"] or ""))):
        key, equals, value = part.partition("=")
        if not equals and bare is not None:
            key, value = bare, part
        elif not equals:
            raise ConfigError(f"{what} {name!r}: {part!r} is not option=value")
        key = short.get(key.strip(), key.strip())
        if key == "id" or key in options:
            raise ConfigError(f"{what} {name!r}: {key!r} is given twice")
        options[key] = _value(value.strip())
    return match["id"], options


def _value(text: str) -> Any:
    """Returns an option's value: numbers, true, false and null as in JSON, None as in Python, all else as a string."""
    if text == "None":
        return None
    try:
        return json.loads(text.lower())
    except (ValueError, RecursionError):  # not JSON, or a number of too many digits
        return text
