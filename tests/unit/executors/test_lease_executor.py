"""Leases kept in step with placements, on a cluster that only keeps books; killed at every moment."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yunlu.core.errors import StoreError
from yunlu.executors.executor import Capabilities, ExecutorError, LeaseState
from yunlu.executors.lease_executor import (
    Lease,
    LeasedExecutor,
    LeaseRecord,
    ObservedLeases,
    known_record,
)
from yunlu.hardware.fleet import NOTHING, Node, Placement
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Document, RunStore


class KilledError(BaseException):
    """The process that used the executor is gone."""


class Books(LeasedExecutor):
    """A cluster that starts nothing, and may be left in the middle of anything."""

    name = address = "books"

    def __init__(self) -> None:
        self.jobs: dict[str, tuple[str, ObservedLeases]] = {}
        self.kill_in: int | None = None
        self.refuses = ""
        self.left: tuple[bytes, dict[str, tuple[str, ObservedLeases]]] | None = None
        """What was on disk and in the cluster when the process was killed."""

    def capabilities(self) -> Capabilities:
        return Capabilities()

    def nodes(self) -> tuple[Node, ...]:
        return tuple(Node(name=name, devices=4) for name in "abc")

    def submit(self, run: RunStore, lease: Lease, *, directory: Path, lead: str | None) -> str:
        record = known_record(run)
        assert record.find(lease.name) is not None, "started before it was written down"
        self._breathe(run)
        if lease.node == self.refuses:
            raise ExecutorError("no")
        handle = str(len(self.jobs))
        self.jobs[handle] = (
            lease.name,
            ObservedLeases(handle=handle, state=LeaseState.WAITING, node=lease.node),
        )
        self._breathe(run)
        return handle

    def observe_leases(self, run: RunStore, record: LeaseRecord) -> dict[str, ObservedLeases]:
        return dict(self.jobs.values())

    def cancel(self, handles: Sequence[str]) -> None:
        for handle in handles:
            self.set(handle, LeaseState.GONE)

    def notify(self, handles: Sequence[str]) -> None:
        pass

    def set(self, handle: str, state: LeaseState) -> None:
        name, seen = self.jobs[handle]
        self.jobs[handle] = (name, replace(seen, state=state))

    def turn(self, run: RunStore) -> None:
        """Time passes: who waits runs, who is not wanted leaves."""
        record = known_record(run)
        for handle, (name, seen) in list(self.jobs.items()):
            lease = record.find(name)
            if seen.state is LeaseState.WAITING:
                self.set(handle, LeaseState.RUNNING)
            elif lease is None or not lease.is_wanted or record.is_ending:
                self.set(handle, LeaseState.GONE)

    def _breathe(self, run: RunStore) -> None:
        if self.kill_in is not None:
            self.kill_in -= 1
            if self.kill_in < 0:
                self.left = (run.path / Document.LEASES).read_bytes(), dict(self.jobs)
                raise KilledError

    def bury(self, run: RunStore) -> None:
        """What a killed process would not have done after its death is undone."""
        if self.left is not None:
            content, self.jobs = self.left
            (run.path / Document.LEASES).write_bytes(content)
        self.kill_in = self.left = None


_MEMORY = Path("/dev/shm")  # a disk would take its time to write down each step


@contextmanager
def new_run() -> Generator[RunStore]:
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as directory:
        run = open_run(Path(directory))
        (run.path / Document.JOB).write_text(json.dumps({}))
        yield run


def shares(placement: Placement) -> dict[str, int]:
    return dict(placement.shares)


placements = st.dictionaries(st.sampled_from("abc"), st.integers(1, 4), min_size=1).map(
    lambda shares: Placement(tuple(shares.items()))
)
moments = st.none() | st.integers(0, 6)


@settings(max_examples=50)
@given(
    first=placements, steps=st.lists(st.tuples(placements, moments), max_size=6), last=placements
)
def test_whatever_is_asked_and_whoever_is_killed_no_device_is_leaked(
    first: Placement, steps: list[tuple[Placement, int | None]], last: Placement
) -> None:
    with new_run() as run:
        books = Books()
        books.start(run, first)
        for wanted, moment in steps:
            books.turn(run)
            books.kill_in = moment
            with suppress(KilledError):
                books.resize(run, wanted)
            books.bury(run)
        lead_node, lead_devices = first.shares[0]
        last = Placement(tuple({**shares(last), lead_node: max(lead_devices, 4)}.items()))
        assert books.resize(run, last).how == "live"
        for _ in range(3):
            books.turn(run)
            books.status(run)
        status = books.status(run)
        assert shares(status.held) == shares(status.wanted) == shares(last)
        assert sum(seen.state is LeaseState.RUNNING for _, seen in books.jobs.values()) == len(
            status.leases
        )
        books.stop(run, now=True)
        assert not books.status(run).is_alive
        assert all(seen.state is LeaseState.GONE for _, seen in books.jobs.values())


@settings(max_examples=30)
@given(first=placements, second=placements, moment=st.integers(0, 8))
def test_a_start_that_is_killed_can_be_repeated_and_nothing_runs_twice(
    first: Placement, second: Placement, moment: int
) -> None:
    with new_run() as run:
        books = Books()
        books.kill_in = moment
        with suppress(KilledError):
            books.start(run, first)
        books.bury(run)
        books.start(run, second)
        books.turn(run)
        assert shares(books.status(run).held) == shares(second)
        alive = [name for name, seen in books.jobs.values() if seen.state is LeaseState.RUNNING]
        assert len(alive) == len(set(alive)) == len(second.shares)


def test_who_was_sent_away_and_is_queued_again_is_called_off() -> None:
    with new_run() as run:
        books = Books()
        books.start(run, Placement((("a", 2), ("b", 1))))
        books.turn(run)
        books.resize(run, Placement((("a", 2),)))  # it is told to leave, but b has just died
        (handle,) = [handle for handle, (_, seen) in books.jobs.items() if seen.node == "b"]
        books.set(handle, LeaseState.WAITING)
        books.status(run)
        assert books.jobs[handle][1].state is LeaseState.GONE
        assert shares(books.status(run).held) == {"a": 2}


def test_who_is_queued_again_after_the_run_was_stopped_is_called_off() -> None:
    with new_run() as run:
        books = Books()
        books.start(run, Placement((("a", 1), ("b", 1))))
        books.turn(run)
        books.stop(run)  # the cluster has not found out yet that b has died
        books.set("0", LeaseState.GONE)
        books.set("1", LeaseState.WAITING)
        books.status(run)
        assert not books.status(run).is_alive


def test_who_only_observes_a_copy_of_a_run_ends_nothing_of_the_run() -> None:
    with new_run() as run:
        books = Books()
        books.start(run, Placement((("a", 2),)))
        copied = run.read(Document.LEASES)
        assert copied is not None
        books.resize(run, Placement((("a", 2), ("b", 1))))
        books.turn(run)
        run.write(Document.LEASES, copied)  # a copy of the run does not know of b
        before = dict(books.jobs)
        assert shares(books.observe(run).held) == {"a": 2}
        assert books.jobs == before
        assert run.read(Document.LEASES) == copied
        books.status(run)  # whoever acts ends what is in nobody's record
        assert books.jobs != before


@pytest.mark.parametrize("method", ["asynchronous", "all-reduce"])
def test_only_asynchronous_workers_are_ended_when_their_lead_is_lost(method: str) -> None:
    with new_run() as run:
        (run.path / Document.JOB).write_text(json.dumps({"communication": {"method": method}}))
        books = Books()
        books.start(run, Placement((("a", 1), ("b", 1))))
        books.turn(run)
        books.set("0", LeaseState.GONE)
        resized = books.resize(run, Placement((("a", 1), ("b", 1), ("c", 1))))
        is_ended = books.jobs["1"][1].state is LeaseState.GONE
        assert (resized.how == "later", is_ended) == ((method == "asynchronous",) * 2)


def test_the_lead_is_never_shrunk_live() -> None:
    with new_run() as run:
        books = Books()
        books.start(run, Placement((("a", 2), ("b", 1))))
        before = known_record(run)
        for wanted in (Placement((("b", 3),)), Placement((("a", 1), ("b", 1)))):
            assert books.resize(run, wanted).how == "restart"
        assert [lease.name for lease in known_record(run).leases] == [
            lease.name for lease in before.leases
        ]


def test_a_lease_that_died_is_replaced_when_the_same_devices_are_asked_for() -> None:
    with new_run() as run:
        books = Books()
        wanted = Placement((("a", 1), ("b", 2)))
        books.start(run, wanted)
        books.turn(run)
        books.set("1", LeaseState.GONE)
        assert shares(books.status(run).held) == {"a": 1}
        assert books.resize(run, wanted).how == "live"
        books.turn(run)
        assert shares(books.status(run).held) == {"a": 1, "b": 2}
        what = [(happening.lease, happening.what) for happening, _ in books.events(run)]
        assert ("b.1", "gone") in what
        assert ("b.2", "running") in what


def test_what_the_cluster_refuses_is_not_kept() -> None:
    with new_run() as run:
        books = Books()
        books.start(run, Placement((("a", 1),)))
        books.refuses = "c"
        with pytest.raises(ExecutorError):
            books.resize(run, Placement((("a", 1), ("b", 1), ("c", 1))))
        books.turn(run)
        assert shares(books.status(run).wanted) == {"a": 1, "b": 1}
        books.refuses = "b"
        with pytest.raises(ExecutorError):
            books.start(run, Placement((("a", 1), ("b", 1))))
        assert not books.status(run).is_alive


def test_a_run_that_nobody_started_is_refused(tmp_path: Path) -> None:
    books = Books()
    with pytest.raises(StoreError, match="no executor"):
        books.status(open_run(tmp_path))
    with pytest.raises(ExecutorError, match="no devices"):
        books.start(open_run(tmp_path), NOTHING)
