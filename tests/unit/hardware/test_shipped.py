"""The data that ships: figures that are known, each with its source; prices that can be paid."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.resources import files

import pytest

from tests.waiting import LIMIT_S
from yunlu.hardware.catalog import (
    KINDS,
    PRECISIONS,
    Catalog,
    CatalogError,
    DeviceModel,
    load_catalog,
    plain,
)

ASKED = [
    "V100",
    "A100-40GB",
    "A100-80GB",
    "H100",
    "H200",
    "B200",
    "GB200",
    "A10G",
    "L4",
    "L40S",
    "T4",
    "RTX4090",
    "MI300X",
    "TPU-v4",
    "TPU-v5e",
    "TPU-v5p",
    "TPU-v6e",
    "Trainium1",
    "Trainium2",
    "Ascend-910B",
    "Ascend-910C",
]
# From the makers' own tables, without sparsity: (bf16 or fp16 peak, memory bandwidth, link).
KNOWN = {
    "V100-32GB": (125, 900, 150),
    "A100-40GB": (312, 1555, 300),
    "A100-80GB": (312, 2039, 300),
    "H100": (989, 3350, 450),
    "H100-PCIe": (756, 2000, 63),
    "H200": (989, 4800, 450),
    "B200": (2250, 8000, 900),
    "GB200": (2500, 8000, 900),
    "L40S": (362, 864, 31),
    "T4": (65, 320, 15.75),
    "MI300X": (1307.4, 5300, 448),
    "TPU-v4": (275, 1200, 300),
    "TPU-v5e": (197, 819, 200),
    "TPU-v5p": (459, 2765, 600),
    "TPU-v6e": (918, 1638, 400),
    "Trainium1": (190, 820, 192),
    "Trainium2": (667, 2900, 640),
    "Ascend-910C": (752, 3200, 392),
}


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog()


@pytest.mark.parametrize("name", ASKED)
def test_every_device_that_people_ask_for_is_there(catalog: Catalog, name: str) -> None:
    assert catalog.device(name).peak_flops


@pytest.mark.parametrize(("name", "figures"), KNOWN.items())
def test_figures_are_the_makers(catalog: Catalog, name: str, figures: tuple[float, ...]) -> None:
    device = catalog.device(name)
    peak = device.peak_flops.get("bf16") or device.peak_flops["fp16"]
    assert (peak / 1e12, device.memory_bytes_per_s / 1e9, device.link_bytes_per_s / 1e9) == (
        pytest.approx(figures)
    )


@pytest.mark.parametrize("device", load_catalog().devices, ids=lambda device: device.name)
def test_every_figure_carries_its_source(device: DeviceModel) -> None:
    figures = ["memory_bytes", "memory_bytes_per_s", "link_bytes_per_s", "node_devices"]
    figures += ["fabric_devices", "network_bytes_per_s"]
    figures += [f"peak_flops.{precision}" for precision in device.peak_flops]
    figures += ["reachable"] if device.reachable is not None else []
    assert [figure for figure in figures if not device.source(figure)] == []
    assert not set(device.sources) - {figure.split(".")[0] for figure in figures}


def test_names_of_devices_stand_apart_in_sources(catalog: Catalog) -> None:
    names = "|".join(re.escape(name) for device in catalog.devices for name in device.names)
    run_together = re.compile(rf"[a-z](?:{names}|Gaudi)\b")
    sources = {text for device in catalog.devices for text in device.sources.values()}
    assert [text for text in sources if run_together.search(text)] == []


@pytest.mark.parametrize("device", load_catalog().devices, ids=lambda device: device.name)
def test_figures_are_dense_and_in_their_units(device: DeviceModel) -> None:
    """Twice the rate for half the width is hardware; four times would be a figure with sparsity."""
    peaks = device.peak_flops
    assert device.kind in KINDS
    assert set(peaks) <= set(PRECISIONS)
    assert all(1e12 < peak < 2e16 for peak in peaks.values())
    if "bf16" in peaks:
        assert peaks.get("fp8", 0) <= 2.1 * peaks["bf16"] or device.name == "Trainium3"
        assert peaks.get("tf32", 0) <= peaks["bf16"]
        assert peaks.get("fp32", 0) <= peaks["bf16"]
    assert 2**32 < device.memory_bytes < 2**39
    assert 1e11 < device.memory_bytes_per_s < 1e13
    assert 1e10 <= device.link_bytes_per_s < 2e12
    assert device.network_bytes_per_s < device.link_bytes_per_s
    assert device.fabric_devices >= device.node_devices >= 1
    assert device.reachable is None or 0.3 < device.reachable < 1


@pytest.mark.parametrize(
    ("name", "peak", "reason"),
    [
        ("RTX4090", 165.2, "disagree"),
        ("A10G", 70, "sparsity"),
        ("Ascend-910B2", 354, "by bin"),
        ("Ascend-910B1", 364, "376"),
        ("Ascend-910B3", 295, "313"),
        ("Ascend-910B4", 246, "280"),
    ],
)
def test_where_sources_disagree_the_choice_has_a_reason(
    catalog: Catalog, name: str, peak: float, reason: str
) -> None:
    device = catalog.device(name)
    assert device.peak_flops["bf16"] == pytest.approx(peak * 1e12)
    assert reason in device.source("peak_flops.bf16")


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("h100", "H100"),
        ("H100-80GB-SXM", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Ascend-910B(Atlas 800T A2)", "Ascend-910B2"),
        ("Ascend910B4", "Ascend-910B4"),
        ("Ascend910B2C", "Ascend-910B2"),
        ("tpu_v5e", "TPU-v5e"),
    ],
)
def test_devices_answer_to_what_drivers_and_clouds_call_them(
    catalog: Catalog, said: str, name: str
) -> None:
    assert catalog.device(said).name == name


@pytest.mark.parametrize(
    ("board", "measured"), [("H100-96GB", "H100"), ("H800", "H100"), ("GB300", "B300")]
)
def test_a_chip_reaches_as_much_on_another_board(
    catalog: Catalog, board: str, measured: str
) -> None:
    assert catalog.device(board).reachable == catalog.device(measured).reachable is not None
    assert measured in catalog.device(board).source("reachable")


def test_no_name_means_two_devices(catalog: Catalog) -> None:
    names = [plain(name) for device in catalog.devices for name in device.names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("A100-40GB-SXM4", "A100-40GB"),
        ("H100-80GB-PCIe", "H100-PCIe"),
        ("NVIDIA H200-141GB-SXM", "H200"),
        ("V100-32GB-SXM2", "V100-32GB"),
    ],
)
def test_words_of_a_name_have_no_order(catalog: Catalog, told: str, name: str) -> None:
    assert catalog.device(told).name == name
    assert not catalog.has_device("A100-64GB")


def test_an_unknown_device_is_refused_with_the_nearest_and_where_all_are(catalog: Catalog) -> None:
    with pytest.raises(
        CatalogError, match=r"gpu: .*'h10O'; did you mean 'H100'.*are known"
    ) as error:
        catalog.device("h10O")
    assert "catalog --devices" in (error.value.hint or "")


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure", "lambda", "runpod", "huawei"])
def test_the_large_clouds_are_there(catalog: Catalog, cloud: str) -> None:
    assert len(catalog.offers(cloud=cloud)) >= 5


def test_every_offer_has_a_known_device_a_source_and_a_sane_price(catalog: Catalog) -> None:
    names = {device.name for device in catalog.devices}
    for offer in catalog.every_offer:
        assert offer.device in names
        assert offer.source
        assert 1 <= offer.devices <= 16
        price, spot = offer.price_per_device(), offer.price_per_device(spot=True)
        assert price is None or 0.05 < price < 30, offer
        assert spot is None or 0.02 < spot < 30, offer
        assert price is None or spot is None or spot < price, offer
        assert price or spot or "price unknown" in offer.terms


@pytest.mark.parametrize(
    ("key", "hardware", "dollars", "gbit_per_s"),
    [
        ("aws:p4d.24xlarge@us-east-1", ("A100-40GB", 8), 21.96, 400),
        ("aws:p5.48xlarge@us-east-1", ("H100", 8), 55.04, 3200),
        ("aws:trn1.32xlarge@us-east-1", ("Trainium1", 16), 21.50, 800),
        ("aws:g5.48xlarge@us-east-1", ("A10G", 8), 16.29, 100),
        # Accelerators and the machine they are in are priced apart: 78.37 + 9.46.
        ("gcp:a3-highgpu-8g@us-central1", ("H100", 8), 87.83, 800),
        ("gcp:a2-highgpu-8g@us-central1", ("A100-40GB", 8), 29.39, 100),
        ("gcp:tpu-v5p-8@us-east5", ("TPU-v5p", 4), 16.80, 200),
        # The table says twelve GPUs.
        ("azure:Standard_ND96isr_H100_v5@eastus", ("H100", 8), 98.32, 3200),
        ("azure:Standard_NC40ads_H100_v5@eastus", ("H100-NVL", 1), 6.98, 40),
        ("lambda:gpu_1x_h100_pcie", ("H100-PCIe", 1), 3.29, 10),
        ("runpod:8x_A100-80GB_SECURE", ("A100-80GB-PCIe", 8), 11.12, 10),
        ("runpod:8x_A100-80GB-SXM_SECURE", ("A100-80GB", 8), 12.72, 10),
        ("nebius:gpu-rtx6000_8gpu-192vcpu-1744gb", ("RTXPRO6000", 8), 14.40, 10),
    ],
)
def test_known_offers(
    catalog: Catalog, key: str, hardware: tuple[str, int], dollars: float, gbit_per_s: float
) -> None:
    offer = catalog.find_offer(key)
    assert (offer.device, offer.devices) == hardware
    assert offer.dollars_per_hour == pytest.approx(dollars, abs=0.01)
    each = catalog.network_bytes_per_s(offer)
    assert each * offer.devices * 8 / 1e9 == pytest.approx(gbit_per_s)


def test_what_huawei_asks_is_unknown_and_sorts_last(catalog: Catalog) -> None:
    offers = catalog.offers(cloud=["huawei", "aws"])
    assert offers[-1].cloud == "huawei"
    assert offers[-1].price() is None
    assert catalog.offers(cloud="huawei", priced=True) == []
    assert catalog.network_bytes_per_s(offers[-1]) > 0


def test_placeholders_are_not_shipped(catalog: Catalog) -> None:
    assert "mithril" not in catalog.clouds
    assert all(offer.spot_dollars_per_hour is None for offer in catalog.offers(cloud="vast"))


def test_the_fast_link_ends_at_the_node_but_for_pods_and_racks(catalog: Catalog) -> None:
    assert catalog.linked_devices(catalog.find_offer("aws:p5.4xlarge")) == 1
    assert catalog.linked_devices(catalog.find_offer("aws:p5.48xlarge")) == 8
    assert catalog.linked_devices(catalog.find_offer("gcp:tpu-v5litepod-4")) == 256


def test_the_tables_stay_small() -> None:
    data = files("yunlu.hardware") / "data"
    assert sum(len(file.read_bytes()) for file in data.iterdir()) < 500_000


def test_reading_the_catalog_imports_neither_arrays_nor_validators() -> None:
    code = (
        "import sys; from yunlu.hardware.catalog import load_catalog; load_catalog(); "
        "print({'numpy', 'torch', 'pydantic', 'yaml'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LIMIT_S
    )
    assert done.stdout.strip() == "set()"
