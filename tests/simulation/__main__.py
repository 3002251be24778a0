"""`python -m tests.simulation`: runs seeds; one that fails prints the command that replays it, and is made smaller."""

from __future__ import annotations

import json
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from tests.simulation.bugs import BUGS, OF_LEARNERS, planted
from tests.simulation.cluster import Outcome, play, undisturbed
from tests.simulation.deaths import deaths
from tests.simulation.ranks import ranks, run_ranks
from tests.simulation.scenario import Scenario, learners, scenario
from tests.simulation.shrink import shrink

CHUNK = 100
Draw = Callable[[int], Scenario]
"""What a seed means."""


@dataclass
class Tally:
    """What some seeds came to; `kind` is the option that says what a seed means."""

    kind: str = ""
    seeds: int = 0
    events: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    ended: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str, str]] = field(default_factory=list)
    """Seed, rule and text."""

    def add(self, other: Tally) -> None:
        self.seeds += other.seeds
        self.events += other.events
        self.virtual_s += other.virtual_s
        self.cpu_s += other.cpu_s
        self.ended += other.ended
        self.fired += other.fired
        self.failures += other.failures

    @property
    def said(self) -> str:
        """What failed, each with the command that replays it."""
        kind = f"{self.kind} " if self.kind else ""
        return "\n".join(
            f"{text}\n  python -m tests.simulation {kind}--seed {seed} --trace" for seed, _, text in self.failures
        )


def run(first: int, stop: int, draw: Draw = scenario) -> Tally:
    """Runs the seeds first … stop − 1."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tally, begin = Tally("" if draw is scenario else f"--{draw.__name__}"), time.process_time()
    for seed in range(first, stop):
        outcome = play(draw(seed))
        tally.seeds += 1
        tally.events += outcome.events
        tally.virtual_s += outcome.seconds
        known = outcome.ended in ("trained", "left behind")
        tally.ended[outcome.ended if known else "ended with a reason"] += 1
        tally.fired.update(outcome.fired)
        if outcome.rule:
            tally.failures.append((seed, outcome.rule, outcome.text))
    tally.cpu_s = time.process_time() - begin
    return tally


def tallies(first: int, stop: int, jobs: int, draw: Draw = scenario) -> Iterator[Tally]:
    """Yields what each chunk of seeds came to."""
    begins = range(first, stop, CHUNK)
    ends = [min(stop, begin + CHUNK) for begin in begins]
    with ProcessPoolExecutor(jobs) if jobs > 1 else nullcontext() as pool:
        yield from (map if pool is None else pool.map)(partial(run, draw=draw), begins, ends)


def hunt(name: str, most: int = 2000) -> tuple[int, str]:
    """Plants a bug; returns how many seeds were run until it was found, or `most`, and which rule it broke."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    draw = learners if name in OF_LEARNERS else scenario
    with planted(name):
        undisturbed.cache_clear()
        for seed in range(most):
            if rule := play(draw(seed)).rule:
                break
    undisturbed.cache_clear()
    return seed + 1, rule


def hunt_all(jobs: int) -> dict[str, tuple[int, str]]:
    """Plants every bug, one at a time; prints a table, and returns it: seeds until it was found, and the rule."""
    print("| bug | seeds | rule |\n|---|---:|---|", flush=True)
    found: dict[str, tuple[int, str]] = {}
    with ProcessPoolExecutor(jobs) as pool:
        for name, (count, rule) in zip(BUGS, pool.map(hunt, BUGS), strict=True):
            found[name] = count, rule
            print(f"| {name} | {count:,} | {f'`{rule}`' if rule else 'not found'} |", flush=True)
    return found


def replay(seed: int, draw: Draw = scenario) -> tuple[Scenario, Outcome]:
    """Runs a seed, and where it fails makes it smaller; returns the smallest and what became of it."""
    found = draw(seed)
    outcome = play(found)
    if outcome.rule:
        found = shrink(found, lambda smaller: play(smaller).rule == outcome.rule)
    return found, play(found, trace=True)


def main(
    seeds: Annotated[str, typer.Option(help="A range of seeds, FIRST:STOP.")] = "0:2000",
    seed: Annotated[int | None, typer.Option(help="One seed alone: made smaller where it fails.")] = None,
    trace: Annotated[bool, typer.Option(help="Print what happens, with --seed.")] = False,
    bugs: Annotated[bool, typer.Option(help="Plant bugs, one at a time, and look how soon each is found.")] = False,
    collective: Annotated[bool, typer.Option(help="Run the collective mode: ranks in place of servers.")] = False,
    together: Annotated[bool, typer.Option("--deaths", help="Workers and servers die close together.")] = False,
    decoupled: Annotated[bool, typer.Option("--learners", help="Run learners that never wait for each other.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures as data.")] = None,
) -> None:
    """Run simulated trainings. Exits with 1 where one breaks a rule."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    draw = deaths if together else learners if decoupled else scenario
    if bugs:
        found_bugs = hunt_all(jobs)
        if json_file is not None:
            json_file.write_text(json.dumps(found_bugs))
        raise typer.Exit(0 if all(rule for _, rule in found_bugs.values()) else 1)
    if seed is not None and not collective:
        found, outcome = replay(seed, draw)
        print(found)
        if trace:
            print("\n".join(outcome.trace))
        print(outcome.text or f"seed {seed}: every rule holds; {outcome.ended}")
        raise typer.Exit(1 if outcome.rule else 0)
    first, _, stop = seeds.partition(":") if seed is None else (str(seed), "", str(seed + 1))
    if collective:
        failures = run_ranks(int(first), int(stop))
        print("\n".join(f"seed {failed}: {text}\n  {ranks(failed)}" for failed, _, text in failures))
        print(f"{int(stop) - int(first):,} seeds of ranks; {len(failures)} failures")
        raise typer.Exit(1 if failures else 0)
    total, begin = Tally(), time.perf_counter()
    for tally in tallies(int(first), int(stop), jobs, draw):
        total.add(tally)
        if tally.failures:
            print(tally.said)
        seconds = time.perf_counter() - begin
        print(f"{total.seeds:,} seeds, {len(total.failures)} failures, {seconds:,.0f} s", end="\r", flush=True)
    seconds = time.perf_counter() - begin
    rate = f"{1e3 * total.cpu_s / total.seeds:.1f} ms of CPU and {total.events / total.seeds:.0f} events each"
    print(f"{total.seeds:,} seeds in {seconds:,.0f} s: {rate}; {dict(total.ended)}; {len(total.failures)} failures")
    print(f"faults: {dict(total.fired.most_common())}")
    if json_file is not None:
        json_file.write_text(json.dumps({"seconds": seconds, "jobs": jobs, **vars(total)}))
    raise typer.Exit(1 if total.failures else 0)


if __name__ == "__main__":
    typer.run(main)
