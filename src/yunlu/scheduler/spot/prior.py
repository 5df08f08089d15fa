"""Prior of the spot model, before a zone was observed.

Fitted by ``python -m benchmarks.fit_spot`` on 25 public traces (365 days in all) of SkyPilot's
spot-traces: AWS K80 and V100 of autumn 2022, clusters of 4 and 16 V100 of summer 2023, preemptions of
V100 and CPU machines on AWS and GCP of spring 2023. The nine V100 zones of February 2023, on which
the policy is judged, are not among them.
"""

from __future__ import annotations

from yunlu.scheduler.spot.model import SpotModel

PRIOR = SpotModel(
    memory_s=21_600.0,
    prior_share=0.644,
    up_by_age=(0.847, 0.369, 0.146, -0.311, -0.814, -1.252),
    up_of_share=(0.201, -1.312),
    down_by_age=(0.221, -0.324, -0.509, -1.000, -1.557, -2.778),
    down_of_share=(0.789, 0.242),
    place_weight=8.0,
    place_memory_s=604_800.0,
)
