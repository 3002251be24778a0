"""One exception tree, as drawn at the top of its module, that also fits what Python programs already catch."""

from __future__ import annotations

import re

import pytest

import thinwire as tw
from thinwire import errors

CLASSES = {name: value for name, value in vars(errors).items() if isinstance(value, type)}


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = re.findall(r"([│ ]*)[├└]── (\w+)", errors.__doc__ or "")
    parents: list[str] = []
    for indent, name in drawn:
        depth = len(indent) // 4
        parents = [*parents[:depth], name]
        expected = CLASSES[parents[depth - 1]] if depth > 1 else errors.ThinwireError
        assert issubclass(CLASSES[name], expected), name
    assert {name for _, name in drawn} == set(CLASSES) - {"ThinwireError"}
    assert all(issubclass(value, errors.ThinwireError) for value in CLASSES.values())


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (tw.ConfigError, ValueError),
        (tw.NonFiniteError, ValueError),
        (tw.FrameError, ValueError),
        (tw.TransportError, ConnectionError),
        (tw.DeadlineError, TimeoutError),
        (tw.EngineError, RuntimeError),
    ],
)
def test_the_builtin_that_each_also_is(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, builtin)


def test_a_message_survives() -> None:
    for kind in CLASSES.values():
        assert str(kind("what came, what was expected")) == "what came, what was expected"


def test_local_misuse_and_remote_misbehaviour_are_apart() -> None:
    assert not issubclass(tw.FrameError, tw.ConfigError)
    assert not issubclass(tw.ConfigError, tw.FrameError)
    assert not issubclass(tw.ProtocolError, ValueError)
