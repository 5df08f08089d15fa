"""Workers that a launcher started become asynchronous ones: each goes on as another program."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from yunlu.training.elastic.exec_module import ASYNC_NODE, ASYNC_SUPERVISOR, exec_module

if TYPE_CHECKING:
    from yunlu.runs.run_store import HeldClaim, RunStore
    from yunlu.training.launch_rendezvous import Rendezvous


def switch_to_async(
    run: RunStore, muster: Rendezvous, claim: HeldClaim | None = None, *, is_new: bool = False
) -> NoReturn:
    """The leader keeps the servers and one worker, each of the others lends one; nobody is started.

    ``claim`` is that on the run, which the leader holds. ``is_new``: this is to be another life of the run.
    """
    if muster.leads:
        muster.meet("given way")  # what they have met at goes with this process
    else:
        muster.come("given way")
    here = ("--devices", "1", "--here", str(muster.workers_here))
    if not muster.leads:
        words = (run.address, "--node", f"rank-{muster.place.rank}", *here)
        exec_module(ASYNC_NODE, *words)
    words = (run.address, *here, "--shares", str(muster.place.size))
    if not is_new:
        assert claim is not None
        words += ("--claim", claim.pass_on())
    exec_module(ASYNC_SUPERVISOR, *words, bind=muster.address)
