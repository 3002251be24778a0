"""Codecs that workers choose for an exchange: what a shard makes of it, what it passes on, and what it refuses."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from thinwire.codecs import decode
from thinwire.codecs.registry import codec
from thinwire.errors import ProtocolError
from thinwire.frames import parse
from thinwire.schema import Delta, Plan, TableSpec, TunedDelta, TunedPush, Values
from thinwire.server.update_engine import UpdateEngine
from thinwire.server.updates import Outgoing

pytestmark = pytest.mark.filterwarnings("ignore:terngrad is unbiased")

with warnings.catch_warnings(action="ignore"):  # an unbiased codec with a residual
    CODECS = tuple(
        codec(name, **options)
        for name, options in (
            ("3lc", {"lag": 5.0, "sparsity": 1.9}),
            ("int8", {"error_feedback": True}),
            ("bf16", {"error_feedback": True}),
            ("int8", {"error_feedback": False}),
            ("terngrad", {"error_feedback": True}),
        )
    )
PLAN = Plan(
    workers=2,
    tables=(TableSpec(name="w", shape=(40, 50)), TableSpec(name="v", shape=(300,), up=2, down=2)),
    codecs=tuple(each.config() for each in CODECS),
    optimizer="SGD",
    groups=({},),
)


def engine(plan: Plan = PLAN) -> UpdateEngine:
    made = UpdateEngine(plan)
    frames = tuple(codec("fp32").encode(np.zeros(spec.shape, np.float32)) for spec in plan.tables)
    made.assign(0, Values(tables=(0, 1), versions=(0, 0)), frames)
    return made


def push(made: UpdateEngine, rank: int, step: int, which: int, note: bytes = b"", **said: object) -> list[Outgoing]:
    """Pushes both tables: the first as the exchange's codec has it, the second as planned."""
    values = np.random.default_rng(10 * step + rank).standard_normal
    frames = (CODECS[which].encode(values((40, 50))), CODECS[2].encode(values(300)))
    tuned = {"codec": which, "note": note, **said}
    return made.push(
        rank,
        TunedPush(step=step, tables=(0, 1), rates=(1.0,), **tuned),  # type: ignore[arg-type]
        tuple(map(bytes, frames)),
        left=(),
    )


def ids(sent: list[Outgoing]) -> list[str]:
    return [
        parse(bytes(frame)).codec for each in sent for frame in each.frames if isinstance(frame, bytes | memoryview)
    ]


def test_pulls_have_the_lowest_ranks_codec_and_what_was_not_sent_goes_with_the_next() -> None:
    made, held = engine(), np.zeros((40, 50), np.float32)
    assert made.tables[0].downlink.values.sum() == 0
    for step, (of_0, of_1) in enumerate(((0, 0), (1, 2), (0, 1), (2, 2))):
        assert push(made, 1, step, of_1) == []
        sent = push(made, 0, step, of_0)
        assert ids(sent)[0] == CODECS[of_0].id, step
        held += decode(bytes(sent[0].frames[0])).numpy()  # type: ignore[arg-type]
        np.testing.assert_array_equal(held, made.tables[0].replica)
    lacking = np.abs(made.tables[0].residual).max()
    assert 0 < lacking < 0.02 * np.abs(made.tables[0].values.numpy()).max(), "bf16 sent what 3LC had left"
    assert made.tables[1].downlink.codec == CODECS[2], "which was not replaced"


def test_notes_are_passed_on_once() -> None:
    made = engine()
    push(made, 1, 0, 0, b"one")
    [sent] = push(made, 0, 0, 0, b"zero")
    assert isinstance(sent.message, TunedDelta)
    assert sent.message.notes == ((0, b"zero"), (1, b"one"))
    push(made, 1, 1, 0)
    [sent] = push(made, 0, 1, 0)
    assert type(sent.message) is Delta


def test_codecs_and_options_that_cannot_be_are_refused() -> None:
    wrong: list[tuple[int, dict[str, Any], str]] = [
        (9, {}, "an exchange with codec 9"),
        (3, {}, "'int8', which keeps no residual"),
        (4, {}, "'terngrad', which keeps no residual, or draws random numbers"),
        (0, {"replaced": -1}, "an exchange with codec -1"),
        (0, {"replaced": 3}, "'int8', which keeps no residual"),
        (0, {"sparsity": 2.0}, "multiplier of 2.0"),
        (0, {"sparsity": float("nan")}, "multiplier of nan"),
        (1, {"codec": 0}, "codec 'int8' came, '3lc' was agreed on"),
    ]
    for which, said, expected in wrong:
        with pytest.raises(ProtocolError, match=expected):
            push(engine(), 0, 0, min(which, 1), **{"codec": which, **said})
