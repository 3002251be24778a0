"""The one line with a single rank, without a group, and on a link that becomes slow."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest

import thinwire as tw
from tests.hooks.ddp_ranks import refusal, run_ranks
from tests.hooks.local_runs import adamw, inner_step, mlp
from thinwire.hooks.auto_choice import LinkWatch
from thinwire.hooks.local_optimizer import LocalUpdateOptimizer


def run_alone(_rank: int) -> tuple[str, list[str], str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("thinwire")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    model = mlp(0)
    with tw.distribute(model, adamw(model)) as opt:
        for number in range(6):
            inner_step(model, opt, 0, number)
        opt.flush()
    return str(opt.report()), said, refusal(opt.step)


def test_single_rank_sends_no_messages() -> None:
    [(report, said, closed)] = run_ranks(1, run_alone)
    assert report == "auto: AdamW, one rank alone" and said == [report] and "is closed" in closed


def test_missing_group_raises_config_error_with_remedy() -> None:
    model = mlp(0)
    with pytest.raises(tw.ConfigError, match=r'torch.distributed.init_process_group\("gloo"\)'):
        tw.distribute(model, adamw(model))
    with pytest.raises(tw.ConfigError, match="design='auto' is for ranks of a group"):
        tw.distribute(model, adamw(model), server="grpc://127.0.0.1:1", design="auto")


def test_slow_link_warns_once() -> None:
    watch, said, exchanging = LinkWatch(), list[str](), 0.0
    opt: Any = mock.Mock(spec=LocalUpdateOptimizer)
    for number in range(200):
        exchanging += 0.1 * (0.8 if number >= 60 else 0.1)
        opt.clock, opt.steps_done, opt.traffic.return_value = number // 4, number, {"exchange_seconds": exchanging}
        with mock.patch("time.perf_counter", return_value=0.1 * number):
            said.append(watch.step_ended(opt))
    [told] = filter(None, said)
    assert 90 < said.index(told) < 100 and "80 % of the time" in told and 'design="local-sgd[h=32]"' in told
