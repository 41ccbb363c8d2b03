"""The page of a report in a real browser: a picture with marks, nothing wider than a phone, light and dark."""

import json
import re
import shutil
import subprocess
from html import escape, unescape

import numpy as np
import pytest

import hf_packing as hfp
from hf_packing.report.render import COLUMNS

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
MEASURE = """
<script>
const shown = (element) => { const box = element.getBoundingClientRect(); return box.width > 0 || box.height > 0; };
const beyond = [...document.querySelectorAll("body *")].filter((element) =>
  !element.closest(".wide") && !element.closest("svg") && element.getBoundingClientRect().right > innerWidth + 0.5);
const marks = [...document.querySelectorAll('figure [id^="mark-"]')].filter(shown).map((mark) => mark.id);
const broken = [], columns = [];
for (const table of document.querySelectorAll("table")) {
  const box = table.parentElement.getBoundingClientRect();
  for (const heading of table.querySelectorAll("thead th:not(:empty)")) {
    const right = heading.getBoundingClientRect().right;
    if (right <= Math.min(box.right, innerWidth) + 0.5) columns.push(heading.textContent); }
  const texts = document.createTreeWalker(table, NodeFilter.SHOW_TEXT);
  while (texts.nextNode())
    for (const word of texts.currentNode.data.matchAll(/\\S+/g)) {
      const range = document.createRange();
      range.setStart(texts.currentNode, word.index);
      range.setEnd(texts.currentNode, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map((line) => line.top)).size > 1) broken.push(word[0]); } }
const cut = [...document.querySelectorAll("figure svg text")].filter((text) =>
  text.getBoundingClientRect().right > text.closest("svg").getBoundingClientRect().right + 0.5);
const labels = document.querySelector("figure svg text");
const found = { width: innerWidth, columns, broken, cut: cut.map((text) => text.textContent),
  scroll: document.documentElement.scrollWidth, marks,
  beyond: beyond.map((element) => element.outerHTML.slice(0, 80)),
  paper: getComputedStyle(document.body).backgroundColor,
  ink: labels && getComputedStyle(labels).fill,
  fetched: performance.getEntriesByType("resource").length };
parent.document.body.innerHTML = "<pre id=found>" + JSON.stringify(found).replaceAll("<", "&lt;") + "</pre>";
</script>
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.9, 0.55, 4000), 1, 9000).astype(int)
    report = hfp.packing_report(lengths, [2048, 4096, 8192], source="a-rather-long-name-of-a-data-set/" * 3)
    file = tmp_path_factory.mktemp("page") / "report.html"
    report.save(file)
    return file


def seen_in_browser(page, width, *options):
    """What the browser measures in a window so wide."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser: install one of {', '.join(BROWSERS)}")
    copy = page.with_name(f"measured-{width}.html")  # browsers have no window as narrow as a phone, but frames
    measured = escape(page.read_text().replace("</body>", f"{MEASURE}</body>"))
    frame = f'<iframe style="width:{width}px;height:2000px;border:0" srcdoc="{measured}"></iframe>'
    copy.write_text(f'<!doctype html><meta name="color-scheme" content="light dark"><body>{frame}</body>')
    profile = page.parent / "profile"
    command = [browser, *QUIET, *options, f"--user-data-dir={profile}", "--window-size=1600,2000", "--dump-dom"]
    dumped = subprocess.run([*command, copy.as_uri()], capture_output=True, text=True, timeout=120, check=True).stdout
    return json.loads(unescape(re.search(r'<pre id="found">(.*?)</pre>', dumped, re.DOTALL)[1]))


LONG = [
    hfp.FixedLength(2048),
    hfp.BestFit(2048, overflow="truncate", max_documents=8, seed=17),
    hfp.Bucket((2048, 4096, 8192, 16384), padding_threshold=0.05, seed=3),
    hfp.Bucket(tuple(range(64, 16385, 64))),
    hfp.Multipack(16384, window=100_001, overflow="drop", seed=12),
    hfp.BestFit(16384),
    hfp.FirstCome(16384, order="longest_first", overflow="truncate", max_documents=16),
    hfp.FirstCome(16384, order="dataset", overflow="drop", max_documents=1234, seed=98765),
]
HEADINGS = [name.replace("-", "\N{NON-BREAKING HYPHEN}") for name in COLUMNS if name]
NOTEBOOK = """<!doctype html><style>
body { width: 700px; overflow-wrap: anywhere; word-break: break-word; font: 13px sans-serif; }
table { border-collapse: collapse; table-layout: fixed; margin: 0 auto 1em; }
td, th { padding: .5em; white-space: normal; max-width: none; border: none; vertical-align: middle; }
</style><body>%s</body>"""
"""The strictest of the rules under which notebooks show what a cell returns."""


@pytest.fixture(scope="module")
def long_names(tmp_path_factory):
    """A report with long names, as a page and as a notebook shows it."""
    lengths = np.clip(np.random.default_rng(0).lognormal(7.6, 0.55, 4000), 1, 90_000).astype(int)
    report = hfp.packing_report(lengths, strategies=LONG)
    folder = tmp_path_factory.mktemp("long")
    report.save(folder / "page.html")
    (folder / "notebook.html").write_text(NOTEBOOK % report._repr_html_())
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 800, 390])
def test_the_speed_up_is_in_sight_and_no_name_is_broken(page, long_names, width):
    for file in (page, long_names / "page.html"):
        found = seen_in_browser(file, width)
        assert found["columns"][0] == HEADINGS[0] == "speed\N{NON-BREAKING HYPHEN}up over padding"
        assert found["columns"] == HEADINGS[: len(found["columns"])]
        if width == 1280:
            assert found["columns"] == HEADINGS
        assert found["broken"] == []
        assert found["cut"] == []
        assert found["beyond"] == []


@pytest.mark.slow
def test_a_notebook_breaks_no_name(long_names, tmp_path):
    found = seen_in_browser(long_names / "notebook.html", 1000)
    assert found["columns"][0] == HEADINGS[0]
    assert found["broken"] == []
    plain = tmp_path / "plain.html"  # the same without styles of its own
    plain.write_text(re.sub(' style="[^"]*"', "", (long_names / "notebook.html").read_text()))
    assert seen_in_browser(plain, 1000)["broken"]


LIGHT = ("rgb(255, 255, 255)", "rgb(31, 36, 48)")
DARK = ("rgb(22, 26, 34)", "rgb(228, 231, 236)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "options", "colors"),
    [
        (390, [], LIGHT),
        (1200, [], LIGHT),
        (390, ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"], DARK),
    ],
)
def test_the_picture_has_marks_and_nothing_overflows(page, width, options, colors):
    found = seen_in_browser(page, width, *options)
    assert found["width"] == width >= found["scroll"]
    assert found["beyond"] == []
    assert found["marks"], "the picture shows nothing"
    assert found["fetched"] == 0
    assert (found["paper"], found["ink"]) == colors


@pytest.mark.slow
def test_that_overflow_would_be_seen(page, tmp_path):
    wide = tmp_path / "report.html"
    wide.write_text(page.read_text().replace("</body>", '<div style="width:900px">wide</div></body>'))
    found = seen_in_browser(wide, 390)
    assert found["scroll"] > 390
    assert found["beyond"]


def test_names_of_elements_are_unique_and_the_picture_has_a_title(page):
    text = page.read_text()
    names = re.findall(r'\sid="([^"]+)"', text)
    assert len(names) == len(set(names)) > 20
    referred = re.findall(r'(?:url\(#|href="#)([^)"]+)', text)
    assert referred
    assert set(referred) <= set(names)
    assert re.findall(r'<svg role="img" aria-label="([^"]+)"', text) == ["Lengths of documents"]
    assert not re.search(r'(src|href)="(?!data:|#|https://)', text), "fetched when the page is opened"


@pytest.mark.parametrize(
    ("source", "title"), [("chat & <b>.jsonl.gz", "chat &amp; &lt;b&gt;.jsonl.gz"), ("", "3 documents, 18 t")]
)
def test_the_title_is_the_source_of_the_data_and_escaped(tmp_path, monkeypatch, source, title):
    monkeypatch.setattr("hf_packing.report.render.picture", lambda *_: "<svg></svg>")
    hfp.packing_report([5, 6, 7], 8, source=source).save(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert f"<title>{title}" in page
    assert f"<h1>{title}" in page
