"""The pictures of the documents, taken of pages that runs have just written.

    python -m tests.browser.pictures             # all of them, ten minutes
    python -m tests.browser.pictures flops nan   # these

They show two examples, `vit.py` and `train.py`, at the widths that readers have, and are written to
`amanda-tools/docs/pictures`; `speed` shows figures of `amanda-torch/docs/speed.md` beside it. Needs
Debian's chromium and chromedriver.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from base64 import b64decode
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import attrs
from PIL import Image
from selenium import webdriver

from amanda_tools._output.report import Document, Section, render
from tests.benchmarks import speed
from tests.browser.conftest import MISSING, ROOT, start_browser

EXAMPLES = ROOT / "amanda-tools/examples"
PICTURES = ROOT / "amanda-tools/docs/pictures"
COLOURS = 128
"""Colours of a picture: text stays smooth, and a picture takes some 50 kB."""


@attrs.frozen
class Picture:
    """What a picture shows.

    Attributes:
        tools: the tools of the run, as after ``-t``.
        element: CSS selector of the first element that it shows; by default the page from its top.
        script: the example that runs.
        width: of the window, in pixels.
        height: of the picture at most, in pixels.
        dark: whether the reader's system is dark.
        before: the tools of an earlier run, into the folder ``before``.
        edit: replacements in the script between that run and this one.
        write: writes the page into a folder, if no run does, and returns its path.
        folder: of the picture.
    """

    tools: str = ""
    element: str = ""
    script: str = "vit.py"
    width: int = 1200
    height: int = 560
    dark: bool = False
    before: str = ""
    edit: tuple[str, str] = ("", "")
    write: Callable[[Path], Path] | None = None
    folder: Path = PICTURES


def write_speed(folder: Path) -> Path:
    """Write a page with charts of the ratios in ``speed.md``."""
    charts = list(speed.charts((ROOT / speed.PAGE).read_text()))
    page = folder / "speed.html"
    page.write_text(render(Document(title="", sections=[Section(name="", charts=charts)])))
    return page


PAGE = "flops,profile,trace,summary"
ALL = {
    "page": Picture(PAGE, width=1400, height=1146),
    "phone": Picture(PAGE, width=420, height=1828, dark=True),
    "trace": Picture("trace", "section.model", height=640),
    "speed": Picture(
        "", "#charts", "", 1300, 700, write=write_speed, folder=ROOT / "amanda-torch/docs"
    ),
    "partition": Picture("partition:flops=0.3-", "section.model", height=640),
    "time-line": Picture("profile", "figure.chart.spans", height=600),
    "diff": Picture(
        *("diff:reference=before", "#charts, .tool", "train.py"),
        before="diff",
        edit=("nn.BatchNorm2d(8)", "nn.BatchNorm2d(8, eps=1e-2)"),
    ),
    **{
        name: Picture(tools, "#charts, .tool", script)
        for name, tools, script in (
            ("coverage", "coverage", "vit.py"),
            ("flops", "flops", "vit.py"),
            ("inject", "inject:ops=conv2d,fault=bitflip,seed=1", "train.py"),
            ("kernels", "kernels", "vit.py"),
            ("nan", "nan", "overflow.py"),
            ("path", "path", "train.py"),
            ("profile", "profile", "vit.py"),
            ("prune", "prune:method=nm", "vit.py"),
            ("quantize", "quantize:calibration=1", "vit.py"),
            ("remat", "remat:budget=0.7", "vit.py"),
            ("stats", "stats", "vit.py"),
            ("summary", "summary", "vit.py"),
        )
    },
}


def run(picture: Picture, folder: Path) -> Path:
    """Run the example under the tools; the page that this writes."""
    source = (EXAMPLES / picture.script).read_text()
    script = folder / picture.script

    def amanda(tools: str, out: str) -> None:
        words = ["-m", "amanda", "run", "-t", tools, "-o", out, "--html", "--", picture.script]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *words], cwd=folder, env=environment, check=True)

    script.write_text(source)
    if picture.before:
        amanda(picture.before, "before")
        script.write_text(source.replace(*picture.edit))
    amanda(picture.tools, "out")
    return folder / "out/report.html"


def shoot(browser: webdriver.Chrome, picture: Picture, page: Path) -> Image.Image:
    """The picture of a page."""
    theme = {"name": "prefers-color-scheme", "value": "dark" if picture.dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [theme]})
    size = {"width": picture.width, "height": 2000, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())
    box = {"x": 0, "y": 0, "width": picture.width, "height": picture.height}
    if picture.element:
        # The list of tools stays at the top of the window, and would cover what is below it.
        box = browser.execute_script(
            "document.querySelectorAll('nav').forEach(nav => nav.style.display = 'none');"
            "const element = document.querySelector(arguments[0]);"
            "element.scrollIntoView();"  # charts are drawn when they come into sight
            "const box = element.getBoundingClientRect(), margin = 16;"
            # A part begins with a line that ends the one before it.
            "const top = {SECTION: margin, DETAILS: 2}[element.tagName] ?? -margin;"
            "return {x: box.x - margin, y: box.y + scrollY + top, width: box.width + 2 * margin,"
            " height: Math.min(box.height + margin - top, arguments[1])}",
            picture.element,
            picture.height,
        )
    browser.set_script_timeout(30)
    browser.execute_async_script("setTimeout(arguments[0], 1500)")
    whole = browser.execute_cdp_cmd(
        "Page.captureScreenshot", {"clip": {**box, "scale": 1}, "captureBeyondViewport": True}
    )
    return Image.open(BytesIO(b64decode(whole["data"])))


def take(browser: webdriver.Chrome, name: str) -> None:
    """Write the page that a picture shows, and the picture."""
    picture = ALL[name]
    with tempfile.TemporaryDirectory() as folder:
        page = picture.write(Path(folder)) if picture.write else run(picture, Path(folder))
        image = shoot(browser, picture, page)
    few = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    few.save(picture.folder / f"{name}.png", optimize=True)


def main(names: list[str]) -> None:
    """Take the pictures of these names, or all."""
    unknown = set(names) - set(ALL)
    if unknown:
        sys.exit(f"no picture is called {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    with tempfile.TemporaryDirectory() as profile:
        browser = start_browser(Path(profile))
        if browser is None:
            sys.exit(MISSING)
        try:
            for name in names or ALL:
                take(browser, name)
        finally:
            browser.quit()


if __name__ == "__main__":
    main(sys.argv[1:])
