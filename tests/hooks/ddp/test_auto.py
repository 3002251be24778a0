"""`ddp.compress(model, "auto")` on three ranks: one decision on all of them, and uncompressed steps are plain DDP's."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.hooks.ddp_ranks import (
    backward,
    batch,
    ddp,
    force,
    mlp,
    residuals_of,
    run_cases,
    same,
    train,
    weights,
)
from thinwire.hooks.exchange import auto as auto_module

WAYS: dict[str, dict[str, Any]] = {
    "one bucket": {},
    "many": {"bucket_cap_mb": 0.01},
    "static": {"bucket_cap_mb": 0.01},
    "unused": {"bucket_cap_mb": 0.01, "find_unused_parameters": True},
}
"""Options of DDP; each makes it call the hook in another way."""
Ranks = dict[str, list[Any]]


def made(**options: Any) -> tuple[DistributedDataParallel, ddp.ThinwireState, Any]:
    """A model, its hook and the hook's controller."""
    model = DistributedDataParallel(mlp())
    state = ddp.compress(model, "auto", **{"measure_link": False, **options})
    return model, state, state.auto


def pair(name: str, *codec: Any, **options: Any) -> tuple[list[DistributedDataParallel], ddp.ThinwireState]:
    """Plain DDP and DDP with a hook, with equal buckets: the sums of three ranks depend on them."""
    models = [DistributedDataParallel(mlp(), **WAYS[name]) for _ in range(2)]
    state = ddp.compress(models[1], *codec, measure_link=False, **options)
    for model in models if name == "static" else ():
        model._set_static_graph()  # type: ignore[no-untyped-call]  # after the hook
    return models, state


def run_settings(rank: int) -> dict[str, Any]:
    """Trains at every setting in turn, then twice from a state in the middle."""
    model, state, auto = made(lag_limit=4, nonfinite="skip")
    waits, names = [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for level in (0, 3, 0, 2, 4, 1, 8, 0):
        force(state, level)
        train(model, rank, 3, first=state.step, optimizer=optimizer)
        waits.append(max(float(residual.abs().max()) for residual in residuals_of(state).values()))
        names.append(auto.setting.name)
    force(state, 3)
    train(model, rank, 2, first=state.step, optimizer=optimizer)
    saved, begun = copy.deepcopy(state.state_dict()), copy.deepcopy(model.state_dict())
    ends = []
    for _ in range(2):
        model.load_state_dict(begun)
        said = state.load_state_dict(saved)
        force(state, 5)
        train(model, rank, 3, first=26)
        ends.append(weights(model.module))
    together = ddp.AllRanks(state).state_dict()
    report = str(ddp.report(state))
    force(state, 2)
    train(model, rank, 1, first=state.step)
    assert auto.setting.name == "int8" and ddp.report(state).sparsity is None
    return {
        "waits": waits,
        "names": names,
        "said": said,
        "kinds": {each: sorted(kept) for each, kept in together["ranks"].items()},
        "ends": ends,
        "report": report,
    }


def run_limited(rank: int) -> list[Any]:
    """Resumes from 3LC with a lag limit that excludes 3LC, and from damaged states of the controller."""
    model, state, _ = made()
    force(state, 4)
    train(model, rank, 3)
    saved = state.state_dict()
    found: list[Any] = []
    part = saved["ranks"][str(rank)]
    for text in (part["auto"], "{}", part["auto"].replace('"used":4', '"used":-4')):
        _, limited, auto = made(lag_limit=1.5)
        try:
            said = limited.load_state_dict({**saved, "ranks": {str(rank): {**part, "auto": text}}})
        except tw.ConfigError as error:
            said = str(error)
        waits = any(bool(residual.any()) for residual in residuals_of(limited).values())
        found.append((said, waits, limited.step, limited.resumed == said, auto.setting.name))
    return found


def run_before_start_step(rank: int) -> dict[str, Any]:
    """Compares uncompressed steps of a fixed codec with plain DDP; counts the reductions of the last callback."""
    waited: list[int] = []
    finish = ddp.ThinwireState.finish_reductions

    def counted(state: ddp.ThinwireState) -> None:
        waited.append(len(state.under_way))
        finish(state)

    found = {}
    ddp.ThinwireState.finish_reductions = counted  # type: ignore[method-assign, assignment]
    for name in WAYS:
        models, state = pair(name, "3lc", start_step=100)
        for model in models:
            train(model, rank, 3)
        found[name] = ([weights(model.module) for model in models], list(waited), state.step, len(state.under_way))
        waited.clear()
    ddp.ThinwireState.finish_reductions = finish  # type: ignore[method-assign]
    return found


def run_uncompressed(rank: int) -> dict[str, Any]:
    """Compares uncompressed steps with notes with plain DDP."""
    found = {}
    for name in WAYS:
        models, state = pair(name, "auto")
        auto: Any = state.auto
        force(state, 0)
        for step in range(6):
            for model in models:
                train(model, rank, 1, first=step)
        assert str(ddp.report(state)).startswith("thinwire: 6 steps, none of them compressed: the link "), name
        found[name] = ([weights(model.module) for model in models], len(auto.controller.memory.window))
    return found


def run_optimizer(rank: int, kinds: list[str]) -> dict[str, Any]:
    """Settings on a link of 1 Mbit/s; `kinds[rank]` names the optimizers' classes, in order."""
    module: Any = auto_module
    usual, module.measure_link = module.measure_link, lambda *_: 1e6
    model, state, auto = made()
    names: list[str] = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for name in kinds[rank].split():
            optimizer = None if name == "none" else getattr(torch.optim, name)(model.parameters(), lr=1e-3)
            for step in range(8 if not names else 70):  # ranks tell each other every 64 steps, or more often
                model.zero_grad()
                backward(model, rank, step, 1.0)
                if optimizer is None:
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter.sub_(cast("torch.Tensor", parameter.grad), alpha=1e-3)
                else:
                    optimizer.step()
                names.append(auto.setting.name)
        force(state, 2)
        auto.controller.held_back = kinds[rank] == "AdamW"
        train(model, rank, 2, first=state.step)
    module.measure_link = usual
    texts = [str(each.message) for each in told if "stays within 8 bits" in str(each.message)]
    return {"names": names, "told": texts, "weights": weights(model.module), "report": str(ddp.report(state))}


def run_fixed(rank: int) -> list[str]:
    """The warnings of a fixed codec, by codec and optimizer; twice each, and with two optimizers."""
    found = []
    for codec, name in (("3lc", "AdamW"), ("int8", "AdamW"), ("3lc", "SGD"), ("topk", "RMSprop")):
        model = DistributedDataParallel(mlp())
        ddp.compress(model, codec, measure_link=False)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            train(model, rank, 2, optimizer=optimizer)
        found.append(" ".join(text for each in told if "fewer than 8 bits" in (text := str(each.message))))
    return found


class Branches(nn.Module):
    """Each step takes one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList([nn.Linear(16, 40), nn.Linear(16, 40)])

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        found: torch.Tensor = self.branches[branch](x)
        return found


def run_unused(rank: int) -> list[float]:
    """The second branch's residual: after two compressed steps of it, two uncompressed of the first, and one of it."""
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    state = ddp.compress(model, "auto", measure_link=False)
    waits = []
    for step, (level, branch) in enumerate([(4, 1), (4, 1), (0, 0), (0, 0), (0, 1)]):
        force(state, level)
        model.zero_grad()
        model(batch(rank, step)[0], branch).pow(2).mean().backward()
        waits.append(float(residuals_of(state)["branches.1.weight"].abs().max()))
    return waits


CASES: dict[str, tuple[Any, ...]] = {
    "settings": (run_settings,),
    "limited": (run_limited,),
    "before start_step": (run_before_start_step,),
    "uncompressed": (run_uncompressed,),
    "sgd": (run_optimizer, ["SGD"] * 3),
    "adaptive": (run_optimizer, ["AdamW"] * 3),
    "one adaptive": (run_optimizer, ["SGD", "SGD", "Adam"]),
    "replaced": (run_optimizer, ["SGD RMSprop"] * 3),
    "none": (run_optimizer, ["none"] * 3),
    "fixed": (run_fixed,),
    "unused": (run_unused,),
}


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    return run_cases(3, CASES, timeout_s=180.0)  # kernels of all settings may have to compile


def test_auto_every_setting_keeps_replicas_equal_and_flushes_residuals(ranks: Ranks) -> None:
    first, *others = ranks["settings"]
    assert [wait == 0 for wait in first["waits"]] == [name == "uncompressed" for name in first["names"]]
    assert first["names"][:3] == ["uncompressed", "3lc[s=1]", "uncompressed"] and len(set(first["names"])) == 6
    line = r"  auto +3lc\[s=1\.25,entropy=zstd\] since step 26, (1 change|\d+ changes), link .*, optimizer sgd$"
    assert re.search(line, first["report"], re.MULTILINE), first["report"]
    assert first["report"].splitlines()[0].endswith(" skipped, auto; fp32") and "\n  lag  " in first["report"]
    for other in others:
        assert first["names"] == other["names"]
        assert all(same(mine, theirs) for mine, theirs in zip(first["ends"], other["ends"], strict=True))


def test_auto_state_resumes_bit_identical(ranks: Ranks) -> None:
    first = ranks["settings"][0]
    assert "bit for bit" in first["said"] and same(*first["ends"])
    assert first["kinds"] == {rank: ["auto", "encodes", "lags", "layouts", "owners", "residuals"] for rank in "012"}


def test_auto_state_smaller_lag_limit_loads_and_damaged_state_raises_config_error(ranks: Ranks) -> None:
    for first, *damaged in ranks["limited"]:
        assert "bit for bit" in first[0] and first[1:] == (True, 3, True, "int8"), first
        for said, *rest in damaged:
            assert "codec='auto' cannot be read" in said and rest == [False, 0, False, "uncompressed"]


def test_start_step_earlier_steps_equal_plain_ddp(ranks: Ranks) -> None:
    """Gloo's threads run no Python."""
    for found in ranks["before start_step"]:
        for name, ((plain, ours), waited, steps, left) in found.items():
            assert same(plain, ours) and (steps, left) == (3, 0), name
            if name == "static":
                assert waited == [], "DDP may wait before any callback of the hook"
            else:
                assert len(waited) == 3 and max(waited) >= (1 if name == "one bucket" else 2), (name, waited)


def test_auto_uncompressed_steps_equal_plain_ddp(ranks: Ranks) -> None:
    for found in ranks["uncompressed"]:
        for name, ((plain, ours), measured) in found.items():
            assert same(plain, ours) and measured >= 1, name


def test_auto_adaptive_optimizer_on_one_rank_limits_all_to_eight_bits(ranks: Ranks) -> None:
    for case in ("sgd", "adaptive", "one adaptive", "replaced", "none"):
        first, *others = ranks[case]
        assert first["names"][0] == "int8", "until it is known"
        assert all(other["names"] == first["names"] for other in others)
        assert case == "one adaptive" or all(same(other["weights"], first["weights"]) for other in others)
    assert all(name.startswith("3lc") for name in ranks["sgd"][0]["names"][3:])
    for case in ("adaptive", "one adaptive", "none"):
        assert set(ranks[case][0]["names"]) == {"int8"}, case
    replaced = ranks["replaced"][0]["names"]
    assert replaced[7].startswith("3lc") and replaced[-1] == "int8", replaced
    assert "optimizer adaptive" in ranks["adaptive"][0]["report"]


def test_auto_adaptive_optimizer_warns_once_of_local_updates(ranks: Ranks) -> None:
    assert [len(each["told"]) for each in ranks["adaptive"]] == [1, 0, 0]
    assert "tw.distribute(model, optimizer)" in ranks["adaptive"][0]["told"][0] and not ranks["sgd"][0]["told"]


def test_fixed_codec_few_bits_with_adaptive_optimizer_warns_once(ranks: Ranks) -> None:
    ternary, mild, sgd, sparse = ranks["fixed"][0]
    assert "AdamW" in ternary and "2.97" in ternary and ternary.count("fewer than 8 bits") == 1
    assert not mild and not sgd and "topk" in sparse and ranks["fixed"][1:] == [[""] * 4] * 2


def test_auto_unused_branch_keeps_residual_in_uncompressed_steps(ranks: Ranks) -> None:
    for _, compressed, *elsewhere, taken in ranks["unused"]:
        assert elsewhere == [compressed] * 2 and compressed > 0 and taken == 0


def test_auto_report_matches_setting() -> None:
    nothing: dict[str, Any] = {"taken": 40, "sent_nbytes": 9e6, "uncompressed_nbytes": 9e6, "wait_s": 0.0}
    spent: dict[str, Any] = {**nothing, "encode_s": 2e-3, "decode_s": 0.0, "link_bps": 1e9, "codecs": "auto"}
    said = str(ddp.Report(**spent, steps=0, auto="uncompressed since step 0"))
    assert "the link (1 Gbit/s) is fast enough, and nothing is compressed, as intended" in said
    said = str(ddp.Report(**{**spent, "sent_nbytes": 8.9e6}, steps=30, auto="bf16 since step 33"))
    assert "bf16 since step 33" in said and "would be faster" not in said
