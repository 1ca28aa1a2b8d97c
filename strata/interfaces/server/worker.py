"""The thread that owns the engine: orders come in through a queue, progress goes out step by step.

Nobody else touches the engine while the thread runs, but for what says that any thread may (`Engine.check`)
and for figures that are single numbers. "The loop" below is the thread of the event loop.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from strata.core import FinishReason, Request, TokenLogprob
from strata.engine.engine import Engine, Event
from strata.interfaces.models import LoadedModel
from strata.interfaces.server.warm_up import Report, warm_up

Dispatch = Callable[[Callable[[], None]], object]


class State(Enum):
    """Where the thread is in its life; the values are what /health says."""

    LOADING = "loading"
    READY = "ok"
    DEAD = "dead"
    STOPPED = "stopped"


class Progress(NamedTuple):
    """What a step brought a request, as it was right after the step: the request itself goes on changing."""

    token: int | None
    logprob: TokenLogprob | None = None
    finish: FinishReason | None = None
    error: Exception | None = None


@dataclass(eq=False)
class Job:
    """A request and who wants to hear of it. listener: called in the loop, once with `finish` set.

    followers: requests with the same prompt; they start when this one's prompt is computed and share it.
    """

    request: Request
    listener: Callable[[Progress], None]
    followers: Sequence[Job] = field(default=())


class _Order(NamedTuple):
    """Start a job, or abort it."""

    job: Job
    start: bool


class EngineThread:
    """Loads the model, warms it up, and then runs the engine's steps until it is told to stop.

    load: makes the model, in the thread; it may report what it is doing and how much of it is done (0 to 1).
    warm_up_seconds: what `warm_up` may take, 0: none.
    dispatch: runs a function in the loop, as `loop.call_soon_threadsafe` does. on_ready, on_end: called there
    when requests may come, and when the thread is through, with `failure` set if it did not mean to be.
    """

    def __init__(
        self,
        load: Callable[[Report], LoadedModel],
        dispatch: Dispatch,
        *,
        warm_up_seconds: float = 0.0,
        on_ready: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.state = State.LOADING
        self.stage: tuple[str, float | None] = ("starting", None)
        self.model: LoadedModel | None = None
        self.failure: BaseException | None = None
        self.last_progress = time.monotonic()
        self.open: dict[str, Job] = {}  # the loop's: every job that has not ended
        self._load = load
        self._dispatch = dispatch
        self._warm = warm_up_seconds
        self._on_ready = on_ready
        self._on_end = on_end
        self._jobs: dict[str, Job] = {}  # the thread's: jobs inside the engine
        self._orders: deque[_Order] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    @property
    def engine(self) -> Engine | None:
        """None until the model is loaded."""
        return self.model.engine if self.model is not None else None

    @property
    def running(self) -> int:
        """Requests that take part in steps."""
        return len(self.engine.scheduler.running) if self.engine is not None else 0

    @property
    def waiting(self) -> int:
        """Requests that do not yet."""
        return max(len(self.open) - self.running, 0)

    def submit(self, job: Job) -> None:
        """Queue a job and its followers. Only in the loop, and only while the state is READY."""
        for each in (job, *job.followers):
            self.open[each.request.request_id] = each
        if len(self.open) == 1 + len(job.followers):
            self.last_progress = time.monotonic()  # it had nothing to do until now
        self._order([_Order(job, start=True)])

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Abort jobs before the next step; those that have ended are left alone."""
        self._order([_Order(job, start=False) for job in jobs])

    def stop(self) -> None:
        """End the thread after the step it is in; what has not ended is aborted."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def join(self, seconds: float) -> bool:
        """Wait for the thread; whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _order(self, orders: list[_Order]) -> None:
        with self._wake:
            self._orders.extend(orders)
            self._wake.notify()

    def _run(self) -> None:
        try:
            self.model = self._load(self._report)
            if self._warm and not self._stopping:
                warm_up(self.model, self._report, self._warm, lambda: self._stopping)
            self.state = State.READY
            self._in_loop(self._on_ready)
            self._serve(self.model.engine)
            self.state = State.STOPPED
        except BaseException as error:  # whatever it is: nothing runs without this thread
            self.failure = error
            self.state = State.DEAD
        finally:
            self._abandon()
            self._in_loop(self._on_end)

    def _report(self, stage: str, share: float | None = None) -> None:
        self.stage = (stage, share)

    def _serve(self, engine: Engine) -> None:
        while True:
            self._take_orders(engine)
            if self._stopping:
                return
            steps = engine.metrics.steps
            news = [(self._jobs[event.request.request_id], event) for event in engine.step()]
            if engine.metrics.steps != steps or news:
                self.last_progress = time.monotonic()
            self._publish([(job, _snapshot(event)) for job, event in news])
            for job, _ in news:
                self._start_followers(engine, job)

    def _take_orders(self, engine: Engine) -> None:
        """All orders so far; waits for one where the engine has nothing to do."""
        with self._wake:
            while not (self._orders or engine.busy or self._stopping):
                self._wake.wait()
            orders = list(self._orders)
            self._orders.clear()
        for order in orders:
            if order.start:
                self._start(engine, order.job)
            else:
                self._abort(engine, order.job)

    def _start(self, engine: Engine, job: Job) -> None:
        request = job.request
        try:
            engine.add(request)
        except Exception as error:
            self._publish([(job, Progress(None, finish=FinishReason.ERROR, error=error))])
            self._start_followers(engine, job)
            return
        if request.finish_reason is None:
            self._jobs[request.request_id] = job
        else:  # max_tokens 0
            self._publish([(job, Progress(None, finish=request.finish_reason))])
            self._start_followers(engine, job)

    def _start_followers(self, engine: Engine, job: Job) -> None:
        followers, job.followers = job.followers, ()
        for follower in followers:
            self._start(engine, follower)

    def _abort(self, engine: Engine, job: Job) -> None:
        """Also the followers that have not begun: they end with the request they would have followed."""
        ended = list(job.followers)
        job.followers = ()
        if engine.abort(job.request.request_id):
            ended.append(job)
        self._publish([(each, Progress(None, finish=FinishReason.ABORT)) for each in ended])

    def _publish(self, news: Sequence[tuple[Job, Progress]]) -> None:
        """One call into the loop for all news of a step: waking it costs more than a small model's token."""
        if not news:
            return
        for job, progress in news:
            if progress.finish is not None:
                self._jobs.pop(job.request.request_id, None)
        self._in_loop(lambda: self._tell(news))

    def _tell(self, news: Sequence[tuple[Job, Progress]]) -> None:
        for job, progress in news:
            if progress.finish is not None:
                self.open.pop(job.request.request_id, None)
            job.listener(progress)

    def _abandon(self) -> None:
        """End every job, those in the engine and those still in the queue."""
        reason = FinishReason.ERROR if self.failure is not None else FinishReason.ABORT
        error = RuntimeError("the engine has stopped") if self.failure is not None else None
        self._jobs.clear()
        self._in_loop(
            lambda: self._tell([(job, Progress(None, None, reason, error)) for job in [*self.open.values()]])
        )

    def _in_loop(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear it
            self._dispatch(function)


def _snapshot(event: Event) -> Progress:
    # A step may bring a request several events: only the last one ends it.
    error = event.request.error if event.finish is FinishReason.ERROR else None
    return Progress(event.token, event.logprob, event.finish, error)
