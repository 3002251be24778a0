"""The public surface: `__all__`, what stands behind each name, and that nothing else leaks out."""

from __future__ import annotations

import inspect
import types
from importlib.metadata import version

import pytest

import thinwire as tw
from thinwire import plan
from thinwire.hooks import ddp, fsdp, named

SURFACE = {
    *("Codec", "Context", "Credentials", "codec", "codecs", "decode", "distribute", "frames", "ray"),
    *("ConfigError", "DataError", "DeadlineError", "EngineError", "FrameError", "NonFiniteError", "ProtocolError"),
    *("ThinwireError", "TransportError"),
}


def test_all_lists_every_public_name() -> None:
    assert set(tw.__all__) == SURFACE and list(tw.__all__) == sorted(tw.__all__)
    assert dir(tw) == sorted([*SURFACE, "__version__"])
    assert tw.__version__ == version("thinwire")
    for package in (tw.codecs, tw.frames, tw.ray):
        assert isinstance(package, types.ModuleType)
        assert [name for name in package.__all__ if not hasattr(package, name)] == []
    with pytest.raises(AttributeError, match="'compress'"):
        tw.compress  # noqa: B018


def test_every_name_is_documented_with_an_example() -> None:
    public = [getattr(tw, name) for name in SURFACE]
    public += [ddp.compress, ddp.report, fsdp.compress, named.compress, tw.frames.parse]
    public += [plan.Plan, plan.Setting, plan.profile, plan.verdict]
    for each in public:
        assert inspect.getdoc(each), each
        if not (isinstance(each, type) and issubclass(each, Exception)):
            assert "Example:" in (inspect.getdoc(each) or ""), each


def test_type_checkers_know_lazy_imports() -> None:
    """`make types` reads it; as `Any`, `launch` would take every argument."""
    ids: list[str] = tw.codecs.ids()
    assert ids == tw.codecs()  # type: ignore[operator]
    with pytest.raises(TypeError):
        tw.ray.launch(len, processes=4)  # type: ignore[call-arg, arg-type]
