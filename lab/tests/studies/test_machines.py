"""Whether runs are of one machine and of one version."""

from __future__ import annotations

import msgspec

from thinwire_lab.jobs.results import machine
from thinwire_lab.studies.machines import mixed, mixed_versions


def test_threads_of_the_process_that_stored_a_run_make_no_other_machine() -> None:
    here = machine()
    assert mixed([here, msgspec.structs.replace(here, threads=here.threads + 1)]) == []
    [note] = mixed([here, msgspec.structs.replace(here, processor="a slower one")])
    assert "a slower one" in note


def test_versions_are_told_apart_where_they_are_stored() -> None:
    here = machine()
    assert mixed_versions([here, msgspec.structs.replace(here, thinwire="")]) == []
    [note] = mixed_versions([here, msgspec.structs.replace(here, thinwire="0.0.9")])
    assert f"thinwire {here.thinwire} and 0.0.9" in note
