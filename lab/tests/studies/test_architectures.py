"""Layer sizes of published networks against their papers."""

import pytest

from thinwire.errors import ConfigError
from thinwire_lab.studies.architectures import ARCHITECTURES, architecture


def test_shares_and_totals_are_the_papers_own() -> None:
    alexnet = architecture("alexnet")
    last = sum(each.numel for each in alexnet[-2:]) / sum(each.numel for each in alexnet)
    assert round(100 * last, 1) == 6.7  # TernGrad §4.2
    # Wu 2018, table 1.1, in millions.
    for name, millions in (("resnet110", 1.73), ("inception-v4", 42.65)):
        assert sum(each.numel for each in architecture(name)) / 1e6 == pytest.approx(millions, abs=0.04), name


def test_architectures_unique_names_and_unknown_raises() -> None:
    for name in ARCHITECTURES:
        names = [each.name for each in architecture(name)]
        assert len(set(names)) == len(names), name
    with pytest.raises(ConfigError, match="unknown architecture 'vgg'; known are alexnet"):
        architecture("vgg")
