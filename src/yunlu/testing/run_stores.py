"""What every run store must do, as tests to inherit.

In your own test suite::

    class TestMyStore(RunStoreContract):
        def make_store(self):
            return MyStore(...)

pytest finds the methods by their names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.runs.metric_writer import MetricWriter
from yunlu.runs.run_store import Area, Claim, Document, Log, last_record, log_end, text_logs

if TYPE_CHECKING:
    from yunlu.runs.run_store import RunStore


class RunStoreContract:
    """The behaviours that workers, executors and readers rely on. Override ``make_store``."""

    def make_store(self) -> RunStore:
        """An empty store of a run."""
        raise NotImplementedError

    def reopen(self, run: RunStore) -> RunStore:
        """The same run as another process sees it: by its address. Override where it must be."""
        return run

    def test_a_run_has_an_id_and_an_address(self) -> None:
        """Both name the run to people and to other processes."""
        run = self.make_store()
        assert run.id
        assert run.address
        assert self.reopen(run).id == run.id
        assert run.location(Document.JOB) != run.location(Document.PLAN)

    def test_what_is_absent_reads_as_nothing(self) -> None:
        """Readers may come before writers."""
        run = self.make_store()
        assert run.read(Document.PLAN) is None
        assert run.stat(Document.PLAN) is None
        assert not run.has(Document.PLAN)
        assert not run.has(Area.MODEL)
        assert list(run.read_log(Log.EVENTS)) == []
        assert last_record(run, Log.METRICS) is None
        assert log_end(run, Log.METRICS) == 0
        assert run.names(Area.LOGS) == []
        assert text_logs(run) == ()
        run.remove(Document.PLAN)
        run.remove(Area.CHECKPOINTS)

    def test_a_document_is_replaced_whole(self) -> None:
        """Text and bytes, durable or not."""
        run = self.make_store()
        run.write(Document.TRIAL, "first, and longer")
        run.write(Document.TRIAL, b"\x00second")
        assert self.reopen(run).read(Document.TRIAL) == b"\x00second"
        run.write(Document.TRIAL, "third", durable=False)
        assert self.reopen(run).read(Document.TRIAL) == b"third"
        run.write(Document.WORKER_GROUP, "a token", durable=False)
        assert self.reopen(run).read(Document.WORKER_GROUP) == b"a token"
        assert run.read(Document.PLAN) is None

    def test_a_document_is_read_in_part(self) -> None:
        """From an offset on, or the last bytes."""
        run = self.make_store()
        run.write(Document.REPORT, "0123456789")
        assert run.read(Document.REPORT, offset=7) == b"789"
        assert run.read(Document.REPORT, offset=-3) == b"789"
        assert run.read(Document.REPORT, offset=-99) == b"0123456789"
        assert run.read(Document.REPORT, offset=99) == b""

    def test_every_write_changes_the_version(self) -> None:
        """Whoever waits for a change does not read an unchanged document again."""
        run = self.make_store()
        versions: list[tuple[int, ...]] = []
        for text in ("one", "two", "two"):
            run.write(Document.TRIAL_CONTROL, text)
            stat = self.reopen(run).stat(Document.TRIAL_CONTROL)
            assert stat is not None
            assert (stat.size, stat.modified_at > 0) == (3, True)
            versions.append(stat.version)
        assert len({*versions}) == len(versions)
        again = run.stat(Document.TRIAL_CONTROL)
        assert again is not None
        assert again.version == versions[-1]

    def test_removed_items_are_gone(self) -> None:
        """A document alone; an area with all that is in it."""
        run = self.make_store()
        run.write(Document.LEASES, "{}")
        run.write("usage/node.0.json", "{}")
        run.write("usage/node.1.json", "{}")
        run.remove(Document.LEASES)
        assert not self.reopen(run).has(Document.LEASES)
        assert self.reopen(run).names("usage") == ["node.0.json", "node.1.json"]
        run.remove("usage")
        assert self.reopen(run).names("usage") == []
        assert run.read("usage/node.0.json") is None

    def test_records_come_back_in_order_with_offsets(self) -> None:
        """Any offset that a reader was given is a place to go on from."""
        run = self.make_store()
        records = [{"step": 1}, {"step": 2, "text": "Straße 云炉"}, {"step": 3, "loss": None}]
        run.append(Log.METRICS, records[:1])
        run.append(Log.METRICS, [])
        run.append(Log.METRICS, records[1:])
        entries = list(self.reopen(run).read_log(Log.METRICS))
        assert [record for record, _ in entries] == records
        offsets = [offset for _, offset in entries]
        assert offsets == sorted({*offsets})
        assert offsets[-1] == log_end(run, Log.METRICS)
        for index, offset in enumerate(offsets, 1):
            rest = [record for record, _ in run.read_log(Log.METRICS, offset=offset)]
            assert rest == records[index:]
        assert last_record(run, Log.METRICS) == records[-1]
        assert list(run.read_log(Log.EVENTS)) == []

    def test_a_log_that_grows_is_read_on(self) -> None:
        """The reader's offset stays valid while the writer appends."""
        run = self.make_store()
        offset = 0
        for step in range(1, 4):
            run.append(Log.LEDGER, [{"step": step}])
            fresh = list(self.reopen(run).read_log(Log.LEDGER, offset=offset))
            assert [record for record, _ in fresh] == [{"step": step}]
            offset = fresh[-1][1]

    def test_metrics_are_one_log_wherever_they_are_kept(self) -> None:
        """Older ones are sealed; positions that readers were given stay."""
        run = self.make_store()
        writer = MetricWriter(run)
        writer.append([{"step": step, "at": 1.0, "loss": 1 / step} for step in range(1, 801)])
        before = list(self.reopen(run).read_metrics())
        writer.close()
        assert self.reopen(run).names(Area.METRICS)
        assert list(self.reopen(run).read_metrics()) == before
        end = run.metric_end()
        writer.append([{"step": 801, "at": 2.0}])
        assert [one["step"] for one, _ in self.reopen(run).read_metrics(offset=end)] == [801]
        assert last_record(run, Log.METRICS)["step"] == 801

    def test_a_claim_is_held_by_one_at_a_time(self) -> None:
        """And free again when its holder leaves, also by an error."""
        run = self.make_store()
        other = self.reopen(run)
        assert not other.is_claimed(Claim.WORKER)
        with run.claim(Claim.WORKER, wait=False):
            assert other.is_claimed(Claim.WORKER)
            assert not other.is_claimed(Claim.LAUNCH)
            assert self._is_refused(other)
            with other.claim(Claim.LAUNCH, wait=True):
                assert run.is_claimed(Claim.LAUNCH)
        assert not other.is_claimed(Claim.WORKER)
        try:
            with other.claim(Claim.WORKER, wait=True):
                raise RuntimeError
        except RuntimeError:
            pass
        assert not run.is_claimed(Claim.WORKER)

    def test_quiet_workers_leave_no_events(self) -> None:
        """Only one worker of a group reports."""
        run = self.make_store()
        run.is_quiet = True
        run.warn("nobody reads this")
        assert not run.has(Log.EVENTS)
        run.is_quiet = False
        run.warn("a full disk")
        assert [event.kind for event, _ in self.reopen(run).read_events()] == ["warning"]

    @staticmethod
    def _is_refused(run: RunStore) -> bool:
        try:
            with run.claim(Claim.WORKER, wait=False):
                return False
        except BlockingIOError:
            return True
