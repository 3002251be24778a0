"""Whether runs were timed on one machine."""

from __future__ import annotations

import msgspec

from thinwire.jobs.results import machine
from thinwire.studies.machines import mixed


def test_threads_of_the_process_that_stored_a_run_make_no_other_machine() -> None:
    here = machine()
    assert mixed([here, msgspec.structs.replace(here, threads=here.threads + 1)]) == []
    [note] = mixed([here, msgspec.structs.replace(here, processor="a slower one")])
    assert "a slower one" in note
