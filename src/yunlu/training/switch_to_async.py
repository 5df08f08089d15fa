"""Switch externally launched workers to asynchronous training: each process execs another module."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from yunlu.training.elastic.exec_module import ASYNC_NODE, ASYNC_SUPERVISOR, exec_module

if TYPE_CHECKING:
    from yunlu.runs.run_store import HeldClaim, RunStore
    from yunlu.training.launch_rendezvous import Rendezvous


def switch_to_async(
    run: RunStore, rendezvous: Rendezvous, claim: HeldClaim | None = None, *, is_new: bool = False
) -> NoReturn:
    """Exec the asynchronous modules: rank 0 runs servers and a worker, the others one worker each.

    ``claim`` is the leader's claim on the run. ``is_new``: this is a new attempt of the run.
    """
    if rendezvous.is_leader:
        rendezvous.barrier("switch to async")  # the store ends with this process
    else:
        rendezvous.arrive("switch to async")
    here = ("--devices", "1", "--workers-here", str(rendezvous.workers_here))
    if not rendezvous.is_leader:
        arguments = (run.address, "--node", f"rank-{rendezvous.launch.rank}", *here)
        exec_module(ASYNC_NODE, *arguments)
    arguments = (run.address, *here, "--shares", str(rendezvous.launch.size))
    if not is_new:
        assert claim is not None
        arguments += ("--claim", claim.pass_on())
    exec_module(ASYNC_SUPERVISOR, *arguments, bind=rendezvous.address)
