"""What `codec="auto"` chooses among, in hooks and of local updates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from thinwire.codecs import Codec
from thinwire.codecs.scheme import Scheme
from thinwire.errors import ConfigError
from thinwire.hooks.exchange.options import ExchangeOptions
from thinwire.kernels import triton
from thinwire.policies.auto_codec import AutoCodec
from thinwire.policies.autopilot import levels


def test_a_setting_without_kernels_where_tensors_are_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(scheme: Scheme, device: torch.device) -> str | None:
        return f"no {scheme.id} on {device}" if scheme.id == "int8" else None

    monkeypatch.setattr(levels, "why_not_encoded", missing)
    auto, gpu, host = AutoCodec(lag_limit=1), torch.device("meta"), torch.device("cpu")
    for devices, expected in (
        ((), ["uncompressed", "bf16", "int8"]),
        ((host,), ["uncompressed", "bf16", "int8"]),
        ((host, gpu), ["uncompressed", "bf16"]),
    ):
        found = [level.name for level in auto.settings(devices, uncompressed=True)]
        assert found == expected
        assert [level.name for level in auto.settings(devices)] == expected[1:], "local updates have no other"


@pytest.mark.parametrize("limit", [5.0, 0.1])
def test_where_no_setting_has_kernels_the_host_encodes_all(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    auto, there = AutoCodec(lag_limit=limit), {torch.device("meta")}
    for uncompressed in (True, False):
        assert auto.settings(there, uncompressed=uncompressed) == auto.settings(uncompressed=uncompressed)
    asked = ExchangeOptions(codec="auto", lag_limit=limit)
    assert asked.choices({"w": (100, 100)}, asked.settings(there))["w"].up.id == auto.codec.id
    monkeypatch.setattr(triton, "find_spec", lambda name: None)
    assert auto.settings({torch.device("cuda")}) == auto.settings()


def test_what_residuals_are_made_for_serves_all_settings() -> None:
    for limit, codec_id, count in ((5.0, "3lc", 4), (1.0, "int8", 2), (0.1, "bf16", 1)):
        auto = AutoCodec(lag_limit=limit)
        assert isinstance(auto.codec, Codec) and auto.codec.id == codec_id
        assert auto.codec in auto.codecs and len(auto.codecs) == count


@pytest.mark.parametrize(
    ("limit", "unit", "told"),
    [
        (5.0, "step", ""),
        (1.5, "step", "lag_limit=1.5: 3LC keeps 2 steps or more waiting even at s = 1; codec=auto stays at int8"),
        (
            0.1,
            "exchange",
            "lag_limit=0.1: 3LC keeps 2 exchanges or more waiting even at s = 1; codec=auto stays at bf16",
        ),
    ],
)
def test_a_limit_that_leaves_no_3lc_is_warned_of(
    limit: float, unit: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    AutoCodec(lag_limit=limit).warn(unit)  # type: ignore[arg-type]
    assert (told in caplog.text) if told else not caplog.text


def test_what_cannot_be() -> None:
    for limit in (0, 10**400):
        with pytest.raises(ConfigError, match=rf"lag_limit={str(limit)[:60]}.*; it is a number of steps above 0"):
            AutoCodec(lag_limit=limit)
    given: Any = np.int64(5)
    assert AutoCodec(lag_limit=given).agreement() == AutoCodec().agreement()
    with pytest.raises(ConfigError, match="target='size'; allowed are 'time' and 'bytes'"):
        AutoCodec(target="size")  # type: ignore[arg-type]
