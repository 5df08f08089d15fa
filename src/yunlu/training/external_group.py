"""Workers that a launcher started, as they train together: all of them, or those who do not stand aside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._C._distributed_c10d import PrefixStore

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
    """One worker's side: its engine and watch, and who else is there.

    Whoever is lost ends the life of such a run; only who steps aside is gone on without.
    """

    watch: WorkerGroupCallbacks

    def __init__(
        self,
        run: RunStore,
        engine: Engine,
        muster: Rendezvous,
        trackers: TrackerThread,
        stop: StopRequest,
        *,
        life: int,
    ) -> None:
        self.run, self.engine, self.muster = run, engine, muster
        self.ranks = list(range(muster.place.size))
        """As the launcher counts, of those who train."""
        self._trackers, self._stop, self._life = trackers, stop, life
        self._generation = 1
        self._log = WorkerGroupLog(
            run,
            device=engine.device,
            life=life,
            forward=lambda values, step: trackers.log(values, step=step),
        )
        self.watch = self._make_watch()

    def begin(self, reason: str) -> None:
        """All hold the same, and go on."""
        self.watch.begin(self._generation)
        layout, muster = self.engine.world.layout, self.muster
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
                        host=muster.hosts[agent],
                        pid=muster.pids[agent],
                        **layout.place_of(rank)._asdict(),
                    )
                    for rank, agent in enumerate(self.ranks)
                ),
            )
        )

    def go_on_without(self, aside: Sequence[int]) -> None:
        """Those who stay meet anew, before the step at which all stand; each holds everything."""
        gone = [agent for rank, agent in enumerate(self.ranks) if rank in aside]
        self.ranks = [agent for agent in self.ranks if agent not in gone]
        self._generation += 1
        before, kept = self.engine.world, self.watch.state()
        self.watch.checkpoints.wait()
        before.close()
        muster = self.muster
        layout = before.layout.model_copy(update={"dp": len(self.ranks)})
        world = form_world(
            layout,
            self.ranks.index(muster.place.rank),
            PrefixStore(f"world-{self._generation}", muster.store),
            device=before.device,
            host=before.host,
        )
        # To become asynchronous takes all who were launched, and who stands aside would not hear of it.
        world.async_obstacle, world.can_exclude_workers = (
            "a worker stands aside",
            before.can_exclude_workers,
        )
        engine, nodes = self.engine, len({muster.hosts[agent] for agent in self.ranks})
        cores = engine.plan.threads * len(self.ranks)
        plan = fit_plan(engine.plan, engine.job, layout, cores=cores, nodes=nodes)
        engine.rejoin(world, micro_batch=plan.micro_batch)
        self.watch = self._make_watch()
        self.watch.restore(kept)
        who = ", ".join(str(agent) for agent in gone)
        self.begin(f"worker {who} {'steps' if len(gone) == 1 else 'step'} aside")

    def _make_watch(self) -> WorkerGroupCallbacks:
        world = self.engine.world
        token = f"{self._life}-{self._generation}"
        return WorkerGroupCallbacks(
            self.engine,
            self.run,
            agent=Unsupervised(self._stop),
            crew=SaveGroup(rank=world.rank, size=world.layout.world, token=token),
            log=self._log,
            trackers=self._trackers,
            life=self._life,
            replicate=lambda _: None,
            forget_after=lambda _: None,
        )
