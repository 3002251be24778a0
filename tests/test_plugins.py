"""Entry points of other packages that cannot be loaded: a warning names them, and all others still work."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from thinwire import frames, names, plugins
from thinwire.codecs import registry
from thinwire.codecs.floats import BF16
from thinwire.codecs.scratch import ScratchPool
from thinwire.errors import ConfigError, FrameError
from thinwire.policies import designs, naming, shipped
from thinwire.policies.compression import as_codec, compression
from thinwire.policies.consistency import POLICIES, consistency
from thinwire.policies.placement import placement

BROKEN = EntryPoint("broken", "nowhere_at_all:Thing", "thinwire.example")
TOLD = r"'broken' \(thinwire.example\) cannot be loaded from nowhere_at_all:Thing: ModuleNotFoundError: .*uninstall it"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if a package that offers it were installed."""
    point = EntryPoint("mine", "thinwire.codecs.floats:BF16", "thinwire.example")
    found = EntryPoints([BROKEN, point])
    monkeypatch.setattr(naming, "plugins", lambda group: found.select(name="broken"))
    monkeypatch.setattr(registry, "entry_points", lambda group: found)
    plugins.load_or_warn.cache_clear()
    yield
    plugins.load_or_warn.cache_clear()


@pytest.mark.usefixtures("installed")
def test_broken_plugin_raises_on_lookup_and_warns_once_otherwise() -> None:
    with pytest.warns(UserWarning, match=TOLD):
        assert consistency("bsp").id == "bsp"
    with warnings.catch_warnings(action="error"):
        assert "bsp" in POLICIES.known()
    with pytest.raises(ConfigError, match=TOLD):
        consistency("broken")


@pytest.mark.usefixtures("installed")
def test_broken_plugin_leaves_later_codecs_available() -> None:
    codecs = registry.Registry([], ScratchPool(), "thinwire.example")
    with pytest.warns(UserWarning, match=TOLD):
        assert codecs.ids() == [BF16.id]
    with pytest.raises(ConfigError, match=TOLD):
        codecs.codec("broken")
    with pytest.raises(ConfigError, match="unknown codec 'other'; there are"):
        codecs.codec("other")


def test_names_of_the_lab_raise_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "'qsgd-ds' is in thinwire-lab, which is not installed: pip install ./lab"
    monkeypatch.setattr(registry, "entry_points", lambda group: ())
    monkeypatch.setattr(designs, "plugins", lambda group: ())
    product = registry.Registry(registry.SHIPPED, ScratchPool())
    with pytest.raises(ConfigError, match=f"the codec {told}"):
        product.codec("qsgd-ds")
    frame = frames.pack(frames.Frame("qsgd-ds", "fp32", (1,), (1.0,), 0, b"y"))
    with pytest.raises(FrameError, match=f"not registered here: the codec {told}"):
        product.decode(frame)
    with pytest.raises(ConfigError, match=f"the design {told}"):
        designs.design("qsgd-ds[packing=2bit]")


def test_invalid_codec_names_are_explained() -> None:
    for name, options, told in (
        ("3lc[s=1.5,zstd]", {}, r"'3lc\[s=1.5,zstd\]': 'zstd' is not option=value"),
        ("3lc[s=1.5]", {"sparsity": 1.5}, "'sparsity' is given twice"),
        ("3lc", {"s": 1.5, "sparsity": 1.5}, "'sparsity' is given twice"),
        ("3lc[sparsty=1.5]", {}, r"'sparsty' \(did you mean 'sparsity'\?\)"),
        ("3LC", {}, r"'3LC' \(did you mean '3lc'\?\)"),
        ("int9", {}, r"'int9' \(did you mean 'int8'\?\)"),
        ("local-sgd[h=4]", {}, r"tw.distribute\(model, optimizer, design='local-sgd\[h=4\]'\)"),
    ):
        with pytest.raises(ConfigError, match=told):
            registry.codec(name, **options)


def test_every_design_that_is_no_codec_is_known_where_a_codec_is_expected() -> None:
    assert set(shipped.SHIPPED) - {scheme.id for scheme in registry.SHIPPED} == names.DESIGNS


def test_codec_accepts_names_printed_in_reports() -> None:
    made = registry.codec("3lc[s=1.0,entropy=zstd]")
    assert made == registry.codec("3lc", sparsity=1.0, entropy="zstd") == registry.codec("3lc", s=1, entropy="zstd")
    assert made == as_codec("3lc[s=1.0]", {"entropy": "zstd"}) == registry.codec(**made.config())
    for codec_id in registry.ids():
        codec = registry.codec(codec_id, error_scale=0.5, nonfinite="skip")
        assert registry.codec(str(codec)) == codec


def test_objects_of_another_kind_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    half = registry.codec("fp16")
    makers: list[Callable[[str], object]] = [
        consistency,
        placement,
        lambda name: compression(name, up=half, down=half),
        designs.design,
    ]
    for value in ("math:pi", "math:sqrt", "thinwire.codecs.base:Codec", "fractions:Fraction"):
        point = EntryPoint("mine", value, "thinwire.example")
        monkeypatch.setattr(naming, "plugins", lambda group, point=point: (point,))
        monkeypatch.setattr(designs, "plugins", lambda group, point=point: (point,))
        monkeypatch.setattr(registry, "entry_points", lambda group, point=point: (point,))
        plugins.load_or_warn.cache_clear()
        codecs = registry.Registry([BF16], ScratchPool(), "thinwire.example")
        with pytest.warns(UserWarning, match="where a class derived from thinwire.codecs.scheme.Scheme is expected"):
            assert codecs.ids() == [BF16.id]
        with pytest.raises(ConfigError, match=r"'mine' \(thinwire.example\) is .* where a class derived from"):
            codecs.codec("mine")
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            for make in makers:
                with pytest.raises(ConfigError, match="mine"):
                    make("mine")
    plugins.load_or_warn.cache_clear()
