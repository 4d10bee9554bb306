"""Draws docs/pictures/: the server's page with both demos, light and dark.

python tools/page_pictures.py

Needs Debian's chromium (or Chromium under that name) and playwright (the extra dev-browser).
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
SIZE = {"width": 1180, "height": 720}
NUM_COLOURS = 160  # the files stay small
SUDOKU = "Solve sudoku:\n45. .12\n..2 5.6\n3.5 .6.\n621 435\n.1. 65.\n.64 ..3"


def main() -> None:
    program = shutil.which("chromium")
    if program is None:
        sys.exit("no program chromium: apt install chromium")
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, kind, act in (("chat", "autoregressive", chat), ("diffusion", "diffusion", fill)):
            with served(kind) as url:
                for scheme in ("light", "dark"):
                    draw(browser, url, scheme, act, FOLDER / f"page-{name}-{scheme}.png")
        browser.close()


def draw(browser: Browser, url: str, scheme: str, act: Callable[[Page], None], path: Path) -> None:
    """Write a picture of the page after `act`."""
    page = browser.new_page(viewport=SIZE, color_scheme=scheme)
    page.goto(url)
    page.locator("#model:not(:empty)").wait_for()
    act(page)
    page.locator(":focus").evaluate_all("all => all.forEach((each) => each.blur())")
    taken = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    taken.quantize(NUM_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")
    page.close()


def chat(page: Page) -> None:
    """Ask two questions."""
    for question in ("Roman 148", "Sort 93 21 57 40 12"):
        ask(page, question)


def fill(page: Page) -> None:
    """Have a sudoku solved, a token in a pass where nothing is certain, and go back to drafts."""
    page.get_by_role("button", name="Sampling").click()
    page.get_by_label("threshold", exact=True).fill("1")
    page.get_by_role("button", name="Done").click()
    ask(page, SUDOKU)
    scrubber = page.get_by_role("slider", name="Pass")
    scrubber.fill(str(int(scrubber.get_attribute("max") or "2") * 2 // 5))


def ask(page: Page, text: str) -> None:
    """Ask, and wait for the end of the answer and of its numbers."""
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")
    page.locator(".assistant:last-child .facts").get_by_text("ended").wait_for()
    page.locator("body:not(.running)").wait_for()


@contextmanager
def served(kind: str) -> Iterator[str]:
    """Serve a demo whose experts are partly on disk; yield its address."""
    options = ("--port", "0", "--context", "512", "--host-memory", "6MiB")
    command = [sys.executable, "-m", "lowtide", "serve", f"demo:{kind}", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"is served at (http://\S+)", line):
                yield found[1]
                break
        process.terminate()


if __name__ == "__main__":
    main()
