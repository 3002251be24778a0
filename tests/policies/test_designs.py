"""Designs by name, options in brackets."""

from __future__ import annotations

from typing import Any

import pytest

from thinwire.codecs import codec
from thinwire.errors import ConfigError
from thinwire.policies.designs import design, designs


@pytest.mark.parametrize("name", list(designs()))
def test_every_design_that_is_listed_can_be_made(name: str) -> None:
    made = design(name)
    assert made.name == name and made.cite and designs()[name]
    policy = made.compression()
    assert policy.choose("fc.weight", (100, 100)).up == made.up
    assert policy.choose("fc.weight", (100, 100)).down == made.down
    assert policy.choose("fc.bias", (100,)).up.id == "fp32"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("3lc", {}),
        ("3lc[]", {}),
        ("3lc[s=1.75]", {"sparsity": 1.75}),
        ("3lc[sparsity=1.75]", {"sparsity": 1.75}),
        ("3lc[ s = 1.5 , entropy = zstd ]", {"sparsity": 1.5, "entropy": "zstd"}),
        ("3lc[zero_run=False,layout=partition]", {"zero_run": False, "layout": "partition"}),
        ("3lc[error_feedback=null]", {"error_feedback": None}),
        ("3lc[error_scale=1e-1]", {"error_scale": 0.1}),
    ],
)
def test_options_go_to_the_codec_both_ways(name: str, options: dict[str, Any]) -> None:
    made = design(name)
    assert made.up == codec("3lc", **options) == made.down
    assert made.name == name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("4lc", r"unknown design '4lc'; there are fp32, .*3lc"),
        ("", r"design ''; expected an id with options in brackets, as in "),
        ("3lc[s=1.75", r"expected an id with options"),
        ("3lc s=1.75", r"expected an id with options"),
        ("3lc[[s=1]]", r"expected an id with options"),
        ("3lc[1.75]", r"'1.75' is not option=value"),
        ("3lc[s]", r"'s' is not option=value"),
        ("3lc[s=2]", r"sparsity=2; it must lie in \[1, 2\)"),
        ("3lc[s=0.99]", r"sparsity=0.99"),
        ("3lc[s=nan]", r"sparsity='nan'"),
        ("3lc[s=1e999]", r"sparsity=inf"),
        ("3lc[sparsty=1.5]", r"unknown option 'sparsty' \(did you mean 'sparsity'\?\)"),
        ("3lc[s=1.5,sparsity=1.75]", r"'sparsity' is given twice"),
        ("3lc[id=fp32]", r"'id' is given twice"),
        ("fp32[s=1.5]", r"fp32: unknown option 'sparsity'"),
    ],
)
def test_what_is_no_design(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        design(name)
