"""The settings of `codec="auto"`: which there are, on which devices, and what limits are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from thinwire.codecs.scheme import Scheme
from thinwire.errors import ConfigError
from thinwire.policies.auto import levels
from thinwire.policies.auto.levels import Limits, residual_codec


def test_setting_without_kernels_where_tensors_are_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(scheme: Scheme, device: torch.device) -> str | None:
        return f"no {scheme.id} on {device}" if scheme.id == "int8" else None

    monkeypatch.setattr(levels, "why_not_encoded", missing)
    host, gpu = torch.device("cpu"), torch.device("meta")
    all_three = ["uncompressed", "bf16", "int8"]
    for devices, expected in (((), all_three), ((host,), all_three), ((host, gpu), ["uncompressed", "bf16"])):
        assert [level.name for level in Limits(lag_limit=1).levels(devices)] == expected


def test_limit_decides_what_residuals_are_made_for_and_one_without_3lc_warns(caplog: pytest.LogCaptureFixture) -> None:
    for limit, codec_id in ((5.0, "3lc"), (1.0, "int8"), (0.1, "bf16")):
        caplog.clear()
        assert residual_codec(Limits(lag_limit=limit).levels()).id == codec_id
        assert ("codec='auto' stays at" in caplog.text) == (codec_id != "3lc")


def test_limits_and_targets_that_cannot_be_are_refused() -> None:
    for limit in (0, 10**400, True, "5"):
        with pytest.raises(ConfigError, match="lag_limit="):
            Limits(lag_limit=limit)  # type: ignore[arg-type]
    given: Any = np.int64(5)
    assert Limits(lag_limit=given) == Limits()
    with pytest.raises(ConfigError, match="target='size'"):
        Limits(target="size")  # type: ignore[arg-type]
