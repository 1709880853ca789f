"""The page itself: complete, harmless, and it says what was found."""

import base64
import io
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import CANDIDATES, HOSTILE, SPLIT, N, content, smooth_images
from PIL import Image

from palimpsest.report import Content, Variant, figures, render
from palimpsest.report.page import INVISIBLE
from palimpsest.scoring import score

VOID = {"meta", "link", "img", "br", "input"}
PAGES = {
    "two variants": {},
    "one variant": {"variants": 1},
    "colour": {"channels": 3},
    "no held-out images": {"held_out": 0},
    "too few held-out images": {"held_out": 1, "variants": 1},
    "no training images": {"truth": False, "variants": 1},
    "two without training images": {"truth": False},
    "nothing found": {"noise": 3.0},
}


class Page(HTMLParser):
    """Elements with their attributes, the text, and whether every element was closed where it should be."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.open, self.text = [], [], ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data

    def all(self, *tags):
        return [attributes for tag, attributes in self.elements if tag in tags]

    @property
    def sections(self):
        return [attributes["id"] for attributes in self.all("section")]


@pytest.fixture(params=list(PAGES))
def case(request):
    made = content(**PAGES[request.param])
    html = render(made)
    return made, html, Page(html)


def test_it_is_well_formed_and_says_the_verdict_first(case):
    made, _, page = case
    assert not page.open
    score = made.judged.score
    assert (score.verdict.sentence if score else "No verdict: 15 candidates") in page.text
    assert page.sections[:2] == ["verdict", "pictures"]
    assert page.sections[-2:] == ["settings", "responsible-use"]


def test_every_picture_has_alternative_text_and_decodes(case):
    made, _, page = case
    pictures = page.all("img")
    assert len(pictures) >= len(made.judged.images)
    for picture in pictures:
        assert picture["alt"].strip()
        kind, data = picture["src"].split(",")
        assert kind == "data:image/png;base64"
        image = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
        image.load()
        assert image.size == (12, 12)
        assert image.mode == ("RGB" if made.judged.images.shape[1] == 3 else "L")


def test_every_figure_has_alternative_text(case):
    for drawing in case[2].all("svg"):
        assert drawing.get("aria-hidden") == "true" or len(drawing["aria-label"]) > 20


def test_nothing_is_loaded_and_nothing_is_run(case):
    _, html, page = case
    assert not page.all("script", "iframe", "object", "embed", "form", "base")
    assert not re.search(r"https?:|//[a-z]+\.|url\(|@import", html)
    for attributes in (a for _, a in page.elements):
        assert not any(name.startswith("on") for name in attributes)
        assert all(attributes.get(name, "data:").startswith(("data:", "#")) for name in ("src", "href"))
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'unsafe-inline'")
    assert "script-src" not in policy


def test_numbers_are_never_raw(case):
    assert not re.search(r"\bnan\b|\binf\b|\d\.\d{8}|\de-\d\d|None|tensor\(", case[2].text)


def test_it_is_small(case):
    assert len(case[1]) < 500_000


# --- what is shown when --------------------------------------------------------------------------


def shown(**options):
    return Page(render(content(**options)))


def test_two_variants_are_compared():
    page = shown()
    assert page.sections == [
        *("verdict", "pictures", "evidence", "comparison", "course", "trajectories", "eigenvalues"),
        *("settings", "responsible-use"),
    ]
    drawings = [d["aria-label"].split()[0] for d in page.all("svg") if "aria-label" in d]
    assert drawings == ["Distribution", "Scatter", "Relative", "Mean", "Images", "Smallest"]
    assert "∞" not in page.text  # one PSNR is infinite, the median is not
    assert "0.5 is chance" in page.text


def test_one_variant_has_nothing_to_be_compared_with():
    page = shown(variants=1)
    assert "Scatter" not in str(page.elements)
    assert "without splitting" not in page.text


def test_without_held_out_images_no_verdict_is_given_and_no_threshold_shown():
    page = shown(held_out=0)
    assert "No verdict" in page.text
    assert "training images recovered" not in page.text
    assert not any("Distribution" in d.get("aria-label", "") for d in page.all("svg"))


def test_options_that_were_left_open_are_not_shown():
    assert "task" not in shown().text  # it is None, and so is the KKT residual
    assert "kkt residual" not in shown().text


def test_candidates_are_counted_in_a_histogram():
    ours = torch.tensor([0.98, 0.97, 0.96, 0.53, 0.51, 0.01, 0.01, 0.01, 0.01])
    drawing = str(figures.histograms(ours, torch.tensor([0.52, *[0.02] * 150]), 4, figures.PROBABILITY))
    page = Page(drawing)
    heights = {
        name: [float(r["height"]) for r in page.all("rect") if r["class"] == name] for name in ("solid", "hollow")
    }
    assert heights["hollow"] == [pytest.approx(n * heights["solid"][1], abs=0.5) for n in (3, 2, 4)]
    assert len(page.all("rect")) == 3 + 2 + 2
    assert re.findall(r'middle">(\d+)</text>', drawing)[-5:] == ["3", "2", "4", "1", "150"]
    assert "control: 52 %" in page.text


def test_no_evidence_is_said_soberly():
    page = shown(noise=3.0)
    assert "No evidence of leakage" in page.text
    assert "not proven safe" in page.text


def test_the_stronger_reconstruction_gives_the_verdict():
    images, others = smooth_images(40, 1, seed=0), smooth_images(40, 1, seed=1)
    strong, weak = (
        Variant(
            name, shown, torch.arange(40), torch.full((40,), -1), [], score(shown, images, held_out=others, looks=2)
        )
        for name, shown in (("strong", images.clone()), ("weak", smooth_images(40, 1, seed=2)))
    )
    for variants in ([strong, weak], [weak, strong]):
        made = Content("An audit", variants, images, 40)
        assert made.judged is strong
        assert strong.score.verdict.sentence in render(made)


def test_without_training_images_nothing_is_judged():
    page = shown(truth=False, variants=1)
    assert not {"evidence"} & set(page.sections)
    assert not re.search("SSIM|AUC", page.text)
    assert len(page.all("img")) >= CANDIDATES + SPLIT


def test_a_bare_result_is_a_page_too():
    made = content(truth=False, variants=1, configuration={}, versions={}, seeds={}, training={}, seconds={})
    object.__setattr__(made.judged, "history", [])
    object.__setattr__(made.judged, "snapshots", [])
    assert Page(render(made)).sections == ["verdict", "pictures", "comparison", "responsible-use"]


# --- what is said of single images ---------------------------------------------------------------


def test_training_images_are_sorted_by_score_each_once():
    made = content()
    alts = [p["alt"] for p in Page(render(made)).all("img")]
    order = [int(re.search(r"\d+", alt)[0]) - 1 for alt in alts[: 3 * N] if alt.startswith("Training image")]
    assert sorted(order) == list(range(N))
    evidence = made.judged.score.evidence[order]
    assert (evidence[:-1] >= evidence[1:]).all()


def test_recovered_images_are_marked():
    made = content()
    page = render(made)
    marks = sum(int(v.score.recovered.sum()) for v in made.variants)
    assert page.count('class="note recovered"') == marks > 0


def test_trajectories_follow_a_candidate_through_its_split():
    alts = [p["alt"] for p in Page(render(content(truth=False, variants=1))).all("img")]
    frames = [re.match(r"Candidate (\d+) with splitting at (.*)", alt) for alt in alts]
    told = [(int(m[1]), m[2]) for m in frames if m]
    assert told[:3] == [(0, "step 0"), (0, "step 100"), (CANDIDATES, "the end")]  # 0 split into 10 and 15


# --- strings that mean harm ----------------------------------------------------------------------


def test_user_strings_are_text_wherever_they_appear():
    made = content(
        title=HOSTILE,
        configuration={HOSTILE: {HOSTILE: [HOSTILE, {"deep": HOSTILE}]}},
        versions={"palimpsest": HOSTILE},
        seeds={HOSTILE: 1},
        training={"data": HOSTILE},
        seconds={HOSTILE: 1.0},
    )
    for run in made.variants:
        object.__setattr__(run, "name", HOSTILE)
    html = render(made)
    assert "<img src=x" not in html
    assert "</script>" not in html
    page = Page(html)
    assert not page.open
    assert page.text.count(HOSTILE) > 10
    assert "49" not in page.text.partition("Configuration")[2].partition("Responsible")[0]
    assert all(p["src"].startswith("data:") for p in page.all("img"))


FRAGMENTS = (
    *(
        "<script>",
        "</script>",
        '"><img src=x onerror=alert(1)>',
        "]]>",
        "<!--",
        "-->",
        "&lt;",
        "{{ 7 * 7 }}",
        "{% raw %}",
    ),
    *(
        "</title>",
        "</style>",
        "javascript:",
        "\u202e",
        "\u2066",
        "\x00",
        "\x1b[31m",
        "\ud800",
        "\uffff",
        "⁻⁹",
        "\n",
        "'",
    ),
    *("`", "\\", "<svg/onload=alert(1)>", "&#x3c;", "\N{ZERO WIDTH JOINER}", "𝕏", "x" * 3000),
)
STRINGS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=8), min_size=1, max_size=6).map("".join)
PLAIN = content(truth=False, variants=1)


def with_strings(a, b):
    """A page with strings wherever a user, a folder or a file can put them."""
    table = {a: {b: [a, {"deep": b}]}}
    few = {
        "images": PLAIN.judged.images[:2],
        "ids": PLAIN.judged.ids[:2],
        "history": [],
        "snapshots": [],
        "metrics": [],
    }
    final = replace(PLAIN.judged, name=b, **few)
    tables = {"configuration": table, "training": {"data": a}, "seeds": {b: a}, "seconds": {a: 1.0}, "versions": {b: a}}
    return render(replace(PLAIN, title=a, variants=[final], **tables))


def skeleton(html):
    """Elements and the names of their attributes; superscripts are made of characters, by us."""
    return [(tag, sorted(attributes)) for tag, attributes in Page(html).elements if tag != "sup"]


SKELETON = skeleton(with_strings("a", "b"))


@settings(max_examples=25, derandomize=True, deadline=None)
@given(STRINGS, STRINGS)
def test_no_string_adds_an_element_or_an_attribute(a, b):
    html = with_strings(a, b)
    assert skeleton(html) == SKELETON
    assert not INVISIBLE.search(html)
    assert html.encode().decode() == html


@pytest.mark.parametrize("name", ["<b>&amp;\"'", "]]><script>alert(1)</script>", "имя-名前", "x" * 500])
def test_strings_are_shown_as_they_are(name):
    assert Page(with_strings(name, "b")).text.count(name) >= 5


def test_characters_that_turn_text_around_are_shown_as_what_they_are():
    text = Page(with_strings("photo\u202egnp.exe", "b")).text
    assert "photo\N{REPLACEMENT CHARACTER}gnp.exe" in text
