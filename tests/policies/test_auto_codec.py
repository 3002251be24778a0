"""What `codec="auto"` chooses among, in hooks and of local updates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from thinwire.codecs import Codec
from thinwire.codecs.scheme import Scheme
from thinwire.errors import ConfigError
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


def test_a_limit_decides_what_residuals_are_made_for_and_one_that_leaves_no_3lc_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for limit, codec_id, count in ((5.0, "3lc", 4), (1.0, "int8", 2), (0.1, "bf16", 1)):
        auto = AutoCodec(lag_limit=limit)
        assert isinstance(auto.codec, Codec) and auto.codec.id == codec_id
        assert auto.codec in auto.codecs and len(auto.codecs) == count
        caplog.clear()
        auto.warn("exchange")
        assert bool(caplog.text) == (codec_id != "3lc")
        if caplog.text:
            assert f"lag_limit={limit:g}: 3LC keeps 2 exchanges or more" in caplog.text
            assert f"codec=auto stays at {codec_id}" in caplog.text


def test_limits_and_targets_that_cannot_be() -> None:
    for limit in (0, 10**400):
        with pytest.raises(ConfigError, match="lag_limit="):
            AutoCodec(lag_limit=limit)
    given: Any = np.int64(5)
    assert AutoCodec(lag_limit=given).agreement() == AutoCodec().agreement()
    with pytest.raises(ConfigError, match="target='size'"):
        AutoCodec(target="size")  # type: ignore[arg-type]
