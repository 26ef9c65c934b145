"""`trainstep doctor [options] script.py [args]`: runs a script and reports when Python exits."""

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
_OPTIONS_WITH_VALUE = ("--json", "--html", "--log", "--max-retraces", "--fail-on")


def main(arguments: Sequence[str]) -> None:
    """Runs the command line: a script, a module, or a report on a log file."""
    mine, target, args = _split(arguments)
    parser = _parser()
    options = parser.parse_args(mine)
    _check(parser, options)
    if not target:
        parser.error("pass a script to run")
    if target[0] == "report":
        options = parser.parse_args([*mine, *args[:-1]])
        _check(parser, options)
        _show_file(parser, args[-1] if args else "", options)
    elif target[0] != "-m" and not Path(target[0]).is_file():
        parser.error(f"the file {target[0]} does not exist")
    else:
        _run(target, args, options)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Splits the command line into doctor's options, the target and the target's arguments."""
    mine: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "-m":
            return mine, ["-m", *rest[:1]], rest[1:]
        if not word.startswith("-"):
            return mine, [word], rest
        mine.append(word)
        if word in _OPTIONS_WITH_VALUE and rest:
            mine.append(rest.pop(0))
    return mine, [], []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trainstep doctor",
        usage=USAGE,
        description="Runs a training script and reports each trace and compilation with its cause.",
    )
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON")
    parser.add_argument("--html", metavar="FILE", help="write the report as a page")
    parser.add_argument("--log", metavar="FILE", help="append each record at once, as JSONL")
    parser.add_argument(
        "--xla",
        action="store_true",
        help="count XLA compilations in TensorFlow's log; stderr goes through a pipe",
    )
    parser.add_argument(
        "--max-retraces", metavar="N", type=int, help="exit with code 1 if there are more than N"
    )
    parser.add_argument(
        "--fail-on",
        metavar="KIND,...",
        default="",
        help=f"exit with code 1 on a finding of these kinds: {', '.join(FINDINGS)}",
    )
    return parser


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Validates the options before the script runs."""
    options.fail_on = _kinds(parser, options.fail_on)
    if options.max_retraces is not None and options.max_retraces < 0:
        parser.error(f"--max-retraces must be 0 or more; got: {options.max_retraces}")
    for name in ("json", "html", "log"):
        file = getattr(options, name)
        if file:
            path = Path(file).absolute()  # the script may change the working directory
            if not path.parent.is_dir():
                parser.error(f"--{name}: the folder {path.parent} does not exist; create it first")
            setattr(options, name, str(path))


def _kinds(parser: argparse.ArgumentParser, text: str) -> list[str]:
    kinds = [kind.strip() for kind in text.split(",") if kind.strip()]
    for kind in kinds:
        if kind not in FINDINGS:
            known = ", ".join(FINDINGS)
            parser.error(f"--fail-on: unknown kind; got: {kind!r}; the kinds are {known}")
    return kinds


def _run(target: Sequence[str], args: Sequence[str], options: argparse.Namespace) -> None:
    """Runs the script. The report follows at exit, after the script's threads and `atexit`."""
    folder = tempfile.mkdtemp(prefix="trainstep-doctor-")
    path = options.log or os.path.join(folder, "records.jsonl")
    Path(path).write_text("")
    child_processes.watch_children(path)
    doctor = Doctor([*target, *args], path, xla=options.xla)
    ending = _AtExit(doctor, path, folder, options)
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


class _AtExit:
    """Writes the report at exit and sets the exit code."""

    def __init__(self, doctor: Doctor, path: str, folder: str, options: argparse.Namespace) -> None:
        self._doctor, self._options = doctor, options
        self._path, self._folder = path, folder
        self._process = os.getpid()
        self.code = 0

    def __call__(self) -> None:
        if os.getpid() != self._process:  # a forked child inherits the atexit hook
            return
        self._doctor.stop()
        records = [*self._doctor.log.records, *child_processes.child_records(self._path)]
        shutil.rmtree(self._folder, ignore_errors=True)
        failed = show(diagnose(records), self._options)
        if self.code == 128 + signal.SIGINT:  # Python exits by the signal too, after Ctrl-C
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        if failed and not self.code:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # inside atexit, only this changes the exit code


def show(report: Report, options: argparse.Namespace) -> bool:
    """Writes the report to stderr and to the files requested; returns whether it fails a gate."""
    from trainstep._doctor.show.page import page
    from trainstep._doctor.show.text import text

    sys.stdout.flush()
    width = shutil.get_terminal_size((100, 24)).columns
    print(text(report, width=min(width, 120), color=sys.stderr.isatty()), file=sys.stderr)
    outputs = {
        options.json: functools.partial(json.dumps, report.to_dict(), indent=2),
        options.html: functools.partial(page, report),
    }
    for file, render in outputs.items():
        if file:
            try:
                Path(file).write_text(render(), encoding="utf-8")
            except OSError as error:
                print(f"trainstep doctor: could not write {file}: {error}", file=sys.stderr)
    return any(_failures(report, options))


def _failures(report: Report, options: argparse.Namespace) -> list[str]:
    found = []
    limit = options.max_retraces
    if limit is not None and report.retraces > limit:
        found.append(f"{report.retraces} retraces; --max-retraces allows {limit}")
    for kind in options.fail_on:
        count = sum(finding.kind == kind for finding in report.findings)
        if count:
            found.append(f"{count} findings of kind {kind}")
    for each in found:
        print(f"trainstep doctor: failed: {each}", file=sys.stderr)
    return found


def _show_file(parser: argparse.ArgumentParser, file: str, options: argparse.Namespace) -> None:
    """Reports on a log file, for a run that crashed or was killed."""
    if not Path(file).is_file():
        parser.error(f"the file {file!r} does not exist; pass one that --log wrote")
    with open(file, encoding="utf-8", errors="replace") as lines:
        records = read(lines)
    if not records:
        parser.error(f"the file {file!r} contains no records; pass one that --log wrote")
    sys.exit(1 if show(diagnose(records), options) else 0)
