"""FSDP2 and HSDP with the hook on four ranks: stock FSDP2's gradients, however a model runs; coded parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import thinwire as tw
from tests.hooks import fsdp_ranks
from tests.hooks.ddp_ranks import Weights, backward, run_cases, same
from tests.hooks.fsdp_ranks import (
    CODEC,
    KINDS,
    LOSSLESS,
    Break,
    alike,
    gradients,
    mesh,
    sharded,
    sharded_layers,
    train,
    whole,
)
from thinwire.errors import ProtocolError
from thinwire.hooks import fsdp
from thinwire.hooks.fsdp.gathering import CodedAllGather

GOES_ON = hasattr(FSDPModule, "reset_iter_state")
"""Whether this torch continues after an interrupted backward pass."""
STEPS = 3


def run(rank: int, kind: str, how: str = "", codec: str = "fp32", **options: Any) -> tuple[bool, int]:
    """Whether gradients are stock FSDP2's, and how many steps the hook has counted."""
    states: list[fsdp.ShardedState] = []

    def make(compressed: bool) -> Any:
        early = how == "before the root"
        model = sharded_layers(kind, root=how not in ("several roots", "before the root"), **options)
        if compressed:
            gather: dict[str, Any] = {"gather": "fp32"} if how == "resharded" else {}
            given = model.second if how == "part" else model
            states.append(fsdp.compress(given, codec, measure_link=False, **gather))
        return fully_shard(model, mesh=mesh(kind)) if early else model

    return alike(rank, make, STEPS, recomputes=how == "recomputed"), states[0].step


def run_resharded(rank: int) -> tuple[bool, int]:
    return run(rank, "fsdp", "resharded", reshard_after_forward=2)


def run_padding_alone(rank: int, codec: str) -> tuple[bool, int]:
    """Two rows over four shards, and nothing else is trained."""
    return run(rank, "wide", "padding", codec, frozen=True, outputs=2)


def run_broken_off(rank: int, kind: str, compressed: bool) -> list[Weights]:
    """The gradients of four steps; the second is interrupted."""
    model = sharded_layers(kind)
    if compressed:
        fsdp.compress(model, **LOSSLESS)
    found: list[Weights] = []
    for step in range(4):
        Break.on = step == 1
        try:
            found.append(gradients(model, rank, step, to_none=False))
        except ValueError:
            model.reset_iter_state()
    Break.on = False
    return found


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
CODECS: dict[str, Mapping[str, Any] | None] = {"plain": None, "fp32": LOSSLESS, "3lc": CODEC}


def run_mixed(rank: int, codec: str) -> Weights:
    return fsdp_ranks.run(rank, "hsdp", CODECS[codec], 2, mp_policy=BF16)


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


def run_report(rank: int) -> tuple[str, dict[str, str]]:
    model = sharded("hsdp")
    options: dict[str, Any] = {"codec_down": "int8", "codecs": {"0.*": "bf16"}, "last_layer": "fp32"}
    state = fsdp.compress(model, "3lc", sparsity=1.5, start_step=2, **options)
    train(model, rank, 2)
    assert str(fsdp.report(state)) == "thinwire: 2 steps, none of them compressed: they come before start_step"
    train(model, rank, 3, first=2)
    tensors = state.core.residuals.tensors.values()
    return str(fsdp.report(state)), {each.name: f"{each.choice.up.id}/{each.choice.down.id}" for each in tensors}


HOWS = ("recomputed", "several roots", "part", "before the root")
CASES: dict[str, tuple[Any, ...]] = {
    **{f"{kind}, {how}": (run, kind, how) for kind in KINDS for how in HOWS},
    "descending": (run, "descending"),
    "descending sites": (run, "descending sites"),
    "resharded": (run_resharded,),
    "padding, fp32": (run_padding_alone, "fp32"),
    "padding, auto": (run_padding_alone, "auto"),
}
MORE: dict[str, tuple[Any, ...]] = {
    "report": (run_report,),
    **{name: (fsdp_ranks.run, "hsdp", options) for name, options in CODECS.items()},
    **{f"bf16, {codec}": (run_mixed, codec) for codec in CODECS},
    **{f"{kind}, accumulating, {codec}": (run_accumulating, kind, codec) for kind in KINDS for codec in CODECS},
}
BROKEN = {f"{kind}, {on}": (run_broken_off, kind, on) for kind in KINDS for on in (False, True)} if GOES_ON else {}


Ranks = dict[str, list[Any]]


def run_gathered(rank: int, codec: str | None) -> tuple[Weights, Weights, float, str]:
    """Returns the exact weights, those that the forward pass used, and bytes sent for each step."""
    model = sharded("fsdp")
    state = fsdp.compress(model, **{**CODEC, "gather": codec})
    train(model, rank, 4)
    sent = state.counters()["wire_bytes"] / 4
    with torch.no_grad():
        model(torch.zeros(1, 16))
        model.unshard()
        model[2].unshard()
        used = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if name[0] in "235"}
        model.reshard()
        model[2].reshard()
    return whole(model), used, sent, str(fsdp.report(state))


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    cases: dict[str, tuple[Any, ...]] = {f"gathered {codec}": (run_gathered, codec) for codec in (None, "fp32", "int8")}
    return run_cases(4, {**cases, **CASES, **MORE, **BROKEN}, group_timeout_s=60.0)


def test_gradients_and_steps_equal_stock_fsdp2(ranks: Ranks) -> None:
    """One step for each backward pass; shards follow ranks, and a rank with empty shards exchanges, too."""
    for case in CASES:
        assert ranks[case] == [(True, STEPS)] * 4, case


def test_weights_equal_stock_fsdp2_and_replicas_equal(ranks: Ranks) -> None:
    """In bfloat16, too, and where a step accumulates several passes."""
    for name, tolerance in (("", 1e-6), ("bf16, ", 2e-3)):
        plain, ours, coded = (ranks[name + codec] for codec in CODECS)
        for key, value in plain[0].items():
            torch.testing.assert_close(ours[0][key], value, rtol=tolerance, atol=tolerance)
        assert all(same(each, coded[0]) for each in coded) and not same(coded[0], ours[0])
    for kind in KINDS:
        plain, ours, coded = (ranks[f"{kind}, accumulating, {codec}"] for codec in CODECS)
        for key, value in plain[0][0].items():
            torch.testing.assert_close(ours[0][0][key], value, rtol=1e-6, atol=1e-6)
        assert all(steps == (3 if kind == "hsdp" else 5) for _, steps in ours)
        assert all(same(each, coded[0][0]) for each, _ in coded)


def test_codecs_by_name_and_start_step_are_reported(ranks: Ranks) -> None:
    for text, chosen in ranks["report"]:
        assert re.search(r"3 compressed steps of 5, 0 skipped.*\n.*× less.*\n(.*\n)+.*measured link", text), text
        assert "3lc[sparsity=1.5] up and int8 down; bf16; fp32" in text.splitlines()[0], text
        assert chosen["0.weight"].startswith("bf16/") and chosen["5.weight"].startswith("fp32/")
        assert chosen["2.weight"] == "3lc/int8" and chosen["2.bias"] == "fp32/fp32"


@pytest.mark.skipif(not GOES_ON, reason="this torch cannot continue after such a pass")
def test_interrupted_backward_pass_discards_gradients(ranks: Ranks) -> None:
    for kind in KINDS:
        for plain, ours in zip(ranks[f"{kind}, False"], ranks[f"{kind}, True"], strict=True):
            assert len(plain) == 3
            for wanted, found in zip(plain, ours, strict=True):
                assert all(torch.allclose(found[name], wanted[name], rtol=1e-5, atol=1e-7) for name in wanted)
                assert wanted.keys() == found.keys()


def test_gathered_parameters_are_equal_on_ranks_and_exact_at_owners(ranks: Ranks) -> None:
    exact, used, _, _ = ranks["gathered None"][0]
    assert exact and all(torch.equal(value, exact[name]) for name, value in used.items())
    assert same(ranks["gathered fp32"][0][0], exact)
    for kept, rounded, sent, report in ranks["gathered int8"]:
        assert same(kept, ranks["gathered int8"][0][0]) and same(rounded, ranks["gathered int8"][0][1])
        for name, value in rounded.items():
            error = (value - kept[name]).abs().max() / kept[name].abs().max()
            lossless = name.endswith("bias") or name == "3.weight"
            assert error == 0 if lossless else 0 < error <= 0.5 / 127 + 1e-6, (name, error)
            torch.testing.assert_close(kept[name], exact[name], rtol=0.05, atol=0.05)
        assert sent < 0.4 * ranks["gathered fp32"][0][2]
        ratio = re.search(r"([\d.]+)× less", report)
        assert ratio and float(ratio[1]) > 5, report
        # No average travels down, and the ratio counts gathers too.
        assert "3lc[sparsity=1.5]; fp32; int8 gathers\n" in report and " bit a gradient value\n" in report, report


def test_gathered_frames_decode_in_place() -> None:
    gather: Any = SimpleNamespace(_peers=SimpleNamespace(names=[4, 7]), _group="layer")
    values = [torch.linspace(-1, 1, 50), torch.linspace(-3, 3, 8), torch.zeros(0), torch.linspace(0, 1, 30)]
    frames = [tw.codec(id).encode(each) for id, each in zip(("int8", "fp32", "int8", "bf16"), values, strict=True)]
    for dtype in (torch.float32, torch.bfloat16):
        flat = torch.full((88,), torch.nan, dtype=dtype)
        parts = torch.split(flat, [each.numel() for each in values])
        CodedAllGather._fill(gather, 1, frames, parts)
        assert torch.equal(flat, torch.cat([tw.decode(frame) for frame in frames]).to(dtype))
    with pytest.raises(
        ProtocolError,
        match=r"rank 7 sent parameters of layer that cannot be read: .* shape \(8,\); the frame holds \(50,\)",
    ):
        CodedAllGather._fill(gather, 1, frames[:1], parts[1:2])
    damaged = frames[0][:-1] + bytes([frames[0][-1] ^ 1])
    with pytest.raises(ProtocolError, match="rank 7 sent parameters of layer that cannot be read: "):
        CodedAllGather._fill(gather, 1, [damaged], parts[:1])
