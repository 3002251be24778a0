"""Codecs for every tensor of a model: the policy's, the exceptions, and what cannot train."""

from __future__ import annotations

import re

import pytest

from thinwire.codecs import codec
from thinwire.errors import ConfigError
from thinwire.policies.compression import ByShape
from thinwire.policies.selection import as_codec, check_pull_codec, select

UP, DOWN = codec("3lc", sparsity=1.5), codec("int8")
SHAPES = {
    "first.weight": (30, 20),
    "first.bias": (30,),
    "mid.weight": (30, 30),
    "last.in": (30, 30),
    "last.out": (9, 30),
}
POLICY = ByShape(up=UP, down=DOWN)


def test_the_policy_decides_and_exceptions_come_before_it() -> None:
    def ids(**exceptions: object) -> dict[str, str]:
        chosen = select(SHAPES, POLICY, **exceptions)  # type: ignore[arg-type]  # of both exceptions' types
        return {name: f"{choice.up.id}/{choice.down.id}" for name, choice in chosen.items()}

    both = {"first.weight": "3lc/int8", "first.bias": "fp32/fp32", "mid.weight": "3lc/int8"}
    last = {"last.in": "3lc/int8", "last.out": "3lc/int8"}
    assert ids() == both | last
    # The last layer is the module of the last matrix, with all of its tensors.
    assert ids(last_layer="fp32") == both | dict.fromkeys(last, "fp32/fp32")
    # Patterns come first, the first match wins, and a pattern takes vectors too.
    patterns = {"first.*": "bf16", "*.weight": "onebit", "last.in": codec("fp16")}
    matched = {"first.weight": "bf16/bf16", "first.bias": "bf16/bf16", "mid.weight": "onebit/onebit"}
    assert ids(codecs=patterns, last_layer="int8") == matched | {"last.in": "fp16/fp16", "last.out": "int8/int8"}
    assert select({"scale": (5,)}, POLICY, last_layer="int8")["scale"].up.id == "fp32", "a model without a matrix"


def test_what_cannot_be_is_refused_by_name() -> None:
    random = codec("qsgd-ds", error_feedback=True)
    for call, text in (
        (lambda: select(SHAPES, POLICY, codecs={"conv*": "int8", "mid*": "int8"}), r"\['conv\*'\] match no parameter"),
        (lambda: select(SHAPES, ByShape(up=UP, down=random)), "first.weight: 'qsgd-ds' draws random numbers"),
        (lambda: check_pull_codec(random, "pulls"), "pulls: .* deterministic codec_down such as '3lc'"),
        (lambda: as_codec(UP, {"sparsity": 1.0}), r"options \['sparsity'\] belong to a codec's id"),
        (lambda: as_codec(3, {}), "a codec is an id such as '3lc'"),  # type: ignore[arg-type]
        (lambda: as_codec("four", {}), "unknown codec 'four'"),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        assert re.search(text, str(caught.value)), text
