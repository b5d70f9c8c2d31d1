"""The page of ``amanda run --html`` in a real browser: it works, alone, and trusts no name."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

from amanda.results import Chart, RunReport, Table, ToolReport
from amanda_tools._output.report import render
from amanda_tools._output.report.run import document_of
from tests.browser.conftest import Page, Report

Show = Callable[..., Page]

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;</style>"

TORCH = f"""
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
        self.body = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()) for _ in range(12)
        )
        self.add_module({HOSTILE.replace(".", "")!r}, torch.nn.Linear(4, 2))
        self.last = list(self.children())[-1]

    def forward(self, x):
        x = self.stem(x).mean((2, 3))
        for layer in self.body:
            x = layer(x)
        return self.last(x)

net = Net()
for _ in range(9):
    net(torch.rand(2, 3, 8, 8)).sum().backward()
with torch.no_grad():
    net.eval()(torch.rand(2, 3, 8, 8))  # Ten calls are more than nine.
"""

KERAS = """
import tensorflow as tf
model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(8, "relu"),
                             tf.keras.layers.Dense(2)])
model.compile("sgd", "mse")
model.fit(tf.ones((8, 4)), tf.ones((8, 2)), epochs=1, verbose=0)
"""


@pytest.fixture(scope="session")
def torch_page(report: Report) -> Path:
    """A small PyTorch model, trained under several tools."""
    return report(TORCH, "flops,trace,profile,stats,count")


@pytest.fixture
def page(torch_page: Path, opened: Callable[[Path], Page]) -> Page:
    """The opened page of the PyTorch model."""
    return opened(torch_page)


@pytest.fixture
def show(opened: Callable[[Path], Page], tmp_path: Path) -> Show:
    """Opens the page of one tool, of its charts, its tables and what else its result has."""

    def opening(charts: Sequence[Chart] = (), tables: Sequence[Table] = (), **result: Any) -> Page:
        tool = ToolReport(name="any", result=result, charts=charts, tables=tables)
        path = tmp_path / "page.html"
        path.write_text(render(document_of(RunReport(title="t", facts={}, tools=[tool]))))
        return opened(path)

    return opening


@contextmanager
def phone(page: Page) -> Iterator[None]:
    """Shows the page again, 390 pixels wide."""
    metrics = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page.browser.refresh()
        yield
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def numbers(texts: list[str]) -> list[float]:
    return [float(text.replace(",", "")) for text in texts]


def in_order(page: Page, texts: list[str]) -> list[str]:
    """Texts in the order of people, in which 10 comes after 9."""
    collator = "new Intl.Collator('en', {numeric: true})"
    return list(page.browser.execute_script(f"return arguments[0].sort({collator}.compare)", texts))


def test_it_needs_nothing_from_outside_and_says_nothing(page: Page) -> None:
    """No request, no message on the console, and every tool has its part."""
    heads = [head.text for head in page.all("details.tool h2")]
    assert heads == ["flops", "trace", "profile", "stats", "count"]
    assert page.fetched() == []
    assert page.browser.execute_script("return performance.getEntriesByType('resource')") == []
    assert page.complaints() == []


def test_all_tools_have_one_tree_one_table_and_one_chart_area(page: Page) -> None:
    """Headings name the tool and the unit; what else there is stands folded below."""
    assert len(page.all("section.model")) == len(page.all("section[id] .grid")) == 1
    assert {"FLOPs\nflops, FLOP", "time\nprofile, s"} <= {h.text for h in page.all(".tree th")}
    heads = {head.text for head in page.all("th", page.operators())}
    assert {"flops\nflops, FLOP", "time\nprofile, s", "mean\nstats"} <= heads
    assert not any(element.is_displayed() for element in page.all("details.tool .grid"))
    assert sum(area.is_displayed() for area in page.all(".charts")) == 1
    assert page.browser.execute_script("return document.documentElement.scrollHeight") < 4000
    page.all("nav a")[-1].click()
    count = page.all("details.tool .grid")[-1]
    WebDriverWait(page.browser, 30).until(lambda _: count.is_displayed())


def test_a_summary_alone_has_figures_tree_and_graph(
    report: Report, opened: Callable[[Path], Page]
) -> None:
    """Modules have the figures of the summary, operators the source line; repeated ones add up."""
    page = opened(report(TORCH, "summary"))
    assert page.all("dl.cards")[0].text.split("\n")[:4:2] == ["forward FLOPs", "parameters"]
    names = [head.text.split("\n")[0] for head in page.all(".tree th")]
    texts = [cell.text for cell in page.all("td", tree_row(page, "0 … 11"))]
    assert dict(zip(names, texts, strict=True))["parameters"] == str(12 * (4 * 4 + 4))
    assert drawn(page, "graph.edges.length") > 0
    assert {"inputs", "source"} <= {head.text for head in page.all("th", page.operators())}


def test_the_graph_opens_to_the_full_window(page: Page) -> None:
    """With the details beside it; the line between them can be moved, and Escape closes it. All of
    its texts have eleven pixels."""
    full = (
        "return ['.views', '.canvas'].map(s => document.querySelector(s).getBoundingClientRect())"
        ".map(b => [b.width, b.height]).concat([[innerWidth, innerHeight]])"
    )
    page.all("[data-do=full]")[0].click()
    page.all("[data-do=fit]")[0].click()
    (views, canvas, window) = page.browser.execute_script(full)
    assert views == window
    fonts = "graph.cy.nodes().filter(n => n.data('label')).map(n => n.data('font'))"
    assert min(drawn(page, f"{fonts}.map(size => size * graph.cy.zoom())")) >= 10.99
    drawn(page, "graph.view.choose(graph.view.model.search(['stem.0/conv2d:0'])[0])")
    details = page.all(".details")[0].text.split("\n")
    told = {"inputs": "2×3×8×8 f32", "attributes": "stride", "source": "program.py:"}
    assert all(text in details[details.index(name) + 1] for name, text in told.items())
    page.all(".divider")[0].send_keys(Keys.ARROW_LEFT)
    assert page.browser.execute_script(full)[1][0] == pytest.approx(canvas[0] - 40, abs=3)
    page.browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert page.browser.execute_script(full)[0][0] < window[0]


def test_columns_sort_with_numbers_as_numbers(page: Page) -> None:
    """The first click gives the largest number first, the second the smallest, the third the
    order of the tool; the head shows the direction."""
    grid = page.operators()
    page.show_all_columns(grid)
    original = page.column(grid, "id")
    cell = page.head(grid, "calls in the run")
    largest: list[float] = []
    for direction in ("descending", "ascending"):
        page.press(grid, "calls in the run")
        assert cell.get_attribute("aria-sort") == direction
        seen = numbers(page.column(grid, "calls in the run"))
        assert seen == sorted(seen, reverse=direction == "descending")
        largest.append(seen[0])
    assert largest == [10, 9]
    page.press(grid, "calls in the run")
    assert cell.get_attribute("aria-sort") is None
    assert page.column(grid, "id") == original


def test_texts_and_amounts_sort_by_what_they_mean(page: Page) -> None:
    """Texts as texts; ``1.5 kFLOP`` is more than ``900 FLOP``."""
    grid = page.operators()
    page.press(grid, "id")
    ids = page.column(grid, "id")
    assert len(set(ids)) == len(ids) > 10
    assert ids == in_order(page, ids)
    grid = page.grid("flops", "flops by module")
    page.press(grid, "forward")
    factors = {"FLOP": 1.0, "kFLOP": 1e3, "MFLOP": 1e6}
    parts = [text.split() for text in page.column(grid, "forward")]
    amounts = [float(number) * factors[unit] for number, unit in parts]
    assert len({unit for _, unit in parts}) > 1
    assert amounts == sorted(amounts, reverse=True)


def test_equal_rows_keep_the_order_of_the_last_sort(page: Page) -> None:
    """Sorted by id and then by type, the ids of each type stay sorted."""
    grid = page.operators()
    for name in ("id", "type"):
        page.press(grid, name)
    pairs = list(zip(page.column(grid, "type"), page.column(grid, "id"), strict=True))
    for kind in dict.fromkeys(kind for kind, _ in pairs):
        ids = [op_id for other, op_id in pairs if other == kind]
        assert ids == in_order(page, ids)


def test_heads_are_reached_and_pressed_with_the_keyboard(page: Page) -> None:
    """A head is a button."""
    grid = page.operators()
    [button] = page.all("button", page.head(grid, "time"))
    button.send_keys(Keys.ENTER)
    assert page.head(grid, "time").get_attribute("aria-sort") == "descending"
    button.send_keys(Keys.TAB)
    assert page.browser.switch_to.active_element.text == "mean\nprofile, s"


def test_the_filter_keeps_rows_that_hold_all_words(page: Page) -> None:
    """Words may be in different columns; what is shown is counted."""
    grid = page.operators()
    total = int(page.all("output", grid)[0].text.split()[-2])
    search = page.all("input", grid)[0]
    search.send_keys("LINEAR body.1")
    rows = page.lines(grid)
    assert len(rows) > 1
    page.show_all_columns(grid)
    texts = zip(*(page.column(grid, name) for name in ("id", "type", "module")), strict=True)
    for text in map(" ".join, texts):
        assert "linear" in text.lower()
        assert "body.1" in text
    assert page.all("output", grid)[0].text == f"{len(rows)} of {total} rows"
    search.clear()
    search.send_keys("nothing is called so")
    assert page.column(grid, "id") == []


def test_only_rows_that_are_seen_are_in_the_document(page: Page) -> None:
    """A long table is scrolled through to its end."""
    grid = page.operators()
    total = int(page.all("output", grid)[0].text.split()[-2])
    first = page.column(grid, "id")
    assert len(first) < total
    scroll = page.all(".scroll", grid)[0]
    page.browser.execute_async_script(
        "const [box, done] = arguments; box.scrollTop = box.scrollHeight;"
        "requestAnimationFrame(() => requestAnimationFrame(done))",
        scroll,
    )
    last = page.column(grid, "id")
    assert len(last) < total
    assert last[-1] not in first


def shown(page: Page) -> list[str]:
    """The names of the rows of the tree that are in the document, when there are some."""
    rows = "return [...document.querySelectorAll('.tree tr.row .text')].map(e => e.textContent)"
    return list(WebDriverWait(page.browser, 30).until(lambda driver: driver.execute_script(rows)))


def tree_row(page: Page, name: str) -> WebElement:
    """The first row of the tree with this name."""
    rows = "[...document.querySelectorAll('.tree tr.row')]"
    found = f"return {rows}.find(r => r.querySelector('.text').textContent === arguments[0])"
    row: WebElement = page.browser.execute_script(found, name)
    page.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", row)
    return row


def drawn(page: Page, what: str) -> Any:
    """A property of the graph, which is a picture for the browser."""
    return page.browser.execute_script(
        f"const graph = document.querySelector('section.model').model.graph; return {what}"
    )


def test_modules_open_and_close_in_the_tree_and_the_graph(page: Page) -> None:
    """By a click in either; repeated modules stand once, with a count, or one by one."""
    assert "0 … 11" in shown(page)
    assert page.all(".count", tree_row(page, "0 … 11"))[0].text == "sum of 12"
    assert "0 … 11 ×12" in drawn(page, "graph.cy.nodes('.many').map(n => n.data('label'))")
    before = drawn(page, "graph.cy.nodes().length")
    tree_row(page, "0 … 11").click()
    assert drawn(page, "graph.cy.nodes().length") == before - 2
    page.browser.execute_script(
        "const graph = document.querySelector('section.model').model.graph;"
        "graph.cy.nodes('.many').filter(n => n.data('label').includes('sum of 12')).emit('tap')"
    )
    assert drawn(page, "graph.cy.nodes().length") == before
    page.all("[data-once]")[0].click()
    assert {str(i) for i in range(12)} < set(shown(page))
    assert "0 … 11" not in shown(page)


def test_backward_operators_stand_below_their_forward_ones(page: Page) -> None:
    """A click on an operator opens them; the details tell of both."""
    Select(page.all("[data-depth]")[0]).select_by_visible_text("all")
    tree_row(page, "conv2d").click()
    rows = shown(page)
    at = rows.index("conv2d")
    assert rows[at + 1].startswith("∇ conv2d_backward")
    assert "ConvolutionBackward0" in page.all(".details")[0].text


def test_the_tree_sorts_within_modules(page: Page) -> None:
    """The largest figure first; the third click gives the order of the run again."""
    original = shown(page)
    for direction in ("descending", "ascending", None):
        page.press(page.all(".tree")[0], "parameters")
        head = page.head(page.all(".tree")[0], "parameters")
        assert head.get_attribute("aria-sort") == direction
        rows = shown(page)
        assert (rows == original) is (direction is None)
        if direction:
            assert (rows.index("stem") < rows.index("body")) is (direction == "ascending")


def test_the_search_goes_to_operators(page: Page) -> None:
    """By type, id or module, forward or backward; repeated ones are told of by themselves."""
    search = page.all("section.model input[type=search]")[0]
    output = page.all("section.model output")[0]
    search.send_keys("conv2d:0 stem")
    assert output.text == "1 of 1"
    details = page.all(".details")[0]
    assert "Net.stem.0/conv2d:0" in details.text
    assert "program.py:" in details.text
    assert page.all("tr.chosen .text")[0].text == "conv2d"
    assert drawn(page, "graph.cy.nodes('.hit').length") == 1
    # The chosen operator is in the middle of the graph.
    x, y, width, height = drawn(
        page,
        "[graph.cy.nodes('.chosen').renderedPosition('x'),"
        " graph.cy.nodes('.chosen').renderedPosition('y'), graph.canvas.clientWidth,"
        " graph.canvas.clientHeight]",
    )
    assert (x, y) == (pytest.approx(width / 2, abs=3), pytest.approx(height / 2, abs=3))
    search.clear()
    search.send_keys("body.7.0/linear:0/grad/AddmmBackward0")
    assert output.text == "1 of 1"
    assert "Net.body.7.0/linear:0" in details.text
    assert "each of 12" in details.text
    search.clear()
    search.send_keys("nothing is called so")
    assert output.text == "0 found"


def test_a_search_leaves_nothing_open_but_what_it_has_found(page: Page) -> None:
    """Modules that its first letters have opened are closed again; nothing found, none chosen."""
    before = [row.text for row in page.all(".tree tr.row")]
    search = page.all("section.model input[type=search]")[0]
    search.send_keys("gra")
    assert page.all("tr.chosen")
    assert page.all(".details")[0].is_displayed()
    search.send_keys("z")
    assert page.all("section.model output")[0].text == "0 found"
    assert [row.text for row in page.all(".tree tr.row")] == before
    assert not page.all("tr.chosen")
    assert not page.all(".details")[0].is_displayed()


def test_nodes_are_coloured_by_the_chosen_figure(page: Page) -> None:
    """And the tree draws bars of it."""
    colours = "graph.cy.nodes().map(n => n.data('colour')).join()"
    before = drawn(page, colours)
    Select(page.all("[data-figure]")[0]).select_by_visible_text("parameters")
    assert drawn(page, colours) != before
    at = [head.text.split("\n")[0] for head in page.all(".tree th")].index("parameters")
    assert page.all(f".tree tr.row td:nth-child({at + 1}).bar")


def missing(page: Page) -> list[int]:
    """Nodes that are in sight, large enough to be read, and not in the picture."""
    found: list[int] = drawn(
        page,
        "(({ x1, y1, x2, y2 }) => [...graph.boxes].filter(([i, b]) => "
        "b.x < x2 && b.x + b.width > x1 && b.y < y2 && b.y + b.height > y1"
        " && b.height * graph.cy.zoom() > 10 && !graph.cy.hasElementWithId(`n${i}`))"
        ".map(([i]) => i))(graph.cy.extent())",
    )
    return found


def many_operators() -> dict[str, Any]:
    """A chain of 5,000 operators, the first half in 2,500 modules."""
    ids = [f"Net.m{i // 10}x.{i % 10}/op{i}:0" for i in range(2500)]
    ids += [f"/f:{i}" for i in range(2500)]
    ops = [
        {"id": i, "type": i.rpartition("/")[2], "module": i[4:].partition("/")[0], "flops": 1}
        for i in ids
    ]
    return {
        "ops": ops,
        "edges": [{"producer": a, "consumer": b} for a, b in itertools.pairwise(ids)],
    }


def test_five_thousand_operators_open_at_once(show: Show) -> None:
    """All have a place, the search goes to the last one, and what is in sight is drawn alone."""
    page = show(**many_operators())
    Select(page.all("[data-depth]")[0]).select_by_visible_text("all")
    assert drawn(page, "graph.boxes.size") > 5000
    assert drawn(page, "graph.edges.length") == 4999
    assert len(page.all(".tree tr.row")) < 100
    assert missing(page) == []
    page.all("section.model input[type=search]")[0].send_keys("/f:2499")
    found = drawn(page, "graph.cy.nodes('.chosen.hit').map(n => n.data('label'))")
    assert found == ["f:2499\n1 FLOP"]
    assert missing(page) == []
    assert 0 < drawn(page, "graph.cy.nodes().length") < 1000
    assert page.complaints() == []


def test_a_large_graph_is_drawn_where_the_reader_moves(show: Show) -> None:
    """With the keyboard or the buttons; all of it is seen at once, too, without what is tiny."""
    page = show(**many_operators())
    Select(page.all("[data-depth]")[0]).select_by_visible_text("all")
    canvas = page.all(".canvas")[0]
    first = set(drawn(page, "graph.cy.nodes().map(n => n.id())"))
    canvas.send_keys(Keys.ARROW_DOWN * 30)
    WebDriverWait(page.browser, 30).until(lambda _: not missing(page))
    assert not first & set(drawn(page, "graph.cy.nodes().not('.open').map(n => n.id())"))
    page.all(".drawing [data-do=fit]")[0].click()
    low, high, height = drawn(
        page,
        "(y => [Math.min(...y), Math.max(...y), graph.canvas.clientHeight])([...graph.boxes"
        ".values()].map(b => b.y * graph.cy.zoom() + graph.cy.pan().y))",
    )
    assert 0 <= low < high <= height
    assert 0 < drawn(page, "graph.cy.elements().length") < 1000
    canvas.send_keys("+" * 30)
    WebDriverWait(page.browser, 30).until(lambda _: not missing(page))
    assert drawn(page, "graph.cy.nodes().not('.open').length") > 0


def test_equal_modules_are_laid_out_alike(show: Show) -> None:
    """Each node has a place, the same within its module."""
    page = show(**many_operators())
    Select(page.all("[data-depth]")[0]).select_by_visible_text("all")
    places = drawn(
        page,
        "(({ view: { model }, boxes }) => {"
        "const within = (i) => model.below(i).map(c => boxes.get(c))"
        ".map(b => [b.x - boxes.get(i).x, b.y - boxes.get(i).y]);"
        "const isModule = (i) => /^m.*x$/.test(model.nodes[i][2]);"
        "return [...boxes.keys()].filter(isModule).map(within)})(graph)",
    )
    assert len(places) == 250
    assert {len(place) for place in places} == {10}
    assert len({str(place) for place in places}) == 1


def test_the_graph_begins_with_the_model(show: Show) -> None:
    """What stands beside a long model, such as its loss, does not push it out of sight."""
    ids = [f"net/layer{chr(97 + i)}/op{i}:0" for i in range(20)]
    # With many figures the graph is narrow.
    figures = dict.fromkeys(("flops", "params", "activation_bytes", "saved_bytes", "seconds"), 1)
    ops = [{"id": i, "type": "f", "module": i.rpartition("/")[0], **figures} for i in ids]
    ops += [{"id": f"loss/f{i}:0", "type": "f", "module": "loss", **figures} for i in range(6)]
    edges = [{"producer": a, "consumer": b} for a, b in itertools.pairwise(ids)]
    page = show(ops=ops, edges=edges)
    left, right, width = drawn(
        page,
        "(b => [b.x1, b.x2, graph.canvas.clientWidth])(graph.cy.nodes()"
        ".filter(n => n.data('label').startsWith('net')).renderedBoundingBox())",
    )
    assert 0 <= left < right <= width
    assert drawn(page, "graph.cy.nodes().renderedBoundingBox().w") > width


def test_a_long_name_leaves_room_for_its_count(show: Show) -> None:
    """Of blocks that repeat the count stands whole in the tree, deep in the model too."""
    within = "Net.encoder.layers.encoder_layer_of_the_transformer_"
    ids = [f"{within}{i}.{part}/f:0" for i in range(12) for part in "ab"]
    figures = {"flops": 5e6, "params": 7, "activation_bytes": 9, "seconds": 1e-3}
    ops = [{"id": i, "type": "f", "module": i[4:-4], **figures} for i in ids]
    edges = [{"producer": a, "consumer": b} for a, b in itertools.pairwise(ids)]
    page = show(ops=ops, edges=edges)
    [count] = page.all(".tree .count")
    assert count.text == "sum of 12"
    assert page.browser.execute_script(
        "const c = arguments[0].getBoundingClientRect();"
        "return c.right <= arguments[0].closest('td').getBoundingClientRect().right"
        " && arguments[0].scrollWidth <= arguments[0].clientWidth + 1",
        count,
    )


def test_headings_and_shapes_stand_whole(show: Show) -> None:
    """In the tree beside the graph, with many figures: a shape has four numbers."""
    shape = [{"shape": [16, 256, 112, 112], "dtype": "float32", "device": "cpu"}]
    figures = {"flops": 5e6, "params": 7, "activation_bytes": 9, "saved_bytes": 8, "seconds": 1e-3}
    figures = {**figures, "zeros": 1, "elements": 2}
    ids = [f"Net.layer{i}/f:0" for i in range(9)]
    ops = [{"id": i, "type": "f", "module": i[4:10], "outputs": shape, **figures} for i in ids]
    edges = [{"producer": a, "consumer": b} for a, b in itertools.pairwise(ids)]
    modules = [{"path": i[4:10], "model": "Net", "outputs": shape} for i in ids]
    page = show(ops=ops, edges=edges, modules=modules)
    cut = (
        "return [...document.querySelectorAll('.tree th, .tree th button, .tree td.shape')]"
        ".filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent)"
    )
    assert page.browser.execute_script(cut) == []
    assert "16×256×112×112 f32" in page.all(".tree")[0].text
    search = page.all("section.model input[type=search]")[0]
    assert page.browser.execute_script(
        "const e = arguments[0], c = document.createElement('canvas').getContext('2d');"
        "c.font = getComputedStyle(e).font;"
        "return c.measureText(e.placeholder).width < e.clientWidth - 12",
        search,
    )


def test_tables_fit_the_page_and_begin_with_figures(page: Page) -> None:
    """Long ids lose what most begin with, texts give way; equal columns are told below."""
    grid = page.operators()
    fits = "return document.body.scrollWidth <= innerWidth"
    assert page.browser.execute_script(fits)
    page.all("input", grid)[0].send_keys("body.1.0 grad")
    page.browser.set_window_size(600, 900)
    try:
        lines = page.lines(grid)
        assert lines
        assert all(re.match(r"….+:\d", line) for line in lines)
        # Charts are drawn anew some time after the window has got its size.
        WebDriverWait(page.browser, 30).until(lambda browser: browser.execute_script(fits))
    finally:
        page.browser.set_window_size(1300, 1000)
    below = [line.text for line in page.all(".equal", page.section("stats"))]
    assert "Equal in all rows: " in " ".join(below)


def test_no_table_is_wider_than_the_page(page: Page) -> None:
    """What does not fit is behind a button, and is seen when it is pressed."""
    wide = (
        "return [...document.querySelectorAll('.scroll, .tree')]"
        ".filter(box => box.scrollWidth > box.clientWidth)"
        ".map(box => box.closest('.grid')?.textContent.slice(0, 60))"
    )
    assert page.browser.execute_script(wide) == []
    grid = page.operators()
    [button] = page.all("[data-do=columns]", grid)
    few = [head.text for head in page.all("th", grid) if head.is_displayed()]
    assert few[:3] == ["id", "type", "flops\nflops, FLOP"]
    assert button.text == f"{len(page.all('th', grid)) - len(few)} more columns"
    page.show_all_columns(grid)
    heads = [head.text for head in page.all("th", grid) if head.is_displayed()]
    assert {"module", "phase", "outputs", "source"} <= set(heads) - set(few)
    assert button.text == "fewer columns"
    button.click()
    assert [head.text for head in page.all("th", grid) if head.is_displayed()] == few


def test_a_step_is_drawn_over_time(page: Page) -> None:
    """A row for each module in the order of the run, with what is after each other as one bar."""
    chart = page.chart("the last step over time")
    Select(page.all("[data-depth]", chart)[0]).select_by_index(0)
    data = page.browser.execute_script(
        "const { labels, datasets } = arguments[0].chart.chart.data;"
        "const bars = (data) => data.map(({ x, y }) => [...x, y]);"
        "return [labels, datasets.map(({ label, data }) => [label, bars(data)])]",
        chart,
    )
    labels, series = data[0], dict(data[1])
    assert labels.index("stem") < labels.index("body")
    assert list(series)[:2] == ["forward", "backward"]
    starts = {name: min(bar[0] for bar in bars) for name, bars in series.items()}
    assert starts["forward"] < starts["backward"]
    assert all(begin < end for bars in series.values() for begin, end, _ in bars)
    assert {name for bars in series.values() for *_, name in bars} <= set(labels)


def test_a_phone_shows_names_and_figures(show: Show) -> None:
    """390 pixels wide, the first figure of each table and of the tree is seen beside the name."""
    ids = [f"Net.blocks.{i}.attention.projection/linear:0" for i in range(12)]
    ops = [{"id": i, "type": "linear", "module": i[4:-9], "flops": 5_000_000} for i in ids]
    outputs = [{"shape": [4, 197, 768], "dtype": "float32"}]
    ops = [{**op, "calls": 3 + i, "outputs": outputs} for i, op in enumerate(ops)]
    edges = [{"producer": a, "consumer": b} for a, b in itertools.pairwise(ids)]
    page = show(ops=ops, edges=edges)
    with phone(page):
        right = "return [...arguments[0].querySelectorAll('tr.row')].map(row => [...row.cells]"
        right += ".find(cell => cell.classList.contains('n')).getBoundingClientRect().right)"
        grid = page.operators()
        assert max(page.browser.execute_script(right, grid)) < 390
        assert max(page.browser.execute_script(right, page.all(".tree")[0])) < 390
        seen = [line.split("…")[1] for line in page.lines(grid)]
        assert len(set(seen)) == 12
        assert page.browser.execute_script("return document.body.scrollWidth") == 390


def open_blocks(show: Show, ids: Sequence[str]) -> Page:
    """A page with a chain of operators and an edge from the first to the fourth, opened to depth 2.

    Args:
        ids: of the operators, of a model ``Net``.
    """
    ops = [{"id": i, "type": i[i.index("/") + 1 : -2], "module": i[4 : i.index("/")]} for i in ids]
    pairs = [*itertools.pairwise(ids), (ids[0], ids[3])]
    edges = [{"producer": a, "consumer": b} for a, b in pairs]
    page = show(ops=ops, edges=edges)
    Select(page.all("[data-depth]")[0]).select_by_visible_text("depth 2")
    return page


def test_edges_lead_around_nodes_of_open_modules(show: Show) -> None:
    """A residual connection from outside of a block does not cross the block's nodes."""
    ids = ["Net.stem/conv2d:0", "Net.block.norm/layer_norm:0", "Net.block.mlp/linear:0"]
    ids += ["Net.block/add:0", "Net.head/linear:0"]
    page = open_blocks(show, ids)
    script = (
        "(() => { const named = text => graph.cy.nodes()"
        ".filter(node => node.data('label').split('\\n')[0] === text);"
        "const passed = named('mlp')[0], edge = named('conv2d').edgesTo(named('add'))[0];"
        "return [passed.position('x'), passed.position('y'), passed.data('width') / 2,"
        "edge.segmentPoints().map(point => [point.x, point.y])]; })()"
    )
    x, y, half, points = drawn(page, script)
    beside = [
        (left + (right - left) * (y - above) / (below - above))
        for (left, above), (right, below) in itertools.pairwise(points)
        if above <= y < below
    ]
    assert beside
    assert all(abs(other - x) > half for other in beside)


def test_edges_do_not_cross_the_titles_of_open_modules(show: Show) -> None:
    """A title stands beside the edges that enter its module, whole if it is not very long."""
    ids = ["Net.stem/conv2d:0", "Net.cross_attention.norm/layer_norm:0"]
    ids += ["Net.cross_attention.projection/linear:0", "Net.cross_attention/add:0"]
    ids += ["Net.head/linear:0"]
    page = open_blocks(show, ids)
    script = (
        "(() => { graph.cy.zoom(1); graph.letter(1);"
        "const open = graph.cy.nodes('.open')"
        ".filter(n => n.data('label') === 'cross_attention')[0];"
        "const box = open.boundingBox({includeLabels: true, includeNodes: false});"
        "const top = open.position('y') - open.data('height') / 2;"
        "return [open.position('x') + open.data('width') / 2 + open.data('shift'),"
        "open.data('label').length * 6, top,"
        "graph.cy.edges().map(edge => [edge.sourceEndpoint(), ...(edge.segmentPoints() ?? []),"
        "edge.targetEndpoint()].map(point => [point.x, point.y]))]; })()"
    )
    left, width, top, lines = drawn(page, script)
    entering = [
        (x, y)
        for line in lines
        for (x, y), (other, below) in itertools.pairwise(line)
        if y <= top + 13 <= below
        for x in [x + (other - x) * (top + 13 - y) / max(below - y, 1)]
    ]
    assert len(entering) >= 2
    assert all(x < left or x > left + width for x, _ in entering)


def test_rows_of_the_tree_keep_the_focus(page: Page) -> None:
    """Enter on a row's button opens and closes it as often as it is pressed."""
    [button] = page.all(".fold", tree_row(page, "stem"))
    seen = (
        "const e = document.activeElement;"
        "return [e.closest('tr')?.querySelector('.text').textContent, e.ariaExpanded]"
    )
    page.browser.execute_script("arguments[0].focus()", button)
    before = page.browser.execute_script(seen)
    assert before[0] == "stem"
    page.browser.switch_to.active_element.send_keys(Keys.ENTER)
    after = page.browser.execute_script(seen)
    assert after == ["stem", "false" if before[1] == "true" else "true"]
    page.browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert page.browser.execute_script(seen) == before


def test_labels_of_a_chart_are_shortened_alike(show: Show) -> None:
    """What most begin with is left out of all that have it, or of none."""
    long = [f"model.layers.{i}.self_attention_of_the_layer" for i in range(3)]
    short = [f"model.layers.{i}.mlp" for i in range(3)]
    charts = [
        Chart(title=title, kind="bar", labels=labels, values={"x": range(1, len(labels) + 1)})
        for title, labels in (("long", [*long, *short, "head"]), ("short", [*short, "head"]))
    ]
    page = show(charts=charts)
    labels = [
        page.browser.execute_script("return arguments[0].chart.chart.data.labels", figure)
        for figure in page.all("figure.chart")
    ]
    assert [label.rpartition(".")[0] for label in labels[0]] == [*("…0", "…1", "…2") * 2, ""]
    assert labels[1] == [*short, "head"]
    assert labels[0][-1] == "head"


def test_bars_have_room_below_a_long_legend(show: Show) -> None:
    """Its lines are counted, on a phone too."""
    values = {f"aten::a_kernel_with_a_long_name_{i}": [i + 1.0] * 12 for i in range(9)}
    chart = Chart(title="c", kind="bar", labels=[f"op{i}" for i in range(12)], values=values)
    page = show(charts=[chart])
    room = (
        "const { chartArea, legend } = document.querySelector('figure.chart').chart.chart;"
        "return [(chartArea.bottom - chartArea.top) / 12, legend.height]"
    )
    bar, legend = page.browser.execute_script(room)
    assert bar >= 18
    with phone(page):
        narrow, tall = page.browser.execute_script(room)
    assert narrow >= 18
    assert tall > legend


def test_values_of_one_size_have_an_even_axis(show: Show) -> None:
    """Powers of ten are for values that differ by them."""
    near, far = [0.0198, 0.0199, 0.0203, 0.0], [1e-6, 0.0199, 0.0203, 0.0]
    charts = [
        Chart(title=title, kind="points", labels=range(4), values={"x": values}, log=True)
        for title, values in (("near", near), ("far", far))
    ]
    page = show(charts=charts)
    kinds = "return [...document.querySelectorAll('figure.chart')].map(f => f.chart.chart.scales.y)"
    assert page.browser.execute_script(f"{kinds}.map(y => y.type)") == ["linear", "logarithmic"]
    drawn_at = "return document.querySelector('figure.chart').chart.chart.data.datasets[0].data"
    assert [point["y"] for point in page.browser.execute_script(drawn_at)] == near


def test_shapes_stand_whole_before_columns_of_less_use(show: Show) -> None:
    """What the id says as well, names of inputs and sources give way before a shape is cut."""
    ids = [f"Net.blocks.{i}.attention/scaled_dot_product_attention:{i % 2}" for i in range(12)]
    ops = []
    for i, op_id in enumerate(ids):
        specs = [{"shape": [4, 197, 700 + i], "dtype": "float32"}]
        names = {"id": op_id, "type": f"scaled_dot_product_{i % 2}", "forward": ids[i - 1]}
        sources = {"source": f"/usr/lib/net/attention.py:{i}", "phase": f"phase number {i}"}
        tensors = {"inputs": specs, "outputs": specs, "input_names": ["query"] * (1 + i)}
        ops.append({**names, **sources, **tensors, "attributes": {"scale": 0.125 + i}})
    page = show(ops=ops)
    grid = page.operators()
    seen = [head.text for head in page.all("th", grid) if head.is_displayed()]
    assert seen[:2] == ["id", "type"]
    assert {"inputs", "outputs", "attributes"} <= set(seen), seen
    assert "input names" not in seen
    cells = [cell.text for cell in page.all("tr.row td", grid) if "×" in cell.text]
    assert len(cells) == 2 * len(ops)
    assert all(re.fullmatch(r"4×197×7\d\d f32", cell) for cell in cells)


def test_tensors_of_one_operator_are_told_apart(show: Show) -> None:
    """Rows that have one id show which tensor they are about, however many columns there are."""
    ops = [
        {"id": f"Net.b.{i}/op:0", "type": f"op_{i}", "kind": kind, "tensor": tensor}
        | {f"figure_number_{k}": k + i + 0.5 for k in range(14)}
        for i in range(6)
        for kind, tensor in (("weights", "weight"), ("activations", "output0"))
    ]
    page = show(ops=ops)
    heads = page.all("th", page.grid("any", "operators"))
    seen = [head.text for head in heads if head.is_displayed()]
    assert seen[:4] == ["id", "type", "kind", "tensor"]
    assert len(seen) < len(heads)


def test_tensors_are_told_apart_on_a_phone(show: Show) -> None:
    """A tensor is an operator's id and a word: it, too, loses what most begin with."""
    tensors = [(f"LlamaForCausalLM.model.layers.{i}.attn/mm:0 output0", i) for i in range(12)]
    table = Table("tensors", ("tensor", "zeros"), tensors)
    page = show(tables=[table])
    with phone(page):
        lines = page.lines(page.grid("any", "tensors"))
    names = [line.split("output0")[0] for line in lines]
    assert all(name.startswith("…") for name in names)
    assert len(set(names)) == 12


def test_amounts_are_short_whatever_their_size(page: Page) -> None:
    """A tiny share, too, fits its column."""
    amounts = [[3.18e-5, "%"], [0.0123, "%"], [17.53, "%"], [1.5e9, "B"], [2e-7, "s"], [0, "%"]]
    texts = page.browser.execute_script("return arguments[0].map(a => amount(...a))", amounts)
    assert texts == ["3.18e-5 %", "0.0123 %", "17.5 %", "1.5 GB", "200 ns", "0"]


def test_the_title_of_the_graph_is_clear_of_the_buttons_on_a_phone(page: Page) -> None:
    """The graph begins below them."""
    with phone(page):
        top = drawn(
            page,
            "Math.min(...[...graph.boxes.values()].map(b => b.y)) * graph.cy.zoom()"
            " + graph.cy.pan().y",
        )
        bottom = page.browser.execute_script(
            "const box = document.querySelector('.canvas').getBoundingClientRect();"
            "return document.querySelector('.zoom').getBoundingClientRect().bottom - box.top"
        )
        assert top >= bottom > 0


def test_tables_are_filtered_by_module_and_type(page: Page) -> None:
    """A module is chosen with all that is in it."""
    grid = page.operators()
    [module] = page.all("select[aria-label=module]", grid)
    Select(module).select_by_value("=body.3")
    page.show_all_columns(grid)
    assert {text.rpartition(".")[0] for text in page.column(grid, "module")} == {"body.3"}
    Select(page.all("select[aria-label=type]", grid)[0]).select_by_value("=linear")
    assert set(page.column(grid, "type")) == {"linear"}
    assert page.all("output", grid)[0].text.startswith("1 of ")


def test_a_value_without_a_logarithm_is_drawn_a_power_of_ten_below(show: Show) -> None:
    """Powers of ten are equally far apart; hovering tells the value and the name of a point."""
    chart = Chart(
        title="c", kind="points", labels=range(4), values={"x": [1e-6, 1e-3, 1, 0]}, names="abcd",
        log=True,
    )  # fmt: skip
    page = show(charts=[chart])
    found = page.browser.execute_script(
        "const { chart } = document.querySelector('figure.chart').chart;"
        "const { title, label } = chart.options.plugins.tooltip.callbacks;"
        "const item = { dataIndex: 3, dataset: chart.data.datasets[0] };"
        "return [chart.getDatasetMeta(0).data.map((point) => point.y), title([item]), label(item)]"
    )
    first, second, third, zero = found[0]
    assert first - second == pytest.approx(second - third, abs=0.1)
    assert zero - first == pytest.approx((first - second) / 3, abs=0.1)
    assert found[1:] == ["d", "0"]


def test_a_histogram_stands_on_its_axis(show: Show) -> None:
    """Each bin is a bar from zero."""
    chart = Chart(title="c", kind="hist", labels=["a", "b"], values={"n": [2, 4]})
    page = show(charts=[chart])
    low, high = page.browser.execute_script(
        "const { chart } = document.querySelector('figure.chart').chart;"
        "return chart.getDatasetMeta(0).data.map(({ y, base }) => [y, base])"
    )
    assert low[1] == high[1]
    assert high[1] - high[0] == pytest.approx(2 * (low[1] - low[0]), abs=1)


def test_bars_that_have_no_room_are_counted(show: Show) -> None:
    """Their figures are in the tables."""
    chart = Chart(title="c", kind="bar", labels=range(30), values={"x": [1.0] * 30})
    page = show(charts=[chart])
    assert page.all("figure.chart .more")[0].text == "6 more in the tables"
    labels = "return document.querySelector('figure.chart').chart.chart.data.labels.length"
    assert page.browser.execute_script(labels) == 24


def test_charts_show_the_tools_figures(page: Page) -> None:
    """A library draws them; those of modules at the depth that the reader picks."""
    chart = page.chart("executions by type")
    Select(page.all("[data-over]", chart)[0]).select_by_value("run")
    script = "return arguments[0].chart.chart.data"
    data = page.browser.execute_script(script, chart)
    assert [part["label"] for part in data["datasets"]] == ["forward", "backward"]
    assert data["datasets"][0]["data"][data["labels"].index("linear")] == 13 * 10
    modules = page.chart("operations by module")
    depth = Select(page.all("[data-depth]", modules)[0])
    depth.select_by_index(0)
    few = page.browser.execute_script(script, modules)["labels"]
    assert {"stem", "body"} <= set(few)
    depth.select_by_index(1)
    assert "body.0" in page.browser.execute_script(script, modules)["labels"]
    assert page.all("canvas", page.chart("standard deviation of the activations"))


def test_charts_and_the_tree_show_the_same_step(page: Page) -> None:
    """Bars are those of one step, as the tree's figures are, until the reader picks the run."""
    chart = page.chart("operations by module")
    Select(page.all("[data-depth]", chart)[0]).select_by_index(0)
    data = "return arguments[0].chart.chart.data"

    def body() -> float:
        drawn = page.browser.execute_script(data, chart)
        at = drawn["labels"].index("body")
        return float(sum(part["data"][at] for part in drawn["datasets"]))

    over = Select(page.all("[data-over]", chart)[0])
    assert over.first_selected_option.text == "the last step"
    step = body()
    [cell] = page.all("td.n", tree_row(page, "body"))[:1]
    assert cell.text == page.browser.execute_script("return amount(arguments[0], 'FLOP')", step)
    over.select_by_visible_text("the whole run")
    # The last call is an evaluation, without the backward pass, which has twice the operations.
    assert body() == pytest.approx((9 + 1 / 3) * step)


def test_a_type_has_one_bar(page: Page) -> None:
    """Backward operators stand beside the type of their forward ones, whatever they are called."""
    for title in ("operations by type", "executions by type", "time by type"):
        data = "return arguments[0].chart.chart.data"
        data = page.browser.execute_script(data, page.chart(title))
        backward = data["datasets"][1]["data"][data["labels"].index("linear")]
        assert backward > 0
        assert not [label for label in data["labels"] if "backward" in label or "grad" in label]


def test_names_are_text_wherever_they_stand(page: Page) -> None:
    """A module may be called anything: it makes no element, and no script of it runs."""
    name = HOSTILE.replace(".", "")
    assert any(name in text for text in shown(page))
    grid = page.operators()
    page.all("input", grid)[0].send_keys("onerror")
    page.show_all_columns(grid)
    assert set(page.column(grid, "module")) == {name}
    page.all("section.model input[type=search]")[0].send_keys("onerror")
    assert name in page.all(".details")[0].text
    assert page.all("img") == []
    assert len(page.all("script:not([type])")) == 1
    assert page.complaints() == []


def test_a_keras_model(report: Report, opened: Callable[[Path], Page]) -> None:
    """The page is the same for TensorFlow."""
    page = opened(report(KERAS, "flops,trace,profile"))
    assert [head.text for head in page.all("details.tool h2")] == ["flops", "trace", "profile"]
    grid = page.operators()
    page.all("input", grid)[0].send_keys("linear dense")
    assert {"linear", "linear_backward"} <= set(page.column(grid, "type"))
    page.all("input", grid)[0].clear()
    page.all("input", grid)[0].send_keys("bias dense")
    # The runtime has fused the products into them.
    assert {"bias_add", "bias_add_backward"} <= set(page.column(grid, "type"))
    assert drawn(page, "graph.cy.nodes().length") > 5
    assert page.all("figure.chart")
    assert (page.complaints(), page.fetched()) == ([], [])


def test_two_runs_side_by_side(opened: Callable[[Path], Page], tmp_path: Path) -> None:
    """One tree and one table have each figure of both runs; cards have the ratio."""
    row = {"type": "mm", "phase": "forward", "executions": 2}
    ours, theirs = (
        [ToolReport(name=f"flops {run}", result={"tool": "flops", "summary": {"steps": 2}, "ops": [
            {**row, "id": f"Net.{name}/mm:0", "module": name, "per_step": {"flops": flops}}
            for name, flops in modules.items()
        ]})]
        for run, modules in (("A", {"one": 20, "old": 10}), ("B", {"one": 50, HOSTILE: 10}))
    )  # fmt: skip
    both = RunReport(title="a and b", facts={"A": "a"}, tools=[], runs=(ours, theirs))
    (tmp_path / "page.html").write_text(render(document_of(both)))
    page = opened(tmp_path / "page.html")
    card = ["FLOPs per step", "30 FLOP → 60 FLOP", "B is about 2 times A"]
    assert page.all(".cards div")[0].text.split("\n") == card
    tree, grid = page.all(".tree")[0], page.operators()
    assert [h.text[:7] for h in page.all("th", tree)][1:3] == ["FLOPs A", "FLOPs B"]
    found = [[cell.text for cell in page.all("td", row)] for row in page.all("tr.row", tree)]
    values = [["30 FLOP", "60 FLOP"], ["20 FLOP", "50 FLOP"], ["10 FLOP", ""], ["", "10 FLOP"]]
    assert [row[1:3] for row in found if not row[0].endswith("mm")] == values
    assert page.column(grid, "id") == [f"Net.{m}/mm:0" for m in ("one", "old", HOSTILE)]
    heads = {head.text for head in page.all("th", grid)}
    assert {"flops\nflops A, FLOP", "flops\nflops B, FLOP"} <= heads
    assert (page.complaints(), page.fetched()) == ([], [])
