"""3LC on the device beside the oracle and beside one call for each tensor: every byte, residual and output."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import thinwire as tw
from tests.kernels import oracle
from thinwire.codecs import Context
from thinwire.codecs.ternary_device import DeviceTernary
from thinwire.kernels.triton import batch
from thinwire.kernels.triton.ternary import encode_ternary
from thinwire.kernels.triton.ternary_decode import decode_ternary
from thinwire.kernels.triton.workspace import DeviceWorkspace

pytestmark = pytest.mark.gpu

Floats = NDArray[Any]
# Around groups of five, runs of fourteen, and blocks (of 512 codes; under the interpreter of 64, so 320 values).
SIZES = (1, 2, 4, 5, 6, 63, 70, 71, 319, 320, 321, 640, 1500)
ZERO_FRACTIONS = (0.0, 0.6, 0.9, 0.99, 0.999, 1.0)


@pytest.fixture
def space(device: torch.device) -> DeviceWorkspace:
    return DeviceWorkspace(device)


def draw(size: int, zero_fraction: float, dtype: str, seed: int) -> tuple[Floats, Floats]:
    """Values of which about this share is quantised to zero, and a small residual."""
    random = np.random.default_rng([seed, size])
    values = random.choice([-1.0, 1.0], size) * (random.random(size) >= zero_fraction)
    values = (values * random.uniform(0.8, 1.0, size)).astype(dtype)
    return values, (0.01 * random.standard_normal(size)).astype(dtype)


def check(values: list[Floats], residuals: list[Floats] | None, space: DeviceWorkspace, **options: Any) -> list[bytes]:
    """Encodes on both sides, compares everything, decodes (every other tensor adds); returns the payloads."""
    on_device = [torch.from_numpy(v.copy()).to(space.device) for v in values]
    kept = None if residuals is None else [torch.from_numpy(r.copy()).to(space.device) for r in residuals]
    sents = encode_ternary(on_device, residuals=kept, workspace=space, **options).finish()
    payloads = [bytes(sent.payload) for sent in sents]
    for at, (value, sent) in enumerate(zip(values, sents, strict=True)):
        residual = None if residuals is None else residuals[at].copy()
        scale, payload = oracle.encode_ternary(value, residual=residual, **options)
        assert sent.finite and sent.scale == scale
        assert payloads[at] == payload.tobytes()
        assert on_device[at].cpu().numpy().tobytes() == value.tobytes()
        if kept is not None and residual is not None:
            assert kept[at].cpu().numpy().tobytes() == residual.tobytes()
        form: dict[str, Any] = {"accumulate": at % 2 == 1}
        expected = np.linspace(-1, 1, value.size).astype(value.dtype)
        expected[::3] = -0.0
        out = torch.from_numpy(expected.copy()).to(space.device)
        oracle.decode_ternary(payload, scale=scale, out=expected, **form)
        space.synchronize()
        decode_ternary([payloads[at]], scales=[scale], outs=[out], workspace=space, **form)
        assert out.cpu().numpy().tobytes() == expected.tobytes()
    return payloads


def test_bytes_residuals_and_values_are_the_oracles(space: DeviceWorkspace) -> None:
    for turn, dtype in enumerate(("float32", "float64")):
        # One batch, so that tensors of every size and share of zeros are neighbours.
        drawn = [draw(size, ZERO_FRACTIONS[(at + turn) % 6], dtype, turn) for at, size in enumerate(SIZES)]
        # Three blocks of the interpreter's, which takes a second for each turn's; whole blocks and a last one in part.
        size = SIZES[-1] if space.device.type == "cuda" else 700
        drawn += [draw(size, zero_fraction, dtype, seed=1) for zero_fraction in ZERO_FRACTIONS]
        sparsity = (1.2, 0.7)[turn]  # below 1 the largest values are sent in part
        check([v for v, _ in drawn], [r for _, r in drawn], space, sparsity=sparsity)
    drawn = [draw(size, 0.97, "float32", seed=2) for size in (1, 7, 71, 321)]
    check([v for v, _ in drawn], [r for _, r in drawn], space, sparsity=1.75, residual_scale=0.1)


def test_runs_that_meet_at_block_borders(space: DeviceWorkspace) -> None:
    # One value in a ground of zeros moves over the borders between blocks, so that runs of every length modulo
    # fourteen end there, begin there, or fill a block.
    block = batch.TILE // 8
    values = []
    for code in (0, 1, 13, block - 14, block - 2, block - 1, block, block + 1, block + 13, 2 * block - 1, 2 * block):
        for ends in ((), (block - 1, block)):
            value = np.zeros(5 * 3 * block, np.float32)
            value[[5 * at for at in (code, *ends)]] = 1.0
            values.append(value)
    check(values, None, space, sparsity=1.0)


def test_nan_and_inf_leave_residuals_unchanged(space: DeviceWorkspace) -> None:
    for bad, together in product((np.nan, np.inf, -np.inf), (False, True)):
        drawn = [draw(size, 0.5, "float32", seed=5) for size in (10, 1000, 20)]
        drawn[1][0][900] = bad
        values = [torch.from_numpy(v).to(space.device) for v, _ in drawn]
        residuals = [torch.from_numpy(r.copy()).to(space.device) for _, r in drawn]
        sents = encode_ternary(values, residuals=residuals, sparsity=1.0, together=together, workspace=space).finish()
        assert [sent.finite for sent in sents] == [True, False, True], (bad, together)
        unchanged = [r.cpu().numpy().tobytes() == old.tobytes() for r, (_, old) in zip(residuals, drawn, strict=True)]
        assert unchanged == [together, True, together], (bad, together)


def test_any_split_of_a_run_decodes(space: DeviceWorkspace) -> None:
    for payload in ([121] * 30, [243] * 15, [255, 255, 243], [243, 121, 255, 254], [0, 242, *[250] * 3, 121]):
        sizes = [1 if byte < 243 else byte - 241 for byte in payload]
        out = torch.ones(5 * sum(sizes), device=space.device)
        expected = np.ones(out.numel(), np.float32)
        space.synchronize()
        decode_ternary([bytes(payload)], scales=[0.5], outs=[out], workspace=space)
        oracle.decode_ternary(bytes(payload), scale=0.5, out=expected)
        assert out.cpu().numpy().tobytes() == expected.tobytes()


LENGTHS = (1, 5, 7, 700, 1203)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"sparsity": 1.75},
    {"entropy": "zstd", "error_scale": 0.5},
    {"error_feedback": False},
)


def drawn(seed: int, device: torch.device) -> torch.Tensor:
    """All tensors in one, each behind a gap, so that they begin anywhere."""
    return torch.randn(sum(LENGTHS) + len(LENGTHS), generator=torch.Generator().manual_seed(seed)).to(device)


def pieces(flat: torch.Tensor) -> list[torch.Tensor]:
    ends = np.cumsum([size + 1 for size in LENGTHS]).tolist()
    return [flat[end - size : end] for end, size in zip(ends, LENGTHS, strict=True)]


def places(flat: torch.Tensor) -> Any:
    return np.array([each.data_ptr() for each in pieces(flat)], np.int64)


def contexts(options: dict[str, Any], device: torch.device) -> list[Context]:
    codec = tw.codec("3lc", **options)
    return [codec.context(each, name=str(each.numel())) for each in pieces(drawn(0, device))]


def test_batch_equals_single_frames_residuals_and_sums(device: torch.device) -> None:
    for options in OPTIONS:
        together, apart = contexts(options, device), contexts(options, device)
        batch = DeviceTernary(together)
        for step in range(3):
            flat = drawn(step, device)
            frames = batch.encode(places(flat))
            assert frames == [context.encode(each) for context, each in zip(apart, pieces(flat), strict=True)]
            for ours, theirs in zip(together, apart, strict=True):
                assert (ours.step, ours.payload_nbytes) == (theirs.step, theirs.payload_nbytes)
                assert (ours.residual is None) == (theirs.residual is None)
                assert ours.residual is None or theirs.residual is None or torch.equal(ours.residual, theirs.residual)
            out, expected = drawn(7, device), drawn(7, device)
            adds = np.array([True, False, True, False, True])
            nbytes = batch.decode(frames, places(out), adds)
            for frame, each, add in zip(frames, pieces(expected), adds.tolist(), strict=True):
                tw.decode(frame, out=each, accumulate=add)
            assert torch.equal(out, expected)
            assert nbytes == [context.payload_nbytes for context in together]


def test_unsupported_tensors_and_frames_are_skipped(device: torch.device) -> None:
    batch, flat = DeviceTernary(contexts({}, device)), drawn(1, device)
    frames = batch.encode(places(flat))
    assert frames is not None
    frames[0], frames[1], frames[2] = b"", tw.codec("int8").encode(np.ones(5, np.float32)), frames[3]
    frames[3] = frames[3][:-1] + bytes([frames[3][-1] ^ 1])
    out = torch.full_like(flat, 7.0)
    done = batch.decode(frames, places(out), np.zeros(5, np.bool_))
    assert [nbytes > 0 for nbytes in done] == 4 * [False] + [True]
    assert bool((out[: -LENGTHS[-1]] == 7).all())
    assert batch.decode([b""] * 5, places(out), np.zeros(5, np.bool_)) == [0] * 5


def test_nan_leaves_all_residuals_alone(device: torch.device) -> None:
    made = contexts({}, device)
    batch, flat = DeviceTernary(made), drawn(1, device)
    assert batch.encode(places(flat)) is not None
    before = [context.residual.clone() for context in made if context.residual is not None]
    flat[-3] = torch.nan
    assert batch.encode(places(flat)) is None
    for context, residual in zip(made, before, strict=True):
        assert context.step == 1 and context.residual is not None and torch.equal(context.residual, residual)
