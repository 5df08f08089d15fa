"""What every client must do, as tests to inherit.

In your own test suite::

    class TestMyClient(ClientContract):
        def make_client(self):
            return MyClient()

        def make_job(self, ending):
            ...

pytest finds the methods by their names; ``tmp_path`` is its own fixture. Each test needs an empty home
directory.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from yunlu.client import protocol
from yunlu.core.errors import YunluError
from yunlu.core.value import Value
from yunlu.jobs.run_log import MetricRecord
from yunlu.runs.states import RunState

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from yunlu.client.protocol import Client
    from yunlu.spec.job import Job

V = TypeVar("V", bound=Value)
Ending = Literal["finish", "fail", "wait"]
"""How a run ends by itself: it finishes, it fails, or it trains until it is stopped."""

_VALID = "task: tabular-classification\nmodel: mlp\ndata: synthetic:digits\n"


class ClientContract:
    """The behaviours the command line relies on. Override ``make_client`` and ``make_job``."""

    def make_client(self) -> Client:
        """A client of an empty home."""
        raise NotImplementedError

    def make_job(self, ending: Ending) -> Job:
        """A job whose run takes seconds and ends in this way; the second attempt finishes."""
        raise NotImplementedError

    def make_plan_job(self) -> Job:
        """A job that can be planned for hardware of the catalog, without its data."""
        raise NotImplementedError

    def test_it_has_every_verb(self) -> None:
        """The verbs of the protocol are methods."""
        client = self.make_client()
        parts = (
            protocol.JobVerbs,
            protocol.RunVerbs,
            protocol.PoolVerbs,
            protocol.StudyVerbs,
            protocol.MachineVerbs,
        )
        verbs = [name for part in parts for name in vars(part) if not name.startswith("_")]
        assert len(verbs) > 30
        for verb in verbs:
            assert callable(getattr(client, verb, None)), verb

    def test_validation_returns_the_job_or_its_problems(self, tmp_path: Path) -> None:
        """A problem names file, line and key."""
        client, file = self.make_client(), tmp_path / "job.yaml"
        file.write_text(_VALID)
        result = check_value(client.validate(str(file), overrides=["train.epochs=3"]))
        assert result.require().train.epochs == 3
        file.write_text(_VALID + "trian: {}\n")
        result = check_value(client.validate(str(file)))
        assert not result.is_valid
        (problem,) = result.problems
        assert (problem.file, problem.line, problem.key) == (str(file), 4, "trian")

    def test_run_is_followed_to_its_end(self) -> None:
        """Updates come in order, each cursor is where the next update begins."""
        client = self.make_client()
        started = check_value(client.train(self.make_job("finish")))
        updates = [
            check_value(update) for update in client.follow(started.id, since=started.cursor)
        ]
        items = [item for update in updates for item in update.items]
        assert any(isinstance(item, MetricRecord) for item in items)
        assert client.run(started.id).state is RunState.FINISHED
        halfway = updates[len(updates) // 2].cursor
        rest = [
            item for update in client.follow(started.id, since=halfway) for item in update.items
        ]
        # Each log is in order; how the two interleave depends on when they were read.
        for is_metric in (False, True):
            before, after = (
                [item for item in read if isinstance(item, MetricRecord) is is_metric]
                for read in (items, rest)
            )
            assert after == before[len(before) - len(after) :]
        assert list(client.follow(started.id, since=updates[-1].cursor))[-1].items == ()

    def test_run_is_listed_shown_and_reported(self) -> None:
        """By its id, a prefix of it, and as the last one."""
        client = self.make_client()
        run = self._finish(client)
        listed = check_value(client.ps())
        assert [one_run.id for one_run in listed.runs] == [run]
        assert check_value(client.run("last")).id == check_value(client.run(run[:-2])).id == run
        details = check_value(client.show(run))
        assert details.state is RunState.FINISHED
        assert details.evaluations
        assert details.plan is not None
        assert details.plan.steps == details.steps == details.step
        assert check_value(client.events(run)).items
        assert check_value(client.logs(run, lines=5)) is not None
        report = check_value(client.report(run))
        assert report.run_id == run
        assert report.state is RunState.FINISHED

    def test_failure_has_the_code_and_message_of_the_worker(self) -> None:
        """So that a caller can raise the same error."""
        client = self.make_client()
        started = client.train(self.make_job("fail"))
        for _ in client.follow(started.id):
            pass
        assert client.run(started.id).state is RunState.FAILED
        failure = client.failure(started.id)
        assert failure is not None
        error = check_value(failure).to_error()
        assert (error.code, error.message) == (failure.code, failure.message)

    def test_stopped_run_is_resumed(self) -> None:
        """From its checkpoint; the log of the new attempt begins at the returned cursor."""
        client = self.make_client()
        started = client.train(self.make_job("wait"))
        for update in client.follow(started.id):
            if any(isinstance(item, MetricRecord) for item in update.items):
                break
        stopped = check_value(client.stop(started.id))
        assert stopped.state is RunState.STOPPED
        again = check_value(client.resume(started.id))
        assert again.cursor.events > 0
        for _ in client.follow(started.id, since=again.cursor):
            pass
        assert client.run(started.id).state is RunState.FINISHED

    def test_finished_run_is_removed_and_an_active_one_is_not(self) -> None:
        """A plan removes nothing; what it lists is removed whole, and measured before."""
        client = self.make_client()
        run = self._finish(client)
        usage = check_value(client.disk_usage())
        assert [used.id for used in usage.runs] == [run]
        assert usage.size.bytes >= usage.runs[0].size.bytes > 0
        assert check_value(client.plan_prune()).items == ()
        plan = check_value(client.plan_removal([run[:-2]]))
        assert [item.run for item in plan.items] == [run]
        assert client.run(run).id == run
        result = check_value(client.clean_up(plan))
        assert (result.removed, result.skipped) == (plan.items, ())
        assert client.ps().runs == ()
        active = client.train(self.make_job("wait")).id
        assert _error_of(lambda: client.plan_removal([active])).code == "store"
        client.stop(active, now=True)

    def test_unknown_run_is_refused(self) -> None:
        """With the error of the store."""
        client = self.make_client()
        verbs: list[Callable[[str], Any]] = [client.run, client.show, client.stop, client.report]
        for verb in verbs:
            assert _error_of(lambda verb=verb: verb("no-such-run")).code == "store"

    def test_queue_without_a_pool_keeps_runs(self) -> None:
        """They wait in order of priority, and say so."""
        client = self.make_client()
        first = check_value(client.submit(self.make_job("finish"), priority=1))
        second = check_value(client.submit(self.make_job("finish"), team="vision"))
        assert not first.pool_is_up
        view = check_value(client.pool())
        assert not view.is_up
        assert [run.id for run in view.runs] == [first.run, second.run]
        entry = check_value(client.pool_change(second.run, priority=5, deadline="2h"))
        assert entry.priority == 5
        assert entry.deadline_at is not None
        assert [run.id for run in client.pool().runs] == [second.run, first.run]
        assert check_value(client.pool_why(first.run)).run == first.run
        assert not check_value(client.pool_down()).was_up

    def test_plan_is_a_value(self) -> None:
        """The best option first, each with its prediction."""
        outcome = check_value(self.make_client().plan(self.make_plan_job(), top=2))
        assert len(outcome.options) == 2
        assert outcome.options.best.total_s.value > 0

    def test_catalog_lists_offers_by_price(self) -> None:
        """Of one device, on demand."""
        client = self.make_client()
        offers = [check_value(offer) for offer in client.offers(gpu="A100-80GB")]
        prices = [round(offer.dollars_per_device_hour or math.inf, 6) for offer in offers]
        assert offers
        assert prices == sorted(prices)
        page = check_value(client.device("A100-80GB"))
        assert list(page.offers) == offers
        assert page.device in [check_value(device) for device in client.devices()]
        assert page.device.name in [
            check_value(offered).device.name for offered in client.offered_devices()
        ]

    def test_empty_home_has_no_studies_and_no_probe(self) -> None:
        """Lists are empty; what is named and absent is refused."""
        client = self.make_client()
        assert check_value(client.studies()).studies == ()
        assert _error_of(lambda: client.study("none")).code == "study"
        assert check_value(client.forget()).forgotten == 0

    def test_selftest_of_one_device_reports_every_check_once(self) -> None:
        """What was not asked for is skipped; its runs are not among the user's."""
        client = self.make_client()
        result = check_value(client.selftest(devices=1, checks=["table"]))
        names = [check.name for check in result.checks]
        assert len(set(names)) == len(names)
        made = {check.name for check in result.checks if check.outcome != "skipped"}
        assert {"text", "table"} <= made <= {"cpu", "text", "table"}
        assert client.ps().runs == ()
        assert _error_of(lambda: client.selftest(checks=["no-such-check"])).code == "job"

    def _finish(self, client: Client) -> str:
        started = client.train(self.make_job("finish"))
        for _ in client.follow(started.id, since=started.cursor):
            pass
        return started.id


def check_value(value: V) -> V:
    """The value, if it is frozen and survives a trip through JSON."""
    assert isinstance(value, Value), type(value)
    assert value.model_config.get("frozen")
    assert type(value).model_validate_json(value.model_dump_json()) == value
    return value


def _error_of(call: Callable[[], Any]) -> YunluError:
    try:
        call()
    except YunluError as error:
        return error
    raise AssertionError("nothing was refused")
