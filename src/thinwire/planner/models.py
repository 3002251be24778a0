"""A plan's profile of a model that a function makes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module

import torch
from torch import nn

from thinwire.errors import ConfigError
from thinwire.planner.profile import Profile, profile

Made = tuple[nn.Module, Callable[[], None]]
"""A model, and what makes its next step without any exchange."""


def profile_model(name: str, *, steps: int, threads: int | None = None) -> Profile:
    """Measures some steps of a model.

    Args:
        name: `module:function`, which is called without arguments.
        steps: how many steps are measured.
        threads: threads of torch's arithmetic; None leaves their number to torch.

    Raises:
        ConfigError: no such function, or it returns something else.
    """
    network, step = _call(name)
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


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Within it, torch's arithmetic has so many threads; None leaves them as they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
