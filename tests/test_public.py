"""The public surface: `__all__`, what stands behind each name, and that nothing else leaks out."""

from __future__ import annotations

import inspect
import types

import pytest

import thinwire as tw
from thinwire import plan
from thinwire.hooks import ddp, fsdp, named

SURFACE = {
    "Codec",
    "ConfigError",
    "Context",
    "Credentials",
    "DataError",
    "DeadlineError",
    "EngineError",
    "FrameError",
    "NonFiniteError",
    "ProtocolError",
    "ThinwireError",
    "TransportError",
    "codec",
    "codecs",
    "decode",
    "distribute",
    "frames",
    "ray",
}


def test_all_is_the_surface() -> None:
    assert set(tw.__all__) == SURFACE
    assert list(tw.__all__) == sorted(tw.__all__)
    assert dir(tw) == sorted([*SURFACE, "__version__"])


@pytest.mark.parametrize("name", sorted(SURFACE))
def test_every_name_is_there_and_documented(name: str) -> None:
    value = getattr(tw, name)
    assert inspect.getdoc(value)


def test_every_name_has_an_example() -> None:
    public = [getattr(tw, name) for name in SURFACE]
    public += [ddp.compress, ddp.report, fsdp.compress, named.compress, tw.frames.parse]
    public += [plan.Plan, plan.Setting, plan.profile, plan.verdict]
    for each in public:
        if not (isinstance(each, type) and issubclass(each, Exception)):
            assert "Example:" in (inspect.getdoc(each) or ""), each


def test_the_list_of_codecs_has_a_name_that_type_checkers_know() -> None:
    ids: list[str] = tw.codecs.ids()  # which `make types` reads
    assert ids == tw.codecs()  # type: ignore[operator]
    assert "`tw.codecs.ids()`" in (tw.codecs.__doc__ or "")


def test_what_is_not_there_says_so() -> None:
    with pytest.raises(AttributeError, match="module 'thinwire' has no attribute 'compress'"):
        tw.compress  # noqa: B018


def test_packages_only_offer_what_they_name() -> None:
    for package in (tw.codecs, tw.frames, tw.ray):
        assert isinstance(package, types.ModuleType)
        for name in package.__all__:
            assert hasattr(package, name)


def test_type_checkers_see_the_signature_of_what_is_imported_late() -> None:
    """`make types` reads it; as `Any`, `launch` would take every argument."""
    with pytest.raises(TypeError):
        tw.ray.launch(len, processes=4)  # type: ignore[call-arg, arg-type]


def test_the_version_is_the_distributions() -> None:
    from importlib.metadata import version

    assert tw.__version__ == version("thinwire")
