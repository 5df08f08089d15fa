"""Clean-up: what may go, what never goes, and what a kill in the middle leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.canned_runs import DAY_S, make_ended_run
from yunlu.client.local import LocalClient
from yunlu.core.disk_usage import DiskMeter
from yunlu.core.errors import StoreError
from yunlu.core.settings import read_settings
from yunlu.jobs import cleanup
from yunlu.jobs.cleanup import CleanupPlan
from yunlu.runs.events import StateChanged
from yunlu.runs.home import DirectoryRunStore, find_runs
from yunlu.runs.run_store import Claim, Document
from yunlu.runs.states import RunState
from yunlu.scheduler.allocation_record import AllocationRecord, write_allocation
from yunlu.scheduler.queue import QueueEntry
from yunlu.scheduler.run_status import ResourceRequest
from yunlu.tuning.study_dir import StudyDir, StudyRequest, StudyStatus, studies_home

SCORES = {10: {"accuracy": 0.7}, 20: {"accuracy": 0.9, "loss": 0.5}, 30: {"accuracy": 0.8}}


@pytest.fixture
def client():
    return LocalClient()


def names(plan: CleanupPlan) -> list[str]:
    return sorted(f"{item.kind} {Path(item.path).name}" for item in plan.items)


def steps(run) -> list[str]:
    return run.names("checkpoints")


@pytest.mark.parametrize(
    ("state", "has_model", "keep_best", "left"),
    [
        ("finished", True, False, []),
        ("finished", True, True, [20]),
        ("finished", False, False, [20]),  # never exported: the only copy
        ("stopped", False, False, [30]),
        ("stopped", False, True, [20, 30]),
        ("failed", False, True, [20]),
        ("lost", False, False, [20]),  # the last copy of the model of its name
    ],
)
def test_prune_keeps_the_checkpoints_that_are_needed(client, state, has_model, keep_best, left):
    run = make_ended_run(state=state, checkpoints=SCORES, has_model=has_model)
    plan = client.plan_prune(keep_best=keep_best)
    assert {item.kind for item in plan.items} <= {"checkpoint"}
    assert steps(run) == [f"step-{step:010d}" for step in SCORES], "a plan removes nothing"
    result = client.clean_up(plan)
    assert not result.skipped
    assert steps(run) == [f"step-{step:010d}" for step in left]
    assert run.has("model/model.safetensors") is has_model
    assert client.plan_prune(keep_best=keep_best).items == ()


def test_a_failed_run_goes_whole_where_its_model_was_trained_by_another(client):
    failed = make_ended_run("again", state="failed", checkpoints=SCORES)
    trained = make_ended_run("again", state="finished", has_model=True)
    empty = make_ended_run("early", state="failed")
    plan = client.plan_prune()
    assert {item.run for item in plan.items} == {failed.id, empty.id}
    assert names(client.plan_prune(keep_best=True)) == sorted(
        [f"run {empty.id}", "checkpoint step-0000000010", "checkpoint step-0000000030"]
    )
    client.clean_up(plan)
    assert [run.id for run in client.ps().runs] == [trained.id]


def test_ties_of_the_metric_are_broken_by_the_loss(client):
    scores = {
        1: {"accuracy": 1.0, "loss": 0.2},
        2: {"accuracy": 1.0, "loss": 0.1},
        3: {"loss": 0.0},
    }
    run = make_ended_run(state="finished", checkpoints=scores, has_model=True)
    client.clean_up(client.plan_prune(keep_best=True))
    assert steps(run) == ["step-0000000002"]


def test_a_checkpoint_that_cannot_be_read_is_no_copy(client):
    run = make_ended_run(state="stopped", checkpoints={**SCORES, 40: None})
    client.clean_up(client.plan_prune())
    assert steps(run) == ["step-0000000030"]
    damaged = make_ended_run("damaged", state="stopped", checkpoints={10: None, 20: None})
    assert client.plan_prune().items == ()
    assert len(steps(damaged)) == 2


def test_new_and_active_runs_stay(client):
    make_ended_run(state="failed", age_days=29)
    active = make_ended_run(state="running", checkpoints=SCORES)
    with active.claim(Claim.WORKER, wait=False):
        assert client.plan_prune().items == ()
        with pytest.raises(StoreError, match="is alive: it is running") as refused:
            client.plan_removal([active.id])
    assert refused.value.hint == f"yunlu stop {active.id}"
    assert len(client.plan_prune(older="28d").items) == 1


def test_a_run_whose_worker_has_not_left_yet_stays(client):
    run = make_ended_run(state="failed")
    plan = client.plan_prune()
    with run.claim(Claim.WORKER, wait=False):
        with pytest.raises(StoreError, match="its worker has not"):
            client.plan_removal([run.id])
        result = client.clean_up(plan)
    assert [Path(item.path).name for item in result.skipped] == [run.id]
    assert run.has(Document.JOB)


@pytest.mark.parametrize("how", ["absolute", "relative", "through a link", "hf"])
def test_a_run_that_another_started_from_stays(client, tmp_path, monkeypatch, how):
    base = make_ended_run("base", state="finished", checkpoints=SCORES, has_model=True)
    (tmp_path / "link").symlink_to(base.path)
    model = {
        "absolute": {"name": "mlp", "weights": str(base.path / "model")},
        "relative": {"name": "mlp", "weights": os.path.relpath(base.path / "model", tmp_path)},
        "through a link": {"name": "mlp", "weights": str(tmp_path / "link" / "model")},
        "hf": f"hf:{base.path}/model",
    }[how]
    monkeypatch.chdir(tmp_path)
    tuned = make_ended_run("tuned", state="finished", has_model=True, model=model)
    monkeypatch.chdir("/")
    plan = client.plan_prune()
    assert plan.items == ()
    (kept,) = plan.retained
    assert (kept.run, kept.reason, kept.by) == (base.id, "used", tuned.id)
    with pytest.raises(StoreError, match=f"{base.id} is the base of {tuned.id}") as refused:
        client.plan_removal([base.id])
    assert refused.value.hint == f"yunlu rm {base.id} {tuned.id} removes both"
    both = client.plan_removal([base.id, tuned.id])
    assert set(both.last_models) == {"base", "tuned"}
    assert not client.clean_up(both).skipped
    assert client.ps().runs == ()


def test_a_run_that_became_a_base_after_the_plan_stays(client):
    base = make_ended_run("base", state="finished", has_model=True)
    plan = client.plan_removal([base.id])
    weights = {"name": "mlp", "weights": str(base.path / "model")}
    make_ended_run("tuned", state="finished", model=weights)
    (skipped,) = client.clean_up(plan).skipped
    assert "is the base of tuned" in skipped.problem
    assert base.has("model/model.safetensors")


def test_a_run_that_was_resumed_after_the_plan_stays(client):
    run = make_ended_run(state="stopped", checkpoints=SCORES)
    plan = client.plan_prune()
    with run.claim(Claim.WORKER, wait=False):
        run.emit(StateChanged(state=RunState.PENDING, reason="resumed"))
        skipped = client.clean_up(plan).skipped
    assert len(skipped) == len(plan.items) == 2
    assert len(steps(run)) == 3


def test_a_run_of_another_user_stays(client, monkeypatch):
    run = make_ended_run(state="failed")
    plan = client.plan_prune()
    monkeypatch.setattr(DirectoryRunStore, "foreign_owner", "eve")
    (kept,) = client.plan_prune().retained
    assert (kept.reason, kept.by) == ("foreign", "eve")
    with pytest.raises(StoreError, match="belongs to eve"):
        client.plan_removal([run.id])
    assert len(client.clean_up(plan).skipped) == 1
    assert run.has(Document.JOB)


def test_a_run_that_waits_in_the_pool_stays_until_it_is_given_up(client):
    run = make_ended_run(state="failed")
    request = ResourceRequest(least=1, most=1, requested=1)
    entry = QueueEntry(submitted_at=0.0, request=request, wish="pause")
    run.write(Document.QUEUE_ENTRY, entry.model_dump_json())
    assert [kept.reason for kept in client.plan_prune().retained] == ["queued"]
    with pytest.raises(StoreError, match="waits in the queue"):
        client.plan_removal([run.id])
    write_allocation(run, AllocationRecord(ticket=1, given_up="it failed 3 times"))
    assert names(client.plan_prune()) == [f"run {run.id}"]


@pytest.mark.parametrize("state", ["stopped", "finished"])
def test_trials_stay_while_their_study_can_use_them(client, state):
    run = make_ended_run("trial", state="failed")
    run.write(Document.TRIAL, json.dumps({"study": "widths", "number": 0}))
    study = StudyDir(studies_home() / "widths")
    study.path.mkdir(parents=True)
    request = StudyRequest(
        id="1", name="widths", metrics=("loss",), directions=("minimize",), created_at=1.0
    )
    study.write_request(request)
    study.write_status(StudyStatus(state=state))
    plan = client.plan_prune()
    if state == "stopped":
        assert [(kept.reason, kept.by) for kept in plan.retained] == [("study", "widths")]
    else:  # it has no best trial
        assert names(plan) == [f"run {run.id}"]
    assert len(client.plan_removal([run.id]).items) == 1  # named by the user


def test_caches_go_when_nobody_used_them_for_long(client):
    cache, old = read_settings().cache, time.time() - 40 * DAY_S
    (cache / "shapes").mkdir()
    for name, at in (("old.json", old), ("new.json", time.time())):
        (cache / "shapes" / name).write_text("{}")
        os.utime(cache / "shapes" / name, (at, at))
    (cache / "calibration.json").write_text("{}")
    os.utime(cache / "calibration.json", (old, old))
    (cache / "shapes" / "link.json").symlink_to(cache / "calibration.json")
    plan = client.plan_prune()
    assert names(plan) == ["cache old.json"]
    client.clean_up(plan)
    left = sorted(path.name for path in (cache / "shapes").iterdir())
    assert left == ["link.json", "new.json"]
    assert (cache / "calibration.json").exists()


def test_made_data_of_an_active_run_stays(client, tmp_path, monkeypatch):
    monkeypatch.setenv("YUNLU_CACHE", str(tmp_path / "cache"))
    data, old = tmp_path / "cache" / "synthetic" / "digits-v1", time.time() - 40 * DAY_S
    data.mkdir(parents=True)
    (data / "0.wav").write_bytes(b"RIFF")
    for path in (data / "0.wav", data):
        os.utime(path, (old, old))
    active = make_ended_run(state="running", data="synthetic:digits")
    with active.claim(Claim.WORKER, wait=False):
        assert client.plan_prune().items == ()
    active.emit(StateChanged(state=RunState.FAILED))
    assert names(client.plan_prune()) == ["cache digits-v1"]


_KILLED = """
import os, shutil, signal, sys
from yunlu.client.local import LocalClient
from yunlu.jobs import cleanup

def half(path, **options):
    victim = next(file for file in sorted(path.rglob("*")) if file.is_file())
    victim.unlink()
    os.kill(os.getpid(), signal.SIGKILL)

cleanup.shutil.rmtree = half
client = LocalClient()
client.clean_up(client.plan_removal(["last"]) if sys.argv[1] == "rm" else client.plan_prune())
"""


@pytest.mark.parametrize("verb", ["rm", "prune"])
def test_a_removal_that_is_killed_leaves_nothing_that_looks_whole(client, own_home, verb):
    run = make_ended_run(state="stopped", checkpoints=SCORES)
    ended = subprocess.run([sys.executable, "-c", _KILLED, verb], check=False)
    assert ended.returncode == -signal.SIGKILL
    if verb == "rm":
        assert not run.path.exists()
        assert list(find_runs(own_home)) == []
        assert client.ps().runs == ()
    else:  # the newest checkpoint is whole, of the others none can be seen
        assert steps(run) == ["step-0000000030"]
        assert len([*(run.path / "checkpoints" / steps(run)[0]).iterdir()]) == 2
    unfinished = sorted(map(str, own_home.rglob(".trash-*")))
    assert len(unfinished) == (1 if verb == "rm" else 2)
    plan = client.plan_prune(older="1000d")
    assert {item.kind for item in plan.items} == {"leftover"}
    assert sorted(item.path for item in plan.items) == unfinished
    assert not client.clean_up(plan).skipped
    assert not [*own_home.rglob(".trash-*")]


def test_what_killed_saves_and_exports_left_goes_where_nobody_works(client):
    run = make_ended_run(state="lost", checkpoints={10: SCORES[10]})
    (run.path / "checkpoints" / ".part-step-0000000020-1").mkdir()
    (run.path / ".model.part").mkdir()
    plan = client.plan_prune(older="1000d")
    assert names(plan) == ["leftover .model.part", "leftover .part-step-0000000020-1"]
    client.clean_up(plan)
    assert steps(run) == ["step-0000000010"]


@pytest.mark.parametrize("kind", ["cache", "leftover", "checkpoint"])
def test_a_plan_cannot_reach_out_of_the_home(client, tmp_path, kind):
    make_ended_run(state="failed")
    (tmp_path / "precious").mkdir()
    (item,) = client.plan_prune().items
    forged = item.model_copy(update={"kind": kind, "path": str(tmp_path / "precious"), "run": ""})
    (skipped,) = client.clean_up(CleanupPlan(home=str(tmp_path), items=(forged,))).skipped
    assert "is not in" in skipped.problem
    assert (tmp_path / "precious").is_dir()


def test_a_forged_run_must_be_a_run(client, tmp_path):
    (tmp_path / "precious").mkdir()
    make_ended_run(state="failed")
    (item,) = client.plan_prune().items
    forged = item.model_copy(update={"path": str(tmp_path / "precious")})
    assert len(client.clean_up(CleanupPlan(home=str(tmp_path), items=(forged,))).skipped) == 1
    assert (tmp_path / "precious").is_dir()


def test_a_damaged_run_hides_no_other(client):
    odd = make_ended_run("odd", state="stopped", checkpoints=SCORES)
    (odd.path / "checkpoints").rename(odd.path / "elsewhere")
    (odd.path / "checkpoints").symlink_to(odd.path / "elsewhere")
    failed = make_ended_run(state="failed")
    plan = client.plan_prune()
    assert names(plan) == [f"run {failed.id}"]
    assert [(kept.run, kept.reason) for kept in plan.retained] == [(odd.id, "unreadable")]


def test_an_age_that_is_none_is_refused(client):
    with pytest.raises(StoreError, match="'soon' is not a time"):
        client.plan_prune(older="soon")


def test_choosing_reads_nothing(tmp_path):
    run = make_ended_run(state="finished", checkpoints=SCORES, has_model=True)
    record = LocalClient().run(run.id)
    contents = cleanup.load_contents(run, record, DiskMeter())
    run.remove("checkpoints")
    chosen = cleanup.choose(contents, keep_best=True, is_model_known=False)
    assert [Path(item.path).name for item in chosen] == ["step-0000000010", "step-0000000030"]


def test_links_of_one_file_count_once(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "weights").write_bytes(bytes(1 << 20))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "weights").hardlink_to(tmp_path / "a" / "weights")
    (tmp_path / "b" / "link").symlink_to(tmp_path / "a")
    meter = DiskMeter()
    both = meter.measure(tmp_path)
    assert both.files == 3
    assert 1 << 20 <= both.bytes < 2 << 20
    assert meter.measure(tmp_path / "a").bytes < 1 << 20
    assert DiskMeter().measure(tmp_path, most=1).is_partial


def test_space_is_divided_by_kind_and_by_run(client, tmp_path, own_home):
    (tmp_path / "table.csv").write_bytes(bytes(10_000))
    large = make_ended_run(
        state="finished", checkpoints=SCORES, has_model=True, data=str(tmp_path / "table.csv")
    )
    small = make_ended_run("small", state="failed")
    (own_home / ".trash-x").mkdir()
    usage = client.disk_usage()
    assert [run.id for run in usage.runs] == [large.id, small.id]
    kinds = {share.kind: share for share in usage.shares}
    assert {"checkpoints", "models", "records", "leftovers", "own-data"} <= kinds.keys()
    assert kinds["own-data"].path == str(tmp_path / "table.csv")
    assert kinds["checkpoints"].size == usage.runs[0].checkpoints
    total = sum(path.lstat().st_blocks * 512 for path in own_home.rglob("*"))
    in_home = sum(share.size.bytes for share in usage.shares if share.path == str(own_home))
    inside = {run.id: DiskMeter().measure(own_home / run.id).bytes for run in usage.runs}
    roots = sum(own_home.joinpath(run.id).lstat().st_blocks * 512 for run in usage.runs)
    assert in_home == total - roots, inside


def test_checkpoints_of_a_run_that_became_a_base_stay(client):
    base = make_ended_run("base", state="finished", checkpoints=SCORES, has_model=True)
    plan = client.plan_prune()
    make_ended_run(
        "tuned", state="finished", model={"name": "mlp", "weights": f"{base.path}/model"}
    )
    assert len(client.clean_up(plan).skipped) == 3
    assert len(steps(base)) == 3


def test_what_cannot_be_deleted_is_hidden_and_reported(client, own_home, monkeypatch):
    run = make_ended_run(state="failed")
    with monkeypatch.context() as patched:
        patched.setattr("yunlu.jobs.cleanup.shutil.rmtree", lambda *_, **__: None)
        (skipped,) = client.clean_up(client.plan_prune()).skipped
    assert "not all of it could be deleted" in skipped.problem
    assert not run.path.exists()
    plan = client.plan_prune()
    assert names(plan) == [f"leftover {path.name}" for path in own_home.glob(".trash-*")]
    assert not client.clean_up(plan).skipped
    assert not [*own_home.glob(".trash-*")]


def test_caches_of_another_user_stay(client, monkeypatch):
    shapes, old = read_settings().cache / "shapes", time.time() - 40 * DAY_S
    shapes.mkdir()
    (shapes / "old.json").write_text("{}")
    os.utime(shapes / "old.json", (old, old))
    monkeypatch.setattr(cleanup, "name_if_foreign", lambda uid: "eve")
    assert client.plan_prune().items == ()
