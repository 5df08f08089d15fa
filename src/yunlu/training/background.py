"""Background threads of the training process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch


def open_background(name: str) -> ThreadPoolExecutor:
    """An executor with one thread that uses no OpenMP threads; called by the training thread.

    OpenMP gives every thread with a large enough operation a pool of its own, one thread per core, and
    keeps it. The process then has more threads than cores, and the training thread's pool no longer
    spins while waiting: on two cores, the steps of a small model take twice as long from the first
    checkpoint on.
    """
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
    count = torch.get_num_threads()
    if count > 1:
        pool.submit(_use_one_thread).result()
        torch.set_num_threads(count)  # part of the setting is global to all threads
    return pool


def _use_one_thread() -> None:
    torch.get_num_threads()  # a thread inherits the global number at the first call
    torch.set_num_threads(1)
