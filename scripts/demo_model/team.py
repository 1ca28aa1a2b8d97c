"""Synchronous data-parallel training of several single-threaded processes on one machine.

One process with several threads waits for its slowest thread at the end of every small operation,
which is ruinous on a busy machine.  Here each worker is one thread and they meet twice per step.
Parameters and momentum live in shared memory; every worker updates its share of the matrices.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

import torch
from torch import Tensor

from demo_model.model import DemoModel


class Team:
    """Shared gradients, a barrier, and the fraction of the time that rank 0 publishes."""

    def __init__(self, workers: int, model: DemoModel) -> None:
        self.workers, self.rank = workers, 0
        self.context = multiprocessing.get_context("fork")  # workers inherit the shared tensors
        self.barrier = self.context.Barrier(workers, timeout=900)  # seconds; a lost worker ends the run
        model.share_memory()
        size = sum(p.numel() for p in model.parameters())
        self.slots = torch.zeros(workers, size).share_memory_()  # type: ignore[no-untyped-call]
        self.fraction = torch.zeros(1, dtype=torch.float64).share_memory_()  # type: ignore[no-untyped-call]

    def start(self, work: Callable[[], None]) -> None:
        """Run ``work`` in every worker; the calling process is rank 0."""
        others = []
        for rank in range(1, self.workers):
            process = self.context.Process(target=self._enter, args=(rank, work), daemon=True)
            process.start()
            others.append(process)
        work()
        for process in others:
            process.join()

    def _enter(self, rank: int, work: Callable[[], None]) -> None:
        self.rank = rank
        try:
            work()
        except BaseException:
            self.barrier.abort()  # nobody may wait for a worker that is gone
            raise

    def mean_gradients(self, model: DemoModel) -> Tensor:
        """Replace every gradient by the mean over the workers; returns the gradient's norm."""
        parameters = list(model.parameters())
        mine = self.slots[self.rank]
        at = 0
        for p in parameters:
            assert p.grad is not None
            mine[at : at + p.numel()].copy_(p.grad.reshape(-1))
            at += p.numel()
        self.barrier.wait()
        mean = self.slots.mean(0) if self.workers > 1 else mine
        at = 0
        for p in parameters:
            p.grad = mean[at : at + p.numel()].view(p.shape)
            at += p.numel()
        norm: Tensor = torch.linalg.vector_norm(mean)
        return norm

    def meet(self) -> None:
        """Wait until every worker has updated its share."""
        self.barrier.wait()
