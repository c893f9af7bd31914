"""Photograph the pages of run folders and studies with Chromium, and say what is cut off on them.

    python scripts/screenshots.py runs/first              # first-1280.png and first-375.png, whole pages
    python scripts/screenshots.py runs/first --width 1280 --height 860 --out docs/images
    python scripts/screenshots.py runs/* --check          # no pictures; fails if anything is cut
    python scripts/screenshots.py http://127.0.0.1:8000/  # the page of a running `fedmtl serve`: 127.0.0.1-1280.png

Each argument is a folder with a report.html, study.html, measure.html or wire.html, a page itself, or the address of a
server on this machine. `--script` is JavaScript to run on the page first, such as a click; half a second later it is
photographed. Without `--height` a picture shows the whole page. The browser finds what is cut: whatever reaches beyond
the window and lies in no box that scrolls.
Chromium is the only need (`apt-get install chromium`, or `--browser PATH`). It is driven over two pipes, so nothing has
to be installed for Python; it reaches nothing but 127.0.0.1.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PAGES = ("report.html", "study.html", "measure.html", "wire.html")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Elements beyond the window's right edge whose nearest box that clips or scrolls is the page itself.
CUT = """(() => {
  const wide = document.documentElement.clientWidth, found = [];
  const inBox = (e) => { for (let p = e.parentElement; p && p !== document.body; p = p.parentElement)
    if (['auto', 'scroll'].includes(getComputedStyle(p).overflowX)) return true; return false; };
  const hidden = (e) => { const s = getComputedStyle(e);
    return s.clipPath !== 'none' || s.visibility === 'hidden' || e.closest('details:not([open]) > :not(summary)'); };
  for (const e of document.body.querySelectorAll('*')) {
    const box = e.getBoundingClientRect();
    if (box.width && box.right > wide + 1 && !inBox(e) && !hidden(e))
      found.push(`${e.tagName.toLowerCase()}.${e.getAttribute('class') || ''} by ${Math.round(box.right - wide)} px: `
        + (e.textContent || '').trim().slice(0, 40));
  }
  for (const e of document.querySelectorAll('figure .scroll'))
    if (e.scrollWidth > e.clientWidth + 1 && wide > 1000)
      found.push(`table in a figure by ${e.scrollWidth - e.clientWidth} px: ${e.getAttribute('aria-label')}`);
  for (const e of document.querySelectorAll('th > *, td > *')) {
    const beyond = e.getBoundingClientRect().right - e.parentElement.getBoundingClientRect().right;
    if (beyond > 1 && !hidden(e))
      found.push(`over the next cell by ${Math.round(beyond)} px: ${(e.textContent || '').trim().slice(0, 40)}`);
  }
  return found.slice(0, 12);
})()"""


class Browser:
    """A Chromium without a window, to which commands of its debugging protocol are sent over a pipe."""

    def __init__(self, program: str, profile: str) -> None:
        to_read, self.to = os.pipe()
        self.answers, to_write = os.pipe()
        command = [
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--force-color-profile=srgb", "about:blank",
        ]  # fmt: skip
        # Chromium reads commands from descriptor 3 and answers on 4.
        shell = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        self.process = subprocess.Popen(
            ["/bin/bash", "-c", shell, "chromium", *command],
            pass_fds=(to_read, to_write),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self.buffer, self.number, self.session = b"", 0, ""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.send("Page.enable")

    def send(self, method: str, **params: Any) -> Any:
        """Send a command and return its result."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise SystemExit(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def wait_for(self, event: str) -> None:
        """Wait until the browser reports an event of this name."""
        while self._receive().get("method") != event:
            pass

    def _receive(self) -> Any:
        while b"\0" not in self.buffer:
            read = os.read(self.answers, 1 << 20)
            if not read:
                raise SystemExit("the browser ended; start it by hand to see why")
            self.buffer += read
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def open(self, address: str, width: int, height: int, dark: bool) -> None:
        """Open a page in a window of this size."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        failed = self.send("Page.navigate", url=address).get("errorText")
        if failed:
            raise SystemExit(f"{address}: {failed}")
        self.wait_for("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression on the open page."""
        return self.send("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def picture(self, width: int, top: int, height: int | None) -> bytes:
        """Return the open page from `top` on as PNG, the whole of it where no height is given."""
        tall = height or int(self.evaluate("Math.ceil(document.documentElement.scrollHeight)")) - top
        clip = {"x": 0, "y": top, "width": width, "height": tall, "scale": 1}
        found = self.send("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(found["data"])


@contextmanager
def started(program: str) -> Iterator[Browser]:
    """Run a browser with an empty profile for as long as the block lasts."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(program, profile)
        try:
            yield browser
        finally:
            browser.process.terminate()
            browser.process.wait(timeout=20)


def find_page(name: str) -> tuple[str, str]:
    """Return the address of the page that an argument means, itself or the one in its folder, and what to call it."""
    if name.startswith("http://"):
        return name, urlsplit(name).hostname or "page"
    path = Path(name)
    if path.is_file():
        return path.resolve().as_uri(), path.parent.resolve().name if path.name in PAGES else path.stem
    for page in PAGES:
        if (path / page).is_file():
            return (path / page).resolve().as_uri(), path.resolve().name
    raise SystemExit(f"{path}: no page there; name a page, or a folder with {', '.join(PAGES)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", help="run folders, studies, pages or addresses")
    parser.add_argument("--width", default="1280,375", help="widths of the window, with commas between")
    parser.add_argument("--height", type=int, help="so many pixels; the whole page without it")
    parser.add_argument("--top", type=int, default=0, help="begin so many pixels below the top")
    parser.add_argument("--dark", action="store_true", help="in dark colours")
    parser.add_argument("--out", type=Path, default=Path(), help="the folder to write into")
    parser.add_argument("--script", help="JavaScript to run on every page first")
    parser.add_argument("--check", action="store_true", help="no pictures: say what is cut, and fail if anything is")
    parser.add_argument("--browser", help="the program; found by its name otherwise")
    given = parser.parse_args()
    program = given.browser or next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        raise SystemExit(f"no browser found ({', '.join(BROWSERS)}); apt-get install chromium, or --browser PATH")
    is_cut = False
    with started(program) as browser:
        for name in given.pages:
            page, stem = find_page(name)
            for width in map(int, given.width.split(",")):
                browser.open(page, width, given.height or 900, given.dark)
                if given.script:
                    time.sleep(0.5)  # a page may still ask its server what to show
                    browser.evaluate(given.script)
                    time.sleep(0.5)
                cut = browser.evaluate(CUT)
                is_cut = is_cut or bool(cut)
                for line in cut:
                    print(f"{page} at {width} px: cut: {line}")
                if given.check:
                    continue
                picture = browser.picture(width, given.top, given.height)
                given.out.mkdir(parents=True, exist_ok=True)
                file = given.out / f"{stem}-{width}{'-dark' if given.dark else ''}.png"
                file.write_bytes(picture)
                print(f"{file}: {file.stat().st_size:,} bytes")
    return 1 if given.check and is_cut else 0


if __name__ == "__main__":
    sys.exit(main())
