"""Many steps: what every enrolled codec must do with a residual, a random stream and their state."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.codecs import samples
from tests.codecs.contract import ENROLLED, Enrolled, every_codec, naming, one_item, one_item_each
from tests.codecs.samples import DTYPES
from tests.codecs.test_contract import NON_FINITE

SHAPE = (9, 11)


def gradients(count: int, dtype: str = "fp32", seed: int = 3) -> list[torch.Tensor]:
    """A run's gradients for one layer: noise around a direction that turns slowly, as in training."""
    noise = samples.normal(count * 99, seed).reshape(count, *SHAPE)
    turn = np.sin(np.arange(count) / 40)[:, None, None]
    return [samples.tensor(step, dtype) for step in 0.1 * noise + 0.3 * turn]


# ---- the residual


@every_codec
def test_context_keeps_a_residual_as_its_codec_says(entry: Enrolled) -> None:
    tensor = samples.tensor(samples.heavy_tails(99), "fp32").view(SHAPE)
    context = entry.codec.context(tensor, name="", seed=0)
    assert (context.residual is not None) == entry.codec.residual_by_default
    if context.residual is not None:
        assert context.residual.shape == SHAPE
        assert not context.residual.any(), "a new context starts from zero, not from its example"
    assert context.encode(tensor) == entry.codec.encode(tensor), "the first frame of a context is the codec's own"
    for tensor in gradients(3):
        frame = context.encode(tensor)
        assert context.payload_nbytes == len(tw.frames.parse(frame).payload)


@every_codec
def test_frames_and_states_stay_on_the_host_with_any_default_device(entry: Enrolled) -> None:
    tensor = samples.tensor(samples.heavy_tails(99), "fp32").view(SHAPE)
    context, again = (entry.codec.context(tensor, seed=0) for _ in range(2))
    context.encode(tensor)
    with torch.device("meta"):
        decoded = tw.decode(entry.codec.encode(tensor))
        again.load_state_dict(context.state_dict())
        assert decoded.is_cpu and context.encode(tensor) == again.encode(tensor)


@one_item
def test_error_feedback_works_warns_or_is_refused_as_claimed(entry: Enrolled) -> None:
    options = {**entry.codec.config(), "error_feedback": True}
    if entry.feedback == "refused":
        with pytest.raises(tw.ConfigError, match="error_feedback"):
            tw.codec(**options)
    else:
        with warnings.catch_warnings(record=True, action="always") as caught:
            codec = tw.codec(**options)
        assert len(caught) == (1 if entry.feedback == "warned" else 0)
        assert codec.context(torch.zeros(3)).residual is not None
    assert entry.with_options(error_feedback=False).context(torch.zeros(3)).residual is None


@one_item_each([entry for entry in ENROLLED if entry.feedback != "refused"])
def test_sent_plus_residual_equals_the_input(entry: Enrolled) -> None:
    """residual ← error_scale · residual + input − decoded, over many steps: with a scale of 1, nothing is lost."""
    for dtype, steps, scale in (
        ("fp32", 200, 1.0),
        ("fp32", 30, 0.5),
        ("fp16", 30, 1.0),
        ("bf16", 30, 1.0),
        ("fp64", 60, 1.0),
    ):
        with naming(f"{dtype}, error_scale={scale}"):
            inputs = gradients(steps, dtype)
            context = entry.with_options(error_feedback=True, error_scale=scale).context(inputs[0])
            compute = torch.float64 if dtype == "fp64" else torch.float32
            kept = np.zeros(99)
            for tensor in inputs:
                decoded = tw.decode(context.encode(tensor), out=torch.empty(SHAPE, dtype=compute))
                kept = scale * kept + samples.wide(tensor) - samples.wide(decoded)
            assert context.residual is not None and context.residual.dtype == compute
            largest = max(float(tensor.abs().max()) for tensor in inputs) + float(context.residual.abs().max())
            rounding = steps * largest * (2.0**-50 if dtype == "fp64" else 2.0**-21)
            np.testing.assert_allclose(samples.wide(context.residual), kept, rtol=0, atol=rounding)


@one_item_each([entry for entry in ENROLLED if entry.residual is not None])
def test_residual_stays_within_its_claim(entry: Enrolled) -> None:
    assert entry.residual is not None
    context = entry.with_options(error_feedback=True).context(torch.zeros(400))
    random = np.random.default_rng(8)
    worst = 0.0
    for _ in range(400):
        context.encode(random.uniform(-1, 1, 400).astype(np.float32))
        assert context.residual is not None
        worst = max(worst, float(context.residual.abs().max()))
    assert worst <= entry.residual * (1 + 1e-4)
    if entry.codec.error_scale == 1.0:
        assert worst >= 0.3 * entry.residual, "the claim is far from what happens: the test would miss a fault"


# ---- refusals leave everything as it was


@every_codec
def test_refused_tensors_leave_the_residual_unchanged(entry: Enrolled) -> None:
    for dtype, policy in product(DTYPES, ("raise", "skip")):
        codec = entry.with_options(nonfinite=policy)
        inputs = gradients(4, dtype)
        context = codec.context(inputs[0], name="conv1.weight")
        for tensor in inputs[:3]:
            context.encode(tensor)
        before = None if context.residual is None else samples.raw(context.residual)
        for value in NON_FINITE:
            with naming(f"{value} in {dtype}, nonfinite={policy!r}"):
                bad = inputs[3].clone()
                bad[8, 10] = value
                step = context.step
                if policy == "raise":
                    with pytest.raises(tw.NonFiniteError, match=r"conv1\.weight"):
                        context.encode(bad)
                    assert context.step == step
                else:
                    assert tw.frames.parse(context.encode(bad)).non_finite
                assert (None if context.residual is None else samples.raw(context.residual)) == before
        tw.decode(context.encode(inputs[3]))
    context = entry.codec.context(torch.zeros(SHAPE), name="fc.bias")
    with pytest.raises(tw.ConfigError, match=r"fc\.bias has shape \(99,\)"):
        context.encode(torch.zeros(99))
    if context.residual is not None:
        with pytest.raises(tw.ConfigError, match=r"fc\.bias has dtype fp64"):
            context.encode(torch.zeros(SHAPE, dtype=torch.float64))
    context.encode(torch.ones(SHAPE, dtype=torch.bfloat16))  # mixed precision changes its mind; the residual is float32


# ---- the random numbers, and exact resume


@one_item
def test_random_numbers_depend_on_seed_and_name(entry: Enrolled) -> None:
    tensor = samples.tensor(samples.normal(99), "fp32").view(SHAPE)

    def frames(name: str, seed: int) -> list[bytes]:
        context = entry.codec.context(tensor, name=name, seed=seed)
        return [context.encode(tensor) for _ in range(3)]

    first = frames("a", 1)
    assert first == frames("a", 1)
    if entry.codec.random:
        assert first != frames("a", 2) and first != frames("b", 1)
        assert len(set(first)) == 3
    else:
        assert first == frames("b", 2)


@every_codec
def test_context_state_resumes_exactly(entry: Enrolled) -> None:
    for dtype in ("fp32", "fp64", "bf16"):
        with naming(dtype):
            inputs = gradients(10, dtype)
            through = entry.codec.context(inputs[0], name="w", seed=9)
            for tensor in inputs[:5]:
                through.encode(tensor)
            state, file = through.state_dict(), io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            resumed = entry.codec.context(inputs[0], name="w")
            resumed.load_state_dict(torch.load(file, weights_only=True))
            kept = None if "residual" not in state else samples.raw(state["residual"])
            assert [through.encode(t) for t in inputs[5:]] == [resumed.encode(t) for t in inputs[5:]]
            assert (kept, 5) == (None if kept is None else samples.raw(state["residual"]), state["step"]), "no copy"
    context = entry.codec.context(torch.zeros(SHAPE), name="w")
    state = context.state_dict()
    if context.residual is not None:
        with pytest.raises(tw.ConfigError, match=r"w: the state's residual has shape"):
            context.load_state_dict({**state, "residual": torch.zeros(99)})
        with pytest.raises(tw.ConfigError, match="w: this context keeps a residual"):
            context.load_state_dict({key: value for key, value in state.items() if key != "residual"})
    else:
        with pytest.raises(tw.ConfigError, match="w: this context does not keep a residual"):
            context.load_state_dict({**state, "residual": torch.zeros(SHAPE)})


@pytest.mark.filterwarnings("ignore::UserWarning")
@one_item
def test_deepcopy_of_a_context_is_equal_and_independent(entry: Enrolled) -> None:
    if not entry.codec.residual_by_default:
        return
    values = torch.linspace(-1, 1, 200)
    context = entry.codec.context(values, seed=3)
    context.encode(values)
    for made in (copy.deepcopy(context), pickle.loads(pickle.dumps(context))):
        resumed = entry.codec.context(values, seed=3)
        made.encode(values)
        assert made.residual is not None and made.residual.data_ptr() == made.residual_address
        resumed.load_state_dict(made.state_dict())
        assert made.encode(values) == resumed.encode(values)
    assert context.step == 1, "a copy is a context of its own"


def test_context_damaged_state_is_refused_before_a_change() -> None:
    context = tw.codec("3lc").context(torch.zeros(4))
    context.encode(torch.tensor([0.9, -0.8, 0.1, 0.2]))
    good = context.state_dict()
    wrongs: list[dict[str, Any]] = [
        *({"step": None}, {"step": 1.7}, {"step": -1}, {"seed": "x"}, {"residual": [0.0] * 4}),
        *({"residual": torch.full((4,), math.nan)}, {"residual": torch.full((4,), 1e300, dtype=torch.float64)}),
        *({"residual": torch.zeros(4).to_sparse()}, {"residual": torch.zeros(4, device="meta")}),
        {"residual": torch.zeros(4, dtype=torch.complex64)},
    ]
    for wrong in wrongs:
        with naming(f"{wrong}"), pytest.raises(tw.ConfigError, match=next(iter(wrong))):
            context.load_state_dict({**good, "step": 9, **wrong})
        now = context.state_dict()
        assert now["step"] == 1 and torch.equal(now["residual"], good["residual"])
    with pytest.raises(tw.ConfigError, match="got `array`"):
        context.load_state_dict([1])
    with pytest.raises(tw.ConfigError, match="seed"):
        tw.codec("terngrad").context(torch.zeros(4), seed=1.0)  # type: ignore[arg-type]
