"""The drawings show every interval where and when it was; notebooks show them."""

from __future__ import annotations

import itertools
import struct
import subprocess
import sys
from xml.etree import ElementTree

import matplotlib.image
import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import Rectangle

from pcr_core.timeline import Interval, Timeline
from pcr_core.timeline.lanes import LANES
from pcr_core.timeline.palette import shade

SVG = "{http://www.w3.org/2000/svg}"


def boxes(figure):
    patches = figure.axes[0].patches
    return [p for p in patches if isinstance(p, Rectangle) and p.get_gid()]


def svg_of(timeline):
    page = timeline._repr_html_()
    return ElementTree.fromstring(page[: page.index("</svg>") + len("</svg>")])


def brightness(colour):
    red, green, blue = to_rgb(colour)
    return 0.3 * red + 0.6 * green + 0.1 * blue


# --- matplotlib ---


@pytest.mark.parametrize(("layers", "forwards"), [(1, 1), (30, 3), (80, 2)])
def test_each_interval_is_a_box_in_its_row(pipeline, layers, forwards):
    made = pipeline(layers, forwards)
    drawn = boxes(made.figure())
    assert len(drawn) == len(made.intervals)
    for lane in ("load", "compute", "offload"):
        mine = [b for b in drawn if b.get_gid().startswith(lane)]
        assert len(mine) == layers * forwards
        assert len({b.get_gid() for b in mine}) == layers
        row = LANES.index(lane)
        assert all(row < b.get_y() < b.get_y() + b.get_height() < row + 1 for b in mine)
    shown = {(b.get_gid(), b.get_x(), b.get_width()) for b in drawn}
    assert shown == {(i.name, 1e3 * i.start, 1e3 * i.seconds) for i in made.intervals}


def test_layers_go_from_dark_to_light(pipeline):
    drawn = boxes(pipeline(80).figure())
    shades = [b.get_facecolor() for b in drawn if b.get_gid().startswith("compute")]
    levels = [brightness(shade) for shade in shades]
    assert levels == sorted(levels)
    assert len({to_hex(shade) for shade in shades}) == 80
    assert to_hex(shades[0]) == shade(0.0)
    assert to_hex(shades[-1]) == shade(1.0)


def test_reads_at_once_stand_below_each_other():
    some = [Interval("read", layer, 0.0, 1.0 + layer) for layer in range(4)]
    drawn = sorted(boxes(Timeline(some).figure()), key=lambda b: b.get_y())
    for above, below in itertools.pairwise(drawn):
        assert above.get_y() + above.get_height() <= below.get_y() + 1e-9
    assert drawn[0].get_y() > 1
    assert drawn[-1].get_y() + drawn[-1].get_height() < 2


def test_words_and_the_first_token_are_there(pipeline):
    made = pipeline(30, 3)
    axes = made.figure().axes[0]
    assert axes.get_title("left") == (
        "prompt of 144 tokens: 128 reused, 16 computed; first token after 95.8 ms"
    )
    assert [t.get_text() for t in axes.get_yticklabels()][2:4] == [
        "load\n45.0 ms",
        "compute\n90.0 ms",
    ]
    assert axes.get_xlabel().startswith("ms since submit")
    assert [t.get_text() for t in axes.texts] == ["first token"]
    dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert [line.get_xdata()[0] for line in dashed] == pytest.approx(
        [1e3 * made.first_token]
    )
    (key,) = axes.get_legend().get_texts()
    assert key.get_text() == "exposed: 1.8 ms of 56.5 ms of transfers"


def test_exposed_moments_are_shaded(pipeline):
    made = pipeline(4, 2)
    patches = made.figure().axes[0].patches
    bands = [p for p in patches if isinstance(p, Rectangle) and not p.get_gid()]
    assert [edge for b in bands for edge in (b.get_x(), b.get_width())] == (
        pytest.approx(
            [t for a, b in made.exposed_spans for t in (1e3 * a, 1e3 * (b - a))]
        )
    )


def test_a_long_wait_is_outside_and_said(pipeline):
    axes = pipeline(8, queue=60.0).figure().axes[0]
    left, right = axes.get_xlim()
    assert 59_990 < left < 60_000 < right < 60_020
    assert "not shown: 60.0 s before" in axes.get_xlabel()


@pytest.mark.parametrize(
    "made",
    [
        Timeline(()),
        Timeline((), first_token=0.0),
        Timeline((Interval("load", 0, 0.0, 0.0),)),
        Timeline((Interval("read", None, -5.0, 1.0), Interval("compute", 0, 1.0, 2.0))),
    ],
    ids=["empty", "at once", "no time", "before submit"],
)
def test_odd_ones_are_drawn_too(made):
    assert made._repr_png_().startswith(b"\x89PNG")
    assert len(boxes(made.figure())) == len(made.intervals)
    assert svg_of(made).tag == f"{SVG}svg"


def test_the_png_file_is_a_picture_of_the_layers(pipeline, tmp_path):
    path = tmp_path / "picture"  # the format does not depend on the name
    pipeline(6).save_png(path)
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[12:16] == b"IHDR"
    assert struct.unpack(">II", data[16:24]) == (1800, 690)
    pixels = matplotlib.image.imread(path, format="png")
    for layer in range(6):
        colour = to_rgb(shade(layer / 5))
        alike = (abs(pixels[:, :, :3] - colour) < 0.01).all(axis=2)
        assert alike.sum() > 1000, f"layer {layer} is not to be seen"


def test_no_global_state_is_touched():
    code = (
        "import sys; from pcr_core.timeline import Timeline; assert "
        "'matplotlib' not in sys.modules; Timeline(())._repr_html_(); assert "
        "'matplotlib' not in sys.modules; Timeline(()).figure(); "
        "print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_without_matplotlib_the_extra_is_named_and_notebooks_show_html(
    pipeline, monkeypatch, tmp_path
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    made = pipeline(2)
    with pytest.raises(ImportError, match=r'pip install "pcr-rag\[plot\]"'):
        made.figure()
    with pytest.raises(ImportError, match="plot"):
        made.save_png(tmp_path / "picture.png")
    assert made._repr_png_() is None
    assert "<svg" in made._repr_html_()
    assert "<table>" in made._repr_html_()


# --- SVG ---


def test_the_svg_has_a_box_with_words_for_each_interval(pipeline):
    made = pipeline(30, 3)
    titles = [title.text for title in svg_of(made).iter(f"{SVG}title")]
    assert len(titles) == len(made.intervals)
    assert titles.count("compute, layer 7: 1.0 ms from 11.5 ms, 16 tokens") == 1
    assert "queue: 4.0 ms from 0.0 ms" in titles


def test_the_svg_says_what_the_figure_says(pipeline):
    texts = {text.text for text in svg_of(pipeline(30, 3)).iter(f"{SVG}text")}
    assert texts >= {
        "prompt of 144 tokens: 128 reused, 16 computed; first token after 95.8 ms",
        "exposed: 1.8 ms of 56.5 ms of transfers",
        "first token",
        "SSD reads",
        "layer 0",
        "29",
    }


def test_svg_boxes_stay_inside_and_do_not_cover_the_labels(pipeline):
    root = svg_of(pipeline(8, queue=60.0))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    with_words = [box for box in root.iter(f"{SVG}rect") if len(box)]
    for box in with_words:
        x, y, w, h = (float(box.attrib[n]) for n in ("x", "y", "width", "height"))
        assert 96 <= x <= x + w <= width
        assert 40 <= y <= y + h <= height - 38


def test_a_huge_timeline_makes_a_page_of_bounded_size(pipeline):
    made = pipeline(80, 100)
    assert len(made.intervals) > 24_000
    page = made._repr_html_()
    assert len(page) < 1_500_000
    found = {title.text.split(":")[0] for title in svg_of(made).iter(f"{SVG}title")}
    assert len(found) > 40
