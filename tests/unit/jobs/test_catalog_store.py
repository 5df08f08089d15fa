"""What a user adds is kept whole, stands above what ships, and goes when it is told to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S
from yunlu.core.settings import worker_environment
from yunlu.hardware.catalog import CatalogError, load_catalog
from yunlu.jobs import catalog_store

ADDITIONS = """
devices:
  - name: MyChip
    kind: npu
    memory_gib: 96
    memory_gb_per_s: 3000
    peak_tflops: {bf16: 500, fp32: 62.5}
    link_gb_per_s: 300
    node_devices: 8
    reachable: 0.7
    aliases: [mc1]
    source: our own measurement
prices:
  - offer: huawei:modelarts.bm.npu.arm.8snt9b2.d
    dollars_per_hour: 18.5
  - offer: ours:big
    device: mc1
    devices: 8
    dollars_per_hour: 20
    spot_dollars_per_hour: 8
    regions: [north]
    network_gbit_per_s: 800
machines:
  - name: lab
    device: A100-SXM4-80GB
    devices: 8
    cost: {purchase_dollars: 140000, power_kw: 5, dollars_per_kwh: 0.15}
"""
CHIP = """devices:
  - {name: x, kind: cuda, memory_gib: 1, memory_gb_per_s: 1, source: me, link_gb_per_s: 1,
     peak_tflops: {bf16: 1}}
"""
VMS = """InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region
p9.big,H100,8,96,1024,,40,12,us-east-1
p9.none,,,4,16,,0.2,,us-east-1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(ADDITIONS, "utf-8")
    return path


def test_nothing_is_written_by_looking(own_home: Path) -> None:
    assert catalog_store.open_catalog() == load_catalog()
    assert not own_home.exists()


def test_what_was_added_is_found_as_it_was_written(file: Path) -> None:
    catalog_store.add(file)
    catalog = catalog_store.open_catalog()
    chip = catalog.device("MC-1")
    assert chip == catalog_store.read_added().devices[0].to_device()
    assert chip.source("peak_flops.fp32") == "our own measurement"
    assert catalog.find_offer("huawei:modelarts.bm.npu.arm.8snt9b2.d").dollars_per_hour == 18.5
    ours = catalog.find_offer("ours:big@north")
    assert (ours.device, ours.price(spot=True), ours.network_bytes_per_s) == ("MyChip", 8, 1e11)
    lab = catalog.find_offer("own:lab")
    cost = catalog_store.find_machine("lab").cost
    assert cost
    assert lab.dollars_per_hour == pytest.approx(cost.dollars_per_hour, abs=1e-4)
    assert lab.device == "A100-80GB"
    shipped = [offer for offer in load_catalog().every_offer if offer.cloud != "huawei"]
    kept = [offer for offer in catalog.every_offer if offer.cloud not in {"huawei", "ours", "own"}]
    assert kept == shipped


def test_an_own_machine_is_there_once_unless_there_are_more(file: Path) -> None:
    catalog_store.add(file)
    catalog = catalog_store.open_catalog()
    assert catalog.find_offer("own:lab").most_nodes == 1
    assert catalog.find_offer("ours:big").most_nodes is None
    file.write_text(ADDITIONS + "    nodes: 3\n", "utf-8")
    catalog_store.add(file)
    assert catalog_store.open_catalog().find_offer("own:lab").most_nodes == 3


def test_machines_that_nobody_joins_are_had_one_by_one_unless_the_user_knows_better(
    tmp_path: Path,
) -> None:
    pod = "runpod:8x_MI300X_SECURE"
    assert load_catalog().find_offer(pod).most_nodes == 1
    assert load_catalog().find_offer("aws:p5.48xlarge").most_nodes is None
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(f"prices: [{{offer: '{pod}', dollars_per_hour: 25, nodes: 8}}]", "utf-8")
    catalog_store.add(cluster)
    assert catalog_store.open_catalog().find_offer(pod).most_nodes == 8


def test_a_directory_is_no_file_to_add(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="is a directory, not a file with devices"):
        catalog_store.add(tmp_path)


def test_adding_again_replaces_and_keeps_the_rest(file: Path, tmp_path: Path) -> None:
    catalog_store.add(file)
    more = tmp_path / "more.yaml"
    more.write_text(
        "prices:\n  - {offer: 'ours:big', device: h100, devices: 4, dollars_per_hour: 9}\n"
    )
    catalog_store.add(more)
    assert catalog_store.open_catalog().find_offer("ours:big").device == "H100"
    assert catalog_store.open_catalog().find_offer("own:lab")


def test_a_price_of_one_region_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(
        "prices:\n  - {offer: 'aws:p5.48xlarge', regions: [us-east-1], dollars_per_hour: 33}\n"
    )
    before = load_catalog()
    catalog_store.add(path)
    after = catalog_store.open_catalog()
    assert after.find_offer("aws:p5.48xlarge@us-east-1").dollars_per_hour == 33
    others = {name for o in before.every_offer if o.key == "aws:p5.48xlarge" for name in o.regions}
    for region in others - {"us-east-1"}:
        key = f"aws:p5.48xlarge@{region}"
        assert after.find_offer(key).dollars_per_hour == before.find_offer(key).dollars_per_hour


def test_removing_brings_back_what_shipped(file: Path) -> None:
    catalog_store.add(file)
    for name in catalog_store.read_added().names[1:]:
        catalog_store.remove(name)
    catalog_store.remove("mychip")
    assert set(catalog_store.open_catalog().every_offer) == set(load_catalog().every_offer)
    assert catalog_store.open_catalog().devices == load_catalog().devices


def test_a_device_that_is_needed_stays(file: Path) -> None:
    catalog_store.add(file)
    with pytest.raises(CatalogError, match="ours:big"):
        catalog_store.remove("MyChip")
    assert catalog_store.open_catalog().device("MyChip")


def test_what_was_never_added_cannot_be_removed(file: Path) -> None:
    with pytest.raises(CatalogError, match="nothing was"):
        catalog_store.remove("lab")
    catalog_store.add(file)
    with pytest.raises(CatalogError, match="did you mean 'own:lab'"):
        catalog_store.remove("own:lap")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "machines: [{name: a, device: H100, devices: 0, dollars_per_hour: 1}]",
            r"\[0\].devices.*0",
        ),
        ("machines: [{name: a, device: H100, devices: 1}]", "either cost"),
        (
            "machines: [{name: a, device: H999, devices: 1, dollars_per_hour: 1}]",
            "no device 'H999'",
        ),
        ("machines: [{name: a, devices: 1, dollars_per_hour: 1}]", r"\[0\].device: is needed"),
        (
            "machines: [{name: a, device: t4, devices: 1, cost: {purchase_dollars: -1, years: 0}}]",
            r"(?s)cost.purchase_dollars: .*-1.*cost.years: .*0.*cost.power_kw: is needed",
        ),
        ("prices: [{offer: 'aws:p4d.24xlarge'}]", "dollars_per_hour or spot"),
        ("prices: [{offer: p4d, dollars_per_hour: 2}]", "offer"),
        (
            "prices: [{offer: 'aws:p4d.24xlrge', dollars_per_hour: 2}]",
            "did you mean 'aws:p4d.24xlarge'",
        ),
        ("prices: [{offer: 'aws:x', dolars_per_hour: 2}]", "did you mean 'dollars_per_hour'"),
        ("devices: [{name: x, kind: gpu}]", "'gpu' is not one of cuda, rocm"),
        (
            CHIP.replace("bf16", "bf17"),
            "'bf17' is no precision; fp32, tf32",
        ),
        ("device: []", "did you mean 'devices'"),
        ("{}", "nothing to add"),
        ("- 1", "expected a mapping"),
        ("a: [", "not YAML"),
    ],
)
def test_a_wrong_file_changes_nothing_and_names_the_field(
    file: Path, tmp_path: Path, text: str, words: str
) -> None:
    catalog_store.add(file)
    before = catalog_store.open_catalog()
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(text)
    with pytest.raises(CatalogError, match=words):
        catalog_store.add(wrong)
    assert catalog_store.open_catalog() == before


def test_an_imported_cloud_replaces_what_shipped_of_it(tmp_path: Path, file: Path) -> None:
    (tmp_path / "v8" / "aws").mkdir(parents=True)
    (tmp_path / "v8" / "aws" / "vms.csv").write_text(VMS)
    catalog_store.add(file)
    (table,) = catalog_store.update(tmp_path / "v8")
    assert (table.cloud, table.imported.rows, len(table.imported.offers)) == ("aws", 2, 1)
    catalog = catalog_store.open_catalog()
    assert [offer.key for offer in catalog.offers(cloud="aws")] == ["aws:p9.big"]
    assert catalog.find_offer("own:lab")
    assert catalog.offers(cloud="gcp") == load_catalog().offers(cloud="gcp")
    catalog_store.remove("aws")
    assert catalog_store.open_catalog().offers(cloud="aws") == load_catalog().offers(cloud="aws")


def test_prices_set_by_hand_stand_on_what_is_imported(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(
        "prices:\n  - {offer: 'new:p9.big', device: t4, devices: 1, dollars_per_hour: 1}\n"
    )
    catalog_store.add(own)
    (tmp_path / "new.csv").write_text(VMS)
    catalog_store.update(tmp_path / "new.csv")
    (offer,) = catalog_store.open_catalog().offers(cloud="new")
    assert offer.dollars_per_hour == 1
    catalog_store.remove("new:p9.big")
    assert catalog_store.open_catalog().find_offer("new:p9.big").dollars_per_hour == 40


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("aws.csv", "a,b\n1,2\n", "InstanceType is missing"),
        ("aws.csv", "", "aws.csv is empty"),
        ("aws.csv", VMS.replace("H100", "Nothing"), "nothing was changed"),
        ("aws.csv", VMS.replace("H100", "Nothing"), "2 rows, left out: 1 "),
        ("aws.csv", VMS.splitlines()[0], "it has no rows"),
        ("own.csv", VMS, "--cloud"),
        ("here.csv", VMS, "--cloud"),
        ("my prices!.csv", VMS, "--cloud"),
    ],
)
def test_an_import_of_something_else_changes_nothing(
    tmp_path: Path, own_home: Path, name: str, text: str, words: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(CatalogError) as caught:
        catalog_store.update(tmp_path / name)
    assert words in str(caught.value)
    assert not list(own_home.rglob("*.csv"))


@pytest.mark.parametrize(
    ("cloud", "words"),
    [
        ("../../x", "is no name"),
        ("a/b", "is no name"),
        ("", "is no name"),
        ("own", "your own machines"),
        ("Here", "this machine"),
    ],
)
def test_a_cloud_is_called_by_a_name_of_its_own(
    tmp_path: Path, own_home: Path, cloud: str, words: str
) -> None:
    (tmp_path / "aws.csv").write_text(VMS)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CatalogError, match=words):
        catalog_store.update(tmp_path / "aws.csv", cloud=cloud)
    assert not list(own_home.rglob("*.csv"))
    assert sorted(tmp_path.rglob("*")) == before


def test_an_import_that_fails_over_its_numbers_says_so(tmp_path: Path) -> None:
    (tmp_path / "aws.csv").write_text(VMS.replace("H100,8,", "H100,many,"))
    with pytest.raises(CatalogError, match=r"2 rows, left out: .*1 a number that cannot be read"):
        catalog_store.update(tmp_path / "aws.csv")


def test_one_name_does_not_do_for_several_clouds(tmp_path: Path) -> None:
    for cloud in ("aws", "gcp"):
        (tmp_path / "v8" / cloud).mkdir(parents=True)
        (tmp_path / "v8" / cloud / "vms.csv").write_text(VMS)
    with pytest.raises(CatalogError, match="the tables of 2"):
        catalog_store.update(tmp_path / "v8", cloud="mine")


def test_an_unknown_offer_is_told_each_near_one_once(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("prices: [{offer: 'aws:p4d.24xlrge', dollars_per_hour: 2}]")
    with pytest.raises(CatalogError) as caught:
        catalog_store.add(path)
    listed = str(caught.value).split("near it: ")[1].partition(";")[0].split(", ")
    assert len(listed) > 2
    assert len(set(listed)) == len(listed)
    assert set(listed) <= {offer.key for offer in load_catalog().every_offer}


def test_two_versions_in_one_tree_are_refused(tmp_path: Path) -> None:
    for version in ("v7", "v8"):
        (tmp_path / version / "aws").mkdir(parents=True)
        (tmp_path / version / "aws" / "vms.csv").write_text(VMS)
    with pytest.raises(CatalogError, match="several tables of aws"):
        catalog_store.update(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CatalogError, match=r"holds no vms\.csv"):
        catalog_store.update(tmp_path / "empty")
    with pytest.raises(CatalogError, match="no file or directory"):
        catalog_store.update(tmp_path / "gone")


def test_two_that_add_at_once_do_not_lose_each_other(tmp_path: Path, own_home: Path) -> None:
    code = "import sys; from pathlib import Path; from yunlu.jobs import catalog_store as s; s.add(Path(sys.argv[1]))"
    running = []
    for number in range(4):
        path = tmp_path / f"{number}.yaml"
        path.write_text(
            f"machines: [{{name: m{number}, device: T4, devices: 1, dollars_per_hour: 1}}]"
        )
        environment = worker_environment() | {"YUNLU_HOME": str(own_home)}
        running.append(subprocess.Popen([sys.executable, "-c", code, str(path)], env=environment))
    assert [process.wait(LIMIT_S) for process in running] == [0] * 4
    assert len(catalog_store.read_added().machines) == 4
    assert len(catalog_store.open_catalog().offers(cloud="own")) == 4
