"""Elastic worker groups: membership, generations, and recovery from lost workers.

Three kinds of process. The *supervisor* (``supervisor.py``; no torch, starts in a moment) coordinates.
A *node agent* (``node.py``; one per machine) imports torch, loads the data and builds the model once,
and forks workers. Each worker talks to the supervisor through its *worker agent* (``worker_agent.py``).
The main module of a node passes three functions to ``run_node``::

    def prepare(run: RunStore) -> Parts: ...                     # once per node, before any fork
    def plan(run: RunStore, parts: Parts, devices: int) -> Mapping[int, Layout]: ...
        # in a forked child, once: the layout for every number of workers
    def body(agent: WorkerAgent, parts: Parts) -> None: ...      # in every worker

    if __name__ == "__main__":
        sys.exit(run_node(prepare=prepare, plan=plan, body=body))

and a body looks like this::

    while (assignment := agent.wait_assignment()) is not None:
        try:
            if assignment.departing:
                with agent.handoff_group(assignment):     # default group: ranked, then departing workers
                    hand_off_state(assignment)            # ranks are handoff ranks
                if assignment.is_departing:
                    continue                              # the next assignment is None: exit
            world = agent.join_world(assignment, device)  # default group: the ranked workers
            if not assignment.departing:
                hand_off_state(assignment)                # from assignment.restore, if needs_transfer
            agent.state_restored(assignment, step)        # the state is complete now
            train until the end, a pause or a stop (each step: agent.check(); the sum over all
            ranks of [agent.wants_pause, agent.wants_stop]; agent.report_progress(...))
            agent.report_done("finished" or "stopped", step)    # everything is saved
        except Exception as error:
            if not agent.is_broken(error):
                raise                                     # its own fault: the run fails
            agent.report_paused(step, live=..., replicas=..., detail=str(error))
        finally:
            agent.leave_groups()

After a pause: ``agent.report_paused(step, live=True, replicas=...)`` likewise.
"""
