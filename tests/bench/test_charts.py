"""Pictures of races: panels are wide enough to be read, and methods differ by more than their colour."""

from __future__ import annotations

from thinwire.bench.charts import MOST_COLUMNS, draw_loss_race


def test_panels_of_a_loss_race_stand_in_rows_and_every_method_has_a_marker() -> None:
    names = [f"method {index}" for index in range(12)]
    curve = {name: [(1.0, 3.0), (2.0, 2.0 + index)] for index, name in enumerate(names)}
    picture = draw_loss_race({("model", f"seconds at link {link}"): curve for link in range(5)})
    assert [axes.get_xlabel() for axes in picture.axes] == [f"seconds at link {link}" for link in range(5)]
    places = {(round(axes.get_position().x0, 2), round(axes.get_position().y0, 2)) for axes in picture.axes}
    assert len({x for x, _ in places}) == MOST_COLUMNS and len({y for _, y in places}) == 2
    *lines, frontier = picture.axes[0].lines
    assert len({(line.get_marker(), line.get_color()) for line in lines}) == 12 and frontier.get_marker() == "None"
