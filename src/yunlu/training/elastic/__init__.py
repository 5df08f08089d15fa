"""Workers that come and go: who is there, what they do next, and what happens when one is lost.

Three kinds of process. The *supervisor* (``supervisor.py``; no torch, starts in a moment) decides.
A *node* (``node.py``; one per machine) imports torch, loads the data and builds the model once, and
forks workers when it is told to. A *member* (``member.py``) is such a worker: it trains, or stands by.
The program of a node is one module that hands three functions to ``run_node``::

    def prepare(run: RunStore) -> Parts: ...                      # once per node, before any fork
    def plan(run: RunStore, parts: Parts, devices: int) -> Mapping[int, Layout]: ...
        # in a forked child, once: how the work is split for every number of workers it can run on
    def body(member: Member, parts: Parts) -> None: ...         # in every worker

    if __name__ == "__main__":
        sys.exit(run_node(prepare=prepare, plan=plan, body=body))

and a body looks like this::

    while (assignment := member.wait_assignment()) is not None:
        try:
            if assignment.guests:
                with member.meet(assignment):       # default group: seats, then guests
                    pass_state(assignment)          # ranks are meeting ranks
                if assignment.is_guest:
                    continue                        # the next assignment is None: leave
            world = member.form(assignment, device) # default group: the seats
            if not assignment.guests:
                pass_state(assignment)              # from assignment.restore; nothing if not is_moving
            member.taken(assignment, step)          # the state is whole now
            train until it is done, or flags say pause or stop (each step: member.check(); the sum
            over all ranks of [member.wants_pause, member.wants_stop]; member.beat(...))
            member.done("finished" or "stopped", step)    # everything is saved
        except Exception as error:
            if not member.is_broken(error):
                raise                               # our own fault: the run fails with it, told once
            member.settled(step, live=..., copies=..., detail=str(error))
        finally:
            member.part()                           # leave the groups

After a pause: ``member.settled(step, live=True, copies=...)`` likewise.
"""
