"""One tensor, one frame: what every enrolled codec must do, whatever its scheme."""

from __future__ import annotations

import json
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
from tests.codecs.contract import ENROLLED, FLOAT32_MAX, Enrolled, three_lc
from tests.codecs.samples import DTYPES
from thinwire.codecs import Scheme, registry
from thinwire.frames import CODEC_NUMBERS

every_codec = pytest.mark.parametrize("entry", ENROLLED, ids=lambda entry: entry.label)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


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


def test_every_shipped_codec_is_enrolled() -> None:
    shipped = {codec.id for codec in registry.SHIPPED}
    assert shipped == {entry.codec.id for entry in ENROLLED}, "a codec enrols with one line in tests/codecs/contract.py"


def test_every_codec_class_is_registered_and_numbered() -> None:
    package = import_module("thinwire.codecs")
    found: set[type[Scheme]] = set()
    for module in pkgutil.iter_modules(package.__path__):
        for value in vars(import_module(f"thinwire.codecs.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, Scheme) and "id" in vars(value):
                found.add(value)
    assert found == set(registry.SHIPPED)
    assert {codec.id for codec in found} <= set(CODEC_NUMBERS)
    assert registry.ids()[: len(registry.SHIPPED)] == [codec.id for codec in registry.SHIPPED]


def test_labels_are_unique() -> None:
    labels = [entry.label for entry in ENROLLED]
    assert len(set(labels)) == len(labels)


# ---- round trips


@every_codec
@every_dtype
def test_sizes(entry: Enrolled, dtype: str) -> None:
    for size in samples.SIZES:
        round_trip(entry, samples.tensor(samples.normal(size, seed=size), dtype), dtype)


@every_codec
@every_dtype
@pytest.mark.parametrize("content", samples.CONTENTS)
def test_contents(entry: Enrolled, dtype: str, content: str) -> None:
    decoded = round_trip(entry, samples.tensor(samples.CONTENTS[content](319), dtype), dtype)
    if content == "zero":
        assert not decoded.any(), "zeros came back as something else"


@every_codec
@every_dtype
def test_subnormal(entry: Enrolled, dtype: str) -> None:
    round_trip(entry, samples.subnormal(319, dtype), dtype)


@every_codec
@every_dtype
def test_largest(entry: Enrolled, dtype: str) -> None:
    decoded = round_trip(entry, samples.largest(65, dtype, entry), dtype)
    assert torch.isfinite(decoded).all()


@every_codec
def test_above_the_largest(entry: Enrolled) -> None:
    """The claim is tight: a thousandth more is refused, or is no float32."""
    above = entry.largest * 1.001
    if above <= FLOAT32_MAX:
        with pytest.raises(tw.NonFiniteError):
            entry.codec.encode(torch.tensor([0.5, -above]))


@every_codec
def test_a_million_values(entry: Enrolled) -> None:
    tensor = samples.tensor(samples.normal(samples.BIG), "fp32")
    decoded = round_trip(entry, tensor, "fp32")
    frame = entry.codec.encode(tensor)
    if entry.bits is not None:
        assert tw.frames.parse(frame).bits_per_value <= entry.bits
    total = torch.ones_like(tensor)
    tw.decode(frame, out=total, accumulate=True)
    assert torch.equal(total, torch.ones_like(tensor) + decoded)


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
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(entry: Enrolled, shape: str) -> None:
    tensor = SHAPES[shape]()
    round_trip(entry, tensor, "fp32")
    plain = torch.tensor(tensor.tolist()) if tensor.numel() else torch.zeros(tensor.shape)
    assert entry.codec.encode(tensor) == entry.codec.encode(plain), "the frame depends on the memory layout"


@every_codec
def test_numpy_and_torch_give_the_same_frame(entry: Enrolled) -> None:
    for dtype in ("fp16", "fp32", "fp64"):
        tensor = samples.tensor(samples.heavy_tails(319), dtype)
        array = tensor.numpy()
        frame = entry.codec.encode(tensor)
        assert entry.codec.encode(array) == frame
        assert entry.codec.encode(array.astype(array.dtype.newbyteorder(">"))) == frame
    backwards = np.arange(24, dtype=np.float32).reshape(4, 6)[::-1, ::-2]
    assert entry.codec.encode(backwards) == entry.codec.encode(torch.from_numpy(backwards.copy()))
    fortran = np.asfortranarray(np.arange(24, dtype=np.float32).reshape(4, 6))
    assert entry.codec.encode(fortran) == entry.codec.encode(torch.from_numpy(fortran))


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
    np.arange(3),
    np.zeros(3, dtype=np.complex128),
    np.zeros(3, dtype=np.longdouble),
    np.array(["a"]),
    np.array([None]),
]


@every_codec
def test_what_is_no_floating_tensor(entry: Enrolled) -> None:
    for value in NO_FLOATING_TENSORS:
        with pytest.raises(TypeError, match="codecs take"):
            entry.codec.encode(value)
        with pytest.raises(TypeError, match=r"conv1\.weight"):
            entry.codec.context(torch.zeros(3), name="conv1.weight").encode(value)


@every_codec
def test_too_many_dimensions(entry: Enrolled) -> None:
    assert tw.decode(entry.codec.encode(torch.ones([1] * 32))).ndim == 32
    with pytest.raises(tw.ConfigError, match="33 dimensions"):
        entry.codec.encode(torch.ones([1] * 33))


# ---- decoding into memory that exists


OUTS: dict[str, Callable[[], Any]] = {
    "contiguous": lambda: torch.full((5, 7), 3.0),
    "transposed": lambda: torch.full((7, 5), 3.0).t(),
    "a slice": lambda: torch.full((5, 14), 3.0)[:, ::2],
    "float64": lambda: torch.full((5, 7), 3.0, dtype=torch.float64),
    "float16": lambda: torch.full((5, 7), 3.0, dtype=torch.float16),
    "bfloat16": lambda: torch.full((5, 7), 3.0, dtype=torch.bfloat16),
    "a parameter": lambda: torch.nn.Parameter(torch.full((5, 7), 3.0)),
    "numpy": lambda: np.full((5, 7), 3.0, np.float32),
    "numpy, Fortran order": lambda: np.asfortranarray(np.full((5, 7), 3.0)),
    "numpy float16": lambda: np.full((5, 7), 3.0, np.float16),
}


@every_codec
@pytest.mark.parametrize("kind", OUTS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_out(entry: Enrolled, kind: str, accumulate: bool) -> None:
    frame = entry.codec.encode(samples.tensor(samples.normal(35), "fp32").view(5, 7))
    fresh = tw.decode(frame)
    out = OUTS[kind]()
    result = tw.decode(frame, out=out, accumulate=accumulate)
    held = torch.as_tensor(out)
    cast = fresh.to(held.dtype)
    assert torch.equal(held.detach(), torch.full_like(cast, 3.0) + cast if accumulate else cast)
    assert result.data_ptr() == held.data_ptr(), "a copy came back instead of `out`"


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
]


@every_codec
def test_out_that_does_not_fit(entry: Enrolled) -> None:
    frame = entry.codec.encode(samples.tensor(samples.normal(35), "fp32").view(5, 7))
    for (out, message), accumulate in product(UNFIT_OUTS, (False, True)):
        with pytest.raises(tw.ConfigError, match=message):
            tw.decode(frame, out=out, accumulate=accumulate)
    with pytest.raises(tw.ConfigError, match="no `out`"):
        tw.decode(frame, accumulate=True)


@every_codec
def test_narrow_dtypes_never_decode_to_infinity(entry: Enrolled) -> None:
    """A scale may lie past float16's last number although no value did; the decoded value ends there instead."""
    tensor = torch.tensor([60000.0, -60000.0, 1.0], dtype=torch.float16)
    decoded = tw.decode(entry.codec.encode(tensor))
    assert torch.isfinite(decoded).all()
    array = np.zeros(3, np.float16)
    tw.decode(entry.codec.encode(tensor), out=array)
    assert np.isfinite(array).all()


# ---- NaN and Inf


NON_FINITE = [float("nan"), float("inf"), -float("inf")]


@every_codec
@every_dtype
def test_non_finite_values_are_refused(entry: Enrolled, dtype: str) -> None:
    for value, (size, place) in product(NON_FINITE, ((1, 0), (319, 0), (319, 317), (1000, 999))):
        tensor = samples.tensor(samples.normal(size), dtype)
        tensor[place] = value
        with pytest.raises(tw.NonFiniteError):
            entry.codec.encode(tensor)


@every_codec
@pytest.mark.parametrize("value", NON_FINITE)
def test_non_finite_values_can_be_announced(entry: Enrolled, value: float) -> None:
    frame = entry.with_options(nonfinite="skip").encode(torch.tensor([[1.0, value]]))
    parsed = tw.frames.parse(frame)
    assert parsed.non_finite
    assert (parsed.codec, parsed.shape, parsed.payload, parsed.scales) == (entry.codec.id, (1, 2), b"", ())
    with pytest.raises(tw.FrameError, match="NaN or Inf"):
        tw.decode(frame)


# ---- configuration


@every_codec
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_configuration_round_trips_through_json(entry: Enrolled) -> None:
    config = json.loads(json.dumps(entry.codec.config()))
    again = tw.codec(**config)
    assert again == entry.codec
    assert hash(again) == hash(entry.codec)
    assert again.config() == entry.codec.config()


@every_codec
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_repr_reads_as_the_call(entry: Enrolled) -> None:
    assert eval(repr(entry.codec), {"tw": tw}) == entry.codec


@every_codec
def test_unknown_options_are_refused_by_name(entry: Enrolled) -> None:
    with pytest.raises(tw.ConfigError, match="'sparsiti'"):
        tw.codec(entry.codec.id, sparsiti=1)
    with pytest.raises(tw.ConfigError, match="'gzip'"):
        tw.codec(entry.codec.id, entropy="gzip")
    with pytest.raises(tw.ConfigError, match="'ignore'"):
        tw.codec(entry.codec.id, nonfinite="ignore")
    with pytest.raises(tw.ConfigError, match="error_scale"):
        tw.codec(entry.codec.id, error_scale=1.5)
    with pytest.raises(tw.ConfigError, match="error_scale"):
        tw.codec(entry.codec.id, error_scale=float("nan"))
    with pytest.raises(tw.ConfigError, match="error_feedback"):
        tw.codec(entry.codec.id, error_feedback="yes")


# ---- determinism


@every_codec
def test_one_tensor_gives_one_frame(entry: Enrolled) -> None:
    tensor = samples.tensor(samples.heavy_tails(1000), "fp32")
    frame = entry.codec.encode(tensor)
    entry.codec.encode(samples.tensor(samples.normal(77), "fp32"))  # used memory must not show in later frames
    assert entry.codec.encode(tensor) == frame


@every_codec
def test_threads_do_not_show_in_the_bytes(entry: Enrolled) -> None:
    tensors = [samples.tensor(samples.normal(500 + 137 * i, seed=i), "fp32") for i in range(24)]

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


@pytest.mark.parametrize("entry", [e for e in ENROLLED if e.unbiased], ids=lambda entry: entry.label)
def test_unbiased(entry: Enrolled) -> None:
    assert entry.codec.random, "a deterministic codec is unbiased only where it is exact"
    assert deviations(entry) < MOST_DEVIATIONS


def test_the_test_of_unbiasedness_finds_a_biased_codec() -> None:
    assert deviations(three_lc()) > MOST_DEVIATIONS
