"""How many devices a job can use."""

import pytest

from yunlu.core.errors import JobError
from yunlu.scheduler.run_status import MANY, make_request
from yunlu.spec.job import Job


def job(**parts):
    given = {"task": "tabular-classification", "model": "mlp", "data": "synthetic:x"}
    return Job.model_validate({**given, **parts})


@pytest.mark.parametrize(
    ("parts", "bounds", "expected"),
    [
        ({}, {}, (1, MANY, 1, 1)),
        ({"devices": 2}, {}, (2, 2, 2, 1)),
        ({"layout": "dp2 x fsdp1 x tp1 x pp1"}, {}, (2, 2, 2, 1)),
        ({"layout": "tp2"}, {}, (2, 2, 2, 2)),
        ({"layout": {"tp": 2}}, {}, (2, MANY, 2, 2)),
        ({"layout": "tp2"}, {"least": 3, "most": 7}, (4, 6, 4, 2)),
        ({"devices": 2}, {"least": 1, "most": 4}, (1, 4, 2, 1)),
        ({"devices": 8}, {"most": 4}, (1, 4, 4, 1)),
        ({"goal": {"max_devices": 3}}, {}, (1, 3, 1, 1)),
        ({"train": {"compile": True}}, {}, (1, 1, 1, 1)),
    ],
)
def test_bounds_follow_the_job_and_what_its_owner_says(parts, bounds, expected):
    request = make_request(job(**parts), **bounds)
    assert (request.least, request.most, request.requested, request.multiple) == expected
    assert request.is_rigid == (request.least == request.most)


def test_impossible_bounds_are_refused_with_the_reason():
    with pytest.raises(JobError, match="multiple of 2"):
        make_request(job(layout="tp2"), least=3, most=3)
    with pytest.raises(JobError, match=r"one device only: train\.compile"):
        make_request(job(train={"compile": True}), most=4)
