"""Prints the oldest versions that trainstep supports, as constraints for pip.

    python -m tests.versions > oldest.txt

They are the lower bounds in pyproject.toml, so that these are versions that were run.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

BOUND = re.compile(r"([\w-]+)>=([\w.]+)$")


def oldest() -> list[str]:
    """The constraints, one for each dependency and for TensorFlow."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    found = [BOUND.match(each) for each in (*project["dependencies"], *extras["tensorflow"])]
    pinned = {match[1]: match[2] for match in found if match is not None}
    return [f"{name}=={version}" for name, version in {**pinned, "jaxlib": pinned["jax"]}.items()]


if __name__ == "__main__":
    print("\n".join(oldest()))
