"""Workers that a launcher started become asynchronous ones: each goes on as another program."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NoReturn

from yunlu.training.elastic.exec_module import ASYNCHRONOUS, ASYNCHRONOUS_NODE, exec_module

if TYPE_CHECKING:
    from yunlu.runs.run_store import RunStore
    from yunlu.training.launch_rendezvous import Rendezvous


def switch_to_async(
    run: RunStore, muster: Rendezvous, lock: int | None = None, *, is_new: bool = False
) -> NoReturn:
    """The leader keeps the servers and one worker, each of the others lends one; nobody is started.

    ``lock`` is the run's, which the leader holds. ``is_new``: this is to be another life of the run.
    """
    if muster.leads:
        muster.meet("given way")  # what they have met at goes with this process
    else:
        muster.come("given way")
    here = ("--devices", "1", "--here", str(muster.workers_here))
    if not muster.leads:
        words = (str(run.path), "--node", f"rank-{muster.place.rank}", *here)
        exec_module(ASYNCHRONOUS_NODE, *words)
    words = (str(run.path), *here, "--shares", str(muster.place.size))
    if not is_new:
        assert lock is not None
        os.set_inheritable(lock, True)
        words += ("--lock", str(lock))
    exec_module(ASYNCHRONOUS, *words, bind=muster.address)
