"""Many callers, one engine: whose turn it is to step, and how everybody gets what is theirs.

One thread at a time has the turn. It steps for all, puts what advanced where its caller finds it, and goes on until something
of its own advanced; the others sleep, and are woken when something of theirs did, or when nobody has the turn any more. What a
caller has not picked up yet is kept as the newest state of each request, so that a slow one delays nobody and costs no memory.
Takes: a Loop; calls with their requests. Does not know about: prompts, how outputs are used.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from qkv.errors import ClosedError, RequestError
from qkv.loop import Loop
from qkv.types import Request

T = TypeVar("T")
CLOSED = "the engine is closed; make a new one"


class Call(Generic[T]):
    """The requests of one caller. every_token: whether it wants their states on the way, or their ends only. make: what it gets
    of a request. wake: called, by whoever has the turn, when there is something new."""

    def __init__(self, every_token: bool, make: Callable[[Request], T]) -> None:
        self.every_token, self.make = every_token, make
        self.pending: set[int] = set()  # ids that have not ended
        self.news: dict[int, T] = {}  # the newest state of what advanced since the caller looked
        self.failure: BaseException | None = None  # why nobody steps for it any more
        self.wake: Callable[[], None] = lambda: None

    def take(self) -> list[T]:
        news, self.news = list(self.news.values()), {}
        return news


class Turns:
    """The lock is held for moments only, never during a step. Whoever has the turn owns the loop and all behind it."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._lock = threading.RLock()  # taken again where garbage collection ends a stream in the middle of something
        self._calls: dict[int, Call] = {}  # request id -> whose it is
        self._sleepers: dict[Call, threading.Condition] = {}  # callers that wait for news or the turn, in order of arrival
        self._visitors, self._free = 0, threading.Condition(self._lock)  # who want the turn for themselves go first
        self._owner: int | None = None  # the thread that has the turn
        self._served: set[Call] = set()  # of callers that do not step themselves
        self._server: threading.Thread | None = None
        self.unclaimed: Call[Request] = Call(False, lambda request: request)  # requests of add_request: step() tells of them
        self.closed = False

    # -- a call ------------------------------------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Requests that a caller still waits for."""
        return len(self._calls)

    def claim(self, call: Call, request: Request) -> None:
        """The request is the call's. To be called before a step can see the request."""
        if self.closed:
            raise ClosedError(CLOSED)
        call.pending.add(request.id)
        self._calls[request.id] = call

    def results(self, call: Call[T]) -> Iterator[T]:
        """What the call gets, until its requests have ended. Leaving early aborts what is left. Raises ClosedError."""
        try:
            while call.pending or call.news:
                if self._turn(call, lambda: bool(call.news)):
                    self._advance(call)
                else:
                    yield from self.pick_up(call)
        finally:
            self.abandon(call)

    def pick_up(self, call: Call[T]) -> list[T]:
        """What is new of the call, without waiting. Raises ClosedError, or what ended the thread that stepped for it."""
        with self._lock:
            news = call.take()
            if not news and call.pending and (call.failure or self.closed):
                raise call.failure or closed_under(call)
        return news

    def abandon(self, call: Call) -> None:
        """Abort what has not ended; nobody will ask for it. Its blocks are back at once, or after the step that runs now."""
        left, call.pending = call.pending, set()
        for request_id in left:
            self._calls.pop(request_id, None)
            self._loop.intake.abort(request_id)
        with self._lock:
            self._served.discard(call)
            if not left or self.closed or self._owner is not None:
                self._pass_on()  # to somebody who sleeps because this caller was expected to step
                return
            self._owner = threading.get_ident()
        self._leave()

    def serve(self, call: Call) -> None:
        """Step for this call in a thread of our own, until it has ended or is abandoned."""
        with self._lock:
            self._served.add(call)
            if self._server is None:
                self._server = threading.Thread(target=self._serve, name="qkv steps", daemon=True)
                self._server.start()

    def _serve(self) -> None:
        own: Call[None] = Call(False, lambda _: None)
        try:
            while not self._unserved():
                if self._turn(own, lambda: self.closed or not any(call.pending for call in self._served)):
                    self._advance(own)
        except BaseException as error:
            with self._lock:
                self._server, served = None, tuple(self._served)
            for call in served:
                call.failure = error
                call.wake()
            raise

    def _unserved(self) -> bool:
        """Whether there is nothing to serve; then the thread ends, and the next call that wants one starts another."""
        with self._lock:
            if self.closed or not any(call.pending for call in self._served):
                self._server = None
                return True
            return False

    # -- the turn ----------------------------------------------------------------------------------------------------

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Between two steps, and nobody steps inside. From within a step (a callback) it is the caller's turn already."""
        me = threading.get_ident()
        with self._lock:
            nested = self._owner == me
            if not nested:
                self._visitors += 1
                try:
                    self._free.wait_for(lambda: self._owner is None)
                    self._owner = me
                finally:
                    self._visitors -= 1
                    self._pass_on()
        try:
            yield
        finally:
            if not nested:
                self._leave()

    def step(self, make: Callable[[Request], T]) -> list[T]:
        """One step for everybody. Returns what advanced, or ended since the last call, and is nobody else's. ClosedError."""
        self.not_in_a_step("step")
        with self.alone():
            if self.closed:
                raise ClosedError(CLOSED)
            ended = self.unclaimed.take()
            advanced = self._deliver(self._loop.advance())
            self.unclaimed.take()  # they are among what advanced
            made = [make(request) for request in (*ended, *advanced)]
            for request, state in zip((*ended, *advanced), made, strict=True):
                self._forget_ended(request, state)
            return made

    def _advance(self, call: Call) -> None:
        """A step, by who has the turn. Gives the turn back, which a caller with nothing new takes again at once."""
        try:
            self._deliver(self._loop.advance())
        except BaseException:
            self._leave()
            raise
        self._leave(staying=bool(call.pending and not call.news))

    def not_in_a_step(self, what: str) -> None:
        if self._owner == threading.get_ident():
            raise RequestError(f"{what} was called from inside a step (a callback); call it when the step is over")

    def close(self) -> bool:
        """No more steps; calls that wait end with ClosedError. False if it was closed before. Raises RequestError in a step."""
        self.not_in_a_step("close")
        with self._lock:
            before, self.closed = self.closed, True
            for sleeper in self._sleepers.values():
                sleeper.notify()
            served = tuple(self._served)
        for call in served:
            call.wake()
        return not before

    def _turn(self, call: Call, enough: Callable[[], bool]) -> bool:
        """Sleep until it is the caller's turn to step (True), or there is enough for it without (False). Raises ClosedError."""
        self.not_in_a_step("generate, stream or score")
        with self._lock:
            try:
                while not enough():
                    if self.closed:
                        raise closed_under(call)
                    if self._owner is None and not self._visitors:
                        self._owner = threading.get_ident()
                        return True
                    sleeper = self._sleepers[call] = threading.Condition(self._lock)
                    try:
                        sleeper.wait()
                    finally:
                        del self._sleepers[call]
                return False
            finally:
                self._pass_on()  # perhaps it was woken to take the turn, and does not

    def _leave(self, staying: bool = False) -> None:
        """Give the turn back, once nobody's abort is left in the inbox. staying: the caller will take it again if nobody wants it
        for themselves, so the others may sleep on."""
        while True:
            with self._lock:
                if self._loop.intake.empty or self.closed:
                    self._owner = None
                    if self._visitors or not staying:
                        self._pass_on()
                    return
            self._deliver(self._loop.settle())

    def _pass_on(self) -> None:
        """Wake one who can take the turn, if nobody has it. With the lock."""
        if self._owner is None:
            if self._visitors:
                self._free.notify()
            else:
                idle = next((sleeper for call, sleeper in self._sleepers.items() if not call.news), None)
                if idle is not None:
                    idle.notify()

    def _deliver(self, advanced: Iterable[Request]) -> list[Request]:
        """Put everything where its caller finds it. Returns what is nobody's but step()'s. With the turn, without the lock."""
        unclaimed = []
        for request in advanced:
            call, ended = self._calls.get(request.id), request.finish_reason is not None
            if call is None:
                self._loop.forget(request)
            elif call is self.unclaimed:
                unclaimed.append(request)
            if call is None or not (ended or call.every_token):
                continue
            made = call.make(request)
            with self._lock:
                call.news[request.id] = made
                self._forget_ended(request, made)
                if call in self._sleepers:
                    self._sleepers[call].notify()
            call.wake()
        return unclaimed

    def _forget_ended(self, request: Request, state: object) -> None:
        """Nothing more comes of a request whose last state has been made, even if the loop has yet to end it."""
        if getattr(state, "finish_reason", None) is not None:
            call = self._calls.pop(request.id, None)
            if call is not None:
                call.pending.discard(request.id)


def closed_under(call: Call) -> ClosedError:
    return ClosedError(f"the engine was closed while {len(call.pending)} requests of this call were unfinished")
