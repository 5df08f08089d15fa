"""Worker group of an external launcher: all workers, or those that are not excluded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._C._distributed_c10d import PrefixStore

from yunlu.core.secure_link import derive_secret
from yunlu.planning.splitting import fit_plan
from yunlu.runs.events import WorkerGroupFormed, WorkerRank
from yunlu.training.checkpoint.save_group import SaveGroup
from yunlu.training.parallel.world import form_world
from yunlu.training.worker_group_callbacks import Unsupervised, WorkerGroupCallbacks, WorkerGroupLog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.runs.run_store import RunStore
    from yunlu.training.callbacks import StopRequest
    from yunlu.training.engine import Engine
    from yunlu.training.launch_rendezvous import Rendezvous
    from yunlu.training.trackers.registry import TrackerThread


class ExternalWorkerGroup:
    """One worker's engine, callbacks and peers.

    A lost worker ends the attempt; only excluded stragglers are continued without.
    """

    callbacks: WorkerGroupCallbacks

    def __init__(
        self,
        run: RunStore,
        engine: Engine,
        rendezvous: Rendezvous,
        trackers: TrackerThread,
        stop: StopRequest,
        *,
        attempt: int,
    ) -> None:
        self.run, self.engine, self.rendezvous = run, engine, rendezvous
        self.ranks = list(range(rendezvous.launch.size))
        """Launcher ranks of the workers that train."""
        self._trackers, self._stop, self._attempt = trackers, stop, attempt
        self._generation = 1
        self._log = WorkerGroupLog(
            run,
            device=engine.device,
            attempt=attempt,
            forward=lambda values, step: trackers.log(values, step=step),
        )
        self.callbacks = self._make_callbacks()

    def begin(self, reason: str) -> None:
        """Begin a generation: all workers hold the same state."""
        self.callbacks.begin(self._generation)
        layout, rendezvous = self.engine.world.layout, self.rendezvous
        self.run.emit(
            WorkerGroupFormed(
                generation=self._generation,
                layout=str(layout),
                reason=reason,
                from_step=self.engine.steps_done,
                redone_steps=0,
                ranks=tuple(
                    WorkerRank(
                        rank=rank,
                        worker=str(agent),
                        host=rendezvous.hosts[agent],
                        pid=rendezvous.pids[agent],
                        **layout.place_of(rank)._asdict(),
                    )
                    for rank, agent in enumerate(self.ranks)
                ),
            )
        )

    def continue_without(self, excluded: Sequence[int]) -> None:
        """Form a new group without the excluded workers, before the same step; each holds the complete state."""
        left = [agent for rank, agent in enumerate(self.ranks) if rank in excluded]
        self.ranks = [agent for agent in self.ranks if agent not in left]
        self._generation += 1
        before, state = self.engine.world, self.callbacks.state()
        self.callbacks.checkpoints.wait()
        before.close()
        rendezvous = self.rendezvous
        layout = before.layout.model_copy(update={"dp": len(self.ranks)})
        world = form_world(
            layout,
            self.ranks.index(rendezvous.launch.rank),
            PrefixStore(f"world-{self._generation}", rendezvous.store),
            device=before.device,
            secret=derive_secret(rendezvous.secret, "world", self._generation),
            trusts_network=self.engine.job.communication.trust == "network",
            host=before.host,
        )
        # Asynchronous training needs all launched workers, and excluded ones would not be told.
        world.async_obstacle, world.can_exclude_workers = (
            "a worker is excluded",
            before.can_exclude_workers,
        )
        engine, nodes = self.engine, len({rendezvous.hosts[agent] for agent in self.ranks})
        cores = engine.plan.threads * len(self.ranks)
        plan = fit_plan(engine.plan, engine.job, layout, cores=cores, nodes=nodes)
        engine.rejoin(world, micro_batch=plan.micro_batch)
        self.callbacks = self._make_callbacks()
        self.callbacks.restore(state)
        names = ", ".join(str(agent) for agent in left)
        self.begin(f"worker {names} {'is' if len(left) == 1 else 'are'} excluded as a straggler")

    def _make_callbacks(self) -> WorkerGroupCallbacks:
        world = self.engine.world
        token = f"{self._attempt}-{self._generation}"
        return WorkerGroupCallbacks(
            self.engine,
            self.run,
            agent=Unsupervised(self._stop),
            save_group=SaveGroup(rank=world.rank, size=world.layout.world, token=token),
            log=self._log,
            trackers=self._trackers,
            attempt=self._attempt,
            replicate=lambda _: None,
            forget_after=lambda _: None,
        )
