"""A plan's profile of a model that a function makes: one's own, or one that another package offers by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import nn

from thinwire.errors import ConfigError
from thinwire.extras import LAB
from thinwire.planner.profile import Profile, profile
from thinwire.plugins import load

Made = tuple[nn.Module, Callable[[], None]]
"""A model, and what makes its next step without any exchange."""


def profile_model(
    name: str, *, data: str | None = None, batch: int | None = None, steps: int, threads: int | None = None
) -> Profile:
    """Measures some steps of a model.

    Args:
        name: `module:function`, called without arguments; or a name that an entry point of the group `thinwire.models`
            knows, which is called with it and what of `data` and `batch` is given.
        data: the data set of a model known by name.
        batch: examples per step of a model known by name.
        steps: that are measured.
        threads: of torch's arithmetic; None: as many as it takes by itself.

    Raises:
        ConfigError: no such function, or it returns something else; unknown names.
    """
    network, step = _call(name) if ":" in name else _known(name, data=data, batch=batch)
    with torch_threads(threads):
        return profile(network, step, steps=steps)


def _call(name: str) -> Made:
    module, _, function = name.partition(":")
    if "" not in sys.path:  # as `python -m` has it: the user's module lies in the current folder
        sys.path.insert(0, "")
    try:
        made = getattr(import_module(module), function)()
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--model {name}: {error}; expected MODULE:FUNCTION, importable from here") from error
    match made:
        case (nn.Module() as network, step) if callable(step):
            return network, step
    raise ConfigError(f"--model {name} returned {type(made).__name__}; expected a model and a function for its step")


def _known(name: str, **given: Any) -> Made:
    for source in entry_points(group="thinwire.models"):
        made: Made = load(source)(name, **{key: value for key, value in given.items() if value is not None})
        return made
    raise ConfigError(f"--model {name} is not MODULE:FUNCTION; a bundled model {LAB}")


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Within it, torch's arithmetic has so many threads; None leaves them as they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
