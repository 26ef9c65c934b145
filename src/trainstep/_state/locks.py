"""Locks: one for each set of variables that programs use together.

A step that reads and writes a model must see the state after one completed step. Programs that
share a variable share a `Domain`: a program holds its lock while it reads the variables, runs, and
writes back. Programs of unrelated models never wait for each other. Domains merge when a new
program uses variables of both.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from trainstep._common.side_table import SideTable


class Domain:
    """A lock that may have been merged into another."""

    __slots__ = ("__weakref__", "lock", "parent")

    def __init__(self) -> None:
        # Reentrant: a signal handler or a finalizer may run a step in the middle of another one.
        self.lock = threading.RLock()
        self.parent: Domain | None = None

    def root(self) -> Domain:
        """The domain that this one was merged into; itself if it was not merged."""
        domain = self
        while domain.parent is not None:
            domain = domain.parent
        return domain


_domains: SideTable[Domain] = SideTable()
_merging = threading.RLock()


def domain_of(variables: Iterable[Any]) -> Domain:
    """The domain of these variables; merges their domains if they have several."""
    variables = list(variables)
    with _merging:
        known = {d.root() for v in variables if (d := _domains.get(v)) is not None}
        roots = sorted(known, key=id)
        target = roots[0] if roots else Domain()
        with contextlib.ExitStack() as held:
            for root in roots:  # no program of either domain may run during the merge
                held.enter_context(root.lock)
            for root in roots[1:]:
                root.parent = target
        for variable in variables:
            _domains.set(variable, target)
    return target


@contextlib.contextmanager
def moving(variables: Iterable[Any]) -> Iterator[None]:
    """A block in which variables may move to other memory: no program uses them.

    They get a new domain, so that programs check again whether they are still valid.
    """
    with _merging, contextlib.ExitStack() as held:
        roots = {d.root() for v in variables if (d := _domains.get(v)) is not None}
        for root in sorted(roots, key=id):
            held.enter_context(root.lock)
        yield
        for root in roots:
            root.parent = Domain()


@contextlib.contextmanager
def locked(variable: Any) -> Iterator[None]:
    """A block in which no program uses a variable."""
    while True:
        domain = domain_of([variable])
        with domain.lock:
            # It may have been merged into another domain before the lock was acquired.
            if domain.parent is None:
                yield
                return
