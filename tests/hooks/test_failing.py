"""A rank that fails says so at once, whatever the others do."""

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


def test_a_rank_that_fails_waits_for_no_silent_one_and_its_error_is_what_is_raised() -> None:
    """Without it a busy rank was waited for half a minute, and a frozen one as long as in a step, ten minutes."""
    busy, frozen = run_script(2, Path(__file__).with_name("failing_ranks.py")).splitlines()
    for line, name in ((busy, "busy"), (frozen, "frozen")):
        found = re.fullmatch(rf"{name}: Mine after (\d+) s, (TransportError|SessionLostError|ProtocolError)", line)
        assert found is not None and int(found[1]) < 20, line


@pytest.mark.parametrize(
    ("error", "within_s", "told"),
    [
        (KeyError("mine"), FAILED_S, "KeyError: 'mine'"),
        (KeyError("half \ud800"), FAILED_S, r"KeyError: 'half \ud800'"),
        (OSError("half \ud800"), FAILED_S, "OSError: half ?"),
        (KeyboardInterrupt(), FAILED_S, "KeyboardInterrupt"),
        (SystemExit(1), FAILED_S, "SystemExit: 1"),
        (SystemExit(), None, ""),  # the end of a script
        (SessionLostError("all go back"), None, ""),  # which the shards are to have heard
        (None, None, ""),
    ],
)
def test_only_what_fails_has_no_time(
    error: BaseException | None, within_s: float | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        asked: list[tuple[float | None, str]] = []
        close = opt._driver.close
        monkeypatch.setattr(opt._driver, "close", lambda within_s, failure="": asked.append((within_s, failure)))
        with suppress(KeyError, OSError, KeyboardInterrupt, SystemExit, SessionLostError), opt:
            if error is not None:
                raise error
        close()
        assert asked == [(within_s, told)]

    run_cluster(mlp, train, workers=1, optimizer=sgd, design="3lc")
