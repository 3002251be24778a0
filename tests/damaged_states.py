"""Random damages of nested states, and what loading one may do: refuse it and change nothing, or take it whole."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import thinwire as tw

Path = tuple[Any, ...]


def leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yields the paths of everything in a nested state, containers included."""
    if path:
        yield path
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, each in items:
        yield from leaves(each, (*path, key))


def damaged(state: dict[str, Any], seed: int) -> tuple[dict[str, Any], str]:
    """Returns a copy with one random damage, and what it is."""
    chance = random.Random(seed)
    state = copy.deepcopy(state)
    *above, last = chance.choice(list(leaves(state)))
    parents = [state]
    for key in above:
        parents.append(parents[-1][key])
    old = parents[-1][last]
    how, new = chance.choice(list(_damages(old, chance)))
    if how == "removed" and isinstance(parents[-1], dict):
        del parents[-1][last]
    elif how == "removed":
        new = [each for place, each in enumerate(parents[-1]) if place != last]
        _put(parents[:-1], above, type(parents[-1])(new))
    else:
        _put(parents, [*above, last], new)
    return state, f"{'.'.join(map(str, (*above, last)))} {how}"


def _put(parents: list[Any], path: list[Any], new: Any) -> None:
    """Stores a value; tuples above it are made anew."""
    while isinstance(parents[-1], tuple):
        new = tuple(new if place == path[-1] else each for place, each in enumerate(parents[-1]))
        parents, path = parents[:-1], path[:-1]
    parents[-1][path[-1]] = new


def _damages(old: Any, chance: random.Random) -> Iterator[tuple[str, Any]]:
    if isinstance(old, np.ndarray):
        yield from _damages(torch.from_numpy(old), chance)
        return
    yield "removed", None
    others: list[Any] = [None, "damaged", -5, math.nan, [], {}, torch.zeros(3), b"damaged"]
    for other in others:
        if type(other) is not type(old):
            yield f"replaced by {other!r}", other
    if isinstance(old, torch.Tensor):
        yield "cut short", old.reshape(-1)[:-1].clone()
        yield "twice as long", torch.cat([old.reshape(-1), old.reshape(-1)])
        yield "of int8", old.to(torch.int8)
        if old.is_floating_point() and old.numel():
            for bad in (math.nan, math.inf):
                tensor = old.clone()
                tensor.view(-1)[chance.randrange(old.numel())] = bad
                yield f"with a value of {bad}", tensor
        elif old.numel():
            yield "of −5", torch.full_like(old, -5)
    elif isinstance(old, bool):
        yield "flipped", not old
    elif isinstance(old, int):
        yield "negative", -old - 1
        yield "huge", 2**70
    elif isinstance(old, float):
        yield "NaN", math.nan
        yield "Inf", math.inf
    elif isinstance(old, str):
        yield "of other text", old + "x"
        yield "half as long", old[: len(old) // 2]
    elif isinstance(old, list) and old:
        yield "doubled", [*old, old[-1]]
    elif isinstance(old, dict) and old:
        yield "with one more key", {**old, "more": 1}
        yield (
            "with one key of another type",
            {(1 if place == 0 else key): v for place, (key, v) in enumerate(old.items())},
        )


def is_same(a: Any, b: Any) -> bool:
    """Whether two states are equal bit for bit."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        a, b = torch.from_numpy(a), torch.from_numpy(b)
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        a.pop("more", None)  # a script may give parameter groups keys of its own
        return isinstance(b, dict) and a.keys() == b.keys() and all(is_same(each, b[key]) for key, each in a.items())
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(is_same, a, b))
    return bool(a == b) or (a != a and b != b)


def faults(value: Any, path: Path = ()) -> Iterator[str]:
    """Yields what no valid state holds: floats that are not finite."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, dict):
        for key, each in value.items():
            yield from faults(each, (*path, key))
    elif isinstance(value, list | tuple):
        for place, each in enumerate(value):
            yield from faults(each, (*path, place))
    elif (isinstance(value, torch.Tensor) and value.is_floating_point() and not value.isfinite().all()) or (
        isinstance(value, float) and not math.isfinite(value)
    ):
        yield f"{'.'.join(map(str, path))} is not finite"


def check_loads(
    state: dict[str, Any], now: Callable[[], Any], load: Callable[[dict[str, Any]], Any], seeds: range
) -> list[str]:
    """Loads damaged copies of a state; returns what went wrong.

    Args:
        state: a valid one.
        now: returns the state as it is.
        load: loads one.
        seeds: of the damages.
    """
    wrong = []
    load(copy.deepcopy(state))
    before = copy.deepcopy(now())
    for seed in seeds:
        bad, how = damaged(state, seed)
        try:
            load(bad)
        except tw.ConfigError:
            if not is_same(now(), before):
                wrong.append(f"{seed}: {how}: half loaded")
                load(copy.deepcopy(state))
            continue
        except Exception as error:
            wrong.append(f"{seed}: {how}: {type(error).__name__}: {str(error)[:120]}")
        else:
            try:
                if found := list(faults(now())):
                    wrong.append(f"{seed}: {how}: taken, and {found[0]}")
            except Exception as error:
                wrong.append(f"{seed}: {how}: taken, and then {type(error).__name__}: {str(error)[:120]}")
        load(copy.deepcopy(state))
        if not is_same(now(), before):
            wrong.append(f"{seed}: {how}: a later load of the whole state does not mend it")
    return wrong
