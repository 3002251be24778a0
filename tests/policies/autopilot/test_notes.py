"""Notes: sixteen bytes, read by every rank as the same numbers."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from thinwire.policies.autopilot.notes import NOTE_NBYTES, StepNote, pack_note, unpack_note

number = st.floats(width=32)


@given(st.builds(StepNote, number, number, number, number, number, number, number, number))
def test_a_note_comes_back_within_half_a_percent_and_a_second_time_as_it_is(note: StepNote) -> None:
    data = pack_note(note)
    read = unpack_note(data)
    assert len(data) == NOTE_NBYTES == 16 and pack_note(read) == data
    for sent, came in zip(note, read, strict=True):
        if math.isfinite(sent) and 1e-30 < abs(sent) < 1e38:
            assert abs(came / sent - 1) < 0.005
        elif not math.isfinite(sent):
            assert came == sent or (math.isnan(came) and math.isnan(sent))


def test_what_cannot_be_is_named() -> None:
    good = StepNote(0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, math.nan)
    assert good.problem == ""
    assert good._replace(link_s=-1.0).problem == "link_s = -1"
    assert good._replace(step_s=1e5).problem == "step_s = 100000"
    assert good._replace(sent_nbytes=math.nan).problem == "sent_nbytes = nan"
    assert good._replace(sent_nbytes=1e9).problem == ""
