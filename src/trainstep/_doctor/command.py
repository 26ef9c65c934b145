"""`trainstep doctor [options] script.py [args]`: runs a script, and reports when all is over."""

from __future__ import annotations

import argparse
import atexit
import functools
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from trainstep._common import run_script
from trainstep._doctor import child_processes
from trainstep._doctor.diagnosis import diagnose
from trainstep._doctor.records import read
from trainstep._doctor.report import Report
from trainstep._doctor.session import Doctor
from trainstep._explain.causes import FINDINGS

USAGE = (
    "trainstep doctor [options] script.py [args ...]\n"
    "       trainstep doctor [options] -m module [args ...]\n"
    "       trainstep doctor report [options] FILE.jsonl"
)
_WITH_VALUE = ("--json", "--html", "--log", "--max-retraces", "--fail-on")


def main(arguments: Sequence[str]) -> None:
    """Reads the command line and does what it says."""
    mine, target, args = _split(arguments)
    parser = _parser()
    options = parser.parse_args(mine)
    _check(parser, options)
    if not target:
        parser.error("name a script to run")
    if target[0] == "report":
        options = parser.parse_args([*mine, *args[:-1]])
        _check(parser, options)
        _show_file(parser, args[-1] if args else "", options)
    elif target[0] != "-m" and not Path(target[0]).is_file():
        parser.error(f"there is no file {target[0]}")
    else:
        _run(target, args, options)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Our options, what to run, and its own arguments."""
    mine: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "-m":
            return mine, ["-m", *rest[:1]], rest[1:]
        if not word.startswith("-"):
            return mine, [word], rest
        mine.append(word)
        if word in _WITH_VALUE and rest:
            mine.append(rest.pop(0))
    return mine, [], []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trainstep doctor",
        usage=USAGE,
        description="Runs a training script, and tells what it traced and compiled, and why.",
    )
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON")
    parser.add_argument("--html", metavar="FILE", help="write the report as a page")
    parser.add_argument("--log", metavar="FILE", help="write records as they are made, as JSONL")
    parser.add_argument(
        "--xla",
        action="store_true",
        help="read XLA's compilations in TensorFlow's log; the error output goes through a pipe",
    )
    parser.add_argument(
        "--max-retraces", metavar="N", type=int, help="exit with 1 if there are more"
    )
    parser.add_argument(
        "--fail-on",
        metavar="KIND,...",
        default="",
        help=f"exit with 1 if there is a finding of a kind: {', '.join(FINDINGS)}",
    )
    return parser


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuses what cannot be done, before anything is run."""
    options.fail_on = _kinds(parser, options.fail_on)
    if options.max_retraces is not None and options.max_retraces < 0:
        parser.error(f"--max-retraces: {options.max_retraces} is no count; pass 0 or more")
    for name in ("json", "html", "log"):
        file = getattr(options, name)
        if file:
            path = Path(file).absolute()  # the script may go elsewhere
            if not path.parent.is_dir():
                parser.error(f"--{name}: there is no folder {path.parent}; make it first")
            setattr(options, name, str(path))


def _kinds(parser: argparse.ArgumentParser, text: str) -> list[str]:
    kinds = [kind.strip() for kind in text.split(",") if kind.strip()]
    for kind in kinds:
        if kind not in FINDINGS:
            known = ", ".join(FINDINGS)
            parser.error(f"--fail-on: there is no kind {kind!r}; the kinds are {known}")
    return kinds


def _run(target: Sequence[str], args: Sequence[str], options: argparse.Namespace) -> None:
    """Runs the script. The report comes when Python ends: after its threads and its `atexit`."""
    folder = tempfile.mkdtemp(prefix="trainstep-doctor-")
    path = options.log or os.path.join(folder, "records.jsonl")
    Path(path).write_text("")
    child_processes.prepare(path)
    doctor = Doctor([*target, *args], path, xla=options.xla)
    ending = _Ending(doctor, path, folder, options)
    atexit.register(ending)
    doctor.start()
    try:
        if target[0] == "-m":
            run_script.run_module(target[1] if len(target) > 1 else "", args)
        else:
            run_script.run_script(target[0], args)
    except BaseException as error:
        doctor.error = "" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
        ending.code = run_script.exit_code(error)
    sys.exit(ending.code)


class _Ending:
    """What is done when the script has ended."""

    def __init__(self, doctor: Doctor, path: str, folder: str, options: argparse.Namespace) -> None:
        self._doctor, self._options = doctor, options
        self._path, self._folder = path, folder
        self._process = os.getpid()
        self.code = 0

    def __call__(self) -> None:
        if os.getpid() != self._process:  # a child that was forked
            return
        self._doctor.stop()
        records = [*self._doctor.log.records, *child_processes.records(self._path)]
        shutil.rmtree(self._folder, ignore_errors=True)
        failed = show(diagnose(records), self._options)
        if self.code == 128 + signal.SIGINT:  # as Python ends itself then
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        if failed and not self.code:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # the only way to another code from here


def show(report: Report, options: argparse.Namespace) -> bool:
    """Shows a report in all the ways that were asked for; whether it fails a gate."""
    from trainstep._doctor.show.page import page
    from trainstep._doctor.show.text import text

    sys.stdout.flush()
    width = shutil.get_terminal_size((100, 24)).columns
    print(text(report, width=min(width, 120), color=sys.stderr.isatty()), file=sys.stderr)
    outputs = {
        options.json: functools.partial(json.dumps, report.to_dict(), indent=2),
        options.html: functools.partial(page, report),
    }
    for file, made in outputs.items():
        if file:
            try:
                Path(file).write_text(made(), encoding="utf-8")
            except OSError as error:
                print(f"trainstep doctor: could not write {file}: {error}", file=sys.stderr)
    return any(_failures(report, options))


def _failures(report: Report, options: argparse.Namespace) -> list[str]:
    found = []
    limit = options.max_retraces
    if limit is not None and report.retraces > limit:
        found.append(f"{report.retraces} retraces, and --max-retraces is {limit}")
    for kind in options.fail_on:
        count = sum(finding.kind == kind for finding in report.findings)
        if count:
            found.append(f"{count} findings of kind {kind}")
    for each in found:
        print(f"trainstep doctor: failed: {each}", file=sys.stderr)
    return found


def _show_file(parser: argparse.ArgumentParser, file: str, options: argparse.Namespace) -> None:
    """Reports on records that were written, after a crash or a kill."""
    if not Path(file).is_file():
        parser.error(f"there is no file {file!r}; name one that --log wrote")
    with open(file, encoding="utf-8", errors="replace") as lines:
        records = read(lines)
    if not records:
        parser.error(f"there is no record in {file!r}; name a file that --log wrote")
    sys.exit(1 if show(diagnose(records), options) else 0)
