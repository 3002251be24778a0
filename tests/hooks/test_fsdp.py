"""FSDP2 and HSDP with real ranks: equal to stock FSDP2 where nothing is lost, replicas equal bit for bit always.

Every case runs on the same four ranks, one after the other: starting them is what takes time.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import thinwire as tw
from tests.hooks.ddp_ranks import mlp, run_ranks
from tests.hooks.fsdp_ranks import KINDS, Weights, run_all
from thinwire.collective.cut import Cut, whole_outstanding
from thinwire.collective.residuals import TrainedTensor
from thinwire.hooks import fsdp
from thinwire.hooks.fsdp.parameter_groups import check_backend
from thinwire.policies.compression import PLAIN, ByShape, select

pytestmark = pytest.mark.long  # some 60 trainings; `test_ddp_examples.py` runs HSDP from end to end in every test


@pytest.fixture(scope="module")
def ranks() -> dict[str, list[Any]]:
    """The results of every case, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            Path(folder, kind).mkdir()
        by_rank = run_ranks(4, run_all, folder, group_timeout_s=120.0, timeout_s=280.0)
    return {name: [results[name] for results in by_rank] for name in by_rank[0]}


def same(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def close(a: Weights, b: Weights, tolerance: float, case: str) -> None:
    for name in b:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance, msg=f"{case}: {name}")


def test_uncompressed_codec_equals_stock_fsdp(ranks: dict[str, list[Any]]) -> None:
    for kind in KINDS:
        close(ranks[f"{kind}, fp32"][0], ranks[f"{kind}, plain"][0], 1e-6, kind)
        plain, ours = ranks[f"{kind}, accumulating, plain"][0][0], ranks[f"{kind}, accumulating, fp32"][0][0]
        close(ours, plain, 1e-6, f"{kind}, accumulating")
        for policy, tolerance in (("bf16", 2e-3), ("bf16, reduced in fp32", 1e-5), ("fp16", 3e-4)):
            close(ranks[f"{kind}, {policy}, fp32"][0], ranks[f"{kind}, {policy}, plain"][0], tolerance, policy)
        early, plain, steps = ranks[f"{kind}, warm-up"][0]
        close(early, plain, 1e-6, f"{kind}, warm-up")
        assert steps == 2


def test_replicas_are_equal_bit_for_bit_and_lossy_codecs_train(ranks: dict[str, list[Any]]) -> None:
    for name in [name for name in ranks if re.search(r"3lc|fp32|skip", name)]:
        found = [
            result if isinstance(result, dict) else next(r for r in result if isinstance(r, dict))
            for result in ranks[name]
        ]
        assert all(same(each, found[0]) for each in found), name
    for kind in KINDS:
        assert not same(ranks[f"{kind}, 3lc"][0], ranks[f"{kind}, fp32"][0])
        close(ranks[f"{kind}, 3lc"][0], ranks[f"{kind}, fp32"][0], 0.05, kind)
        assert same(ranks[f"{kind}, 3lc"][0], ranks[f"{kind}, 3lc, each by itself"][0]), "packets change no bit"
        assert ranks[f"{kind}, accumulating, 3lc"][0][1] == (3 if kind == "hsdp" else 5)


def still_to_send(states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """What all ranks of a mesh have still to add to the averaged gradient, by name."""
    merged = fsdp.merge(states)
    replicas = merged["replicas"] or None
    shapes = {name: tuple(p.shape) for name, p in mlp().named_parameters()}
    codec = tw.codec("3lc", sparsity=1.5)
    choices = select(shapes, ByShape(up=codec, down=codec if replicas else PLAIN))
    tensors = [TrainedTensor(name, math.prod(shape), torch.float32, choices[name]) for name, shape in shapes.items()]
    ranks = [merged["ranks"][str(rank)] for rank in range(merged["world_size"])]
    return whole_outstanding(tensors, {name: Cut(shape, 0) for name, shape in shapes.items()}, ranks, replicas=replicas)


def test_residuals_go_on_bit_for_bit_and_on_other_meshes(ranks: dict[str, list[Any]]) -> None:
    for kind in KINDS:
        results = ranks[f"{kind}, saved"]
        for each in results:
            for how in ("torch.save", "dcp"):
                assert same(each[how], each["through"]) and "bit for bit" in each[f"said, {how}"], (kind, how)
            assert "residuals were summed over the old ranks" in each["said, resized"] and each["same from dcp"]
        before = still_to_send([each["state"] for each in results])
        assert set(before) == {"0.weight", "2.weight", "5.weight"} and all(value.any() for value in before.values())
        for mesh_of, states in (
            ("the other kind", [each["other"] for each in results]),
            ("three ranks", [each["three"] for each in results[:3]]),
        ):
            after = still_to_send(states)
            for name, value in before.items():
                assert abs(after[name] - value).max() <= 2**-23 * abs(value).max(), (kind, mesh_of, name)


def test_skip_is_taken_by_every_rank_and_restores_residuals(ranks: dict[str, list[Any]]) -> None:
    for kind in KINDS:
        for rank, (skipped, restored, nan, _) in enumerate(ranks[f"{kind}, skip"]):
            assert (skipped, restored, nan) == (1, True, True), (kind, rank)
        for text in ranks[f"{kind}, nan"]:
            assert re.search("NaN or Inf|a rank of another shard has given up", text), kind


def test_report_and_scopes(ranks: dict[str, list[Any]]) -> None:
    down = {"hsdp": "int8", "fsdp": "fp32"}
    named = {
        "hsdp": "3lc[sparsity=1.5] up and int8 down; bf16; fp32",
        "fsdp": "3lc[sparsity=1.5]; bf16; fp32",
    }
    for kind in KINDS:
        for before, text, chosen in ranks[f"{kind}, report"]:
            assert before == "thinwire: no compressed step yet"
            assert re.search(r"3 compressed steps, 0 skipped.*\n.*× less.*\n(.*\n)+.*measured link", text), text
            assert text.splitlines()[0].endswith(f" skipped, {named[kind]}") and " bit a value" in text, text
            assert chosen["0.weight"].startswith("bf16/") and chosen["5.weight"].startswith("fp32/")
            assert chosen["2.weight"] == f"3lc/{down[kind]}" and chosen["2.bias"] == "fp32/fp32"


def test_gathered_parameters_are_the_same_on_all_ranks_and_exact_where_they_are_kept(
    ranks: dict[str, list[Any]],
) -> None:
    exact, used, _, _ = ranks["gathered, None"][0]
    assert exact and all(torch.equal(value, exact[name]) for name, value in used.items())
    assert same(ranks["gathered, fp32"][0][0], exact), "nothing is lost"
    for kept, rounded, sent, report in ranks["gathered, int8"]:
        assert same(kept, ranks["gathered, int8"][0][0]) and same(rounded, ranks["gathered, int8"][0][1])
        for name, value in rounded.items():
            error = (value - kept[name]).abs().max() / kept[name].abs().max()
            lossless = name.endswith("bias") or name == "3.weight"
            assert error == 0 if lossless else 0 < error <= 0.5 / 127 + 1e-6, (name, error)
        assert sent < 0.4 * ranks["gathered, fp32"][0][2], kept.keys()
        ratio = re.search(r"([\d.]+)× less", report)
        assert ratio and float(ratio[1]) > 5, report
        # Nothing travels down, and the ratio is of gathers too.
        assert "3lc[sparsity=1.5]; fp32; int8 gathers\n" in report and " bit a gradient value\n" in report, report
    close(ranks["gathered, int8"][0][0], exact, 0.05, "int8")


def test_refusals(ranks: dict[str, list[Any]]) -> None:
    expected = {
        "unwrapped": "ConfigError: no module of this Sequential is sharded; wrap it first",
        "ddp": "use ddp.compress",
        "fsdp1": "FSDP1.*Use FSDP2: `from torch.distributed.fsdp import fully_shard`",
        "codec": "ConfigError.*4lc.*3lc",
        "option": "ConfigError.*sparsity",
        "down": "codec_down codes averages for replicas",
        "gather": "inside a replica that is FSDP's",
        "differs": "ProtocolError: rank 3 has codec.*every rank must call compress with the same",
        "twice": "has a communication hook already",
        "compressed still": "^nothing$",
        "unused, False": r"has 128 values and 64 came.*model.set_reduce_scatter_unused_params\(True\)",
        "unused, True": "^nothing$",
        "optimizer in backward": "step the optimizer after the backward pass",
        "three dimensions": "takes a mesh of one dimension .* or two",
        "two meshes": "one mesh for all",
    }
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # earlier versions of torch
        del expected["unused, True"]
    for heard in ranks["refusals"]:
        assert heard.keys() == expected.keys()
        for name, pattern in expected.items():
            assert re.search(pattern, heard[name]), (name, heard[name])


def test_gradients_on_a_gpu_need_more_than_gloo() -> None:
    class Backend:
        def name(self) -> str:
            return "gloo"

    class Group:
        def _get_backend(self, device: torch.device) -> Backend:
            return Backend()

    with pytest.raises(tw.ConfigError, match=r'init_process_group\("cpu:gloo,cuda:nccl"\)'):
        check_backend(torch.device("cuda"), Group())  # type: ignore[arg-type]
    check_backend(torch.device("cpu"), Group())  # type: ignore[arg-type]
