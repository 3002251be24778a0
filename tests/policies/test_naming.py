"""An id with options in brackets; what other packages offer is looked up once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.errors import ConfigError
from thinwire.policies.naming import parse_name

VALUES = st.one_of(
    st.integers(-(2**40), 2**40),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.none(),
    st.from_regex(r"[g-m][g-m-]{0,8}", fullmatch=True),
)


@given(options=st.dictionaries(st.from_regex(r"[a-h]{1,6}", fullmatch=True), VALUES, max_size=4))
@settings(max_examples=50)
def test_what_is_written_is_read_again(options: dict[str, Any]) -> None:
    name = "policy-1.x[" + ", ".join(f"{key}={value}" for key, value in options.items()) + "]"
    assert parse_name(name, "policy") == ("policy-1.x", options)


def test_forms() -> None:
    forms: dict[str, dict[str, Any]] = {
        "a": {},
        "a[]": {},
        "a[ x = 1 ]": {"x": 1},
        "a[x=1,,y=2,]": {"x": 1, "y": 2},
        "a[x=1.5e3,y=FALSE,z=null]": {"x": 1500.0, "y": False, "z": None},
        "a[x=zstd,y=]": {"x": "zstd", "y": ""},
        "a[x=b=c]": {"x": "b=c"},
        "a[s=2]": {"sparsity": 2},
        "a[7,x=1]": {"lone": 7, "x": 1},
    }
    for name, options in forms.items():
        assert parse_name(name, "thing", short={"s": "sparsity"}, bare="lone") == ("a", options), name


def test_what_is_no_name() -> None:
    for name, named in {
        "": "thing ''; expected an id with options in brackets",
        "a[x=1": "expected an id",
        "a[x=[1]]": "expected an id",
        "a[7]": "'7' is not option=value",
        "a[x=1,x=2]": "'x' is given twice",
        "a[s=1,sparsity=2]": "'sparsity' is given twice",
    }.items():
        with pytest.raises(ConfigError, match=named):
            parse_name(name, "thing", short={"s": "sparsity"})
    with pytest.raises(ConfigError, match=r"as in ssp\["):
        parse_name("a b", "consistency")
