"""Which tensors are compressed, and how: the policy, the exceptions, and what cannot train."""

from __future__ import annotations

import re
from typing import Any

import pytest

from thinwire.codecs import codec
from thinwire.errors import ConfigError
from thinwire.packets import MAX_BATCHED_NBYTES
from thinwire.policies.compression import (
    MIN_NUMEL,
    PLAIN,
    ByShape,
    Choice,
    as_codec,
    check_pull_codec,
    is_batched,
    select,
)

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
    }.items():
        expected = Choice(UP, DOWN) if compressed else Choice(PLAIN, PLAIN)
        assert ByShape(up=UP, down=DOWN).choose("any", shape) == expected, shape
    small = ByShape(up=UP, down=DOWN, min_numel=4)
    assert small.choose("w", (2, 2)).up is UP and small.choose("w", (3, 1)).up == PLAIN
    policy = ByShape(up=UP, down=DOWN, exclude=lambda name, shape: name.startswith("embed") or shape[0] == 999)
    assert policy.choose("embed.weight", (100, 100)) == policy.choose("fc.weight", (999, 100)) == Choice(PLAIN, PLAIN)
    assert policy.choose("fc.weight", (100, 100)) == Choice(UP, DOWN)


# ---- by name


def test_what_travels_in_batches() -> None:
    most = MAX_BATCHED_NBYTES // 4
    assert is_batched(codec("fp32"), (most,)) and is_batched(codec("fp32"), ())
    assert not is_batched(codec("fp32"), (most + 1,)) and not is_batched(codec("fp32"), (3, 0))
    assert not is_batched(codec("fp32", entropy="zstd"), (5,)), "its frames are compressed, each by itself"
    assert not is_batched(codec("fp32", nonfinite="skip"), (5,)), "its frames may say that a tensor was refused"
    assert is_batched(codec("bf16"), (5,)) and not is_batched(codec("fp16"), (5,))
    assert not is_batched(codec("bf16"), (5, 5)), "beside uncompressed biases it would travel as they do"


# ---- every tensor of a model

SHAPES = {
    "first.weight": (30, 20),
    "first.bias": (30,),
    "mid.weight": (30, 30),
    "last.in": (30, 30),
    "last.out": (9, 30),
}
POLICY = ByShape(up=codec("3lc", sparsity=1.5), down=DOWN)


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
    with pytest.warns(UserWarning, match="terngrad"):
        random = codec("terngrad", error_feedback=True)
    both: dict[str, Any] = {"*.weight": "3lc", "a.*": "int8"}
    for call, named in (
        (lambda: select(SHAPES, POLICY, codecs={"conv*": "int8", "mid*": "int8"}), r"\['conv\*'\] match no parameter"),
        (lambda: select({"a.weight": (9, 9)}, POLICY, codecs=both), r"put 'a\.\*' first"),
        (lambda: select(SHAPES, ByShape(up=POLICY.up, down=random)), "first.weight: 'terngrad'"),
        (lambda: check_pull_codec(random, "pulls"), "pulls: "),
        (lambda: as_codec(POLICY.up, {"sparsity": 1.0}), r"options \['sparsity'\]"),
        (lambda: as_codec("auto", {}), "codec='auto' is of ddp.compress"),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        assert re.search(named, str(caught.value)), named
