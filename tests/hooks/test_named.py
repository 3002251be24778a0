"""Tensors averaged by name: equal to all-reduce where nothing is lost, with residuals that belong to the name."""

from __future__ import annotations

import gc
import re
import threading
from typing import Any

import torch
import torch.distributed as dist

from tests.hooks.ddp_ranks import run_ranks
from thinwire.errors import ConfigError, NonFiniteError, ProtocolError
from thinwire.hooks import named

WORLD = 3
SHAPES = {"w": (40, 33), "t": (40, 33), "b": (7,), "half": (64, 32)}


def tensors(rank: int, step: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(1000 * step + rank)
    made = {name: torch.randn(shape, generator=drawn) for name, shape in SHAPES.items()}
    # One lies otherwise in memory, one has another dtype, and the order is not always the same.
    made["t"] = made["t"].t().contiguous().t()
    made["half"] = made["half"].to(torch.bfloat16)
    return dict(sorted(made.items(), reverse=step % 2 == 0))


def leaves(state: Any) -> list[Any]:
    """Everything in a state, tensors as lists."""
    if isinstance(state, dict):
        return [(key, leaves(each)) for key, each in state.items()]
    return state.tolist() if isinstance(state, torch.Tensor) else [state]


def exact(rank: int) -> None:
    for reduce in ("mean", "sum"):
        state = named.compress(tensors(rank, 0), codec="fp32", reduce=reduce, measure_link=False)
        found = tensors(rank, 0)
        state.average(found)
        state.close()
        every = [tensors(each, 0) for each in range(WORLD)]
        for name, tensor in found.items():
            wanted = sum(each[name].float() for each in every) / (WORLD if reduce == "mean" else 1)
            assert isinstance(wanted, torch.Tensor)
            torch.testing.assert_close(tensor.float(), wanted, rtol=1e-2 if name == "half" else 1e-6, atol=1e-2)
        one = torch.full((5000,), float(rank))
        dist.all_reduce(one)
        assert one[0] == 3


def coded(rank: int) -> tuple[bool, bool, float, float]:
    """Twelve steps of the same tensors: sums over the steps are those of the averages, but for what waits."""
    state = named.compress(tensors(rank, 0), codec="3lc", sparsity=1.0, min_numel=1, measure_link=False)
    total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(12):
        found = tensors(rank, 0)
        state.average(found)
        for name, tensor in found.items():
            total[name] += tensor.float()
        if step == 5:
            saved = state.state_dict()
    rest = {name: tensor.clone() for name, tensor in found.items()}
    again = named.compress(tensors(rank, 0), codec="3lc", sparsity=1.0, min_numel=1, measure_link=False)
    again.load_state_dict(saved)
    for _ in range(6):
        found = tensors(rank, 0)
        again.average(found)
    same = all(torch.equal(found[name], rest[name]) for name in found) and again.step == state.step == 12
    every = [total["w"].clone() for _ in range(WORLD)]
    dist.all_gather(every, total["w"])
    mean = torch.stack([tensors(each, 0)["w"] for each in range(WORLD)]).mean(0)
    error = float((total["w"] / 12 - mean).norm() / mean.norm())
    counters = state.counters()
    return same, all(torch.equal(each, total["w"]) for each in every), error, counters["payload_bytes"]


def refused(rank: int) -> list[str]:
    state = named.compress(tensors(rank, 0), measure_link=False, gather_mb=0)
    texts = []
    wrong: list[dict[str, Any]] = [
        {"w": torch.zeros(40, 33)},
        {**tensors(rank, 0), "new": torch.zeros(3)},
        {**tensors(rank, 0), "w": torch.zeros(33, 40)},
        {**tensors(rank, 0), "w": torch.zeros(40, 33, dtype=torch.float64)},
    ]
    before = leaves(state.state_dict())
    for each in wrong:
        try:
            state.average(each)
        except ConfigError as error:
            texts.append(str(error))
    assert leaves(state.state_dict()) == before, "a refused call has changed a residual"
    state.average(tensors(rank, 1))  # and the state goes on
    bad: list[dict[str, Any]] = [
        {"tensors": {}},
        {"tensors": {"i": torch.zeros(3, dtype=torch.int64)}},
        {"reduce": "max"},
    ]
    for options in bad:
        given: dict[str, Any] = {"tensors": tensors(rank, 0), "measure_link": False, **options}
        try:
            named.compress(**given)
        except ConfigError as error:
            texts.append(str(error))
    values = torch.zeros(8, 33)
    with torch.inference_mode():
        read_only = torch.zeros(8, 33)
    apart = {"even": values[::2], "odd": values[1::2]}  # rows between each other's
    named.compress(apart, measure_link=False).average(apart)
    for pair in (
        {"a": values, "b": values[3:4]},
        {"a": values, "b": values},
        {"a": read_only},
    ):
        like = {name: torch.zeros(value.shape) for name, value in pair.items()}
        try:
            named.compress(like, measure_link=False).average(pair)
        except ConfigError as error:
            texts.append(str(error))
    others: list[Any] = [[values], {1: values}, {"a": [1.0]}, {"a": values.to_sparse()}, {"a": values.to("meta")}]
    for other in others:
        try:
            named.compress(other, measure_link=False)
        except ConfigError as error:
            texts.append(str(error))
    try:
        poisoned = tensors(rank, 2)
        if rank == 1:
            poisoned["w"][3, 3] = torch.nan
        state.average(poisoned)
    except NonFiniteError as error:
        texts.append(str(error))
    try:
        named.compress({"w": torch.zeros(40 + rank, 33)}, measure_link=False)
    except ProtocolError as error:
        texts.append(str(error))
    return texts


def test_without_compression_it_is_all_reduce() -> None:
    run_ranks(WORLD, exact)


def test_every_name_has_its_residual_and_resumes_bit_for_bit() -> None:
    for same, equal, error, nbytes in run_ranks(WORLD, coded):
        assert same and equal
        assert error < 0.35
        values = sum(torch.Size(shape).numel() for shape in SHAPES.values())
        assert 0 < nbytes < 12 * 4 / 3 * values / 4


def test_what_cannot_be_is_told_and_changes_nothing() -> None:
    for texts in run_ranks(WORLD, refused):
        *texts, nan, shape = texts
        texts, more = [*texts[:7], nan, shape], texts[7:]
        assert len(texts) == 9, texts
        assert ["share memory (tied weights?)" in each for each in more[:2]] == [True, True], more
        assert "inference_mode" in more[2] and "list came" in more[3]
        assert ["expected tensors by name" in each for each in more[4:6]] == [True, True], more
        assert "a is torch.sparse_coo on cpu" in more[6] and "on meta" in more[7]
        assert "b, half, t missing, none unknown" in texts[0]
        assert "none missing, new unknown" in texts[1]
        assert "w: (33, 40) of torch.float32 on cpu came, and compress was given (40, 33) of" in texts[2]
        assert "torch.float64" in texts[3]
        assert "no tensors" in texts[4] and "'i' has dtype torch.int64" in texts[5] and "reduce='max'" in texts[6]
        assert "NaN" in texts[7]
        assert "parameter w" in texts[8]


def unlike(rank: int) -> list[str]:
    """Ranks disagree about orders or a scaler, close their state, or give views into which nothing can be written."""
    said = []
    found = {"q": torch.full((64, 64), rank + 1.0), "k": torch.full((64, 64), 10.0 * (rank + 1))}
    try:  # in the other order on rank 1
        named.compress(dict(reversed(found.items())) if rank else found, measure_link=False)
    except ProtocolError as error:
        said.append(str(error))
    scaler = torch.amp.GradScaler("cpu") if rank else None
    try:
        named.compress(found, nonfinite="skip", scaler=scaler, measure_link=False)
    except ProtocolError as error:
        said.append(str(error))
    state = named.compress(found, codec="fp32", measure_link=False)
    state.average(found)
    assert (found["q"] == 1.5).all() and (found["k"] == 15).all()
    found["k"] = torch.ones(1).expand(64, 64)
    for _ in range(2):
        try:
            state.average(found)
        except ConfigError as error:
            said.append(str(error))
        found["k"] = torch.ones(64, 64)
        state.close()
    try:
        named.compress(found, measure_link=False, timeout=60)  # type: ignore[arg-type]
    except ConfigError as error:
        said.append(str(error))
    return said


def test_other_orders_views_and_a_closed_state() -> None:
    for said in run_ranks(2, unlike):
        assert [re.search(text, each) is not None for text, each in zip(UNLIKE, said, strict=True)] == [True] * 5, said


UNLIKE = (
    "rank 1 has the parameters' order = ",
    "rank 1 has scaler = 'given' and rank 0 has None",
    "k: the average cannot be written: .*overlap",
    "close[(][)] was called",
    "timeout=60",
)


def reported(rank: int) -> int:
    """How many first steps a report leaves out, where nobody has asked for one before."""
    found = {"w": torch.zeros(64, 64)}
    state = named.compress(found, measure_link=False)
    for _ in range(4):
        state.average(found)
    return named.report(state).warm_up


def test_a_report_leaves_out_the_first_steps() -> None:
    assert run_ranks(2, reported) == [2, 2]


def forgotten(rank: int) -> int:
    """How many of thinwire's threads are left of a state that nobody closed."""
    found = {"w": torch.zeros(64, 64)}
    state = named.compress(found, measure_link=False)
    state.average(found)
    del state
    gc.collect()
    return sum(thread.name.startswith("thinwire-pu") for thread in threading.enumerate())


def test_a_state_that_is_forgotten_leaves_no_threads() -> None:
    assert run_ranks(WORLD, forgotten) == [0] * WORLD
