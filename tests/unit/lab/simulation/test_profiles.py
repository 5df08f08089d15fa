"""Reading measurements, and what lies between them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.unit.lab.simulation.toy import BASE, EPOCH_STEPS, EPOCHS, make_profiles, step_s
from yunlu.lab.simulation.profiles import FixedBatchSpeed, SimulationError, load_profiles, normalise
from yunlu.scheduler.policy.goodput import BatchSplit


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_profiles(tmp_path / "all")
    return tmp_path / "all"


def test_limits_and_length_come_from_the_files(directory: Path) -> None:
    application = load_profiles(directory).find("light")
    assert application.epochs == EPOCHS
    assert (application.limits.base, application.limits.most) == (BASE, 256)
    assert (application.limits.local_least, application.limits.local_most) == (4, 64)
    assert application.max_devices == 16
    # An epoch ends when the slowest batch would end it.
    assert application.ends == tuple(EPOCH_STEPS * epoch for epoch in range(EPOCHS + 1))
    assert application.length == EPOCH_STEPS * EPOCHS


@pytest.mark.parametrize(
    ("shape", "local"),
    [
        ((1,), 4),
        ((1,), 10),
        ((4,), 33),
        ((2, 1), 5),
        ((4, 4, 4), 16),
        ((4, 2, 1), 40),
        ((1,) * 4, 64),
    ],
)
def test_times_between_measurements_are_linear(
    directory: Path, shape: tuple[int, ...], local: int
) -> None:
    times = load_profiles(directory).find("light").times["device"]
    found = times.find(shape, local)
    assert found == pytest.approx(step_s(len(shape), sum(shape), local))
    assert times.find(shape, local) == found


def test_beyond_all_measurements_there_is_no_answer(directory: Path) -> None:
    times = load_profiles(directory).find("light").times["device"]
    assert times.find((4,) * 5, 16) is None
    assert times.find((1,), 1000) == times.find((1,), 64)


def test_measurements_of_one_node_tell_of_one_node(directory: Path) -> None:
    light = directory / "light"
    (light / "scalability.csv").unlink()
    rows = (light / "placements.csv").read_text().splitlines()
    one = [row for row in rows if not row[0].isdigit() or row[1] == ","]
    (light / "placements.csv").write_text("\n".join(one) + "\n")
    application = load_profiles(directory).find("light")
    assert application.max_devices == 4
    times = application.times["device"]
    times.prepare()
    assert times.find((4,), 33) == pytest.approx(step_s(1, 4, 33))
    assert times.find((2, 2), 33) is None


def test_a_ring_has_no_first_node() -> None:
    assert normalise((4, 2, 1)) == (1, 4, 2)
    assert normalise((2, 1, 4)) == (1, 4, 2)
    assert normalise((4,)) == (4,)


def test_noise_between_batches_is_linear(directory: Path) -> None:
    path = directory / "light" / "validation-64.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *(line.replace(",1.0,", ",3.0,") for line in lines[1:])]))
    application = load_profiles(directory).find("light")
    assert application.noise(48, 0).sqr == pytest.approx(2.0)
    assert application.noise(64, 0).sqr == 3.0
    assert application.noise(32, 0).sqr == 1.0
    assert application.noise(9999, 2) == application.noise(256, 2)
    assert application.steps(32, 1) == 1000.0


def test_a_type_has_files_of_its_own_or_shares_the_common_ones(directory: Path) -> None:
    light = directory / "light"
    for kind in ("placements", "scalability"):
        (light / f"{kind}.csv").rename(light / f"{kind}-fast.csv")
    profiles = load_profiles(directory, ("fast", "slow"))
    assert set(profiles.find("light").times) == {"fast"}
    assert set(profiles.find("heavy").times) == {"fast", "slow"}


def test_facts_beside_the_tables_count(directory: Path) -> None:
    facts = "epochs: 3\nlocal_most: 16\nbatch: 64\nmax_devices: 2\n"
    (directory / "light" / "facts.yaml").write_text(facts)
    application = load_profiles(directory).find("light")
    assert application.epochs == 3
    assert application.limits.local_most == 16
    assert application.limits.fixed == 64
    assert application.max_devices == 2


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("placements.csv", "", "no column placement"),
        ("placements.csv", "placement,local_bsz,step_time,sync_time\n", "no rows"),
        (
            "placements.csv",
            "placement,local_bsz,step_time,sync_time\n4x,1,1,0\n",
            "line 2: placement",
        ),
        (
            "placements.csv",
            "placement,local_bsz,step_time,sync_time\n4,1,x,0\n",
            "step_time is 'x'",
        ),
        ("placements.csv", "placement,local_bsz,step_time,sync_time\n4,0.5,1,0\n", "local_bsz"),
        ("placements.csv", "placement,local_bsz,step_time,sync_time\n4,1,1,2\n", "not within"),
        ("placements.csv", "placement,local_bsz,step_time,sync_time\n4,1\n", "line 2: step_time"),
        ("scalability.csv", "num_nodes\n1\n", "no column num_replicas"),
        ("validation-32.csv", "progress,iteration,grad_sqr,grad_var\n2,1,1,1\n2,2,1,1\n", "grow"),
        ("validation-x.csv", "progress\n", "validation-BATCH.csv"),
        ("facts.yaml", "epochs: 7\n", "7 epochs are asked, 6 were measured"),
        ("facts.yaml", "colour: red\n", "cannot be understood"),
        ("facts.yaml", "[", "cannot be understood"),
    ],
)
def test_bad_files_are_named_with_what_is_wrong(
    directory: Path, file: str, content: str, message: str
) -> None:
    (directory / "light" / file).write_text(content)
    with pytest.raises(SimulationError, match=message) as caught:
        load_profiles(directory)
    assert "light" in caught.value.message


def test_only_what_is_used_is_read(directory: Path) -> None:
    (directory / "heavy" / "placements.csv").write_text("nonsense\n")
    profiles = load_profiles(directory, names=["light", "light"])
    assert list(profiles.applications) == ["light"]
    with pytest.raises(SimulationError, match="did you mean 'light'"):
        load_profiles(directory, names=["lihgt"])


def test_missing_things_are_named(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(SimulationError, match="not a directory"):
        load_profiles(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SimulationError, match=r"placements\.csv"):
        load_profiles(tmp_path / "empty")
    with pytest.raises(SimulationError, match="did you mean 'light'"):
        load_profiles(directory).find("ligth")
    for path in (directory / "heavy").glob("validation-*"):
        path.unlink()
    with pytest.raises(SimulationError, match=r"no validation-BATCH\.csv"):
        load_profiles(directory)


def test_a_batch_that_does_not_fit_a_device_is_made_in_more_passes(directory: Path) -> None:
    light = directory / "light"
    for kind in ("placements", "scalability"):
        rows = (light / f"{kind}.csv").read_text().splitlines()
        small = [row for row in rows if ",64," not in row]
        (light / f"{kind}-small.csv").write_text("\n".join(small) + "\n")
    application = load_profiles(directory, ("device", "small")).find("light")
    speed = FixedBatchSpeed(application, 128, {"device": 4, "small": 4})
    assert speed.split("device", (2,)) == BatchSplit(64, 0)
    assert speed.split("small", (2,)) == BatchSplit(16, 3)
    assert speed.split("elsewhere", (2,)) is None
    step, sync = step_s(1, 2, 16)
    assert speed.step_s("small", 1, 2) == pytest.approx(step + 3 * (step - sync))
    large, little = (
        float(speed.goodput(kind, np.array([1]), np.array([2]))[0]) for kind in ("device", "small")
    )
    assert large > little > 0
    assert speed.goodput("device", np.array([9]), np.array([36]))[0] == 0
