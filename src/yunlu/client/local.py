"""The client of this machine: calls the rooms below in this process."""

from __future__ import annotations

from yunlu.client.local_machine import LocalMachine
from yunlu.client.local_pool import LocalPool
from yunlu.client.local_runs import LocalJobs, LocalRuns
from yunlu.client.local_studies import LocalStudies


class LocalClient(LocalJobs, LocalRuns, LocalPool, LocalStudies, LocalMachine):
    """Runs, pool, studies and catalog of the home directory that the settings name."""
