"""A state is gone on from by the same local updates alone; `tests/hooks/local/test_resume.py` has whole trainings."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import pytest

from thinwire.errors import ConfigError
from thinwire.policies.designs import design
from thinwire.worker.same_updates import check_same, coded_by


def position(name: str) -> dict[str, Any]:
    of = design(name)
    assert of.local is not None
    return {"local": asdict(of.local), "coded": coded_by(of)}


@pytest.mark.parametrize(
    ("saved", "here", "told"),
    [
        ("local-sgd[h=4]", "local-sgd[h=8]", "the state is of h=4 and this training has h=8: resume with the same"),
        ("local-sgd[h=4]", "local-sgd[h=4,s=1.5]", "codec.sparsity=1.0, codec_down.sparsity=1.0 and"),
        ("update[codec=auto]", "update", "the state is of codec=auto and this training has codec=3lc:"),
        ("update", "update[codec=auto]", "the state is of codec=3lc and this training has codec=auto:"),
        ("update[codec=auto]", "update[codec=auto,target=bytes]", "codec='auto=5,target=bytes'"),
        ("diloco", "diloco[small=bf16]", "compression='by-shape[small=bf16]'"),
    ],
)
def test_what_differs_is_told_by_the_options_of_a_design(saved: str, here: str, told: str) -> None:
    check_same(position(saved), design(saved))
    with pytest.raises(ConfigError, match=re.escape(told)):
        check_same(position(saved), design(here))


def test_older_states_and_other_threads_are_gone_on_from() -> None:
    saved = position("diloco")
    del saved["coded"]
    check_same(saved, design("diloco[s=1.5]"))  # which shards refuse
    check_same(position("diloco"), design("diloco[threads=2]"))
    with pytest.raises(ConfigError, match="the state is of a training without local updates"):
        check_same({}, design("diloco"))
    with pytest.raises(ConfigError, match="the state is of codec="):
        check_same({**saved, "coded": {}}, design("diloco"))
