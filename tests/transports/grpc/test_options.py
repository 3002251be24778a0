"""A session's limits: what is refused, and how it is said."""

from __future__ import annotations

from typing import Any

import pytest

from thinwire.errors import ConfigError
from thinwire.transports.grpc import GrpcOptions


def test_a_value_out_of_range_is_named() -> None:
    for option, value in (
        ("max_message_nbytes", 0),
        ("max_message_nbytes", 2**31),
        ("max_pending_nbytes", 0),
        ("keepalive_s", 0.5),
        ("keepalive_s", float("nan")),
    ):
        options: dict[str, Any] = {option: value}
        with pytest.raises(ConfigError, match=f"{option} is {value}; give"):
            GrpcOptions(**options)
