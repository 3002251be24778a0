"""The models and data that replace the papers', by installed data."""

from __future__ import annotations

import pytest

from thinwire.errors import ConfigError
from thinwire_lab.studies.reproduce import job_cells
from thinwire_lab.studies.reproduce.entry import Scale
from thinwire_lab.studies.reproduce.job_cells import SMALL, stand_in

SCALES: tuple[Scale, ...] = ("tiny", "quick", "full")


def installed(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(job_cells, "is_here", lambda name: name.partition("[")[0] in names)


def test_stand_in_is_the_first_pair_with_data(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = ("resnet8", "cifar10[crop=24]"), ("lenet5", "mnist")
    installed(monkeypatch, "mnist", "cifar10")
    assert stand_in("quick", *pairs) == pairs[0] and stand_in("tiny", *pairs) == SMALL
    installed(monkeypatch, "mnist")
    assert stand_in("full", *pairs) == pairs[1]
    installed(monkeypatch)
    assert stand_in("full", *pairs) == SMALL
    assert stand_in("full", *pairs, small=("mlp-tanh", "digits")) == ("mlp-tanh", "digits")


def test_stand_in_unknown_data_raises_config_error() -> None:
    with pytest.raises(ConfigError, match=r"unknown data set 'minst' \(did you mean 'mnist'"):
        stand_in("full", ("lenet5", "minst"))
