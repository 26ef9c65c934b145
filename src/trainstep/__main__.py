"""The command line: `trainstep run` accelerates a script, `trainstep doctor` examines one."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line and does what it says."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["doctor"]:  # which has arguments of its own, and imports no Keras
        from trainstep._doctor.command import main as doctor

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
    from trainstep._common import run_script as _scripts
    from trainstep._common.import_hooks import Patches
    from trainstep._explain.ledger import ledger

    patches = Patches(_raise)
    patches.on_import("keras.src.trainers.trainer", functools.partial(_accelerate, patches))
    code = 0
    try:
        _scripts.run_script(str(script), args)
    except BaseException as error:
        code = _scripts.exit_code(error)
    if show_ledger:
        print(ledger())
    sys.exit(code)


def _accelerate(patches: Any, module: Any) -> None:
    """Has every model accelerated when it is compiled."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compile(self: Any, *args: Any, **kwargs: Any) -> None:
            from trainstep._trainer.accelerate import accelerate

            original(self, *args, **kwargs)
            accelerate(self)

        return compile

    patches.replace(module.Trainer, "compile", make)


def _raise(module: str, error: Exception) -> None:
    raise error


if __name__ == "__main__":
    main()
