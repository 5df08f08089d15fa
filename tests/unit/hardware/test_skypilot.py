"""What becomes of a SkyPilot table's rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunlu.hardware.catalog import (
    Catalog,
    CatalogError,
    Offer,
    load_catalog,
    read_offers,
    split_slice,
    write_offers,
)
from yunlu.hardware.skypilot import Imported, check_columns, read_skypilot

CATALOG = Catalog(devices=load_catalog().devices, every_offer=())
COLUMNS = [
    "InstanceType",
    "vCPUs",
    "MemoryGiB",
    "AcceleratorName",
    "AcceleratorCount",
    "GpuInfo",
    "Region",
    "AvailabilityZone",
    "Price",
    "SpotPrice",
]


def row(instance: str, accelerator: str, count: str, price: str, spot: str = "", **more: str):
    told = {
        "InstanceType": instance,
        "AcceleratorName": accelerator,
        "AcceleratorCount": count,
        "Price": price,
        "SpotPrice": spot,
        "Region": "here",
        "vCPUs": "8.0",
        "MemoryGiB": "64.0",
    }
    return dict.fromkeys(COLUMNS, "") | told | more


def read(*rows: dict[str, str], cloud: str = "somecloud") -> Imported:
    return read_skypilot(rows, cloud=cloud, catalog=CATALOG, source="test")


def one(*rows: dict[str, str], cloud: str = "somecloud") -> Offer:
    (offer,) = read(*rows, cloud=cloud).offers
    return offer


def memory(mib: int) -> str:
    return str({"Gpus": [{"Name": "x", "MemoryInfo": {"SizeInMiB": mib}}]})


def test_the_cheapest_zone_stands_for_its_region() -> None:
    offer = one(
        row("p", "H100", "8", "60", "40", AvailabilityZone="a"),
        row("p", "H100", "8", "55", "50", AvailabilityZone="b"),
    )
    assert (offer.dollars_per_hour, offer.spot_dollars_per_hour) == (55, 40)


def test_regions_of_one_price_share_an_offer() -> None:
    rows = [row("p", "H100", "8", "55", Region=name) for name in ("b", "a", "c")]
    rows.append(row("p", "H100", "8", "70", Region="d"))
    offers = read(*rows).offers
    assert [(offer.regions, offer.dollars_per_hour) for offer in offers] == [
        (("a", "b", "c"), 55),
        (("d",), 70),
    ]


@pytest.mark.parametrize(
    ("cloud", "instance", "named", "mib", "device"),
    [
        ("runpod", "2x_A100", ("A100-80GB", 2), 80, "A100-80GB-PCIe"),  # gigabytes called MiB
        ("runpod", "2x_H100", ("H100-SXM", 2), 80, "H100"),
        ("vast", "4x-A100_SXM4", ("A100", 4), 327680, "A100-80GB"),  # of all four together
        ("vast", "4x-A100_SXM4", ("A100", 4), 163840, "A100-40GB"),
        ("vast", "1x-H100_NVL", ("H100", 1), 95830, "H100-NVL"),
        ("cudo", "genoa-a100-pcie", ("A100", 1), 81920, "A100-80GB-PCIe"),
        ("nebius", "gpu-rtx6000", ("RTX6000", 1), 98304, "RTXPRO6000"),
        ("seeweb", "ECS1GPU", ("RTX6000", 1), 24576, "Quadro-RTX6000"),
        ("hyperstack", "n3", ("H100-80G-PCIe-NVLink", 8), 81920, "H100-PCIe"),
        ("hyperstack", "n3", ("H100-80G-SXM5", 8), 81920, "H100"),
        ("fluidstack", "x", ("H100-NVLINK", 8), 81920, "H100"),
        ("aws", "trn1.2xlarge", ("Trainium", 1), 0, "Trainium1"),
        ("lambda", "gpu_4x_a100", ("A100", 4), 40960, "A100-40GB-PCIe"),
        ("lambda", "gpu_8x_a100", ("A100", 8), 40960, "A100-40GB"),
        ("paperspace", "V100-32G", ("V100-32GB", 1), 0, "V100-32GB"),
    ],
)
def test_one_device_has_many_names(
    cloud: str, instance: str, named: tuple[str, int], mib: int, device: str
) -> None:
    accelerator, count = named
    told = row(instance, accelerator, str(count), "9", GpuInfo=memory(mib) if mib else "")
    assert one(told, cloud=cloud).device == device


def test_google_prices_the_machine_apart() -> None:
    accelerator = row("", "H100", "8", "78", "40", vCPUs="", MemoryGiB="")
    host = row("a3-highgpu-8g", "", "", "9.5", "5", vCPUs="208", MemoryGiB="1872")
    offer = one(accelerator, host, cloud="gcp")
    assert (offer.instance, offer.cpus) == ("a3-highgpu-8g", 208)
    assert (offer.dollars_per_hour, offer.spot_dollars_per_hour) == (87.5, 45)
    assert "host" not in offer.terms
    alone = one(accelerator, cloud="gcp")
    assert alone.dollars_per_hour == pytest.approx(78 + 9.46006)
    assert "host priced as in us-central1" in alone.terms


def test_machines_that_take_several_kinds_are_told_apart() -> None:
    offers = read(row("", "T4", "1", "0.35"), row("", "V100", "1", "2.5"), cloud="gcp").offers
    assert {offer.instance for offer in offers} == {"n1-highmem-8+1xT4", "n1-highmem-8+1xV100"}


@pytest.mark.parametrize(
    ("name", "device", "chips"),
    [
        ("tpu-v5litepod-8", "TPU-v5e", 8),
        ("tpu-v5p-8", "TPU-v5p", 4),
        ("tpu-v4-16", "TPU-v4", 8),
        ("tpu-v3-8", "TPU-v3", 4),
        ("tpu-v6e-4", "TPU-v6e", 4),
    ],
)
def test_slices_count_cores_or_chips(name: str, device: str, chips: int) -> None:
    assert split_slice(name) == (device, chips)


def test_slices_of_several_hosts_are_had_as_several_of_one() -> None:
    done = read(row("", "tpu-v5p-8", "1", "16.8"), row("", "tpu-v5p-64", "1", "134"), cloud="gcp")
    assert [(offer.instance, offer.devices) for offer in done.offers] == [("tpu-v5p-8", 4)]
    assert sum(done.skipped.values()) == 1


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (row("x", "H100", "8", "0.01", "0.01"), "placeholder"),
        (row("x", "H100", "8", "", ""), "placeholder"),
        (row("", "tpu-v6e-8", "1", "700", "700"), "placeholder"),
        (row("x", "Radeon Pro V520", "1", "1"), "does not know"),
        (row("x", "PRO-6000-MIG-24GB", "1", "1"), "does not know"),
        (row("x", "L4", "0.5", "1"), "part of a device"),
        (row("x", "L4", "one", "1"), "number"),
        (row("x", "L4", "1", "nan"), "number"),
        (row("x", "L4", "1", "-1"), "number"),
        (row("x", "", "", "1"), "no accelerator"),
        (row("", "H100", "5", "1"), "without a machine"),
    ],
)
def test_what_is_left_out_has_a_reason(told: dict[str, str], reason: str) -> None:
    done = read(told)
    assert done.offers == []
    ((words, count),) = done.skipped.items()
    assert reason in words
    assert count == 1


def test_a_spot_price_that_is_none_is_none() -> None:
    assert one(row("x", "H100", "1", "2", "0.00")).spot_dollars_per_hour is None
    assert one(row("x", "H100", "1", "2", "2")).spot_dollars_per_hour is None
    assert one(row("x", "H100", "1", "", "2")).spot_dollars_per_hour == 2
    floor = one(row("x", "H100", "1", "20", "2"))
    assert floor.spot_dollars_per_hour == 2
    assert "cloud's minimum" in floor.terms


def test_networks_are_known_or_assumed_with_caution() -> None:
    gbit = 1e9 / 8
    known = one(row("p4d.24xlarge", "A100", "8", "22", GpuInfo=memory(40960)), cloud="aws")
    assert known.network_bytes_per_s == 400 * gbit
    assert known.source.startswith("test; network: aws.amazon.com")
    whole = one(row("hgx", "H100", "8", "22"))
    assert whole.network_bytes_per_s == 3200 * gbit
    assert "assumed" in whole.terms
    for some in (row("x", "H100", "4", "9"), row("y", "L40S", "8", "9")):
        assert one(some).network_bytes_per_s == 10 * gbit
    assert one(row("pod", "H100-SXM", "8", "22"), cloud="runpod").network_bytes_per_s == 10 * gbit


def test_a_table_of_something_else_is_refused() -> None:
    with pytest.raises(CatalogError, match="InstanceType is missing; did you mean 'instancetype'"):
        check_columns(["instancetype", "Price"], where="x.csv")


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0"), max_size=12)
FIELDS = st.sampled_from(
    ["", "0", "1", "8", "2.5", "-3", "nan", "inf", "1e400", "many", "0.00", "80", "H100", "A100",
     "tpu-v5p-8", "tpu-v9-x", "T4", "{'Gpus': []}", "{'Gpus': [{'MemoryInfo': 3}]}", "{", "a|b"]
)  # fmt: skip


@given(
    rows=st.lists(st.fixed_dictionaries(dict.fromkeys(COLUMNS, FIELDS | WORDS)), max_size=8),
    cloud=st.sampled_from(["aws", "gcp", "vast", "mithril", "runpod", "new"]),
)
def test_any_table_is_read_and_its_offers_can_be_kept(rows: list[dict[str, str]], cloud: str):
    done = read(*rows, cloud=cloud)
    assert done.rows == len(rows)
    assert len(done.offers) + sum(done.skipped.values()) <= len(rows)
    for offer in done.offers:
        assert CATALOG.has_device(offer.device)
        assert offer.devices >= 1
        assert offer.price() or offer.price(spot=True)
        assert offer.network_bytes_per_s
    kept = read_offers(write_offers(done.offers))
    assert [(o.key, o.device, o.devices, o.regions) for o in kept] == [
        (o.key, o.device, o.devices, o.regions) for o in done.offers
    ]
