"""Parameters that FSDP2 gathers coded: equal on all ranks, exact where their owner keeps them, and counted."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.hooks.ddp_ranks import Weights, run_cases, same
from tests.hooks.fsdp_ranks import CODEC, LOSSLESS, gradients, sharded, sharded_layers, train, whole
from thinwire.errors import ProtocolError
from thinwire.hooks import fsdp
from thinwire.hooks.fsdp import gathering
from thinwire.hooks.fsdp.gathering import CodedAllGather

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


def run_counted(rank: int, evaluations: int, **options: Any) -> tuple[float, fsdp.Report]:
    """Bytes of parameters that eight steps gathered, with evaluations in between, and the report."""
    model = sharded_layers("fsdp")
    state = fsdp.compress(model, **LOSSLESS, **options)
    for step in range(8):
        gradients(model, rank, step)
        with torch.no_grad():
            for _ in range(evaluations):
                model(torch.zeros(2, 12))
    return state.counters().get("gather_uncompressed_bytes", 0), fsdp.report(state)


def run_reports(rank: int) -> dict[str, tuple[float, fsdp.Report]]:
    return {
        "uncompressed": run_counted(rank, 0),
        "gathers": run_counted(rank, 0, gather="int8"),
        "evaluates": run_counted(rank, 5, gather="int8"),
        "late": run_counted(rank, 0, gather="int8", start_step=6),
    }


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    cases: dict[str, tuple[Any, ...]] = {str(codec): (run_gathered, codec) for codec in (None, "fp32", "int8")}
    return run_cases(4, {**cases, "reports": (run_reports,)}, group_timeout_s=60.0)


def test_gathered_parameters_are_equal_on_all_ranks_and_exact_where_they_are_kept(ranks: Ranks) -> None:
    exact, used, _, _ = ranks["None"][0]
    assert exact and all(torch.equal(value, exact[name]) for name, value in used.items())
    assert same(ranks["fp32"][0][0], exact)
    for kept, rounded, sent, report in ranks["int8"]:
        assert same(kept, ranks["int8"][0][0]) and same(rounded, ranks["int8"][0][1])
        for name, value in rounded.items():
            error = (value - kept[name]).abs().max() / kept[name].abs().max()
            lossless = name.endswith("bias") or name == "3.weight"
            assert error == 0 if lossless else 0 < error <= 0.5 / 127 + 1e-6, (name, error)
            torch.testing.assert_close(kept[name], exact[name], rtol=0.05, atol=0.05)
        assert sent < 0.4 * ranks["fp32"][0][2]
        ratio = re.search(r"([\d.]+)× less", report)
        assert ratio and float(ratio[1]) > 5, report
        # No average travels down, and the ratio counts gathers too.
        assert "3lc[sparsity=1.5]; fp32; int8 gathers\n" in report and " bit a gradient value\n" in report, report


def test_report_counts_gathers_of_compressed_steps_and_not_of_evaluations(ranks: Ranks) -> None:
    for found in ranks["reports"]:
        assert "beside it FSDP gathers parameters uncompressed" in str(found["uncompressed"][1])
        (all_steps, report), (_, with_some), (late, partly) = (found[how] for how in ("gathers", "evaluates", "late"))
        assert 0.9 * report.sent_nbytes < with_some.sent_nbytes < 1.1 * report.sent_nbytes
        assert late == all_steps > 0 and (partly.steps, partly.warm_up) == (2, 1)
        assert all_steps / 8 < partly.uncompressed_nbytes < all_steps / 4, "one step's, and its gradients"


def test_coded_parameters_are_decoded_where_they_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a frame that is decoded by itself would be so on the CPU, and be uploaded as float32."""
    taken = list[str]()

    def decode(frame: bytes) -> torch.Tensor:
        taken.append(tw.frames.parse(frame).codec)
        return tw.decode(frame)

    monkeypatch.setattr(gathering, "decode", decode)
    gather: Any = SimpleNamespace(_peers=SimpleNamespace(names=[4, 7]), _group="layer")
    values = [torch.linspace(-1, 1, 50), torch.linspace(-3, 3, 8), torch.zeros(0), torch.linspace(0, 1, 30)]
    frames = [tw.codec(id).encode(each) for id, each in zip(("int8", "fp32", "int8", "bf16"), values, strict=True)]
    for dtype in (torch.float32, torch.bfloat16):
        flat = torch.full((88,), torch.nan, dtype=dtype)
        parts = torch.split(flat, [each.numel() for each in values])
        CodedAllGather._fill(gather, 1, frames, parts)
        assert torch.equal(flat, torch.cat([tw.decode(frame) for frame in frames]).to(dtype))
    assert taken == ["fp32", "fp32"]
    with pytest.raises(ProtocolError, match=r"rank 7 sent parameters of shape \(50,\) for \(8,\) of layer"):
        CodedAllGather._fill(gather, 1, frames[:1], parts[1:2])
    damaged = frames[0][:-1] + bytes([frames[0][-1] ^ 1])
    with pytest.raises(ProtocolError, match="rank 7 sent a damaged frame of layer: "):
        CodedAllGather._fill(gather, 1, [damaged], parts[:1])
