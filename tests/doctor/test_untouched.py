"""A script under doctor is the script alone: what it prints, sees, leaves and how it ends.

Most of these scripts import no engine. What they print is compared byte for byte with a plain
run, from the same folder and by the same path.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from .running import SECONDS, Completed, doctor, environment, python, written

pytestmark = pytest.mark.plain


def slow(*values: object) -> object:
    """Parameters of a test that repeats another one in part."""
    return pytest.param(*values, marks=pytest.mark.slow)


def both(folder: Path, text: str, *args: str, **env: str) -> tuple[Completed, Completed]:
    """A script without doctor and with it, which have to print the same and to end alike."""
    script = written(folder, text)
    alone = python(script, *args, cwd=folder, **env)
    under = doctor(script, *args, cwd=folder, **env)
    same_end(alone, under)
    return alone, under


def same_end(alone: Completed, under: Completed) -> None:
    assert under.stdout == alone.stdout, under.stderr[-4000:]
    assert under.returncode == alone.returncode, under.stderr[-4000:]


# How a script ends.


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("import sys; sys.exit(3)", 3),
        ("raise ValueError('boom')", 1),
        slow("print('done')", 0),
        slow("import sys; print('done'); sys.exit()", 0),
        slow("raise SystemExit(True)", 1),
        slow("import sys; sys.exit('no data')", 1),
        slow("import os; print('out', flush=True); os._exit(5)", 5),
        slow("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_the_exit_code_is_the_scripts(text: str, code: int, tmp_path: Path) -> None:
    alone, _ = both(tmp_path, text)

    assert alone.returncode == code


def test_a_text_given_to_exit_is_printed(tmp_path: Path) -> None:
    _, under = both(tmp_path, "import sys; sys.exit('no data')")

    assert under.stderr.startswith("no data\n")


FAILS = """
def outer(depth):
    if depth:
        return outer(depth - 1)
    try:
        {}["missing"]
    except KeyError as error:
        raise ValueError("boom") from error


def main():
    outer(2)


main()
"""


@pytest.mark.parametrize(
    "text", [FAILS, *map(slow, ("x = 1\nx +\n", "import no_such_module\n", "1 / 0\n"))]
)
def test_a_traceback_is_the_one_of_a_plain_run(text: str, tmp_path: Path) -> None:
    alone, under = both(tmp_path, text)

    assert alone.stderr.count('File "')
    assert alone.stderr in under.stderr


def test_a_traceback_of_a_thread_is_the_one_of_a_plain_run(tmp_path: Path) -> None:
    text = (
        "import threading\n"
        "def work():\n"
        "    raise ValueError('boom')\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start()\n"
        "thread.join()\n"
        "print('on')\n"
    )
    alone, under = both(tmp_path, text)

    assert "boom" in alone.stderr
    assert alone.stderr in under.stderr


def test_the_report_is_written_when_the_script_fails(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = doctor(written(tmp_path, "raise ValueError('boom')"), options=["--json", report])

    assert done.returncode == 1
    assert "boom" in json.loads(report.read_text())["error"]


@pytest.mark.parametrize(
    "how", [slow("raise KeyboardInterrupt"), "os.kill(os.getpid(), signal.SIGINT)"]
)
def test_an_interrupted_script_ends_as_interrupted_with_a_report(how: str, tmp_path: Path) -> None:
    script = written(
        tmp_path, f"import os, signal, time\nprint('on', flush=True)\n{how}\ntime.sleep(60)"
    )
    report = tmp_path / "report.json"
    alone = python(script)
    under = doctor(script, options=["--json", report])

    assert alone.returncode == -signal.SIGINT
    assert under.returncode in (-signal.SIGINT, 130)  # as a process and as a shell say it
    assert under.stdout == alone.stdout == "on\n"
    assert "KeyboardInterrupt" in under.stderr
    assert report.exists()


def test_an_interrupt_that_the_script_catches_is_the_scripts(tmp_path: Path) -> None:
    both(
        tmp_path,
        "import os, signal\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    while True: pass\n"
        "except KeyboardInterrupt:\n"
        "    print('caught')\n",
    )


def test_atexit_handlers_run_in_their_order(tmp_path: Path) -> None:
    both(
        tmp_path,
        "import atexit\n"
        "atexit.register(print, 'first registered, last run')\n"
        "atexit.register(print, 'last registered, first run')\n"
        "print('main')\n",
    )


def test_threads_are_waited_for(tmp_path: Path) -> None:
    both(
        tmp_path,
        "import threading, time\n"
        "def work():\n"
        "    time.sleep(0.5)\n"
        "    print('thread')\n"
        "threading.Thread(target=work).start()\n"
        "print('main')\n",
    )


# What a script sees of itself.


SEES = """'''Says what it sees.'''
import sys
import __main__

names = sorted(name for name in globals() if name not in ("sys",))
print(names)
print(__name__, __file__, __doc__, __package__, __spec__)
print(sys.argv, sys.path[0], sys.argv[0])
print(__main__.__dict__ is globals(), sys.modules["__main__"] is __main__)
print(__builtins__.__name__, __loader__ is not None)


def annotated(x: int) -> "str": ...


print(annotated.__annotations__, annotated.__module__, annotated.__code__.co_filename)
"""


def test_a_script_sees_the_names_arguments_and_paths_of_a_plain_run(tmp_path: Path) -> None:
    both(tmp_path, SEES, "one", "--two", "3")


@pytest.mark.parametrize("path", ["./sub/script.py", slow("sub/script.py")])
def test_a_relative_path_stays_as_it_was_given(path: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    written(tmp_path / "sub", SEES)

    same_end(python(path, "x", cwd=tmp_path), doctor(path, "x", cwd=tmp_path))


def test_modules_beside_the_script_are_found(tmp_path: Path) -> None:
    written(tmp_path, "def help(): return __name__\n", "beside.py")
    both(tmp_path, "import beside, sys\nprint(beside.help(), beside.__file__, sys.path[0])\n")


def test_the_environment_of_doctor_is_not_the_scripts(tmp_path: Path) -> None:
    """Nothing is replaced outside a trace: streams, print, hooks, handlers, limits."""
    both(
        tmp_path,
        "import builtins, logging, os, random, signal, sys, threading, time, warnings\n"
        "print(sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__, sys.stdin.fileno())\n"
        "print(builtins.print, builtins.open, type(random.random), time.time)\n"
        "print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))\n"
        "print(threading.current_thread() is threading.main_thread(), threading.active_count())\n"
        "print(sys.getrecursionlimit(), sys.gettrace(), sys.getprofile())\n"
        "print(logging.getLogger().handlers, logging.getLogger().level, warnings.filters)\n"
        "print(sorted(k for k in os.environ if k.startswith(('KERAS', 'TF_', 'JAX', 'TORCH'))))\n",
    )


def test_no_engine_is_imported_before_the_script_imports_it(tmp_path: Path) -> None:
    names = ("keras", "jax", "tensorflow", "torch")
    alone, _ = both(tmp_path, f"import sys\nprint([n for n in {names} if n in sys.modules])\n")

    assert alone.stdout == "[]\n"


@pytest.mark.slow
def test_the_script_chooses_kerass_engine_itself(tmp_path: Path) -> None:
    alone, _ = both(
        tmp_path,
        "import os\n"
        "os.environ['KERAS_BACKEND'] = 'numpy'\n"
        "import keras\n"
        "print(keras.backend.backend(), float(keras.ops.sum(keras.ops.ones((2, 2)))))\n",
    )

    assert alone.stdout == "numpy 4.0\n"


def test_its_encoding_is_heeded(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_bytes(b"# -*- coding: latin-1 -*-\nprint(ascii('caf\xe9'))\n")

    same_end(python(script), doctor(script))


def test_what_is_read_from_standard_input_is_the_scripts(tmp_path: Path) -> None:
    script = written(tmp_path, "import sys\nprint(input(), sys.stdin.read())\n")

    done = subprocess.run(
        [sys.executable, "-m", "trainstep", "doctor", str(script)],
        input="first\nsecond\n",
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )

    assert done.stdout == "first second\n\n"


def test_classes_of_the_script_can_be_pickled_and_functions_read(tmp_path: Path) -> None:
    both(
        tmp_path,
        "import inspect, pickle\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Point:\n"
        "    x: int\n"
        "def area(point):  # a comment\n"
        "    return point.x ** 2\n"
        "copy = pickle.loads(pickle.dumps(Point(3)))\n"
        "print(copy, type(copy) is Point, Point.__module__, pickle.dumps(Point(3)))\n"
        "print(inspect.getsource(area), inspect.getsource(Point))\n"
        "print(pickle.loads(pickle.dumps(area)) is area)\n"
        "print(inspect.getfile(area), inspect.getmodule(area).__name__)\n",
    )


# Options.


ARGUMENTS = """
import argparse, sys

parser = argparse.ArgumentParser()
parser.add_argument("--json")
parser.add_argument("--html")
parser.add_argument("--log")
parser.add_argument("--fail-on")
parser.add_argument("--max-retraces", type=int)
parser.add_argument("-m")
parser.add_argument("rest", nargs="*")
print(parser.parse_args(), sys.argv[1:])
"""


@pytest.mark.parametrize(
    "args",
    [
        ["--json", "x.json", "--html", "x.html", "--log", "x.jsonl"],
        slow(["--max-retraces", "7", "--fail-on", "anything", "-m", "module"]),
        slow(["report", "FILE", "--", "--json"]),
        slow(["--help"]),
    ],
    ids=lambda args: args[0],
)
def test_options_after_the_script_are_the_scripts(args: Sequence[str], tmp_path: Path) -> None:
    both(tmp_path, ARGUMENTS, *args)

    assert sorted(f.name for f in tmp_path.iterdir()) == ["script.py"]


def test_a_module_is_run_as_python_runs_it(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    written(package, "print('package imported as', __name__)\n", "__init__.py")
    written(package, "NAME = 'beside'\n", "beside.py")
    written(
        package,
        "import sys\n"
        "from .beside import NAME\n"
        "print(NAME, __name__, __package__, __spec__.name, sys.argv, sys.path[0], __file__)\n"
        "sys.exit(4)\n",
        "job.py",
    )

    alone = python("-m", "package.job", "--json", "x", cwd=tmp_path)
    under = doctor("package.job", "--json", "x", options=["-m"], cwd=tmp_path)

    assert alone.returncode == 4
    same_end(alone, under)


# Children.


def test_spawned_children_work(tmp_path: Path) -> None:
    both(
        tmp_path,
        "import multiprocessing\n"
        "def square(x):\n"
        "    return x * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(2) as pool:\n"
        "        print(pool.map(square, range(5)))\n",
    )


def test_forked_children_work_and_leave_the_report_alone(tmp_path: Path) -> None:
    text = (
        "import multiprocessing, sys\n"
        "def work(queue):\n"
        "    queue.put('child')\n"
        "context = multiprocessing.get_context('fork')\n"
        "queue = context.Queue()\n"
        "child = context.Process(target=work, args=(queue,))\n"
        "child.start()\n"
        "print(queue.get())\n"
        "child.join()\n"
        "print(child.exitcode)\n"
    )
    both(tmp_path, text)
    report = tmp_path / "report.json"
    doctor(tmp_path / "script.py", options=["--json", report])

    assert json.loads(report.read_text())["complete"]


def test_other_programs_of_the_script_run_without_doctor(tmp_path: Path) -> None:
    _, under = both(
        tmp_path,
        "import subprocess, sys\n"
        "code = 'import sys; print(sys.argv, \"trainstep\" in sys.modules)'\n"
        "print(subprocess.run([sys.executable, '-c', code], capture_output=True, text=True))\n",
    )

    assert "trainstep" in under.stdout


# A process that is gone.


def test_a_killed_run_can_be_reported_from_its_log(tmp_path: Path) -> None:
    """The log is written as things happen; a process that is killed has written what it did."""
    script = written(tmp_path, "import time\nprint('on', flush=True)\ntime.sleep(60)\n")
    log = tmp_path / "log.jsonl"
    command = [sys.executable, "-m", "trainstep", "doctor", "--log", str(log), str(script)]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "on\n"
        running.send_signal(signal.SIGKILL)
    reported = doctor("report", log)

    assert reported.returncode == 0, reported.stderr
    assert "script.py" in reported.stdout + reported.stderr


def test_a_log_with_half_a_line_can_be_reported(tmp_path: Path) -> None:
    script = written(tmp_path, "print('on')\n")
    log = tmp_path / "log.jsonl"
    doctor(script, options=["--log", log])
    whole = log.read_bytes()
    assert whole
    log.write_bytes(whole + b'{"half": "a li')

    assert doctor("report", log).returncode == 0


def test_a_short_script_costs_little_more_under_doctor(tmp_path: Path) -> None:
    """Not a measurement: doctor must not wait for anything when there is nothing to do."""
    script = written(tmp_path, "print('on')\n")
    started = time.monotonic()
    doctor(script)

    assert time.monotonic() - started < 30, os.getloadavg()
