"""Which offers are found, and in which order."""

from __future__ import annotations

import pytest

from yunlu.hardware.catalog import (
    Catalog,
    CatalogError,
    Offer,
    load_catalog,
    read_offers,
    write_offers,
)

OFFERS = (
    Offer("aws", "big", "H100", 8, regions=("us-east-1", "us-west-2"), dollars_per_hour=40.0),
    Offer("aws", "big", "H100", 8, regions=("eu-west-1",), dollars_per_hour=56.0),
    Offer(
        "gcp",
        "one",
        "H100",
        1,
        regions=("us-central1",),
        dollars_per_hour=6.0,
        spot_dollars_per_hour=2.0,
    ),
    Offer("gcp", "old", "T4", 1, regions=("us-central1",), spot_dollars_per_hour=0.1),
    Offer("huawei", "npu", "Ascend-910B3", 8),
)


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog(devices=load_catalog().devices, every_offer=OFFERS)


def keys(offers: list[Offer]) -> list[str]:
    return [f"{offer.instance}@{','.join(offer.regions)}" for offer in offers]


def test_offers_come_by_the_price_of_a_device_and_unknown_ones_last(catalog: Catalog) -> None:
    assert keys(catalog.offers()) == [
        "big@us-east-1,us-west-2",
        "one@us-central1",
        "big@eu-west-1",
        "old@us-central1",
        "npu@",
    ]


def test_spot_offers_are_those_with_a_spot_price_in_its_order(catalog: Catalog) -> None:
    assert keys(catalog.offers(spot=True)) == ["old@us-central1", "one@us-central1"]


def test_filters_meet(catalog: Catalog) -> None:
    assert keys(catalog.offers(gpu="h100-sxm", cloud="AWS")) == [
        "big@us-east-1,us-west-2",
        "big@eu-west-1",
    ]
    assert keys(catalog.offers(gpu="H100", max_price=10)) == ["one@us-central1"]
    assert keys(catalog.offers(gpu=["h100", "t4"], cloud="gcp,huawei", spot=True)) == [
        "old@us-central1",
        "one@us-central1",
    ]


def test_a_region_keeps_only_itself(catalog: Catalog) -> None:
    assert keys(catalog.offers(region="us-w")) == ["big@us-west-2"]
    assert keys(catalog.offers(region="US-")) == [
        "big@us-east-1,us-west-2",
        "one@us-central1",
        "old@us-central1",
    ]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"cloud": "awz"}, "cloud: .*did you mean 'aws'.*gcp, huawei"),
        ({"gpu": "H1000"}, "gpu: .*did you mean 'H100'"),
        ({"region": "mars"}, "region: .*eu-west-1"),
    ],
)
def test_what_is_unknown_is_named_with_what_is_known(
    catalog: Catalog, asked: dict[str, str], words: str
) -> None:
    with pytest.raises(CatalogError, match=words):
        catalog.offers(**asked)  # type: ignore[arg-type]


def test_an_offer_is_found_by_its_key_cheapest_first(catalog: Catalog) -> None:
    assert catalog.find_offer("aws:BIG").dollars_per_hour == 40
    assert catalog.find_offer("aws:big@eu-west-1").dollars_per_hour == 56
    for wrong in ("p4d", "aws:bigg", "moon:big", "aws:big@mars"):
        with pytest.raises(CatalogError):
            catalog.find_offer(wrong)


def test_a_table_reads_back_as_it_was_written() -> None:
    offers = load_catalog().every_offer
    text = write_offers(offers)
    assert read_offers(text) == list(offers)
    assert write_offers(read_offers(text)) == text
