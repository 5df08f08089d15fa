"""What people see of the pool."""

import io

from rich.console import Console

from tests.unit.scheduler.clouds import CALM, Cluster
from yunlu.render.terminal.pool_tables import pool_page, why_page
from yunlu.runs.run_store import Document
from yunlu.scheduler.pool_view import PoolView, explain
from yunlu.scheduler.queue import change_entry
from yunlu.scheduler.scaling import Scaler


def show(page, width=140):
    console = Console(file=io.StringIO(), width=width)
    console.print(page)
    return " ".join(console.file.getvalue().split())


def page_of(view, *, now):
    return pool_page(PoolView.model_validate(view), now=now)


def test_page_shows_machines_holders_and_the_queue(make_world, make_scheduler):
    world = make_world(steps=100)
    world.submit("first", most=2)
    change_entry(world.submit("second", most=2), priority=3, team="vision")
    world.submit("big", least=9, most=9, requested=9)
    scheduler = make_scheduler(world, dollars_per_hour=1.25)
    for _ in range(4):
        scheduler.step()
        world.tick()
    view = {"is_up": True, "pid": 7, **scheduler.pool_store.read_view()}
    text = show(page_of(view, now=view["at"]))
    assert "4 of 4 devices held" in text
    assert "$1.25/h" in text
    assert "second 2, first 2" in text
    assert "● running 2 of 1–2" in text
    assert "○ waiting 0 of 9" in text
    assert "vision" in text
    assert "last looked" not in text
    assert "last looked 1 min" in show(page_of(view, now=view["at"] + 60))


def test_narrow_page_leaves_whole_columns_out_and_says_so(make_world, make_scheduler):
    world = make_world(steps=100)
    change_entry(
        world.submit("a-run-with-a-long-name"), team="vision", deadline_at=world.wall + 600
    )
    scheduler = make_scheduler(world, dollars_per_hour=360.0)
    for _ in range(4):
        scheduler.step()
        world.tick()
    view = {"is_up": True, **scheduler.pool_store.read_view()}
    wide, narrow = (show(page_of(view, now=view["at"]), width) for width in (140, 80))
    assert "no room" not in wide
    assert "no room for: cores, pace, team" in narrow
    assert "vision" not in narrow
    assert "a-run-with-a-long-name ● running 4 of 1–4" in narrow
    assert "…" not in narrow


def test_page_shows_deadlines_and_what_was_spent(make_world, make_scheduler):
    world = make_world(steps=100)
    run = world.submit("first")
    scheduler = make_scheduler(world, dollars_per_hour=360.0)
    for _ in range(4):
        scheduler.step()
        world.tick()
    view = {"is_up": True, **scheduler.pool_store.read_view()}
    assert "deadline" not in show(page_of(view, now=view["at"]))
    change_entry(run, deadline_at=world.wall + 600)
    scheduler.step()
    view = {"is_up": True, **scheduler.pool_store.read_view()}
    text = show(page_of(view, now=view["at"]))
    assert "deadline $ prio" in text
    assert f"in 10 min 00 s {view['runs'][0]['dollars']:.2f}" in text
    assert "passed" in show(page_of(view, now=view["at"] + 601))


def test_page_shows_how_busy_machines_are(make_world, make_scheduler):
    world = make_world()
    world.submit("first")
    scheduler = make_scheduler(world)
    scheduler.step()
    view = {"is_up": True, **scheduler.pool_store.read_view()}
    text = show(page_of(view, now=view["at"]))
    (node,) = view["nodes"]
    assert f"cpu {node['cpu']:.0%}, memory {node['memory']:.0%}" in text
    node["gpus"] = [[0.83, 0.5], [0.07, 0.1]]
    assert "gpu 83% 7%" in show(page_of(view, now=view["at"]))


def test_page_says_what_other_programs_take_of_the_cores(make_world, make_scheduler):
    world = make_world()
    world.submit("first")
    scheduler = make_scheduler(world)
    scheduler.step()
    view = {"is_up": True, **scheduler.pool_store.read_view()}
    view["nodes"][0]["type"] = "cpu"
    view["runs"][0]["cores"] = 0.4
    for others, is_said in ((0.1, False), (2.6, True)):
        view["machine"] = {"cores": 4.0, "other_cores": others}
        text = show(page_of(view, now=view["at"]))
        assert ("other programs keep 2.6 of 4 cores busy" in text) is is_said
        assert "0.4 of 4" in text


def test_page_shows_machines_on_their_way_and_who_starts_with_them(make_world, make_scheduler):
    world = make_world({"standing": 2}, steps=100)
    first, second = world.submit("first", least=2), world.submit("second", least=2)
    cluster = Cluster()
    scheduler = make_scheduler(world, scaler=Scaler(cluster, CALM), round_s=1.0)
    for _ in range(3):
        scheduler.step()
        world.tick()
    assert cluster.asked[0] > 0
    view = {"is_up": True, **scheduler.pool_store.read_view()}
    text = show(page_of(view, now=view["at"]))
    assert f"machines on their way: {cluster.awake} × cloud of 2, in 58" in text
    starts = {run["id"]: run["start_at"] for run in view["runs"]}
    assert starts == {first.id: None, second.id: view["pending_nodes"][0]["at"]}

    world.dead = {"standing"}  # nothing is there, and everything is to come
    world.processes.clear()
    for _ in range(2):
        scheduler.step()
        world.tick()
    view = scheduler.pool_store.read_view()
    assert all(run["start_at"] for run in view["runs"])


def test_page_without_a_pool_says_how_to_start_one():
    text = show(page_of({"is_up": False, "runs": [], "nodes": [], "troubles": {}}, now=0.0))
    assert "yunlu pool up" in text
    assert "yunlu submit" in text


def test_troubles_are_shown(make_world, make_scheduler):
    world = make_world()
    run = world.submit("a")
    (run.path / Document.QUEUE_ENTRY).write_text("{}")
    scheduler = make_scheduler(world)
    scheduler.step()
    view = {"is_up": True, **scheduler.pool_store.read_view()}
    assert "queue.json cannot be read" in show(page_of(view, now=0.0))


def test_why_tells_the_decisions_and_who_holds_the_rest(
    make_world, make_scheduler, own_home, monkeypatch
):
    world = make_world(steps=100)
    first, second = world.submit("first"), world.submit("second", least=4)
    scheduler = make_scheduler(world)
    for _ in range(3):
        scheduler.step()
        world.tick()
    monkeypatch.setattr("yunlu.scheduler.pool_view.find_service", lambda home: object())
    text = show(why_page(explain(own_home, second)))
    assert "second waiting" in text
    assert "not its turn" in text
    assert "held by: first 4" in text
    assert "its turn" in show(why_page(explain(own_home, first)))
