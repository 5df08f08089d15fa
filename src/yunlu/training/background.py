"""Threads beside the one that trains."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch


def open_background(name: str) -> ThreadPoolExecutor:
    """One thread whose operations stay in it; called by the thread that trains.

    Every thread with a large enough operation would get helpers of its own from OpenMP, as many as there
    are cores, and keep them. From then on the process has more threads than cores, and those of the
    thread that trains no longer wait for their next turn awake: on two cores, the steps of a small
    model take twice as long from the first checkpoint on.
    """
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
    count = torch.get_num_threads()
    if count > 1:
        pool.submit(_keep_to_itself).result()
        torch.set_num_threads(count)  # part of what was set is set for all threads
    return pool


def _keep_to_itself() -> None:
    torch.get_num_threads()  # a thread takes over the number of all others when it is first asked for
    torch.set_num_threads(1)
