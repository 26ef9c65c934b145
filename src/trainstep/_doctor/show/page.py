"""A report as one HTML page, and as a piece of a notebook.

A page is self-contained: it loads no other file and needs no network. Its style is limited to the
class `trainstep-doctor`, so a notebook around it keeps its own.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from trainstep._doctor.report import Report
from trainstep._doctor.show import page_parts as parts
from trainstep._doctor.show.html import Markup, joined, tag
from trainstep._doctor.show.summary import versions
from trainstep._doctor.show.timeline import timeline


def page(report: Report) -> str:
    """The report as a self-contained HTML page.

    Args:
        report: The report.

    Returns:
        The text of the HTML file; write it as UTF-8.
    """
    command = versions(report).get("command", "")
    script = _file("page.js")
    top = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"trainstep doctor: {command}" if command else "trainstep doctor"),
        tag("style", _file("page.css")),
        tag("style", "body { margin: 0; }"),
    )
    body = tag(
        "body",
        tag(
            "main",
            tag("h1", "trainstep doctor"),
            tag("p", tag("code", command)) if command else "",
            *_sections(report, prefix=""),
            class_="trainstep-doctor whole",
        ),
        tag("script", script),
    )
    return f"<!doctype html>\n{tag('html', top, body, lang='en')}\n"


def notebook(report: Report) -> str:
    """The report as HTML for a notebook cell, without scripts.

    Args:
        report: The report.

    Returns:
        The text of one HTML element.
    """
    prefix = f"trainstep-{id(report):x}-"  # a notebook may show several reports
    style = tag("style", _file("page.css"))
    return tag("div", style, *_sections(report, prefix), class_="trainstep-doctor")


def _sections(report: Report, prefix: str) -> list[Markup]:
    sections = {
        "Timeline": timeline(report),
        "What to change": parts.findings(report, prefix) if report.findings else "",
        "Functions": parts.functions(report, prefix) if report.functions else "",
        "Small programs": parts.small(report) if report.small else "",
        "What doctor could not see": parts.notes(report) if report.notes else "",
        "To paste into an issue": parts.issue(report),
    }
    shown = [tag("section", tag("h2", name), part) for name, part in sections.items() if part]
    return [parts.head(report), *shown]


def _policy(script: str) -> str:
    """A content security policy: the browser runs only the page's own script and loads nothing."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _file(name: str) -> Markup:
    return joined(Markup((resources.files(__package__) / name).read_text(encoding="utf-8")))
