"""The examples of local updates, run on two ranks as torchrun would start them; every rank serves a share."""

from __future__ import annotations

import re
from pathlib import Path

from tests.hooks.ddp_ranks import run_script

EXAMPLES = Path(__file__).parents[3] / "examples"


def figure(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, text
    return float(found[1].replace(",", ""))


def test_a_transformer_trains_with_adamw() -> None:
    text = run_script(2, EXAMPLES / "local_updates.py", "--steps", "20", "--design", "local-sgd[h=4]")
    assert figure(r"held-out loss ([0-9.]+) nats", text) < 4, "4.85 before training"
    assert figure(r"([0-9]+)x less than float32", text) > 15, "the first weights, which travel once, are in it"


def test_only_adapters_travel() -> None:
    arguments = ("--width", "64", "--blocks", "2", "--rank", "4", "--steps", "16")
    text = run_script(2, EXAMPLES / "lora.py", *arguments)
    adapters, whole = figure(r"adapters: ([0-9,]+) of", text), figure(r"of ([0-9,]+) parameters", text)
    assert (adapters, whole - adapters) == (8192, 120_064)
    before, after = figure(r"loss ([0-9.]+) before", text), figure(r"before, ([0-9.]+) after", text)
    assert after < before - 0.05
    sent = 1000 * figure(r"([0-9.]+) kB a step", text)
    assert sent < 8 * adapters / 4, "both ways, in bytes; the frozen parameters went nowhere"
