"""In what two configurations differ: the keys alone that do, where printing both leaves the reader to compare them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def differences(mine: Any, other: Any, name: str) -> Iterator[tuple[str, str, str]]:
    """Yields every place where two JSON values differ: its path from `name`, and what `mine` and `other` have there.

    Where an `id` differs the other keys are those of another codec or policy, and are left out.

    Example:
        >>> first, second = {"id": "3lc", "sparsity": 1.0, "layout": "stride"}, {"id": "3lc", "sparsity": 1.5}
        >>> list(differences([first], [second], "codecs"))
        [('codecs[0].layout', "'stride'", 'none'), ('codecs[0].sparsity', '1.0', '1.5')]
        >>> list(differences(first, {"id": "int8"}, "codec"))
        [('codec.id', "'3lc'", "'int8'")]
    """
    if isinstance(mine, Mapping) and isinstance(other, Mapping):
        of_another = mine.get("id") != other.get("id")
        for key in ["id"] if of_another else sorted({*mine, *other}):
            if key in mine and key in other:
                yield from differences(mine[key], other[key], f"{name}.{key}")
            else:
                has, lacks = (repr(each[key]) if key in each else "none" for each in (mine, other))
                yield f"{name}.{key}", has, lacks
    elif _listed(mine) and _listed(other) and len(mine) == len(other):
        for index, pair in enumerate(zip(mine, other, strict=True)):
            yield from differences(*pair, f"{name}[{index}]")
    elif not _equal(mine, other):
        yield name, repr(mine), repr(other)


def _equal(mine: Any, other: Any) -> bool:
    numbers = all(isinstance(each, int | float) for each in (mine, other))
    return (numbers or type(mine) is type(other)) and bool(mine == other)


def _listed(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
