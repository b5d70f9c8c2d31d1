"""The page of ``amanda run --html`` in a real browser: it works, alone, and trusts no name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from tests.browser.conftest import Page, Report

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

for _ in range(2):
    Net()(torch.rand(2, 3, 8, 8)).sum().backward()
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


def numbers(texts: list[str]) -> list[float]:
    return [float(text.replace(",", "")) for text in texts]


def in_order(page: Page, texts: list[str]) -> list[str]:
    """Texts in the order of people, in which 10 comes after 9."""
    collator = "new Intl.Collator('en', {numeric: true})"
    return list(page.browser.execute_script(f"return arguments[0].sort({collator}.compare)", texts))


def test_it_needs_nothing_from_outside_and_says_nothing(page: Page) -> None:
    """No request, no message on the console, and every tool has its part."""
    heads = [head.text for head in page.all("section.tool > h2")]
    assert heads == ["flops", "trace", "profile", "stats", "count"]
    assert page.fetched() == []
    assert page.browser.execute_script("return performance.getEntriesByType('resource')") == []
    assert page.complaints() == []


def test_columns_sort_with_numbers_as_numbers(page: Page) -> None:
    """The first click gives the largest number first, the second the smallest, the third the
    order of the tool; the head shows the direction."""
    grid = page.grid("profile", "operators")
    original = page.column(grid, "id")
    cell = page.head(grid, "calls")
    largest: list[float] = []
    for direction in ("descending", "ascending"):
        page.press(grid, "calls")
        assert cell.get_attribute("aria-sort") == direction
        seen = numbers(page.column(grid, "calls"))
        assert seen == sorted(seen, reverse=direction == "descending")
        largest.append(seen[0])
    assert largest[0] > largest[1]
    page.press(grid, "calls")
    assert cell.get_attribute("aria-sort") is None
    assert page.column(grid, "id") == original


def test_texts_and_amounts_sort_by_what_they_mean(page: Page) -> None:
    """Texts as texts; ``1.5 kFLOP`` is more than ``900 FLOP``."""
    grid = page.grid("count", "operators")
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
    grid = page.grid("count", "operators")
    for name in ("id", "type"):
        page.press(grid, name)
    pairs = list(zip(page.column(grid, "type"), page.column(grid, "id"), strict=True))
    for kind in dict.fromkeys(kind for kind, _ in pairs):
        ids = [op_id for other, op_id in pairs if other == kind]
        assert ids == in_order(page, ids)


def test_heads_are_reached_and_pressed_with_the_keyboard(page: Page) -> None:
    """A head is a button."""
    grid = page.grid("profile", "operators")
    [button] = page.all("button", page.head(grid, "seconds"))
    button.send_keys(Keys.ENTER)
    assert page.head(grid, "seconds").get_attribute("aria-sort") == "descending"
    button.send_keys(Keys.TAB)
    assert page.browser.switch_to.active_element.text == "mean"


def test_the_filter_keeps_rows_that_hold_all_words(page: Page) -> None:
    """Words may be in different columns; what is shown is counted."""
    grid = page.grid("count", "operators")
    total = int(page.all("output", grid)[0].text.split()[0])
    search = page.all("input", grid)[0]
    search.send_keys("LINEAR body.1")
    rows = page.lines(grid)
    assert len(rows) > 1
    assert all("linear" in row.lower() and "body.1" in row for row in rows)
    assert page.all("output", grid)[0].text == f"{len(rows)} of {total} rows"
    search.clear()
    search.send_keys("nothing is called so")
    assert page.column(grid, "id") == []


def test_only_rows_that_are_seen_are_in_the_document(page: Page) -> None:
    """A long table is scrolled through to its end."""
    grid = page.grid("count", "operators")
    total = int(page.all("output", grid)[0].text.split()[0])
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


def test_the_graph_is_searched_zoomed_and_opened_module_by_module(page: Page) -> None:
    """Levels go from modules to operators; a match is marked, told of and moved into view."""
    graph = page.all(".graph", page.section("trace"))[0]
    level = Select(page.all("select", graph)[0])
    titles = [option.text for option in level.options]
    assert titles[0].startswith("modules to depth 1")
    assert titles[-1].startswith("all operators")
    level.select_by_index(0)
    few = len(page.all(".canvas g", graph))
    level.select_by_index(len(titles) - 1)
    assert len(page.all(".canvas g", graph)) > few
    assert len(page.all(".canvas path", graph)) > few
    page.all("input", graph)[0].send_keys("conv2d stem")
    assert page.all("output", graph)[0].text == "1 of 2"
    assert len(page.all("g.hit", graph)) == 2
    about = page.all("pre.about", graph)[0].text
    assert about.startswith("Net.stem.0/conv2d:0\nstem.0\nprogram.py:")
    picture = page.all(".canvas svg", graph)[0]
    box, place = picture.rect, page.all("g.chosen", graph)[0].rect
    assert abs(place["x"] + place["width"] / 2 - box["x"] - box["width"] / 2) < 5
    assert abs(place["y"] + place["height"] / 2 - box["y"] - box["height"] / 2) < 5
    width = "return arguments[0].viewBox.baseVal.width"
    before = page.browser.execute_script(width, picture)
    page.all("[data-do=in]", graph)[0].click()
    assert page.browser.execute_script(width, picture) < before


def test_charts_show_the_tools_figures(page: Page) -> None:
    """Bars are as long as their values say; the others have axes, and marks that tell."""
    charts = {c.text.split("\n")[0]: c for c in page.all("figure.chart")}
    assert {"operations by module", "time by type", "executions by type"} <= set(charts)
    bars = page.all(".bar", charts["executions by type"])
    widths = [sum(part.rect["width"] for part in page.all("i", bar)) for bar in bars]
    values = numbers([v.text for v in page.all(".value", charts["executions by type"])])
    for width, value in zip(widths, values, strict=True):
        assert width / widths[0] == pytest.approx(value / values[0], abs=0.01)
    points = charts["standard deviation of the activations"]
    assert len(page.all("circle", points)) > 20
    assert len(page.all("text", points)) >= 4
    assert page.all("rect", charts["sizes of the elements of the weights"])


def test_names_are_text_wherever_they_stand(page: Page) -> None:
    """A module may be called anything: it makes no element, and no script of it runs."""
    name = HOSTILE.replace(".", "")
    assert "<script>alert(1)</script>" in page.browser.execute_script(
        "return [...document.querySelectorAll('figure .label')].map(e => e.textContent).join()"
    )
    grid = page.grid("count", "operators")
    page.all("input", grid)[0].send_keys("onerror")
    assert set(page.column(grid, "module")) == {name}
    graph = page.all(".graph", page.section("trace"))[0]
    page.all("input", graph)[0].send_keys("onerror")
    assert name in page.all("pre.about", graph)[0].text
    assert page.all("img") == []
    assert len(page.all("script:not([type])")) == 1
    assert page.complaints() == []


def test_a_keras_model(report: Report, opened: Callable[[Path], Page]) -> None:
    """The page is the same for TensorFlow."""
    page = opened(report(KERAS, "flops,trace,profile"))
    assert [head.text for head in page.all("section.tool > h2")] == ["flops", "trace", "profile"]
    grid = page.grid("flops", "operators")
    page.all("input", grid)[0].send_keys("linear dense")
    assert {"linear", "linear_backward"} <= set(page.column(grid, "type"))
    grid = page.grid("profile", "operators")
    page.all("input", grid)[0].send_keys("bias dense")
    # The runtime has fused the products into them.
    assert {"bias_add", "bias_add_backward"} <= set(page.column(grid, "type"))
    assert page.all(".canvas g", page.section("trace"))
    assert page.all("figure.chart")
    assert (page.complaints(), page.fetched()) == ([], [])


def test_a_comparison_of_two_runs(
    report: Report, opened: Callable[[Path], Page], tmp_path: Path
) -> None:
    """The page of ``diff`` is made the same way."""
    program = "import torch\nfor i in range(12): (torch.ones(2) * SCALE).exp()\n"
    before = report(program.replace("SCALE", "1"), "diff").parent
    after = report(program.replace("SCALE", "2"), f"diff:reference={before}").parent
    page = opened(after / "diff.html")
    assert "First divergence: mul, op /mul:0" in page.all("header.page, main")[1].text
    [grid] = page.all("section.grid")
    assert page.all("tr.first", grid)
    assert page.all("tr.bad", grid)
    page.press(grid, "relative error")
    errors = [float(text) for text in page.column(grid, "relative error")]
    assert errors == sorted(errors, reverse=True)
    assert page.all("figure circle")
    assert (page.complaints(), page.fetched()) == ([], [])
