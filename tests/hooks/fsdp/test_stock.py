"""FSDP2 and HSDP trained by the hook beside stock FSDP2: dtypes, accumulation, start_step, scopes and the report."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.hooks.ddp_ranks import Weights, backward, run_cases, same
from tests.hooks.fsdp_ranks import CODEC, KINDS, LOSSLESS, run, sharded, train, whole
from thinwire.hooks import fsdp

pytestmark = pytest.mark.long  # some 40 trainings; `ddp/test_examples.py` runs HSDP from end to end in every test

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
BF16_FP32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
POLICIES = {"bf16": (BF16, 2e-3), "bf16, reduced in fp32": (BF16_FP32, 1e-5), "fp16": (FP16, 3e-4)}
"""With the tolerance to stock FSDP2."""
CODECS: dict[str, Mapping[str, Any] | None] = {"plain": None, "fp32": LOSSLESS, "3lc": CODEC}
Ranks = dict[str, list[Any]]


def run_mixed(rank: int, kind: str, policy: str, codec: str) -> Weights:
    return run(rank, kind, CODECS[codec], 2, mp_policy=POLICIES[policy][0])


def run_accumulating(rank: int, kind: str, codec: str) -> tuple[Weights, int]:
    """Three backward passes a step, of which only the last is exchanged."""
    model, options = sharded(kind), CODECS[codec]
    state = None if options is None else fsdp.compress(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in range(3):
        optimizer.zero_grad()
        for part in range(3):
            if number < 2:
                model.set_requires_gradient_sync(part == 2)
            else:  # inside the site gradients are reduced each time, between sites at the last
                model.set_requires_gradient_sync(True)
                model.set_requires_all_reduce(part == 2 or kind != "hsdp")
            backward(model, rank, 3 * number + part)
        optimizer.step()
    return whole(model), 0 if state is None else state.step


def run_start_step(rank: int, kind: str) -> tuple[Weights, Weights, float]:
    model = sharded(kind)
    state = fsdp.compress(model, start_step=3, **CODEC)
    train(model, rank, 3)
    early = whole(model)
    train(model, rank, 2, first=3)
    return early, run(rank, kind, None, 3), state.counters()["steps"]


def run_report(rank: int, kind: str) -> tuple[str, str, dict[str, str]]:
    model = sharded(kind)
    down: dict[str, Any] = {"codec_down": "int8"} if kind == "hsdp" else {}
    state = fsdp.compress(model, "3lc", sparsity=1.5, codecs={"0.*": "bf16"}, last_layer="fp32", **down)
    before = str(fsdp.report(state))
    train(model, rank, 3)
    tensors = state.core.residuals.tensors.values()
    chosen = {tensor.name: f"{tensor.choice.up.id}/{tensor.choice.down.id}" for tensor in tensors}
    return before, str(fsdp.report(state)), chosen


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    cases: dict[str, tuple[Any, ...]] = {}
    for kind in KINDS:
        cases |= {
            f"{kind}, 3lc, each by itself": (run, kind, {**CODEC, "gather_mb": 0}),
            f"{kind}, start_step": (run_start_step, kind),
            f"{kind}, report": (run_report, kind),
        }
        for codec, options in CODECS.items():
            cases[f"{kind}, {codec}"] = (run, kind, options)
            cases[f"{kind}, accumulating, {codec}"] = (run_accumulating, kind, codec)
            cases |= {f"{kind}, {policy}, {codec}": (run_mixed, kind, policy, codec) for policy in POLICIES}
    return run_cases(4, cases, group_timeout_s=120.0, timeout_s=280.0)


def close(a: Weights, b: Weights, tolerance: float) -> None:
    for name in b:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance, msg=name)


def test_lossless_codec_trains_as_stock_fsdp2(ranks: Ranks) -> None:
    for kind in KINDS:
        close(ranks[f"{kind}, fp32"][0], ranks[f"{kind}, plain"][0], 1e-6)
        plain, (ours, steps) = ranks[f"{kind}, accumulating, plain"][0][0], ranks[f"{kind}, accumulating, fp32"][0]
        close(ours, plain, 1e-6)
        assert steps == (3 if kind == "hsdp" else 5)
        for policy, (_, tolerance) in POLICIES.items():
            close(ranks[f"{kind}, {policy}, fp32"][0], ranks[f"{kind}, {policy}, plain"][0], tolerance)
        early, plain, compressed = ranks[f"{kind}, start_step"][0]
        close(early, plain, 1e-6)
        assert compressed == 2


def test_3lc_trains_and_replicas_are_equal_bit_for_bit(ranks: Ranks) -> None:
    for kind in KINDS:
        for name in ["3lc", "fp32", *(f"{policy}, {codec}" for policy in POLICIES for codec in ("3lc", "fp32"))]:
            assert all(same(each, ranks[f"{kind}, {name}"][0]) for each in ranks[f"{kind}, {name}"]), name
        first, *others = ranks[f"{kind}, accumulating, 3lc"]
        assert all(same(each, first[0]) for each, _ in others)
        coded, lossless = ranks[f"{kind}, 3lc"][0], ranks[f"{kind}, fp32"][0]
        assert not same(coded, lossless) and same(coded, ranks[f"{kind}, 3lc, each by itself"][0])
        close(coded, lossless, 0.05)


def test_codecs_by_name_are_applied_and_reported(ranks: Ranks) -> None:
    for kind, down in (("hsdp", "int8"), ("fsdp", "fp32")):
        named = "3lc[sparsity=1.5] up and int8 down" if kind == "hsdp" else "3lc[sparsity=1.5]"
        for before, text, chosen in ranks[f"{kind}, report"]:
            assert before == "thinwire: no compressed step yet"
            assert re.search(r"3 compressed steps, 0 skipped.*\n.*× less.*\n(.*\n)+.*measured link", text), text
            assert text.splitlines()[0].endswith(f" skipped, {named}; bf16; fp32") and " bit a value" in text, text
            assert chosen["0.weight"].startswith("bf16/") and chosen["5.weight"].startswith("fp32/")
            assert chosen["2.weight"] == f"3lc/{down}" and chosen["2.bias"] == "fp32/fp32"
