"""One tensor, one frame: what every enrolled codec must do, whatever its scheme."""

from __future__ import annotations

import copy
import json
import os
import pickle
import pkgutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.codecs import samples
from tests.codecs.contract import (
    ENROLLED,
    FLOAT32_MAX,
    Enrolled,
    every_codec,
    naming,
    one_item,
    one_item_each,
    three_lc,
)
from tests.codecs.samples import DTYPES
from thinwire.codecs import Scheme, open_frame, registry
from thinwire.extras import IN_LAB
from thinwire.frames import CODEC_NUMBERS
from thinwire.frames.layout import DTYPE_NUMBERS


def round_trip(entry: Enrolled, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """Encodes and decodes, and checks what holds for all: shape, dtype, the claimed error, and an untouched caller."""
    before = tensor.clone()
    decoded = tw.decode(entry.codec.encode(tensor))
    assert decoded.shape == tensor.shape
    assert decoded.dtype == tensor.dtype
    assert samples.raw(tensor) == samples.raw(before), "the caller's tensor was written"
    if entry.error is not None:
        samples.assert_within_claim(entry, tensor, decoded, dtype)
    return decoded


# ---- who is held to it


@pytest.mark.skipif("THINWIRE_ENROLLED" in os.environ, reason="codecs of elsewhere are enrolled in place of ours")
def test_every_codec_class_is_registered_numbered_and_enrolled() -> None:
    package = import_module("thinwire.codecs")
    found: set[type[Scheme]] = set()
    for module in pkgutil.iter_modules(package.__path__):
        for value in vars(import_module(f"thinwire.codecs.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, Scheme) and "id" in vars(value):
                found.add(value)
    shipped = [codec.id for codec in registry.SHIPPED]
    assert found == set(registry.SHIPPED) and registry.ids()[: len(shipped)] == shipped
    assert {codec.id for codec in found} == set(CODEC_NUMBERS) - IN_LAB["codec"] and set(DTYPES) == set(DTYPE_NUMBERS)
    assert set(shipped) == {entry.codec.id for entry in ENROLLED}, "enrols with one line in tests/codecs/contract.py"
    labels = [entry.label for entry in ENROLLED]
    assert len(set(labels)) == len(labels)


# ---- round trips


@every_codec
def test_round_trips(entry: Enrolled) -> None:
    for dtype in DTYPES:
        for size in samples.SIZES:
            with naming(f"{size} values of {dtype}"):
                round_trip(entry, samples.tensor(samples.normal(size, seed=size), dtype), dtype)
        for content, make in samples.CONTENTS.items():
            with naming(f"{content} of {dtype}"):
                decoded = round_trip(entry, samples.tensor(make(319), dtype), dtype)
                assert content != "zero" or not decoded.any(), "zeros came back as something else"
        with naming(f"the ends of {dtype}"):
            round_trip(entry, samples.subnormal(319, dtype), dtype)
            assert torch.isfinite(round_trip(entry, samples.largest(65, dtype, entry), dtype)).all()
    for shape in ((0,), (3, 0), (), (130,)):
        open_frame(entry.codec.encode(torch.ones(shape))).explain()


@every_codec
def test_a_million_values(entry: Enrolled) -> None:
    tensor = samples.tensor(samples.normal(samples.BIG), "fp32")
    frame = entry.codec.encode(tensor)
    decoded = tw.decode(frame)
    if entry.error is not None:
        samples.assert_within_claim(entry, tensor, decoded, "fp32")
    if entry.bits is not None:
        assert tw.frames.parse(frame).bits_per_value <= entry.bits
    total = torch.ones_like(tensor)
    tw.decode(frame, out=total, accumulate=True)
    assert torch.equal(total, torch.ones_like(tensor) + decoded)


# ---- the same values give the same frame


SHAPES: dict[str, Callable[[], torch.Tensor]] = {
    "0-d": lambda: torch.tensor(0.75),
    "4-d": lambda: samples.tensor(samples.normal(120), "fp32").view(2, 3, 4, 5),
    "empty 3-d": lambda: torch.zeros(3, 0, 2),
    "transposed": lambda: samples.tensor(samples.normal(72), "fp32").view(8, 9).t(),
    "strided": lambda: samples.tensor(samples.normal(130), "fp32")[1::2],
    "expanded": lambda: samples.tensor(samples.normal(7), "fp32")[:, None].expand(7, 5),
    "channels last": lambda: (
        samples.tensor(samples.normal(120), "fp32").view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    ),
    "parameter": lambda: torch.nn.Parameter(samples.tensor(samples.normal(12), "fp32")),
    "negated view": lambda: torch.complex(torch.zeros(9), samples.tensor(samples.normal(9), "fp32")).conj().imag,
}


@every_codec
def test_frame_depends_only_on_the_values(entry: Enrolled) -> None:
    for shape, make in SHAPES.items():
        with naming(shape):
            tensor = make()
            round_trip(entry, tensor, "fp32")
            plain = torch.tensor(tensor.tolist()) if tensor.numel() else torch.zeros(tensor.shape)
            assert entry.codec.encode(tensor) == entry.codec.encode(plain), "the frame depends on the memory layout"
    for dtype in ("fp16", "fp32", "fp64"):
        with naming(f"a NumPy array of {dtype}"):
            tensor = samples.tensor(samples.heavy_tails(319), dtype)
            array = tensor.numpy()
            frame = entry.codec.encode(tensor)
            assert entry.codec.encode(array) == frame
            assert entry.codec.encode(array.astype(array.dtype.newbyteorder(">"))) == frame
    grid = np.arange(24, dtype=np.float32).reshape(4, 6)
    for name, array in (("backwards", grid[::-1, ::-2]), ("Fortran order", np.asfortranarray(grid))):
        with naming(name):
            assert entry.codec.encode(array) == entry.codec.encode(torch.from_numpy(array.copy()))


@every_codec
def test_frame_is_independent_of_earlier_tensors_and_threads(entry: Enrolled) -> None:
    tensors = [samples.tensor(samples.normal(500 + 137 * i, seed=i), "fp32") for i in range(12)]
    again = entry.codec.encode(tensors[0])
    entry.codec.encode(tensors[5])
    assert entry.codec.encode(tensors[0]) == again, "used memory shows in later frames"

    def one(i: int) -> bytes:
        context = entry.codec.context(tensors[i], name=f"layer{i}", seed=5)
        context.encode(tensors[i])
        return context.encode(tensors[i])

    alone = [one(i) for i in range(len(tensors))]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(one, range(len(tensors))))
        decoded = list(pool.map(tw.decode, alone))
    assert together == alone
    assert all(torch.equal(got, tw.decode(frame)) for got, frame in zip(decoded, alone, strict=True))


# ---- what is refused


NO_FLOATING_TENSORS: list[Any] = [
    None,
    1.5,
    [1.0, 2.0],
    "text",
    torch.arange(3),
    torch.zeros(3, dtype=torch.bool),
    torch.zeros(3, dtype=torch.complex64),
    torch.zeros(3, dtype=torch.int8),
    torch.eye(3).to_sparse(),
    torch.zeros(3, device="meta"),
    np.arange(3),
    np.zeros(3, dtype=np.complex128),
    np.zeros(3, dtype=np.longdouble),
    np.array(["a"]),
    np.array([None]),
]
NON_FINITE = [float("nan"), float("inf"), -float("inf")]


@every_codec
def test_unsupported_tensors_are_refused(entry: Enrolled) -> None:
    for value in NO_FLOATING_TENSORS:
        with naming(f"{value!r}"), pytest.raises(TypeError, match="codecs take"):
            entry.codec.encode(value)
        with naming(f"{value!r}"), pytest.raises(TypeError, match=r"conv1\.weight"):
            entry.codec.context(torch.zeros(3), name="conv1.weight").encode(value)
    assert tw.decode(entry.codec.encode(torch.ones([1] * 32))).ndim == 32
    with pytest.raises(tw.ConfigError, match="33 dimensions"):
        entry.codec.encode(torch.ones([1] * 33))


@every_codec
def test_not_finite_values_are_refused_or_flagged(entry: Enrolled) -> None:
    skipping = entry.with_options(nonfinite="skip")
    for dtype, value, (size, place) in product(DTYPES, NON_FINITE, ((1, 0), (319, 317), (1000, 999))):
        tensor = samples.tensor(samples.normal(size), dtype)
        tensor[place] = value
        with naming(f"{value} at {place} of {size} values of {dtype}"):
            with pytest.raises(tw.NonFiniteError):
                entry.codec.encode(tensor)
            frame = skipping.encode(tensor)
            parsed = tw.frames.parse(frame)
            assert parsed.non_finite
            assert (parsed.codec, parsed.shape, parsed.payload, parsed.scales) == (entry.codec.id, (size,), b"", ())
            with pytest.raises(tw.FrameError, match="NaN or Inf"):
                tw.decode(frame)
    above = entry.largest * 1.001
    if above <= FLOAT32_MAX:  # the claim is tight: a thousandth more is refused, or is no float32
        with naming("above the largest"), pytest.raises(tw.NonFiniteError):
            entry.codec.encode(torch.tensor([0.5, -above]))


# ---- decoding into memory that exists


OUTS: dict[str, Callable[[], Any]] = {
    "contiguous": lambda: torch.full((5, 7), 3.0),
    "transposed": lambda: torch.full((7, 5), 3.0).t(),
    "a slice": lambda: torch.full((5, 14), 3.0)[:, ::2],
    "float64": lambda: torch.full((5, 7), 3.0, dtype=torch.float64),
    "float16": lambda: torch.full((5, 7), 3.0, dtype=torch.float16),
    "bfloat16": lambda: torch.full((5, 7), 3.0, dtype=torch.bfloat16),
    "a negated view": lambda: torch._neg_view(torch.full((5, 7), -3.0)),
    "a negated float16 view": lambda: torch._neg_view(torch.full((5, 7), -3.0, dtype=torch.float16)),
    "a parameter": lambda: torch.nn.Parameter(torch.full((5, 7), 3.0)),
    "numpy": lambda: np.full((5, 7), 3.0, np.float32),
    "numpy, Fortran order": lambda: np.asfortranarray(np.full((5, 7), 3.0)),
    "numpy float16": lambda: np.full((5, 7), 3.0, np.float16),
}

UNFIT_OUTS: list[tuple[Any, str]] = [
    (torch.zeros(7, 5), "the frame holds"),
    (torch.zeros(35), "the frame holds"),
    (torch.zeros(5, 7, dtype=torch.int32), "floating"),
    (torch.zeros(5, 7, dtype=torch.complex64), "floating"),
    (np.zeros((5, 7), np.int64), "floating"),
    (np.zeros((5, 6), np.float32), "the frame holds"),
    ([0.0] * 35, "must be"),
    (torch.zeros(1, 7).expand(5, 7), "overlap"),
    (np.broadcast_to(np.float32(0), (5, 7)), "read-only"),
    (np.lib.stride_tricks.as_strided(np.zeros(7, np.float32), (5, 7), (0, 4), writeable=True), "overlap"),
    (np.zeros((5, 7), np.float32)[::-1], "share its memory"),
    (np.zeros((5, 7), ">f4"), "share its memory"),
    (np.zeros((5, 7), [("x", "f4"), ("y", "i1")])["x"], "share its memory"),
    (np.zeros((5, 7), np.longdouble), "share its memory"),
]


@every_codec
def test_out_is_filled_or_added_to_in_place(entry: Enrolled) -> None:
    frame = entry.codec.encode(samples.tensor(samples.normal(35), "fp32").view(5, 7))
    fresh = tw.decode(frame)
    for (kind, make), accumulate in product(OUTS.items(), (False, True)):
        with naming(f"{kind}, accumulate={accumulate}"):
            out = make()
            result = tw.decode(frame, out=out, accumulate=accumulate)
            held = torch.as_tensor(out)
            cast = fresh.to(held.dtype)
            assert torch.equal(held.detach(), torch.full_like(cast, 3.0) + cast if accumulate else cast)
            assert result.data_ptr() == held.data_ptr(), "a copy came back instead of `out`"
    for (out, message), accumulate in product(UNFIT_OUTS, (False, True)):
        with naming(message), pytest.raises(tw.ConfigError, match=message):
            tw.decode(frame, out=out, accumulate=accumulate)
    with pytest.raises(tw.ConfigError, match="no `out`"):
        tw.decode(frame, accumulate=True)
    # A scale may lie past float16's last number although no value did; the decoded value ends there instead.
    narrow = entry.codec.encode(torch.tensor([60000.0, -60000.0, 1.0], dtype=torch.float16))
    array = np.zeros(3, np.float16)
    tw.decode(narrow, out=array)
    assert torch.isfinite(tw.decode(narrow)).all() and np.isfinite(array).all()


def test_sums_saturate_at_the_largest_number_of_a_narrower_out() -> None:
    inf = float("inf")
    for dtype, numpy in product((torch.float16, torch.bfloat16, torch.float32), (False, True)):
        if numpy and dtype == torch.bfloat16:
            continue
        most, wide = torch.finfo(dtype).max, torch.float64 if dtype is torch.float32 else torch.float32
        frame = tw.codec("fp32").encode(torch.tensor([most, -most, most, 1.0, 1.0], dtype=wide))
        out = torch.tensor([most, -most, -most, 2.0, inf], dtype=dtype)
        tw.decode(frame, out=out.numpy() if numpy else out, accumulate=True)
        assert out.tolist() == [most, -most, 0.0, 3.0, inf], "what the caller brought stays"


# ---- configuration


@pytest.mark.filterwarnings("ignore::UserWarning")
@one_item
def test_config_and_repr_rebuild_the_codec(entry: Enrolled) -> None:
    codec = entry.codec
    again = tw.codec(**json.loads(json.dumps(codec.config())))
    assert again == codec and hash(again) == hash(codec) and again.config() == codec.config()
    assert eval(repr(codec), {"tw": tw}) == codec, "repr reads as the call"
    for unpickled in (pickle.loads(pickle.dumps(codec)), copy.deepcopy(codec)):
        assert unpickled == codec and unpickled.encode(torch.ones(9)) == codec.encode(torch.ones(9))
    for option, value, named in (
        ("sparsiti", 1, "'sparsiti'"),
        ("entropy", "gzip", "'gzip'"),
        ("nonfinite", "ignore", "'ignore'"),
        ("error_scale", 1.5, "error_scale"),
        ("error_scale", float("nan"), "error_scale"),
        ("error_feedback", "yes", "error_feedback"),
    ):
        with pytest.raises(tw.ConfigError, match=named):
            tw.codec(codec.id, **{option: value})


# ---- unbiasedness


NUM_DRAWS = 3000
MOST_DEVIATIONS = 5.0
"""A standard normal value lies further out once in 1.7 million; 16 values make a false alarm 1 in 100,000 seeds."""


def deviations(entry: Enrolled) -> float:
    """The largest |mean of decoded − value| over 16 values, in standard deviations of that mean."""
    tensor = torch.tensor([0.9, -0.8, 0.7, -0.55, 0.5, -0.4, 0.3, 0.25, -0.2, 0.15, -0.1, 0.05, 0.02, -0.01, 0.0, 1.0])
    context = entry.with_options(error_feedback=False).context(tensor, seed=11)
    draws = np.stack([samples.wide(tw.decode(context.encode(tensor))) for _ in range(NUM_DRAWS)])
    error = np.abs(draws.mean(axis=0) - samples.wide(tensor))
    spread = draws.std(axis=0) / np.sqrt(NUM_DRAWS)
    return float((error / np.maximum(spread, 1e-7)).max())


@one_item_each([entry for entry in ENROLLED if entry.unbiased])
def test_unbiased_codecs_have_the_tensor_as_their_mean(entry: Enrolled) -> None:
    assert entry.codec.random, "a deterministic codec is unbiased only where it is exact"
    assert deviations(entry) < MOST_DEVIATIONS


def test_unbiasedness_check_detects_a_biased_codec() -> None:
    assert deviations(three_lc()) > MOST_DEVIATIONS
