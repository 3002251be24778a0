"""Notes on compared runs of several machines, or of several versions."""

from __future__ import annotations

from collections.abc import Iterable

from thinwire_lab.jobs.results import Machine


def mixed(machines: Iterable[Machine]) -> list[str]:
    """Returns a note on the machines that runs were timed on; none where it is one."""
    # Without their threads: those are of the process that stored a run, and depend on what else it did before.
    names = dict.fromkeys(f"{m.processor}, {m.system}, torch {m.torch}" for m in machines)
    told = f"Runs were timed on different machines: {'; '.join(names)}. So are their ratios."
    return [told] if len(names) > 1 else []


def mixed_versions(machines: Iterable[Machine]) -> list[str]:
    """Returns a note on the versions of thinwire that made runs; none where it is one."""
    versions = dict.fromkeys(m.thinwire for m in machines)
    told = f"Runs were made by thinwire {' and '.join(versions)}. In another folder, all are made by one."
    return [told] if len(versions) > 1 else []
