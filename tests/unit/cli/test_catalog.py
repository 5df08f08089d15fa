"""What ``yunlu catalog`` prints, takes in and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from yunlu.cli.main import main
from yunlu.hardware.catalog import load_catalog

MACHINE = """
machines:
  - name: lab
    device: A100-80GB
    devices: 8
    cost:
      purchase_dollars: 140000
      years: 4
      power_kw: 5
      dollars_per_kwh: 0.15
      utilisation: 0.6
      yearly_dollars: 6000
"""
VMS = """InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region
big,H100,8,96,1024,,40,12,us-east-1
small,Mystery,1,4,16,,0.2,,us-east-1
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["catalog", *words]) == code
    shown = capsys.readouterr()
    return shown.err if code else shown.out


def lines_of(shown: str) -> list[list[str]]:
    return [line.split() for line in shown.splitlines()]


def test_a_line_for_each_device_that_can_be_had(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {line[0]: line for line in lines_of(run(capsys)) if line}
    offered = {offer.device for offer in load_catalog().every_offer}
    assert offered <= rows.keys()
    assert rows["H100"][1:4] == ["80", "GiB", "989"]


def test_offers_are_filtered_and_the_cheapest_device_hour_comes_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = run(capsys, "--gpu", "h100", "--cloud", "aws,lambda", "--region", "us-")
    offers = [line[2] for line in lines_of(shown) if line and line[0] == "H100"]
    assert offers[0] == "lambda:gpu_8x_h100_sxm5"
    assert "aws:p5.48xlarge" in offers
    assert "…" not in shown


def test_json_gives_every_offer_with_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--gpu", "a100-40gb", "--spot", "--max-price", "20", "--json")
    offers = [json.loads(line) for line in run(capsys, *words).splitlines()]
    assert offers
    prices = [offer["spot_dollars_per_device_hour"] for offer in offers]
    assert prices == sorted(prices)
    for offer in offers:
        assert offer["spot_dollars_per_hour"] <= 20
        assert offer["device"] == "A100-40GB"
        assert offer["source"]


def test_all_lists_every_region(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--gpu", "h100", "--cloud", "aws")
    few, every = run(capsys, *words), run(capsys, *words, "--all")
    assert "--all" in few
    assert every.count("aws:p5.48xlarge") > few.count("aws:p5.48xlarge") == 1


def test_devices_and_their_figures(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {line[0]: line for line in lines_of(run(capsys, "--devices")) if line}
    assert rows["GB200"][1:] == (
        [
            "cuda",
            "185",
            "GiB",
            "8,000",
            "80",
            "1,250",
            "2,500",
            "2,500",
            "5,000",
            "10,000",
            "900",
            "4/72",
            "73%",
        ]
    )
    (device,) = run(capsys, "--devices", "--gpu", "tpu-v5p", "--json").splitlines()
    assert json.loads(device)["peak_flops"] == {"bf16": 4.59e14, "fp8": 4.59e14}


def test_one_device_with_sources_and_offers(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run(capsys, "show", "rtx-4090")
    assert "165.2 TFLOP/s" in shown
    assert "Sources disagree" in " ".join(shown.split())
    assert "vast:8x-RTX_4090-32-65536" in shown
    assert "no offer is known" in run(capsys, "show", "trainium2")
    record = json.loads(run(capsys, "show", "h200", "--json"))
    assert record["sources"]["peak_flops"]
    assert record["offers"]


def test_unknown_prices_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert "price unknown" in run(capsys, "--cloud", "huawei")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "h1000"], "gpu: there is no device 'h1000'; did you mean 'H100'?"),
        (["--cloud", "amazon"], "cloud: there is no 'amazon'; known: aws, azure"),
        (["--gpu", "h100", "--region", "mars"], "region: nothing fits in 'mars'"),
        (["--max-price", "-1"], "--max-price: -1 is not above 0"),
        (["show", "nothing"], "device: there is no device 'nothing'"),
        (["own", "gone.yaml"], "There is no file gone.yaml"),
        (["own", "gone"], "neither a file nor a machine 'gone'"),
        (["add", "gone.yaml"], "There is no file gone.yaml"),
        (["update", "gone"], "There is no file or directory gone"),
        (["remove"], "nothing was added yet"),
        (["remove", "x"], "'x' was never added"),
    ],
)
def test_what_is_wrong_is_named_and_ends_with_one(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    shown = run(capsys, *words, code=1)
    assert said in shown
    assert "Traceback" not in shown


def test_machines_are_added_compared_and_removed(capsys: pytest.CaptureFixture[str]) -> None:
    Path("lab.yaml").write_text(MACHINE)
    assert "lab: 8.93 $ for each hour of work" in run(capsys, "add", "lab.yaml")
    assert "own:lab" in run(capsys, "--gpu", "a100-80gb")
    shown = run(capsys, "own", "lab", "--against", "aws:p4de.24xlarge,aws:p4d.24xlarge")
    (rent,) = [line for line in lines_of(shown) if line and line[0] == "aws:p4de.24xlarge"]
    assert rent[1:] == ["1.00", "us-east-1", "27.45", "577,442", "$", "6,459", "h", "18%", "own"]
    assert "187,931 $" in shown
    assert run(capsys, "own", "lab.yaml").count("own") >= 3
    run(capsys, "remove", "own:lab")
    assert "own:lab" not in run(capsys, "--gpu", "a100-80gb")


def test_unlike_devices_compare_by_their_peak(capsys: pytest.CaptureFixture[str]) -> None:
    Path("lab.yaml").write_text(MACHINE)
    words = ("own", "lab.yaml", "--against", "lambda:gpu_8x_h100_sxm5", "--json")
    (even,) = json.loads(run(capsys, *words))["against"]
    assert even["nodes"] == pytest.approx(312 / 989)
    assert even["rent_dollars_per_hour"] == pytest.approx(31.92 * 312 / 989)
    assert even["own_dollars"] == pytest.approx(187_931, abs=1)


def test_a_rent_that_is_unknown_cannot_be_compared(capsys: pytest.CaptureFixture[str]) -> None:
    Path("lab.yaml").write_text(MACHINE)
    words = ("own", "lab.yaml", "--against", "huawei:modelarts.bm.npu.arm.8snt9b2.d")
    assert "is not known" in run(capsys, *words, code=1)


def test_an_import_tells_what_it_took_and_left(capsys: pytest.CaptureFixture[str]) -> None:
    Path("aws").mkdir()
    Path("aws/vms.csv").write_text(VMS)
    shown = run(capsys, "update", ".")
    assert "2 rows →    1 offers" in shown
    assert "1 a device the catalog does not know" in shown
    assert [line[2] for line in lines_of(run(capsys, "--cloud", "aws")) if "H100" in line] == [
        "aws:big"
    ]
    record = json.loads(run(capsys, "update", "aws/vms.csv", "--cloud", "new", "--json"))
    assert (record["cloud"], record["rows"], record["offers"]) == ("new", 2, 1)
    run(capsys, "remove", "aws", "new")
    assert "aws:p5.48xlarge" in run(capsys, "--cloud", "aws", "--gpu", "h100")
