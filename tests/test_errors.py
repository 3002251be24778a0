"""One exception tree, as drawn at the top of its module, that also fits what Python programs already catch."""

from __future__ import annotations

import re

import thinwire as tw
from thinwire import errors

CLASSES = {name: value for name, value in vars(errors).items() if isinstance(value, type)}


def test_error_tree_in_the_docstring_equals_the_classes() -> None:
    drawn = re.findall(r"([│ ]*)[├└]── (\w+)", errors.__doc__ or "")
    parents: list[str] = []
    for indent, name in drawn:
        depth = len(indent) // 4
        parents = [*parents[:depth], name]
        assert issubclass(CLASSES[name], CLASSES[parents[depth - 1]] if depth > 1 else errors.ThinwireError), name
    assert {name for _, name in drawn} == set(CLASSES) - {"ThinwireError"}
    assert all(issubclass(value, errors.ThinwireError) for value in CLASSES.values())


def test_errors_derive_from_builtin_errors_and_separate_local_from_remote() -> None:
    for error, builtin in (
        (tw.ConfigError, ValueError),
        (tw.NonFiniteError, ValueError),
        (tw.FrameError, ValueError),
        (tw.TransportError, ConnectionError),
        (tw.DeadlineError, TimeoutError),
        (tw.EngineError, RuntimeError),
    ):
        assert issubclass(error, builtin), error
    assert not issubclass(tw.FrameError, tw.ConfigError) and not issubclass(tw.ConfigError, tw.FrameError)
    assert not issubclass(tw.ProtocolError, ValueError)
