"""Which tensors are compressed."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from thinwire.codecs import codec
from thinwire.errors import ConfigError
from thinwire.packets import MAX_BATCHED_NBYTES
from thinwire.policies import compression as module
from thinwire.policies.compression import MIN_NUMEL, PLAIN, ByShape, Choice, compression, is_batched
from thinwire.policies.designs import design

UP, DOWN = codec("3lc", sparsity=1.75), codec("int8")


def test_name_and_shape_decide() -> None:
    assert MIN_NUMEL == 128
    for shape, compressed in {
        (): False,
        (100_000,): False,  # a bias or a norm layer, however wide
        (0, 500): False,
        (MIN_NUMEL - 1, 1): False,
        (MIN_NUMEL, 1): True,
        (16, 8): True,
        (3, 3, 3, 5): True,
        (20, 1, 5, 5): True,
    }.items():
        expected = Choice(UP, DOWN) if compressed else Choice(PLAIN, PLAIN)
        assert ByShape(up=UP, down=DOWN).choose("any", shape) == expected, shape
    small = ByShape(up=UP, down=DOWN, min_numel=4)
    assert small.choose("w", (2, 2)).up is UP and small.choose("w", (3, 1)).up is PLAIN
    policy = ByShape(up=UP, down=DOWN, exclude=lambda name, shape: name.startswith("embed") or shape[0] == 999)
    assert policy.choose("embed.weight", (100, 100)) == policy.choose("fc.weight", (999, 100)) == Choice(PLAIN, PLAIN)
    assert policy.choose("fc.weight", (100, 100)) == Choice(UP, DOWN)


# ---- by name


@dataclass(frozen=True, kw_only=True)
class Named(ByShape):
    """Of another package: only tensors with a letter in their name."""

    letter: str = "w"

    def choose(self, name: str, shape: tuple[int, ...]) -> Choice:
        return super().choose(name, shape) if self.letter in name else Choice(PLAIN, PLAIN)


@pytest.fixture
def other_package(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint(name, f"{__name__}:Named", "thinwire.compression") for name in ("named", "by-shape")]
    monkeypatch.setattr(EntryPoint, "load", lambda point: globals()[point.value.partition(":")[2]])
    monkeypatch.setattr(module, "plugins", lambda group: points)


def test_by_its_name_a_policy_is_made_with_what_the_design_says() -> None:
    made: Any = compression("by-shape", up=UP, down=DOWN, min_numel=7)
    assert made == ByShape(up=UP, down=DOWN, min_numel=7)
    assert design("3lc").compress() == ByShape(up=design("3lc").up, down=design("3lc").down)


@pytest.mark.usefixtures("other_package")
def test_a_policy_of_another_package_goes_by_its_name() -> None:
    policy = design("3lc", compression="named[letter=x]").compress(lambda name, shape: name == "x.no")
    assert policy.choose("x.weight", (100, 100)).up.id == "3lc"
    assert policy.choose("y.weight", (100, 100)).up is PLAIN and policy.choose("x.no", (100, 100)).up is PLAIN
    assert type(compression("by-shape", up=UP, down=DOWN)) is ByShape, "ours is not replaced"
    with pytest.raises(ConfigError, match=r"compression 'named\[colour=red\]': .*colour"):
        design("3lc", compression="named[colour=red]")


def test_what_travels_in_batches() -> None:
    most = MAX_BATCHED_NBYTES // 4
    assert is_batched(codec("fp32"), (most,)) and is_batched(codec("fp32"), ())
    assert not is_batched(codec("fp32"), (most + 1,)) and not is_batched(codec("fp32"), (3, 0))
    assert not is_batched(codec("fp32", entropy="zstd"), (5,)), "its frames are compressed, each by itself"
    assert not is_batched(codec("fp32", nonfinite="skip"), (5,)), "its frames may say that a tensor was refused"
    assert not is_batched(codec("fp16"), (5,))
