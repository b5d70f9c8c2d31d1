"""What notebooks show, in a real browser: frames with pages of results, and tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import amanda
from tests.browser.conftest import Page

STYLE = "table{{table-layout:fixed}} body{{background:{colour}}} p{{margin:0}} .tree{{color:red}}"


@pytest.fixture(scope="module")
def outputs() -> list[str]:
    """The HTML of three cells: two tools and a summary."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    tools = [amanda.tools.load(name)() for name in ("flops", "trace")]
    with amanda.apply(*tools):
        model(torch.rand(2, 4)).sum().backward()
    return [made._repr_html_() for made in (*tools, amanda.summary(model, torch.rand(2, 4)))]


def notebook(folder: Path, outputs: list[str], mark: str, colour: str = "white") -> Path:
    """A page that holds outputs as JupyterLab does: in elements of one document."""
    cells = "".join(f'<div class="jp-OutputArea-output">{output}</div>' for output in outputs)
    path = folder / "notebook.html"
    path.write_text(
        f"<!DOCTYPE html><html><head><meta charset=utf-8><style>{STYLE.format(colour=colour)}"
        f'</style></head><body {mark}><p id="own">text</p>{cells}</body></html>'
    )
    return path


def test_outputs_of_one_notebook_leave_it_and_each_other_alone(
    outputs: list[str], opened: Callable[[Path], Page], tmp_path: Path
) -> None:
    """Each frame has its own page, drawn once; the notebook gets no element or style of it."""
    page = opened(notebook(tmp_path, outputs, ""))
    ids = "return [...document.querySelectorAll('[id]')].map(found => found.id)"
    assert page.browser.execute_script(ids) == ["own"]
    assert page.all("script, canvas, section") == []
    seen = []
    for frame in page.all("iframe"):
        page.browser.switch_to.frame(frame)
        assert len(page.all(".tree table")) == 1
        seen.append([head.text for head in page.all("details.tool h2")])
        rows = page.all(".tree tr.row")
        rows[0].click()
        assert len(page.all(".tree tr.row")) < len(rows)
        page.browser.switch_to.default_content()
    assert seen == [["flops"], ["trace"]]
    assert (page.complaints(), page.fetched()) == ([], [])


@pytest.mark.parametrize(
    ("mark", "is_dark"),
    [
        ('data-jp-theme-light="false"', True),
        ('data-jp-theme-light="true"', False),
        ('data-vscode-theme-kind="vscode-dark"', True),
        ('data-vscode-theme-kind="vscode-high-contrast-light"', False),
    ],
)
def test_frames_have_the_theme_of_the_notebook(
    outputs: list[str], opened: Callable[[Path], Page], tmp_path: Path, mark: str, is_dark: bool
) -> None:
    """Dark in a dark notebook and light in a light one, whatever the browser prefers."""
    page = opened(notebook(tmp_path, outputs[:1], mark))
    other = {"name": "prefers-color-scheme", "value": "light" if is_dark else "dark"}
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [other]})
    try:
        page.browser.switch_to.frame(page.all("iframe")[0])
        colour = "return getComputedStyle(document.body).backgroundColor"
        light = page.browser.execute_script(colour) == "rgb(255, 255, 255)"
        assert light is not is_dark
    finally:
        page.browser.switch_to.default_content()
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_summary_fits_a_narrow_notebook(
    outputs: list[str], opened: Callable[[Path], Page], tmp_path: Path
) -> None:
    """A wide table scrolls by itself; headings stand above the texts and the figures."""
    page = opened(notebook(tmp_path, outputs[-1:], ""))
    metrics = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        assert page.browser.execute_script("return document.body.scrollWidth") <= 390
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    ways = (
        "return [...document.querySelectorAll(arguments[0])]"
        ".map(cell => getComputedStyle(cell).textAlign)"
    )
    heads = page.browser.execute_script(ways, "th")
    assert heads == page.browser.execute_script(ways, "tbody tr:first-child td")
    assert heads == ["left"] * 2 + ["right"] * 3
