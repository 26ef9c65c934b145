"""The command line: `trainstep run` accelerates a script, `trainstep doctor` examines one."""

from __future__ import annotations

import argparse
import functools
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line and does what it says."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["doctor"]:  # which has arguments of its own, and imports no Keras
        from trainstep._doctor._command import main as doctor

        doctor(given[1:])
        return
    parser = argparse.ArgumentParser(prog="trainstep", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a script with every compiled model accelerated")
    run.add_argument("--ledger", action="store_true", help="print every trace at the end")
    run.add_argument("script", type=Path, help="the Python file to run")
    run.add_argument("args", nargs=argparse.REMAINDER, help="its own arguments")
    commands.add_parser("doctor", help="run a script, and tell what it traced, and why")
    options = parser.parse_args(given)
    if not options.script.is_file():
        parser.error(f"there is no file {options.script}")
    run_script(options.script, options.args, show_ledger=options.ledger)


def run_script(script: Path, args: Sequence[str], *, show_ledger: bool) -> None:
    """Runs a script as Python would, with every model that it compiles accelerated."""
    from keras.src.trainers.trainer import Trainer as KerasTrainer

    from trainstep._accelerate import accelerate
    from trainstep._ledger import ledger

    original: Callable[..., Any] = KerasTrainer.compile

    @functools.wraps(original)
    def compile(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        accelerate(self)

    argv, path = sys.argv, sys.path[:]
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.resolve().parent))
    KerasTrainer.compile = compile
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        KerasTrainer.compile = original
        sys.argv, sys.path[:] = argv, path
        if show_ledger:
            print(ledger())


if __name__ == "__main__":
    main()
