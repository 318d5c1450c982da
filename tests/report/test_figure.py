"""The style of figures: labels do not overlap, a mode has one look, colors differ, the same figure is the same file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from matplotlib.text import Annotation, Text

from nmt_train.modes.table import MODES
from nmt_train.report.figure import (
    BLUE,
    CONTEXT,
    GREEN,
    INK,
    ORANGE,
    label_ends,
    log_ticks,
    look,
    new_figure,
    save_figure,
    spread_apart,
)

heights = st.lists(st.floats(0, 1), min_size=1, max_size=20)


@given(heights, st.floats(0.001, 0.3))
def test_labels_are_apart_in_the_order_of_their_places_and_inside(places: list[float], gap: float) -> None:
    found = spread_apart(places, gap, 0.0, 1.0)
    room = min(gap, 1 / max(1, len(places) - 1))
    ordered = [found[index] for index in sorted(range(len(places)), key=lambda index: places[index])]
    assert all(after - before >= room - 1e-9 for before, after in itertools.pairwise(ordered))
    assert -1e-9 <= min(found) <= max(found) <= 1 + 1e-9


@given(heights)
def test_labels_that_are_apart_already_stay(places: list[float]) -> None:
    alone = sorted({round(place, 1) for place in places})
    assert spread_apart(alone, 0.05, 0.0, 1.0) == pytest.approx(alone)


def test_labels_that_touch_move_as_little_as_possible() -> None:
    assert spread_apart([0.5, 0.5], 0.1, 0.0, 1.0) == pytest.approx([0.45, 0.55])
    assert spread_apart([0.55, 0.5, 0.9], 0.1, 0.0, 1.0) == pytest.approx([0.575, 0.475, 0.9])
    assert spread_apart([0.0, 0.0], 0.1, 0.0, 1.0) == pytest.approx([0.0, 0.1])


def labels(axes: Any) -> Iterator[Annotation]:
    return (its for its in axes.texts if isinstance(its, Annotation))


def test_thirteen_lines_with_the_same_end_have_labels_that_do_not_overlap() -> None:
    figure, axes = new_figure(6, 4)
    label_ends(axes, {axes.plot([0, 1], [number, 5])[0]: f"mode {number}" for number in range(13)})
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(label) for label in labels(axes)]  # without the pointers
    assert len(boxes) == 13
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_a_line_is_labeled_where_it_leaves_the_axes_and_not_at_all_outside() -> None:
    _, axes = new_figure(6, 4)
    inside, leaving, outside = (axes.plot(x, y)[0] for x, y in (([0, 1], [1, 1]), ([0, 2], [0, 4]), ([0, 2], [9, 9])))
    axes.set(xlim=(0, 1.5), ylim=(0, 2))
    label_ends(axes, {inside: "inside", leaving: "leaving", outside: "outside"})
    ends = {label.get_text(): label.xy for label in labels(axes)}
    assert ends == {"inside": pytest.approx((1 / 1.5, 0.5)), "leaving": pytest.approx((1 / 1.5, 1.0))}


def test_every_mode_is_gray_or_has_a_look_of_its_own() -> None:
    looks = [str(look(mode)) for mode in MODES if look(mode)["color"] != CONTEXT]
    assert len(looks) == len(set(looks))
    assert {look(mode)["color"] for mode in MODES} == {BLUE, ORANGE, GREEN, INK, CONTEXT}
    assert look("mode of tomorrow")["color"] == CONTEXT


# What people without one kind of cone see, as a matrix of linear RGB (Machado et al. 2009, severity 1).
CONES = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
# From linear RGB to XYZ relative to white.
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) / [[0.9505], [1.0], [1.089]]


def linear(color: str) -> Any:
    return np.array([its / 12.92 if its <= 0.04045 else ((its + 0.055) / 1.055) ** 2.4 for its in to_rgb(color)])


def lab(rgb: Any) -> Any:
    """CIELAB of linear RGB; a distance of 2.3 is just noticeable."""
    x, y, z = (its ** (1 / 3) if its > 0.008856 else 7.787 * its + 16 / 116 for its in XYZ @ np.clip(rgb, 0, 1))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("missing", CONES)
def test_color_blind_readers_distinguish_the_colors(missing: str) -> None:
    seen = [lab(np.array(CONES[missing]) @ linear(color)) for color in (BLUE, ORANGE, GREEN, INK)]
    assert min(np.linalg.norm(one - other) for one, other in itertools.combinations(seen, 2)) > 20


@pytest.mark.parametrize("color", [BLUE, ORANGE, GREEN, INK, CONTEXT])
def test_text_in_every_color_is_legible_on_white(color: str) -> None:
    """The contrast that WCAG 2 asks of large text is 3."""
    luminance = (np.array([0.2126, 0.7152, 0.0722]) * linear(color)).sum()
    assert 1.05 / (luminance + 0.05) > 3.5


@pytest.mark.parametrize("ending", [".svg", ".png", ".pdf"])
def test_the_same_figure_gives_the_same_bytes(ending: str, tmp_path: Path) -> None:
    for name in ("first", "second"):
        figure, axes = new_figure(3, 2, "A title")
        label_ends(axes, {axes.plot([0, 1], [0, 1], **look("sparse"))[0]: "sparse"})
        save_figure(figure, tmp_path / f"{name}{ending}")
    assert (tmp_path / f"first{ending}").read_bytes() == (tmp_path / f"second{ending}").read_bytes()


def test_an_svg_is_opaque_and_needs_no_font(tmp_path: Path) -> None:
    figure, axes = new_figure(3, 2, "A title")
    axes.plot([0, 1])
    save_figure(figure, tmp_path / "its.svg")
    text = (tmp_path / "its.svg").read_text(encoding="utf-8")
    assert "fill: #ffffff" in text
    assert "<text" not in text
    assert "dc:date" not in text


def test_logarithmic_axes_have_only_the_ticks_that_are_named() -> None:
    _, axes = new_figure(3, 2)
    axes.plot([0.1, 10], [1, 2])
    log_ticks(axes, "x", (0.1, 1, 10))
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.1", "1", "10"]
    assert [*axes.xaxis.get_ticklocs(minor=True)] == []
