"""Local updates averaged among ranks: against plain torch by hand, equal replicas, NaN on one rank, sealed messages."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from tests.hooks.ddp_ranks import refusal, run_cases, run_ranks
from tests.hooks.local.test_training import SUM, WORKERS, by_hand, nesterov, plain
from tests.hooks.local_runs import adamw, batch, inner_step, mlp, values

BY_HAND: dict[str, tuple[int, int, Any, float]] = {
    "update[codec=fp32]": (1, 0, plain, 0.0),
    "local-sgd[h=4,codec=fp32,steer=0]": (4, 0, plain, 0.0),
    f"local-sgd[h=4,{SUM}]": (4, 0, plain, 0.0),
    "local-sgd[h=4,codec=fp32]": (4, 0, plain, 0.6),
    "local-sgd[h=4,steer=0.3,warmup=3,codec=fp32]": (4, 3, plain, 0.3),
    "diloco[h=5,codec=fp32]": (5, 0, nesterov, 0.0),
}
CODED = (
    "update",
    "update[keep_unsent=0.5]",
    "local-sgd[h=4]",
    "local-sgd[h=3,settle=2]",
    "diloco[h=3]",
    "diloco[h=3,outer=SignSGD,outer_lr=0.001,outer_momentum=0,nesterov=false]",
    "sparseloco[h=3]",
    "demo[inner=any]",
    "streaming-diloco[h=6,fragments=3,delay=2]",
)


def trained(rank: int, design: str, count: int = 13, make: Any = mlp, **options: Any) -> torch.Tensor:
    model = make(rank)
    with tw.distribute(model, adamw(model), group=dist.group.WORLD, design=design, **options) as opt:
        for step in range(count):
            inner_step(model, opt, rank, step)
    return values(model)


def poisoned(rank: int, design: str) -> tuple[torch.Tensor, float]:
    """Rank 1's gradients are NaN in inner step 7, and so are its parameters then."""
    model = mlp(rank)
    with (
        warnings.catch_warnings(record=True) as told,
        tw.distribute(model, adamw(model), group=dist.group.WORLD, design=design) as opt,
    ):
        warnings.simplefilter("always")
        for step in range(24):
            x, y = batch(rank, step)
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            (loss * (torch.nan if (rank, step) == (1, 7) else 1.0)).backward()  # type: ignore[no-untyped-call]
            opt.step()
        opt.flush()
        assert all(bool(state["exp_avg"].isfinite().all()) for state in opt.state.values())
        assert any("continues from the shared ones" in str(each.message) for each in told) == (rank == 1)
        return values(model), opt.traffic()["void_rounds"]


def conserved(rank: int, settle: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The changes of all ranks: in the shared parameters and in residuals."""
    design = f"local-sgd[h=3,codec_down=fp32,settle={settle}]"
    model = mlp(rank)
    with tw.distribute(model, adamw(model), group=dist.group.WORLD, design=design) as opt:
        for step in range(6):
            inner_step(model, opt, rank, step)
        opt.flush()
        unsent = opt.state_dict()["residuals"]["residuals"]["0.weight"].clone()
        return model.get_parameter("0.weight").detach().flatten().clone(), unsent, opt.clock


def sealed(rank: int, tokens: list[Path]) -> tuple[torch.Tensor, str]:
    with_token = partial(trained, rank, "local-sgd[h=4]")
    found = with_token(credentials=tw.Credentials(token_file=tokens[0]))
    return found, refusal(lambda: with_token(credentials=tw.Credentials(token_file=tokens[rank > 0])))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    tokens = [tmp_path_factory.mktemp("tokens") / name for name in ("one", "other")]
    for number, token in enumerate(tokens):
        token.write_text(f"{number}{'0123456789abcdef' * 3}\n")
        token.chmod(0o600)
    cases: dict[str, tuple[Any, ...]] = {design: (trained, design) for design in (*BY_HAND, *CODED)}
    cases |= {f"poisoned {each}": (poisoned, each) for each in ("local-sgd[h=3]", CODED[-1], "diloco[h=6,delay=2]")}
    cases |= {f"settle {count}": (conserved, count) for count in (0, 1, 4)} | {"sealed": (sealed, tokens)}
    return run_cases(WORKERS, cases)


@pytest.mark.parametrize("design", BY_HAND)
def test_uncompressed_training_equals_plain_torch(ranks: dict[str, list[Any]], design: str) -> None:
    h, warmup, outer, steer = BY_HAND[design]
    torch.testing.assert_close(ranks[design][0], by_hand(13, h, outer, warmup, steer), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("design", [*BY_HAND, *CODED])
def test_replicas_are_bit_identical_after_close(ranks: dict[str, list[Any]], design: str) -> None:
    first, *others = ranks[design]
    assert first.isfinite().all() and all(torch.equal(first, each) for each in others)


def test_nan_voids_exchange_on_all_ranks(ranks: dict[str, list[Any]]) -> None:
    for name in (each for each in ranks if each.startswith("poisoned")):
        for end, void in ranks[name]:
            assert end.isfinite().all() and torch.equal(end, ranks[name][0][0]) and void >= 1, name


def test_residuals_keep_unsent_changes_and_flush_settles_them(ranks: dict[str, list[Any]]) -> None:
    waits, all_in_all, clocks = [], [], []
    for count in (0, 1, 4):
        found = ranks[f"settle {count}"]
        unsent = torch.stack([each for _, each, _ in found])
        waits.append(float(unsent.norm()))
        all_in_all.append(found[0][0] - unsent.mean(0))
        clocks.append(found[0][2])
    assert 0 < waits[2] < 0.5 * waits[1] < 0.5 * waits[0] and [each - clocks[0] for each in clocks] == [0, 1, 4]
    torch.testing.assert_close(all_in_all[1:], [all_in_all[0]] * 2, rtol=1e-5, atol=1e-6)


def test_token_seals_messages_and_another_token_raises(ranks: dict[str, list[Any]]) -> None:
    for end, told in ranks["sealed"]:
        assert torch.equal(end, ranks["local-sgd[h=4]"][0]), "and changes no bit"
        assert "another key" in told or "is gone" in told, told


def raises(rank: int) -> str:
    return refusal(lambda: poisoned(rank, "local-sgd[h=3,nonfinite=raise]"))


def test_nan_raises_on_all_ranks_if_design_asks() -> None:
    assert all(told.startswith("NonFiniteError: ") for told in run_ranks(2, raises))
