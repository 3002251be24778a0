"""How policies and designs are named: an id with options in brackets, as in `ssp[staleness=5]`."""

from __future__ import annotations

import json
import re
from typing import Any

from thinwire.errors import ConfigError

_EXAMPLES = {
    "design": "3lc[s=1.75]",
    "codec": "topk[fraction=0.01]",
    "placement": "uniform[min=1024]",
    "compression": "by-shape",
}
_FORM = re.compile(r"^(?P<id>[\w.-]+)(?:\[(?P<options>[^\[\]]*)\])?$")


def parse_name(
    name: str, what: str, *, short: dict[str, str] | None = None, bare: str | None = None
) -> tuple[str, dict[str, Any]]:
    """Returns the id and the options of a name.

    Args:
        name: as a user wrote it.
        what: the kind of thing, for messages.
        short: abbreviations of option names.
        bare: the option that a lone value means, as in `backup[1]`.

    Raises:
        ConfigError: not of that form.

    Example:
        >>> parse_name("ssp[staleness=5,mode=passive]", "consistency")
        ('ssp', {'staleness': 5, 'mode': 'passive'})
        >>> parse_name("backup[1]", "consistency", bare="spare")
        ('backup', {'spare': 1})
    """
    match = _FORM.match(name) if isinstance(name, str) else None
    if match is None:
        raise ConfigError(
            f"{what} {name!r}; expected an id with options in brackets, as in {_EXAMPLES.get(what, 'ssp[staleness=5]')}"
        )
    options: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in (match["options"] or "").split(","))):
        key, equals, value = part.partition("=")
        if not equals and bare is not None:
            key, value = bare, part
        elif not equals:
            raise ConfigError(f"{what} {name!r}: {part!r} is not option=value")
        key = (short or {}).get(key.strip(), key.strip())
        if key == "id" or key in options:
            raise ConfigError(f"{what} {name!r}: {key!r} is given twice")
        options[key] = _value(value.strip())
    return match["id"], options


def _value(text: str) -> Any:
    """Numbers, true, false and null as in JSON; anything else is a string."""
    try:
        return json.loads(text.lower())
    except json.JSONDecodeError:
        return text
