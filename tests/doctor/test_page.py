"""A report as a page and in a notebook: well formed, self-contained, and text stays text."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pytest

from trainstep._doctor.records import Site, Span
from trainstep._doctor.report import Report
from trainstep._doctor.show import html, source_lines
from trainstep._doctor.show import page as _page

from . import sample_reports as samples

pytestmark = pytest.mark.plain
Sample = Callable[[], Report]
every = pytest.mark.parametrize("sample", samples.ALL, ids=lambda sample: sample.__name__)


class Parsed(HTMLParser):
    """The elements of a page, in order, and the text in each kind; complains if it is malformed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"an attribute twice: {attrs}"
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self._open[-1] if self._open else "", data))

    def named(self, tag: str, css: str = "") -> list[dict[str, str | None]]:
        """The attributes of all elements of a kind, of a class if one is named."""
        of_tag = [attrs for name, attrs in self.elements if name == tag]
        return [attrs for attrs in of_tag if not css or css in (attrs.get("class") or "").split()]

    def text(self, *tags: str) -> str:
        """The text, of some kinds of elements if they are named."""
        return "".join(data for tag, data in self.texts if not tags or tag in tags)

    @property
    def said(self) -> str:
        """What there is to read."""
        return "".join(data for tag, data in self.texts if tag not in ("style", "script", "title"))


def headings(parsed: Parsed) -> list[str]:
    return [data for tag, data in parsed.texts if tag == "h2"]


@every
def test_a_page_is_well_formed_and_its_links_lead_somewhere(sample: Sample) -> None:
    parsed = Parsed(_page.page(sample()))

    assert parsed.named("html") == [{"lang": "en"}]
    assert parsed.text("title").startswith("trainstep doctor")
    assert len(parsed.named("h1")) == 1
    ids = [attrs["id"] for _, attrs in parsed.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {attrs["href"] for attrs in parsed.named("a")} <= {f"#{each}" for each in ids}


@every
def test_a_page_needs_nothing_but_itself(sample: Sample) -> None:
    page = _page.page(sample())
    parsed = Parsed(page)

    assert not {tag for tag, _ in parsed.elements} & {"link", "img", "iframe", "object", "embed"}
    assert not [attrs for _, attrs in parsed.elements if "src" in attrs]
    assert "http://" not in page
    assert "https://" not in page
    assert "url(" not in page
    assert "@import" not in page
    (policy,) = [m["content"] for m in parsed.named("meta") if "http-equiv" in m]
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")


def test_text_stays_text() -> None:
    parsed = Parsed(_page.page(samples.hostile()))

    assert len(parsed.named("script")) == 1
    assert "alert" not in parsed.text("script")
    assert not parsed.named("b")
    assert not parsed.named("i")
    assert not [c for c in _page.page(samples.hostile()) if not c.isprintable() and c != "\n"]
    for told in (
        "x = '</pre><script>alert(1)</script>' # [red]\\x1b[31m",
        "<script>[bold]f\\x07",
        "<i> when traced, '\"><script> now",
        "[link=x]<script>[/link]",
        "<script>note [red]",
        "The run ended with an error: <script>Error",
        "<script>inner",
        "<script>add",
    ):
        assert told in parsed.said
    assert "<script>.py" in parsed.text("title")


def test_the_parts_are_in_the_order_of_their_weight() -> None:
    parsed = Parsed(_page.page(samples.by_shape()))

    assert headings(parsed) == [
        "Timeline",
        "What to change",
        "Functions",
        "Small programs",
        "What doctor could not see",
        "To paste into an issue",
    ]


def test_a_clean_page_says_that_there_is_nothing_to_report() -> None:
    parsed = Parsed(_page.page(samples.clean()))

    assert "Nothing to report: 2 functions were traced once, as needed" in parsed.said
    assert headings(parsed) == ["Timeline", "Functions", "To paste into an issue"]


def test_an_empty_report_is_a_page() -> None:
    parsed = Parsed(_page.page(samples.empty()))

    assert headings(parsed) == ["To paste into an issue"]


def test_what_runs_uncompiled_comes_before_the_headline() -> None:
    said = Parsed(_page.page(samples.limit())).said

    assert said.index("NO LONGER COMPILED") < said.index("8 traces of 1 function")


def test_a_run_that_was_cut_off_says_so() -> None:
    parsed = Parsed(_page.page(samples.killed()))

    assert "was cut off" in parsed.said
    assert "of the run" not in parsed.said
    assert "failed: RESOURCE_EXHAUSTED: Out of memory" in parsed.said


def test_the_headline_numbers() -> None:
    parsed = Parsed(_page.page(samples.by_shape()))
    said = [data for tag, data in parsed.texts if tag in ("dt", "dd")]

    pairs = dict(zip(said[:12:2], said[1:12:2], strict=True))
    assert pairs == {
        "avoidable": "6.48 s",
        "tracing and compiling": "13.3 s",
        "of the run": "22%",
        "traces and compilations": "6",
        "functions": "2",
        "findings": "2",
    }


def bars(parsed: Parsed, css: str) -> list[tuple[float, float]]:
    """Where bars begin and how long they are, in percent."""
    found = parsed.named("rect", css)
    return [(float(b["x"][:-1]), float(b["width"][:-1])) for b in found]  # type: ignore[index]


def test_the_timeline_has_a_bar_for_each_trace_where_and_as_long_as_it_was() -> None:
    parsed = Parsed(_page.page(samples.by_shape()))

    assert bars(parsed, "needed") == [(0.83, 2.7), (33.33, 2.7)]  # at 0.5 and 20 of 60 s
    assert bars(parsed, "avoidable") == [(6.67, 2.7), (10.0, 2.7), (13.33, 2.7), (35.0, 2.7)]
    assert bars(parsed, "disk") == [(35.0, 2.7)]
    assert bars(parsed, "span") == [(31.67, 50.0), (83.33, 6.67)]
    assert len(parsed.named("rect", "call")) == 8
    titles = [data for tag, data in parsed.texts if tag == "title"]
    assert any("#2 at 4.00 s, avoidable\nx: float32[32,4] -> float32[30,4]" in t for t in titles)


def test_the_axis_is_in_round_seconds_and_ends_within_the_run() -> None:
    parsed = Parsed(_page.page(samples.by_shape()))

    marks = [
        data for tag, data in parsed.texts if tag == "text" and re.fullmatch(r"[\d.]+ s", data)
    ]
    assert marks == ["0 s", "10 s", "20 s", "30 s", "40 s", "50 s", "60 s"]


def test_the_axis_of_a_run_without_a_length_reaches_the_last_trace() -> None:
    report = samples.killed()
    report.functions[0].call_times = [10.0]

    assert "10 s" in Parsed(_page.page(report)).text("text")


def test_thousands_of_calls_are_drawn_as_far_as_they_can_be_told_apart() -> None:
    report = samples.by_shape()
    report.functions[0].call_times = [i / 1000 for i in range(60_000)]
    report.spans = [Span(at=i / 100, what="train_on_batch", seconds=0.01) for i in range(6000)]

    parsed = Parsed(_page.page(report))

    assert 300 < len(parsed.named("rect", "call")) < 500
    assert 300 < len(parsed.named("rect", "span")) < 500


def test_of_very_many_functions_some_have_a_lane_and_the_rest_is_counted() -> None:
    functions = [samples.function(samples.event(1, i), name=f"f{i}") for i in range(30)]

    parsed = Parsed(_page.page(samples.report(*functions)))

    assert len(parsed.named("rect", "needed")) == 24
    assert "... and 6 more functions" in parsed.said


def test_a_finding_has_its_severity_its_line_and_its_cure() -> None:
    parsed = Parsed(_page.page(samples.stale()))

    assert len(parsed.named("article", "high")) == 1
    assert "may be wrong" in parsed.text("span")
    assert "stale:" in parsed.text("code")
    assert "1.0 when traced, 2.0 now; noticed at train.py:44: scale = 2.0" in parsed.said
    assert "the compiled function holds the old value as a constant" in parsed.said
    assert "tf.Variable" in parsed.text("code")


def test_all_traces_of_sixty_are_on_the_page_and_most_are_folded() -> None:
    page = _page.page(samples.many())
    parsed = Parsed(page)

    assert "57 more like #3, 92.3 s" in parsed.text("summary")
    numbers = [int(data[1:]) for tag, data in parsed.texts if tag == "td" and data[0] == "#"]
    assert sorted(n for n in numbers if n > 1) == list(range(2, 62))
    opened = [attrs for attrs in parsed.named("details") if "open" in attrs]
    assert [attrs["id"] for attrs in opened] == ["function-0"]
    assert "Also to fix: each dtype needs a program: convert to one dtype" in parsed.said


def test_the_same_function_of_two_processes_is_told_apart() -> None:
    said = Parsed(_page.page(samples.processes())).said

    assert "train_step (process 11)" in said
    assert "train_step (process 12)" in said


def test_versions_can_be_copied() -> None:
    parsed = Parsed(_page.page(samples.clean()))

    assert "command    python train.py\n" in parsed.text("pre")
    assert "jax        0.10.1" in parsed.text("pre")
    assert ".versions" in parsed.text("script")
    assert len(parsed.named("pre", "versions")) == 1


LINES = ["import x", "", "def f():", "    a = 1", "    if a:", "        b = 2", "    c = 3", "f()"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of eight lines."""
    path = tmp_path / "user.py"
    path.write_text("\n".join(LINES))
    return path


def test_the_source_has_the_line_marked_and_two_on_each_side(file: Path) -> None:
    parsed = Parsed(source_lines.sources([Site(str(file), 6, "b = 2")]))

    assert parsed.text("figcaption", "code") == "user.py:6"
    assert parsed.said.removeprefix("user.py:6") == (
        "  4      a = 1\n  5      if a:\n> 6          b = 2\n  7      c = 3\n  8  f()\n"
    )
    assert parsed.text("mark") == "        b = 2"


def test_neighbours_are_one_listing_and_lines_far_apart_have_a_gap(file: Path) -> None:
    file.write_text("\n".join(f"line {i}" for i in range(1, 40)))
    sites = [Site(str(file), line) for line in (30, 4, 5)]

    parsed = Parsed(source_lines.sources(sites))

    assert parsed.text("code") == "user.py:4, 5, 30"
    numbers = re.findall(r"^> +(\d+)", parsed.text().removeprefix("user.py:4, 5, 30"), re.M)
    assert numbers == ["4", "5", "30"]
    assert parsed.text().count("  ...\n") == 1
    assert len(parsed.named("figure")) == 1


@pytest.mark.parametrize("line", [4, 99])
def test_a_file_that_has_changed_since_shows_what_was_noted_alone(file: Path, line: int) -> None:
    parsed = Parsed(source_lines.sources([Site(str(file), line, "loss = step(x)")]))

    assert parsed.text("mark") == "loss = step(x)"
    assert "import" not in parsed.said


def test_a_file_that_is_gone_is_no_error(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone.py")

    assert "(the file is not readable)" in source_lines.sources([Site(gone, 3)])
    assert "loss = step(x)" in source_lines.sources([Site(gone, 3, "loss = step(x)")])
    assert source_lines.sources([Site()]) == ""


@every
def test_a_notebook_gets_one_element_without_scripts(sample: Sample) -> None:
    shown = _page.notebook(sample())
    parsed = Parsed(shown)

    assert shown.startswith('<div class="trainstep-doctor">')
    assert not {"script", "html", "body", "main", "meta"} & {tag for tag, _ in parsed.elements}
    assert "To paste into an issue" in parsed.said


def test_two_reports_of_a_notebook_share_no_ids() -> None:
    reports = [samples.by_shape(), samples.by_shape()]

    first, second = (
        {a["id"] for _, a in Parsed(_page.notebook(r)).elements if "id" in a} for r in reports
    )

    assert first
    assert not first & second


def test_the_style_touches_nothing_outside_of_a_report() -> None:
    style = (resources.files("trainstep._doctor.show") / "page.css").read_text()
    flat = re.sub(r"@media[^{]*\{", "", style)
    selectors = [one.strip() for rule in re.findall(r"([^{}]+)\{", flat) for one in rule.split(",")]

    assert len(selectors) > 50
    assert [each for each in selectors if not each.startswith(".trainstep-doctor")] == []


def test_html_is_escaped_unless_it_was_made_here() -> None:
    inner = html.tag("b", 'a < "b"')

    assert html.tag("p", inner, "<i>", title='"') == (
        '<p title="&quot;"><b>a &lt; &quot;b&quot;</b>&lt;i&gt;</p>'
    )
    assert html.coded("use `a<b>` or `") == "use <code>a&lt;b&gt;</code> or `"
    assert (
        html.tag("td", hidden=False, open=True, data_label="x") == '<td open data-label="x"></td>'
    )
