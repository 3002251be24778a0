"""A rank that fails ends at once with its own error, whatever the other ranks do."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import pytest
from torch import nn

from tests.hooks.cluster import run_cluster
from tests.hooks.ddp_ranks import run_script
from tests.hooks.local_runs import mlp, sgd
from thinwire.errors import SessionLostError
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.ending import FAILED_S


def test_failing_rank_raises_its_own_error_and_waits_for_no_busy_or_frozen_rank() -> None:
    busy, frozen = run_script(2, Path(__file__).with_name("failing_ranks.py")).splitlines()
    for line, name in ((busy, "busy"), (frozen, "frozen")):
        found = re.fullmatch(rf"{name}: Mine after (\d+) s, (TransportError|SessionLostError|ProtocolError)", line)
        assert found is not None and int(found[1]) < 20, line


def goodbye(error: BaseException | None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float | None, str]]:
    """How long a worker that ends with an error waits for its server, and what it says of the error."""

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> list[tuple[float | None, str]]:
        asked: list[tuple[float | None, str]] = []
        close = opt._driver.close
        monkeypatch.setattr(opt._driver, "close", lambda within_s, failure="": asked.append((within_s, failure)))
        with suppress(KeyError, OSError, KeyboardInterrupt, SystemExit, SessionLostError), opt:
            if error is not None:
                raise error
        close()
        return asked

    [asked], _ = run_cluster(mlp, train, workers=1, optimizer=sgd, design="3lc")
    return list(asked)


def test_failures_alone_shorten_the_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.hooks.ending.FAILED_S", FAILED_S)  # not the short one of these tests
    for error, within_s, told in (
        (KeyError("mine"), FAILED_S, "KeyError: 'mine'"),
        (KeyError("half \ud800"), FAILED_S, r"KeyError: 'half \ud800'"),
        (OSError("half \ud800"), FAILED_S, "OSError: half ?"),
        (KeyboardInterrupt(), FAILED_S, "KeyboardInterrupt"),
        (SystemExit(1), FAILED_S, "SystemExit: 1"),
        (SystemExit(), None, ""),  # the end of a script
        (SessionLostError("all go back"), None, ""),  # the shards are to hear it
        (None, None, ""),
    ):
        assert goodbye(error, monkeypatch) == [(within_s, told)], error
