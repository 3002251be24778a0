"""Charts: series differ by more than their colour, references stand back, and many panels stand in rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import ConfigError
from thinwire.presentation.charts import (
    MOST_COLUMNS,
    Chart,
    Kind,
    Panel,
    Series,
    draw,
    to_matplotlib,
    to_svg,
)


def panel(series: Sequence[Series], kind: Kind = "lines", **more: Any) -> Panel:
    return Panel(title="title", x_label="seconds", y_label="nats", series=series, kind=kind, **more)


def chart(*panels: Panel) -> Chart:
    return Chart(name="chart", caption="", panels=panels)


def lines(count: int) -> list[Series]:
    return [Series(label=f"method {index}", x=[1.0, 2.0], y=[3.0, 2.0 + index]) for index in range(count)]


def test_many_panels_stand_in_rows() -> None:
    picture = to_matplotlib(chart(*(panel(lines(2)) for _ in range(5))))
    places = {(round(axes.get_position().x0, 2), round(axes.get_position().y0, 2)) for axes in picture.axes}
    assert len(picture.axes) == 5
    assert len({x for x, _ in places}) == MOST_COLUMNS and len({y for _, y in places}) == 2


def test_eleven_series_differ_in_grey_and_more_in_colour_too() -> None:
    shown = chart(panel(lines(40)))
    [axes] = to_matplotlib(shown).axes
    drawn = axes.get_lines()
    assert len({line.get_marker() for line in drawn[:11]}) == 11
    assert len({(line.get_marker(), line.get_color()) for line in drawn}) == 40
    bars = [Series(label=f"{index}", x=["a"], y=[1.0]) for index in range(40)]
    [axes] = to_matplotlib(chart(panel(bars, "bars"))).axes
    assert len({(bar.get_facecolor(), bar.get_hatch()) for bar in axes.patches}) == 40
    assert len({bar.get_hatch() for bar in axes.patches[:11]}) == 11


def test_a_reference_is_below_the_others_and_last_in_the_legend() -> None:
    target = Series(label="target", x=[1.0, 2.0], y=[2.5, 2.5], role="reference")
    paper = Series(label="paper", x=[1.0], y=[2.0], role="paper")
    shown = chart(panel([target, *lines(1)], "points"), panel([target, paper]))
    assert shown.labels() == ["method 0", "paper", "target"]
    picture = to_matplotlib(shown)
    [legend] = picture.legends
    assert [text.get_text() for text in legend.get_texts()] == shown.labels()
    for axes in picture.axes:
        first, second = axes.get_lines()
        assert first.get_zorder() < second.get_zorder()
        assert (first.get_linestyle(), first.get_marker()) == ("-", "None"), "a line, also among points"
    assert picture.axes[1].get_lines()[1].get_color() == "#000000"


def test_a_long_legend_makes_the_picture_higher_and_one_name_needs_none() -> None:
    few, many = (to_matplotlib(chart(panel(lines(count)))) for count in (2, 30))
    assert many.get_figheight() > few.get_figheight() == 4.2
    assert not to_matplotlib(chart(panel(lines(1)))).legends


def test_long_names_stay_inside_the_picture_and_leave_room_for_what_is_drawn() -> None:
    names = [f"model.decoder.blocks.{each}.attention.query_key_value.weight" for each in range(12)]
    bars = [Series(label=way, x=names, y=[1.0] * 12) for way in ("up", "down")]
    curves = [Series(label=2 * name, x=[1.0, 2.0], y=[1.0, 2.0]) for name in names[:3]]
    for shown in (chart(panel(bars, "bars")), chart(panel(curves))):
        picture = to_matplotlib(shown)
        picture.draw_without_rendering()
        [axes] = picture.axes
        texts = [*axes.get_yticklabels(), *picture.legends[0].get_texts()]
        boxes = [each.get_window_extent() for each in texts]
        assert all(box.x0 >= 0 and box.x1 <= picture.bbox.width and box.y0 >= 0 for box in boxes)
        assert axes.get_position().width > 0.5
        marks = sorted((each.get_window_extent() for each in axes.get_yticklabels()), key=lambda box: box.y0)
        assert all(below.y1 <= above.y0 + 1 for below, above in pairwise(marks)), "names do not overlap"


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "chart.png").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=r"chart\.png cannot be written: No space left on device\. Choose another"):
        draw(chart(panel(lines(1))), tmp_path / "chart.png")


def test_measured_values_are_no_labels_of_an_axis() -> None:
    for x in ([0.0, 1.0], [8.25, 20.0], [float(each) for each in range(1, 12)]):
        shown = panel([Series(label="s", x=x, y=[1.0] * len(x))], x_log=True)
        assert shown.ticks() == []
        assert to_svg(chart(shown)).count("<svg") == 1, "nothing warns"
