"""The lab's designs by name, with options, and with their papers."""

from __future__ import annotations

import pytest

import thinwire as tw
from thinwire.errors import ConfigError
from thinwire.policies.designs import design, designs
from thinwire.policies.shipped import SHIPPED

RESIDUALS = {"stoch3": False, "mqe1": True, "sparse5": True, "qsgd-ds": False}


def test_lab_designs_follow_the_products_with_descriptions() -> None:
    found = designs()
    assert list(found)[: len(SHIPPED)] == list(SHIPPED)
    assert all("§" in found[name] for name in RESIDUALS)


def test_lab_designs_residuals() -> None:
    for name, kept in RESIDUALS.items():
        made = design(name)
        assert (made.up.residual_by_default, made.down.residual_by_default) == (kept, kept), name
        assert made.name == name and made.cite == designs()[name]


def test_lab_designs_pass_options_to_the_codec() -> None:
    made = design("sparse5[fraction=0.1,consistency=ssp[2]]")
    assert (made.name, made.consistency) == ("sparse5[fraction=0.1,consistency=ssp[2]]", "ssp[2]")
    assert made.up.config()["fraction"] == made.down.config()["fraction"] == 0.1
    with pytest.raises(ConfigError, match=r"design 'mqe1\[s=2\]': mqe1: unknown option 'sparsity'"):
        design("mqe1[s=2]")


def test_lab_codecs_follow_the_products() -> None:
    moved = ["dithering", "mqe1", "qsgd", "qsgd-ds", "randomk", "stoch3", "threshold", "truncate"]
    assert sorted(tw.codecs.ids()[-8:]) == moved
