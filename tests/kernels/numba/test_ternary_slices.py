"""3LC in slices: the bytes, the residual and the decoded values of one slice, whatever the number of slices."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels import oracle

from thinwire.errors import ConfigError, FrameError, NonFiniteError
from thinwire.executor import InTurn, Threads
from thinwire.kernels.numba import Workspace, decode_ternary, encode_ternary
from thinwire.kernels.numba.ternary import canonical_cuts, encode_runs

ONE = Workspace()
CREW = [Workspace() for _ in range(7)]


def crew(slices: int) -> dict[str, Any]:
    """Workspaces for so many slices."""
    return {"workspace": CREW[0], "others": CREW[1:slices]}


def gradient(size: int, dtype: Any, zero_fraction: float, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    values = rng.uniform(0.6, 1.0, size) * rng.choice([-1.0, 1.0], size) * (rng.random(size) >= zero_fraction)
    return (values + 0.05 * rng.standard_normal(size).clip(-3, 3)).astype(dtype)


def check(values: Any, residual: Any, slices: int, executor: Any, **options: Any) -> None:
    case = f"{slices} slices of {values.dtype}[{values.size}], {options}"
    alone, shared = (None, None) if residual is None else (residual.copy(), residual.copy())
    m, wanted = encode_ternary(values, residual=alone, workspace=ONE, **options)
    wanted = wanted.copy()
    got = encode_ternary(values, residual=shared, **crew(slices), executor=executor, **options)
    assert (got[0], got[1].tobytes()) == (m, wanted.tobytes()), case
    if alone is not None and shared is not None:
        assert alone.tobytes() == shared.tobytes(), case
    form: dict[str, Any] = {key: options[key] for key in ("layout", "zero_run") if key in options}
    for accumulate in (False, True):
        form["accumulate"] = accumulate
        out, expected = np.full(values.size, 0.5, values.dtype), np.full(values.size, 0.5, values.dtype)
        decode_ternary(wanted, scale=m, out=expected, workspace=ONE, **form)
        decode_ternary(wanted, scale=m, out=out, **crew(slices), executor=executor, **form)
        assert out.tobytes() == expected.tobytes(), case


@pytest.mark.parametrize("slices", [1, 2, 3, 7])
def test_slices_do_not_show(slices: int) -> None:
    executors = (InTurn(), Threads())
    forms = itertools.product((0, 1, 4, 5, 6, 34, 71, 319, 1001, 20_483, 123_457), ("stride", "partition"), (1, 0))
    for seed, (size, layout, zero_run) in enumerate(forms):
        for turn, zero_fraction in enumerate((0.0, 0.6, 0.9, 0.99, 0.999, 1.0)):
            values = gradient(size, np.float64 if seed % 5 == 0 else np.float32, zero_fraction, seed)
            check(
                values,
                gradient(size, values.dtype, 0.7, seed + 50) if seed % 3 else None,
                slices,
                executors[(seed + turn) % 2],
                sparsity=(1.0, 1.75)[seed % 2],
                residual_scale=(1.0, 0.1)[seed % 2],
                paper_literal=seed % 4 == 0,
                layout=layout,
                zero_run=bool(zero_run),
            )


RUNS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60)), max_size=12)


def codes_of(runs: list[tuple[int, int]]) -> Any:
    return np.array([code for others, zeros in runs for code in [*range(others), *[121] * zeros]], np.uint8)


@settings(max_examples=100, deadline=None)
@given(runs=RUNS, parts=st.integers(1, 7))
def test_canonical_cuts_need_no_joining(runs: list[tuple[int, int]], parts: int) -> None:
    codes = codes_of(runs)
    cuts = canonical_cuts(codes, parts)
    assert cuts == sorted(cuts) and (cuts[0], cuts[-1], len(cuts)) == (0, codes.size, parts + 1)
    joined = encode_runs(codes, cuts, coalesce="canonical", workspaces=CREW[:parts], executor=InTurn())
    assert joined.tolist() == oracle.zero_run_encode(codes).tolist()


def test_a_run_longer_than_the_look_back_is_cut_as_a_serial_encoder_would() -> None:
    codes = np.full(100_003, 121, np.uint8)
    codes[17] = 5
    cuts = canonical_cuts(codes, 7)
    assert all((cut - 18) % 14 == 0 for cut in cuts[1:-1]) and len(set(cuts)) == 8
    joined = encode_runs(codes, cuts, coalesce="canonical", workspaces=CREW, executor=Threads())
    assert joined.tolist() == oracle.zero_run_encode(codes).tolist()


@settings(max_examples=100, deadline=None)
@given(runs=RUNS, data=st.data())
def test_the_papers_coalescing_equals_the_oracle(runs: list[tuple[int, int]], data: st.DataObject) -> None:
    codes = codes_of(runs)
    inner = data.draw(st.lists(st.integers(0, codes.size), max_size=6))
    cuts = [0, *sorted(inner), codes.size]
    joined = encode_runs(codes, cuts, coalesce="paper", workspaces=CREW, executor=InTurn()).copy()
    assert joined.tolist() == oracle.zero_run_encode_parts(codes, cuts).tolist()
    assert oracle.zero_run_decode(joined.tobytes(), codes.size).tolist() == codes.tolist()


def test_worked_examples_of_the_papers_coalescing() -> None:
    for codes, cuts, joined in (
        ([5, *[121] * 39, 7], [0, 10, 41], [5, 250, 255, 255, 243, 7]),
        ([9, 121, 121, 9], [0, 2, 4], [9, 243, 9]),
        ([121] * 6, [0, 2, 4, 6], [247]),
        ([121] * 3, [0, 1, 2, 3], [244]),
    ):
        given = np.array(codes, np.uint8)
        ours = encode_runs(given, cuts, coalesce="paper", workspaces=CREW, executor=InTurn())
        assert ours.tolist() == joined, (codes, cuts)
        assert oracle.zero_run_encode_parts(given, cuts).tolist() == joined, (codes, cuts)


def test_the_papers_coalescing_is_longer_now_and_then_and_never_shorter() -> None:
    longer = 0
    for seed in range(100):
        values = gradient(2000, np.float32, 0.98, seed)
        _, serial = encode_ternary(values, sparsity=1.0, workspace=ONE)
        wanted = serial.size
        _, paper = encode_ternary(values, sparsity=1.0, coalesce="paper", **crew(3), executor=InTurn())
        out = np.empty_like(values)
        decode_ternary(paper.copy(), scale=1.0, out=out, workspace=ONE)
        assert paper.size >= wanted, seed
        longer += paper.size > wanted
    assert 0 < longer < 100


def test_bad_values_change_nothing() -> None:
    executors: list[Any] = [InTurn(), Threads()]
    for executor, poison, place in itertools.product(executors, (np.nan, np.inf), (0, 5000, 9999)):
        values, residual = gradient(10_000, np.float32, 0.9, 1), gradient(10_000, np.float32, 0.5, 2)
        values[place] = poison
        before = residual.tobytes()
        with pytest.raises(NonFiniteError, match="NaN or Inf; nothing was changed"):
            encode_ternary(values, sparsity=1.0, residual=residual, **crew(3), executor=executor)
        assert residual.tobytes() == before, (executor, poison, place)


def test_damaged_payloads_are_refused_before_anything_is_written() -> None:
    values = gradient(5003, np.float32, 0.97, 3)
    for zero_run, accumulate in itertools.product((True, False), (True, False)):
        m, payload = encode_ternary(values, sparsity=1.0, zero_run=zero_run, workspace=ONE)
        whole = payload.tobytes()
        form: dict[str, Any] = {"zero_run": zero_run, "accumulate": accumulate}
        for damaged in (whole[:-1], whole + b"\x79", whole[:40] + b"\xff" + whole[41:], b""):
            out = np.full(5003, 0.5, np.float32)
            with pytest.raises(FrameError, match=r"the shape asks for|which end at 242"):
                decode_ternary(damaged, scale=m, out=out, **crew(3), executor=Threads(), **form)
            assert (out == 0.5).all(), (len(damaged), form)


def test_what_is_no_option() -> None:
    values = np.zeros(9, np.float32)
    for options, message in (
        ({"coalesce": "greedy"}, "coalesce 'greedy' does not exist"),
        ({"layout": "rows"}, "layout 'rows' does not exist"),
        ({"residual": np.zeros(8, np.float32)}, "make a new context"),
    ):
        given: dict[str, Any] = options
        with pytest.raises(ConfigError, match=message):
            encode_ternary(values, sparsity=1.0, **crew(2), executor=InTurn(), **given)
