"""Where a training step ends: behind the last of the calls that a step of a loop consists of.

The counterpart of ``shared_boundary``, for what has to happen before the loop takes its next batch. Optimizers have
hooks. Schedulers, gradient scalers and engines have none, and nothing may be kept in them: a scheduler's state dict is
its ``__dict__``, and engines are copied and pickled. So their class tells of them, by weak reference, for as long as
anybody asks.
"""

from __future__ import annotations

import inspect
import weakref
from contextlib import contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

INSTEAD = "leave it off, and call Checkpointer.step() behind each step"
_resting = 0


@contextmanager
def resting() -> Iterator[None]:
    """While it lasts, no call belongs to a training step: what repeats logged steps calls optimizers too."""
    global _resting
    _resting += 1
    try:
        yield
    finally:
        _resting -= 1


def untraced(call: Callable[..., None]) -> Callable[..., None]:
    """Return a function that ``torch.compile`` calls as it is: what it would make of a hook is of no use, and is made
    anew whenever something has changed that the hook looks at.

    Asked for where an optimizer is there: that has loaded the compiler's front end already, which takes seconds.
    """

    def called(*args: Any) -> None:
        call(*args)

    disabled: Callable[..., None] = torch.compiler.disable(called)
    return disabled


def _call(method: Callable[..., None], *args: Any) -> None:
    method(*args)


class Ending:
    """Calls a function when all calls of a training step have been made, each once.

    The optimizers hold it, and it holds the function; nothing else does. So what the function needs lives as long as
    the optimizers, and an engine that nobody has any more is freed together with it.

    Args:
        call: the function.
        parts: names of the calls. They may come in any order, but the first one of a step must be one that opens it:
            else a scheduler that was called once too often would be taken for the last call of the step before.
    """

    def __init__(self, call: Callable[[], None], parts: Sequence[str]) -> None:
        self._call, self._parts = call, parts
        self._done: set[int] = set()
        self._open = self._inside = False
        self._undo: list[Callable[[], None]] = []

    def optimizer(self, part: int, optimizer: Any) -> None:
        """Let a step of a torch optimizer be a call, one that opens the training step.

        Raises:
            ConfigError: it has no hooks.
        """
        self._hook(optimizer, "pre", partial(self.begin, part, True))
        self._hook(optimizer, "post", partial(self.end, part))

    def method(self, part: int, owner: Any, name: str, *, opens: bool = False, ends: bool = True) -> None:
        """Let a method of some object be a call; with ``ends=False`` one that comes before the part is done.

        Raises:
            ConfigError: the method cannot be watched.
        """
        end = self.end if ends else self.left
        self._undo.append(watch(owner, name, weakref.WeakMethod(self.begin), weakref.WeakMethod(end), part, opens))

    def held_by(self, optimizer: Any) -> None:
        """Let a torch optimizer keep this alive whose own step is no call, but made inside of one.

        A step of it outside of any, by a method that the loop has kept from before it was watched, is refused there.

        Raises:
            ConfigError: it has no hooks.
        """
        self._hook(optimizer, "pre", self._within)

    def remove(self) -> None:
        """Take all hooks away, and leave all methods as they were."""
        for undo in self._undo:
            undo()
        self._undo = []

    def begin(self, part: int, opens: bool, *_: Any) -> None:
        """Say that a call is about to be made.

        Raises:
            ConfigError: it is not one that can come here; nothing is done yet.
        """
        if _resting:
            return
        name = self._parts[part]
        if part in self._done:
            missing = [one for i, one in enumerate(self._parts) if i not in self._done]
            raise ConfigError(
                f"hook=True: a training step is one call each of {', '.join(self._parts)}; found a second call of "
                f"{name} before {', '.join(missing)}: {INSTEAD}"
            )
        if not (opens or self._open):
            raise ConfigError(
                f"hook=True: expected {name} once behind each step of an optimizer, found it in front of one or twice "
                f"behind one, so that nothing tells where a training step ends: {INSTEAD}"
            )
        self._open = self._inside = True

    def end(self, part: int, *_: Any) -> None:
        """Say that a call has been made."""
        if _resting:
            return
        self._inside = False
        self._done.add(part)
        if len(self._done) == len(self._parts):
            self._done.clear()
            self._open = False
            self._call()

    def left(self, *_: Any) -> None:
        """Say that a call has been made that is only the beginning of its part."""
        self._inside = False

    def _within(self, optimizer: Any, *_: Any) -> None:
        if not (self._inside or _resting):
            raise ConfigError(
                f"hook=True: expected steps of {type(optimizer).__name__} inside of {self._parts[0]}, found one "
                f"outside, where nothing tells where a training step ends: {INSTEAD}"
            )

    def _hook(self, optimizer: Any, when: str, call: Callable[..., None]) -> None:
        try:
            handle = getattr(optimizer, f"register_step_{when}_hook")(untraced(call))
        except AttributeError as error:
            kind = type(optimizer).__name__
            raise ConfigError(f"hook=True: an optimizer of type {kind} takes no hooks ({error}): {INSTEAD}") from error
        self._undo.append(handle.remove)


# ------------------------------------------------------------------------------------------------- methods of classes


class _Watcher(NamedTuple):
    """Calls ``before()(part, opens)`` and ``after()(part)`` by ``tell``; all references are weak."""

    owner: weakref.ref[Any] | None
    before: Any
    after: Any
    part: int
    opens: bool
    tell: Callable[..., None]


class _Method:
    """A method of a class that is wrapped. ``own``: what the class itself had under that name, None if nothing."""

    def __init__(self, kind: type, name: str) -> None:
        original = inspect.getattr_static(kind, name)
        if not inspect.isfunction(original):
            raise TypeError(f"it is a {type(original).__name__}, expected a function")
        self.kind, self.name, self.own = kind, name, vars(kind).get(name)
        self.watchers: dict[int, list[_Watcher]] = {}

        @wraps(original)
        def wrapped(this: Any, *args: Any, **kwargs: Any) -> Any:
            # Called by the method of a subclass, this is a part of that method, and not the call.
            found = self.watchers.get(id(this), ()) if type(this) is kind else ()
            here = [one for one in found if one.owner is None or one.owner() is this]
            return _around(here, original, this, *args, **kwargs)

        wrapped._watched = self  # type: ignore[attr-defined]
        self.wrapped = wrapped
        setattr(kind, name, wrapped)

    @staticmethod
    def of(kind: type, name: str) -> _Method:
        """Return a class's wrapped method; the first time it is wrapped."""
        there = vars(kind).get(name)
        found = getattr(there, "_watched", None)
        return found if isinstance(found, _Method) and found.wrapped is there else _Method(kind, name)

    def forget(self, key: int, watcher: _Watcher) -> None:
        """Take a watcher away, and with the last one the wrapper, unless somebody has wrapped it again."""
        left = [one for one in self.watchers.pop(key, ()) if one is not watcher]
        if left:
            self.watchers[key] = left
        if not self.watchers and vars(self.kind).get(self.name) is self.wrapped:
            if self.own is None:
                delattr(self.kind, self.name)
            else:
                setattr(self.kind, self.name, self.own)


def watch(owner: Any, name: str, before: Any, after: Any, part: int, opens: bool) -> Callable[[], None]:
    """Have weakly referenced methods called before and after each call of a method; return what ends that.

    Raises:
        ConfigError: the method is not a function of a class written in Python.
    """
    kind = type(owner)
    if name in getattr(owner, "__dict__", {}):  # somebody has wrapped the method of this one object
        return _watch_object(owner, name, _Watcher(None, before, after, part, opens, untraced(_call)))
    try:
        where, method = weakref.ref(owner), _Method.of(kind, name)
    except (AttributeError, TypeError) as error:
        shown = f"{kind.__module__}.{kind.__qualname__}.{name}"
        raise ConfigError(f"hook=True: {shown} cannot be watched ({error}): {INSTEAD}") from error
    key, watcher = id(owner), _Watcher(where, before, after, part, opens, untraced(_call))
    method.watchers.setdefault(key, []).append(watcher)
    gone = weakref.finalize(owner, method.forget, key, watcher)
    gone.atexit = False

    def undo() -> None:
        gone()

    return undo


def _watch_object(owner: Any, name: str, watcher: _Watcher) -> Callable[[], None]:
    original, where = vars(owner)[name], weakref.ref(owner)

    @wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return _around([watcher], original, *args, **kwargs)

    setattr(owner, name, wrapped)

    def undo() -> None:
        there = where()
        if there is not None and vars(there).get(name) is wrapped:
            setattr(there, name, original)

    return undo


def _around(watchers: Iterable[_Watcher], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    for one in watchers:
        if (before := one.before()) is not None:
            one.tell(before, one.part, one.opens)
    result = original(*args, **kwargs)
    for one in watchers:
        if (after := one.after()) is not None:
            one.tell(after, one.part)
    return result
