"""The report in a real browser: it draws, it complains of nothing, and nothing leaves the machine."""

import json
import re
import shutil
import subprocess
from html import unescape

import pytest
from made_up import HOSTILE, content

from palimpsest.report import render

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIETLY = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-default-apps", "--disable-extensions", "--disable-sync"),
    "--proxy-server=http://127.0.0.1:9",
)
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy".*?>')
INSPECTION = """<script>addEventListener("load", () => {
  const found = {
    pictures: [...document.images].map(image => image.complete ? image.naturalWidth : 0),
    figures: [...document.querySelectorAll("svg")].map(svg => svg.getBoundingClientRect().height),
    right: Math.max(...[...document.body.querySelectorAll("*")].map(e => e.getBoundingClientRect().right)),
  };
  document.documentElement.setAttribute("data-found", JSON.stringify(found));
})</script></head>"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


class Browser:
    """Opens pages from disk. Its proxy is a closed door, so nothing leaves the machine; what pages ask for is noted."""

    def __init__(self, folder):
        self.folder, self.asked = folder, []

    def open(self, html, *options):
        """The document after loading, and what the console said."""
        page, notes = self.folder / "page.html", self.folder / "network.json"
        page.write_text(html, encoding="utf-8")
        files = (f"--user-data-dir={self.folder / 'profile'}", f"--log-net-log={notes}")
        command = [CHROMIUM, *QUIETLY, *files, *options, "--enable-logging=stderr", "--dump-dom", page.as_uri()]
        run = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=600, check=True)
        self.asked += requests_of_pages(json.loads(notes.read_text(encoding="utf-8")))
        return run.stdout, [line for line in run.stderr.splitlines() if "CONSOLE" in line]

    def inspect(self, html, width):
        """What a script finds in a copy of the page that may run one."""
        narrowed = f"<style>html {{ width: {width}px }}</style>"  # for windows are at least 500 pixels wide
        copy = POLICY.sub("", html).replace("</head>", narrowed + INSPECTION)
        document, console = self.open(copy, f"--window-size={width},2000")
        assert not console
        return json.loads(unescape(re.search(r'data-found="(.*?)"', document)[1]))


def requests_of_pages(log):
    """Addresses that a page asked for; what the browser asks for on its own account has no origin."""
    start = log["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    started = [event.get("params", {}) for event in log["events"] if event["type"] == start]
    return [request["url"] for request in started if request.get("initiator", "not an origin") != "not an origin"]


@pytest.fixture
def browser(tmp_path):
    return Browser(tmp_path)


def test_the_page_opens_from_disk_without_a_complaint_or_a_request(browser):
    made = content(title=HOSTILE)
    document, console = browser.open(render(made))
    assert made.judged.score.verdict.sentence in document
    assert not console
    assert not browser.asked


def test_a_page_that_asks_or_runs_is_caught(browser):
    """The test above would notice."""
    html = render(content(variants=1))
    asking = POLICY.sub("", html).replace("</body>", '<img src="http://example.test/pixel.png" alt=""></body>')
    browser.open(asking)
    assert browser.asked == ["http://example.test/pixel.png"]
    _, console = browser.open(html.replace("</body>", "<script>document.title = 'run'</script></body>"))
    assert any("Content Security Policy" in line for line in console)


LONG = "W" * 3000 + HOSTILE + "\u202e" + "名" * 300


def test_hostile_and_endless_names_are_text_that_fits(browser):
    tables = {name: {LONG: {LONG: LONG}, "data": LONG} for name in ("configuration", "versions", "seeds", "training")}
    html = render(content(title=LONG, seconds={LONG: 1.0}, **tables))
    document, console = browser.open(html)
    assert not console
    assert not browser.asked
    assert "<img src=x" not in document
    assert browser.inspect(html, 400)["right"] <= 400


@pytest.mark.parametrize("width", [1200, 400])
@pytest.mark.parametrize("options", [{"channels": 3}, {"truth": False, "variants": 1}], ids=["scored", "unscored"])
def test_everything_is_drawn_and_fits(browser, width, options):
    html = render(content(**options))
    found = browser.inspect(html, width)
    assert len(found["pictures"]) == html.count("<img ")
    assert set(found["pictures"]) == {12}
    assert min(found["figures"]) > 5
    assert found["right"] <= width
    assert not browser.asked
