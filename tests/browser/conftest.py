"""Debian's chromium, and pages that ``amanda run --html`` has made of real programs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from tests.running import run_python

ROOT = Path(__file__).parents[2]
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--window-size=1300,1000"
).split()
MISSING = "no chromium and chromedriver; try: apt-get install chromium chromium-driver"

Report = Callable[..., Path]


def start_browser(profile: Path) -> webdriver.Chrome | None:
    """A browser that notes what it says on its console and what it fetches; None if there is none.

    Args:
        profile: an empty folder for its own files.
    """
    binary, server = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or server is None:
        return None
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for option in (*OPTIONS, f"--user-data-dir={profile}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(server))


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """A browser, which all tests share."""
    browser = start_browser(tmp_path_factory.mktemp("profile"))
    if browser is None:
        pytest.skip(MISSING)
    yield browser
    browser.quit()


class Page:
    """An opened page, as the tests use it."""

    def __init__(self, browser: webdriver.Chrome, path: Path) -> None:
        self.browser = browser
        browser.get_log("performance")
        browser.get_log("browser")
        browser.get(path.as_uri())
        # A tree is drawn when its size is observed, in the first frame after the page is loaded.
        frames = "requestAnimationFrame(() => requestAnimationFrame(arguments[0]))"
        browser.execute_async_script(frames)

    def all(self, selector: str, inside: WebElement | None = None) -> list[WebElement]:
        """The elements that a CSS selector finds."""
        return (inside or self.browser).find_elements(By.CSS_SELECTOR, selector)

    def section(self, name: str) -> WebElement:
        """The part of the page that one tool has, opened."""
        [found] = [e for e in self.all("details.tool") if self.all("h2", e)[0].text == name]
        self.browser.execute_script("arguments[0].open = true", found)
        return found

    def chart(self, title: str) -> WebElement:
        """The first chart whose title begins so, in the tab that is chosen for it."""
        figures = self.all("figure.chart")
        found = next(f for f in figures if f.get_attribute("textContent").strip().startswith(title))
        choose = "document.getElementById(arguments[0].parentElement.id.replace('c', 't'))?.click()"
        self.browser.execute_script(choose, found)
        return found

    def operators(self) -> WebElement:
        """The table of operators."""
        [found] = self.all("#operators .grid")
        return found

    def grid(self, tool: str, title: str) -> WebElement:
        """A table of a tool, by the beginning of its title."""
        heads = self.all("section.grid > h3", self.section(tool))
        [found] = [head for head in heads if head.text.startswith(title)]
        return found.find_element(By.XPATH, "..")

    def column(self, grid: WebElement, name: str) -> list[str]:
        """The whole texts of one column, of the rows that are in the document."""
        names = [head.text.split("\n")[0] for head in self.all("th", grid)]
        return self.browser.execute_script(
            "return [...arguments[0].querySelectorAll('tr.row')]"
            ".map(row => row.cells[arguments[1]])"
            ".map(cell => cell.textContent.includes('…') ? cell.title : cell.textContent)",
            grid,
            names.index(name),
        )

    def lines(self, grid: WebElement) -> list[str]:
        """The rows that are in the document."""
        rows = "return [...arguments[0].querySelectorAll('tr.row')].map(row => row.textContent)"
        return list(self.browser.execute_script(rows, grid))

    def head(self, grid: WebElement, name: str) -> WebElement:
        """The head of a column: by its name, or by that and the line of its tool."""
        heads = [h for h in self.all("th", grid) if name in (h.text, h.text.split("\n")[0])]
        return heads[0]

    def press(self, grid: WebElement, name: str) -> None:
        """Click on the head of a column."""
        [button] = self.all("button", self.head(grid, name))
        self.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
        button.click()

    def show_all_columns(self, grid: WebElement) -> None:
        """Show the columns for which a table has no room."""
        for button in self.all("[data-do=columns]", grid):
            if button.is_displayed() and button.text.endswith(("more column", "more columns")):
                self.browser.execute_script("arguments[0].click()", button)

    def complaints(self) -> list[dict[str, Any]]:
        """What the browser has said on its console since the page was opened."""
        return self.browser.get_log("browser")

    def fetched(self) -> list[str]:
        """The addresses that it has asked for, the page itself and the browser's own aside."""
        entries = self.browser.get_log("performance")
        messages = [json.loads(entry["message"])["message"] for entry in entries]
        sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        addresses = [params["request"]["url"] for params in sent]
        own = ("chrome", "data:", self.browser.current_url)
        return [address for address in addresses if not address.startswith(own)]


@pytest.fixture
def opened(driver: webdriver.Chrome) -> Callable[[Path], Page]:
    """Opens a page."""
    return lambda path: Page(driver, path)


@pytest.fixture(scope="session")
def report(driver: webdriver.Chrome, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Runs a program under tools and gives the page, if there is a browser to open it."""

    def run(program: str, tools: str, name: str = "program.py", **variables: str) -> Path:
        folder = tmp_path_factory.mktemp("report")
        (folder / name).write_text(program)
        words = ["-m", "amanda", "run", "-t", tools, "-o", "out", "--html", "--", name]
        done = run_python(*words, cwd=folder, env={"OMP_NUM_THREADS": "1", **variables})
        assert done.returncode == 0, done.stderr
        return folder / "out/report.html"

    return run
