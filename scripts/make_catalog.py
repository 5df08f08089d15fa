"""Make the catalog's offers anew from a directory of evidence.

    python scripts/make_catalog.py EVIDENCE [--date 2026-08-22]

EVIDENCE holds ``catalog/skypilot_accelerators_full.csv`` (rows of SkyPilot's catalog with a column
``cloud``), ``modelarts_flavors.csv`` and ``hardware.csv``. Writes ``offers.csv`` beside the devices;
devices are kept by hand, and compared with ``hardware.csv``: each difference is printed with the
reason that ``sources.csv`` gives.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

from yunlu.hardware.catalog import Catalog, Offer, load_catalog, write_offers
from yunlu.hardware.skypilot import read_skypilot

DATA = Path(__file__).parents[1] / "src" / "yunlu" / "catalog" / "data"
GIB = 2**30
# What a ModelArts flavour holds; its name tells no more than the device and how many.
FLAVORS = {
    "modelarts.bm.arm.d910b.kat2ne.48xlarge.4": ("Ascend-910B2", 4, 96, 768),
    "modelarts.bm.npu.arm.8snt9b2.d": ("Ascend-910B3", 8, None, None),
    "modelarts.bm.arm.24u.192g.npu.1d910b": ("Ascend-910B3", 1, 24, 192),
    "modelarts.bm.snt9.xlarge.2": ("Ascend-910", 2, None, None),
    "modelarts.bm.910.arm.public.1": ("Ascend-910", 1, None, None),
    "modelarts.bm.gpu.v100NV32": ("V100-32GB", 1, 8, 64),
    "modelarts.bm.gpu.8v100": ("V100-32GB", 8, None, None),
}


def main() -> None:
    """Read, convert, write, and say what was left out."""
    parser = argparse.ArgumentParser(description="Make the catalog's offers anew.")
    parser.add_argument("evidence", type=Path)
    parser.add_argument("--date", default="2026-08-22", help="of the prices")
    arguments = parser.parse_args()
    catalog = Catalog(devices=load_catalog().devices, every_offer=())
    offers = _priced(arguments.evidence, catalog, arguments.date) + _flavors(arguments.evidence)
    text = write_offers(offers)
    (DATA / "offers.csv").write_text(text, "utf-8")
    say(f"{text.count(chr(10))} rows, {len(text) / 1e3:.0f} kB in {DATA / 'offers.csv'}")
    _compare(arguments.evidence, catalog)


def say(line: str) -> None:
    """One line for the reader."""
    sys.stdout.write(line + "\n")


def _priced(evidence: Path, catalog: Catalog, date: str) -> list[Offer]:
    clouds: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
    path = evidence / "catalog" / "skypilot_accelerators_full.csv"
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            clouds[row["cloud"]].append(row)
    offers: list[Offer] = []
    left: Counter[str] = Counter()
    for cloud, rows in sorted(clouds.items()):
        source = f"SkyPilot's catalog, {cloud}, {date}"
        done = read_skypilot(rows, cloud=cloud, catalog=catalog, source=source)
        say(f"{cloud:16}{done.rows:7} rows {len(done.offers):6} offers  {dict(done.skipped)}")
        offers += done.offers
        left += done.skipped
    say(f"left out: {dict(left)}")
    return offers


def _flavors(evidence: Path) -> list[Offer]:
    """Huawei publishes no price list: the flavours are known, their prices are the user's to add."""
    offers: list[Offer] = []
    with (evidence / "modelarts_flavors.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["flavor"] not in FLAVORS:
                say(f"huawei: {row['flavor']} is left out ({row['meaning']})")
                continue
            device, count, cpus, memory_gib = FLAVORS[row["flavor"]]
            offers.append(
                Offer(
                    cloud="huawei",
                    instance=row["flavor"],
                    device=device,
                    devices=count,
                    cpus=cpus,
                    memory_bytes=memory_gib and memory_gib * GIB,
                    source="flavours of ModelArts named in public code",
                    terms="price unknown: Huawei publishes no price list; set it with "
                    "yunlu catalog add",
                )
            )
    return offers


def _compare(evidence: Path, catalog: Catalog) -> None:
    """Where the evidence and our figures part."""
    with (evidence / "hardware.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            name = re.sub(r"\s*\(.*\)|-16/32GB|-80GB$|-141GB$", "", row["device"])
            name = {"V100-SXM2": "V100-32GB", "A100-SXM": "A100-80GB"}.get(name, name)
            if not catalog.has_device(name):
                say(f"hardware.csv: {row['device']} is not in the catalog")
                continue
            device = catalog.device(name)
            ours = device.peak_flops.get("bf16") or device.peak_flops.get("fp16") or 0
            pairs = (
                ("peak_flops", ours / 1e12, row["bf16_dense_tflops"]),
                ("memory_bytes_per_s", device.memory_bytes_per_s / 1e9, row["mem_bw_GBps"]),
                ("link_bytes_per_s", device.link_bytes_per_s / 1e9, row["intra_link_unidir_GBps"]),
            )
            for field, figure, told in pairs:
                first = re.search(r"(?<![\w.])\d+(\.\d+)?", told)
                if first and abs(float(first[0]) / figure - 1) > 0.01:
                    say(
                        f"{device.name} {field}: {figure:g} here, {told!r} there: "
                        f"{device.source(field)}"
                    )


if __name__ == "__main__":
    main()
