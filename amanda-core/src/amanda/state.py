"""The only global state: scopes and switches of the current thread, and the attached drivers.

``STATE`` holds the scopes and switches of the current thread; the drivers' hot paths read it
directly. They follow from the thread's open blocks (:class:`Block`), each a with-block of ``apply``
or of a switch. Where a generator or a coroutine has opened a block (``STATE.held``), the dispatcher
calls :func:`find_active` before it reads the state, since Python does not report when the generator
is suspended. The classes that fill the state lie in higher layers and are known here by protocol
only.

Do not reload this module.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar

import attrs

from amanda.python._internals import owned_check, reset_lock

_T = TypeVar("_T")


class CurrentCall(Protocol):
    """The execution of an operator that a replacement stands in for."""

    op_id: str

    def freeze(self) -> Callable[[Sequence[Any]], Any]:
        """A function of flat inputs that runs the operator with the attributes of this call."""


class LiveScope(Protocol):
    """The part of a scope that the engine and the drivers use.

    Attributes:
        alive: False once the scope has ended.
        cache: records of the operators that its tools have analysed.
        tools: its tools in the order in which they act.
        followers: the tools that are notified which tensors replace outputs.
        op_filter: restricts its tools to some operators and executions; None for no filter.
        drivers: the attached drivers that it uses.
        statistics: figures about the run under it.
        iterations: the iterations under the scope.
        reference: a weak reference to it.
        thread: the identifier of the thread that has entered it.
    """

    alive: bool
    thread: int
    reference: tuple[weakref.ref[Any]]
    cache: Any
    tools: tuple[Any, ...]
    followers: Sequence[Any]
    op_filter: Any
    drivers: list[Any]
    statistics: Any
    iterations: Any

    def covers(self, driver: Any) -> bool:
        """True if operators of `driver` are instrumented under the scope."""

    def analyses_at(self, point: Any) -> bool:
        """True if any tool has an analysis routine at `point`."""

    def analyses_backward(self) -> bool:
        """True if any tool analyses backward operators."""

    def turns(self, point: Any) -> Mapping[int, Any]:
        """The calls of each tool at `point`, by the ``id()`` of the tool."""

    def routines_at(self, point: Any) -> Sequence[tuple[Any, Callable[..., Any]]]:
        """The tools' routines at a derived point, in order, each with its tool."""

    def exit(self) -> None:
        """End the scope."""

    def abandon(self) -> None:
        """End the scope in a forked child."""


@attrs.define(eq=False, repr=False)
class Block:
    """One open with-block: of a scope, or of a switch.

    Attributes:
        is_open: False once the block has been left, in whichever thread.
        thread: ``vars(STATE)`` of the thread that has entered it.
        scope: the scope, None for a switch.
        switch: the name of the switch, "" for a scope.
        value: what the switch is set to.
        frame: the generator or coroutine that the block belongs to; None for other code.
        task: the task of asyncio whose own code the block belongs to, None for none.
    """

    scope: LiveScope | None
    switch: str = ""
    value: Any = None
    frame: FrameType | None = None
    task: Any = None
    is_open: bool = attrs.field(default=True, init=False)
    thread: dict[str, Any] = attrs.field(init=False)

    @thread.default
    def _of_current_thread(self) -> dict[str, Any]:
        return vars(STATE)

    def exit(self) -> None:
        """Close it; harmless when called twice."""
        close_block(self)
        invalidate()

    def applies(self) -> bool:
        """True if the code that runs now is inside of the block.

        A generator or coroutine that is suspended is outside of its block; tasks of asyncio that a
        coroutine has started inside of the block are inside.
        """
        # A frame that is suspended has no caller.
        if self.frame is None or self.frame.f_back is not None:
            return True
        if self.task is None or self not in _IN_TASKS.get():
            return False
        return current_task() is not self.task


_IN_TASKS: contextvars.ContextVar[tuple[Block, ...]] = contextvars.ContextVar(
    "amanda_blocks", default=()
)
"""Open blocks of coroutines that run as tasks. A task starts with the blocks of the code that
created it, since asyncio copies the context variables."""


def current_task() -> Any:
    """The task of asyncio that runs in this thread, None if none does."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is None:
        return None
    try:
        return asyncio.current_task()
    except (RuntimeError, AttributeError):  # no event loop runs here; it is being imported
        return None


class WeakMembers(Generic[_T]):
    """Objects that are held weakly, added and iterated over by any thread at any time.

    ``weakref.WeakSet`` fails where one thread adds while another one iterates, and forgets objects
    in Python, where an interrupt is lost. Objects are told apart by ``==`` and their hash.
    """

    def __init__(self) -> None:
        self._references: set[weakref.ref[_T]] = set()

    def add(self, member: _T) -> None:
        """Add an object."""
        self._references.add(weakref.ref(member, self._references.discard))

    def __contains__(self, member: _T) -> bool:
        return weakref.ref(member) in self._references

    def __iter__(self) -> Iterator[_T]:
        # The list is made in one step.
        found = [reference() for reference in list(self._references)]
        return iter([member for member in found if member is not None])


Undo = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function that restores a part of a thread's state, with its arguments; it may run twice."""


def unwind(undo: list[Undo], mark: int) -> None:
    """Undo the changes of a thread's state down to `mark`, the last one first.

    Whoever changes the state of a thread notes before how to restore it, and unwinds afterwards::

        undo = vars(STATE)["undo"]
        mark = len(undo)
        undo.append((set_mode, (get_mode(),)))
        try:
            set_mode("other")
            ...
        finally:
            unwind(undo, mark)

    An interrupt in the last line leaves the rest to the next one that unwinds: an outer function,
    or at the latest the end of the scope.
    """
    while len(undo) > mark:
        restore, given = undo[-1]
        restore(*given)
        # Removed afterwards: an interrupt in between would lose the change.
        del undo[-1]
    if not undo:
        deliver()


def deliver() -> None:
    """Run the handlers of signals that have waited, if the state of the thread is restored."""
    thread = vars(STATE)
    waiting = thread["waiting"]
    if not waiting or thread["undo"] or thread["paused"]:
        return
    for number in tuple(waiting):
        with contextlib.ExitStack() as stack:
            for driver in tuple(ATTACHED.values()):
                stack.enter_context(driver.resumed())
            waiting.pop(number, bool)()


class ThreadState(threading.local):
    """Scopes and switches of one thread.

    ``vars(STATE)`` is the dictionary of the current thread. A driver may hold it where an
    attribute lookup through the thread-local object is too slow: at every routine.

    Attributes:
        blocks: the open blocks, in the order of their entry. The other attributes are found from
            them.
        held: True if one of them belongs to a generator or a coroutine, so that
            :func:`find_active` has to be called before the next four are read.
        scopes: the active scopes, outermost first.
        enabled: False within ``amanda.disabled()``.
        cache: False within ``amanda.cache_disabled()``.
        ad: the switch of ``ad_enabled()``/``ad_disabled()``; None outside of both.
        paused: depth of tool code running in this thread; its framework calls
            are vanilla.
        call: the execution whose replacement runs in this thread, None if none does.
        undo: what restores the thread as it was, the last change last (:func:`unwind`).
        waiting: the handlers of signals that wait until it is restored, by number.
    """

    def __init__(self) -> None:
        self.blocks: tuple[Block, ...] = ()
        self.held: bool = False
        self.scopes: tuple[LiveScope, ...] = ()
        self.enabled: bool = True
        self.cache: bool = True
        self.ad: bool | None = None
        self.paused: int = 0
        self.call: CurrentCall | None = None
        self.undo: list[Undo] = []
        self.waiting: dict[int, Callable[..., Any]] = {}


STATE = ThreadState()


class Lock:
    """A lock that the thread which holds it can take again.

    An interrupt does not leave it taken, nor does a fork while another thread holds it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.acquire = self._lock.acquire
        self.release = self._lock.release
        self.is_owned = owned_check(self._lock)
        _LOCKS.add(self)

    def hold(self, function: Callable[..., _T], *args: Any) -> _T:
        """Call a function while the lock is held."""
        with self._lock:
            return function(*args)

    def reset(self) -> None:
        """Release it in a forked child, where the thread that held it does not exist."""
        reset_lock(self._lock)


_LOCKS: WeakMembers[Lock] = WeakMembers()


def reset_locks() -> None:
    """Release in a forked child all locks that its only thread does not hold."""
    for lock in _LOCKS:
        if not lock.is_owned():
            lock.reset()


def owned_locks() -> int:
    """How many locks the current thread holds."""
    return sum(lock.is_owned() for lock in _LOCKS)


SCOPE_LOCK = Lock()
"""Held while a scope begins or ends, so that one thread at a time attaches and detaches drivers.
Under it no tool's code runs, and only such locks are taken under which nothing waits."""

TOOL_LOCK = Lock()
"""Held while a tool's code runs, so that it never runs in two threads at once."""

COUNT_LOCK = Lock()
"""Held while a figure of a scope is read and written. Under it nothing waits."""

owns_tool_lock = TOOL_LOCK.is_owned
locked = SCOPE_LOCK.hold
tool_locked = TOOL_LOCK.hold


def open_block(block: Block) -> None:
    """Add a block to those of the current thread."""
    locked(_open, block)


def _open(block: Block) -> None:
    thread = block.thread
    thread["blocks"] = (*thread["blocks"], block)
    if block.task is not None:
        _IN_TASKS.set((*(b for b in _IN_TASKS.get() if b.is_open), block))
    if block.scope is None or block.frame is not None or thread["held"]:
        find_active(thread)
    else:
        thread["scopes"] = (*thread["scopes"], block.scope)


def close_block(block: Block) -> None:
    """Remove a block from those of its thread; from any thread, and harmless when called twice.

    Blocks may be closed in another order than that of their entry.
    """
    locked(_close, block)


def _close(block: Block) -> None:
    thread = block.thread
    block.is_open = False
    blocks, scopes = thread["blocks"], thread["scopes"]
    if blocks and blocks[-1] is block and scopes[-1:] == (block.scope,) and not thread["held"]:
        # The usual case, whose time does not depend on the number of nested scopes.
        thread["blocks"] = blocks[:-1]
        thread["scopes"] = scopes[:-1]
    else:
        find_active(thread)
    if block.task is not None:
        # A task that was started inside has a copy of the variable, and finds the block closed.
        _IN_TASKS.set(tuple(b for b in _IN_TASKS.get() if b.is_open))
    block.frame = block.task = block.scope = None


def find_active(thread: dict[str, Any]) -> None:
    """Find a thread's active scopes and switches from its blocks.

    Args:
        thread: ``vars(STATE)`` of the thread.
    """
    blocks = thread["blocks"]
    if not all(block.is_open for block in blocks):
        blocks = thread["blocks"] = tuple(block for block in blocks if block.is_open)
    scopes: list[LiveScope] = []
    switches: dict[str, Any] = {"enabled": True, "cache": True, "ad": None}
    for block in blocks:
        scope = block.scope  # read once: another thread may close the block
        if not block.applies():
            continue
        if scope is not None:
            scopes.append(scope)
        elif block.switch:
            switches[block.switch] = block.value
    if len(scopes) != len(thread["scopes"]) or thread["scopes"] != tuple(scopes):
        thread["scopes"] = tuple(scopes)
    thread.update(switches)
    thread["held"] = any(block.frame is not None for block in blocks)


ATTACHED: dict[type[Any], Any] = {}
"""Attached drivers by class: one instance serves all scopes. See :func:`note_attached`."""

UNPAUSED: dict[type[Any], Any] = {}
"""Attached drivers that do not notice by themselves that a thread is paused: their ``vanilla()``
is entered wherever a tool's code runs (``Driver.follows_pauses``)."""

FAILED: dict[type[Any], str] = {}
"""Drivers that could not be attached in this process, and the reason for each."""

LIVE_SCOPES: list[LiveScope] = []
"""Scopes of all threads that have not ended, in the order of their entry."""


def note_attached(cls: type[Any], driver: Any) -> None:
    """A driver has been attached."""
    if not driver.follows_pauses:
        UNPAUSED[cls] = driver
    ATTACHED[cls] = driver


def note_detached(cls: type[Any]) -> None:
    """A driver is attached no longer; harmless when called twice."""
    UNPAUSED.pop(cls, None)
    ATTACHED.pop(cls, None)


def invalidate() -> None:
    """Tell every attached driver that plans may be out of date."""
    for driver in tuple(ATTACHED.values()):
        driver.invalidate()
