"""What was chosen for a run, as text, of the fields that jobs and comparisons have."""

from __future__ import annotations

from dataclasses import fields

import pytest

from thinwire_lab.jobs.describe import choices, servers_of
from thinwire_lab.jobs.options import JobOptions, RecipeOptions
from thinwire_lab.studies.options import ComparisonOptions

TOLD = {"consistency", "placement", "compression", "transmission"}
TOLD |= {field.name for field in fields(RecipeOptions)} - {"batch", "lr"}


@pytest.mark.parametrize(("kind", "more"), [(JobOptions, {"codec_up", "codec_down"}), (ComparisonOptions, set())])
def test_jobs_and_comparisons_have_every_field_that_is_told(kind: type[RecipeOptions], more: set[str]) -> None:
    told = choices({field.name: 1 for field in fields(kind)})
    assert {each.removesuffix("=1") for each in told.split(", ")} == TOLD | more


def test_of_options_as_they_are_by_default_only_the_servers_are_told() -> None:
    assert choices(vars(JobOptions())) == choices(vars(ComparisonOptions())) == ""
    assert servers_of(vars(JobOptions())) == servers_of(vars(ComparisonOptions())) == "1 of their own"
    assert servers_of({}) == servers_of({"servers": None}) == "1 of their own", "one that was stored may lack them"
