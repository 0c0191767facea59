"""Makes the README's pictures from a real session: `make_pictures.py WORKSPACE SESSION TERMINAL_LOG`.

Writes small PNGs to docs/pictures: the terminal, report.html in light and on a dark phone, progress.png, the dashboard.
Needs what the tests of pages need (Chromium, Playwright, the dashboard extra).
"""

import argparse
import html
import json
import shutil
import subprocess
import sys
from pathlib import Path

from browser import NAMES
from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
TERMINAL = "margin:0;padding:16px;color:#e6edf3;background:#0d1117;font:13px/1.35 DejaVu Sans Mono,monospace"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workspace", type=Path)
    parser.add_argument("session")
    parser.add_argument("log", type=Path, help="what `overnight run` printed")
    arguments = parser.parse_args()
    PICTURES.mkdir(exist_ok=True)
    folder = (arguments.workspace / ".overnight" / arguments.session).resolve()
    overnight(arguments.workspace, "report", arguments.session, stdout=subprocess.DEVNULL).wait()
    kept = [one for one in rows(arguments.workspace, arguments.session) if one["status"] == "keep"]
    served = overnight(arguments.workspace, "dashboard", "--port", "0", "--json", stdout=subprocess.PIPE)
    try:
        address = (
            json.loads("".join(iter(served.stdout.readline, "}\n")) + "}")["address"] + f"session/{arguments.session}"
        )
        with sync_playwright() as started:
            browser = started.chromium.launch(
                executable_path=next(filter(None, map(shutil.which, NAMES))), args=["--no-sandbox"]
            )
            take(browser, (folder / "report.html").as_uri(), "report", 1100, 880, "light")
            take(browser, (folder / "report.html").as_uri(), "report-phone", 390, 844, "dark")
            take(browser, address, "dashboard", 1100, 880, "dark")
            if kept:
                take(browser, f"{address}/experiment/{kept[-1]['experiment']}", "experiment", 1100, 880, "light")
            terminal(browser, arguments.log.read_text())
            browser.close()
    finally:
        served.terminate()
        served.wait()
    progress = Image.open(folder / "progress.png").convert("RGB").resize((1200, 750), Image.Resampling.LANCZOS)
    progress.save(PICTURES / "progress.png")
    shrink("progress")


def overnight(workspace: Path, *words: str, stdout: int) -> subprocess.Popen:
    command = [sys.executable, "-P", str(ROOT / "agent" / "__main__.py"), *words]
    return subprocess.Popen(command, cwd=workspace, stdout=stdout, text=True)


def rows(workspace: Path, session: str) -> list[dict]:
    started = overnight(workspace, "results", session, "--json", stdout=subprocess.PIPE)
    return json.loads(started.communicate()[0])


def take(browser, address, name, width, height, scheme):
    with browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme) as context:
        page = context.new_page()
        page.goto(address)
        page.wait_for_timeout(500)
        page.screenshot(path=PICTURES / f"{name}.png")
    shrink(name)


def terminal(browser, text):
    with browser.new_context(viewport={"width": 1180, "height": 600}) as context:
        page = context.new_page()
        page.set_content(f'<body style="margin:0"><pre style="{TERMINAL}">{html.escape(text)}</pre>')
        page.locator("pre").screenshot(path=PICTURES / "terminal.png")
    shrink("terminal")


def shrink(name):
    """64 colours are enough for a page, and a tenth of the size."""
    path = PICTURES / f"{name}.png"
    Image.open(path).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)
    print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
