"""Reads a pickle without unpickling it: interprets its opcodes, and knows no function that the caller has not named.

``pickletools`` cuts the bytes into opcodes and checks their lengths; nothing of the standard unpickler runs, nor of
torch's private one: this works the same for every release of torch and every pickle protocol. A class or function that
the pickle names is looked up in a table of our own functions (``names``); importing what it names
is left to ``trust``, which a user must ask for.
"""

from __future__ import annotations

import pickletools
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from itertools import chain
from typing import IO, Any, TypeVar, cast

from ckpt.convert.torchfile.names import PLAIN, Inert, Named, Names, check_keys, kind_of
from ckpt.errors import CkptError, FormatError, MalformedData, UnsupportedFeature

T = TypeVar("T")

REFUSED = "which is not on the list of what may be read without running code from the file (--trust-pickle lifts that)"

MAX_OPCODES = 50_000_000
"""Each makes at most one small object, so this bounds the memory that a pickle can ask for."""
MAX_DEPTH = 200
"""Nesting of what may come out."""
MAX_NODES = 50_000_000
"""Values that may come out, one for each place where it stands: references can make few bytes into very many."""

_MARK = object()


class _Refused:
    """Stands for a value that cannot be read: what is wrong is said once it is known where it stands."""

    def __init__(self, error: UnsupportedFeature) -> None:
        self.error = error


class _At(Exception):
    """On its way from a value that cannot be read to the top. ``path``: to it, from the bottom up."""

    def __init__(self, error: UnsupportedFeature) -> None:
        super().__init__()
        self.error = error
        self.path: list[str] = []


_NO_KEYWORDS: dict[str, Any] = {}


def run_pickle(
    file: IO[bytes],
    where: str,
    names: Names,
    persistent: Callable[[Any], Any] | None = None,
    *,
    trust: bool = False,
) -> Any:
    """Return what the pickle at the file's position holds; the file stands behind its last byte then.

    Args:
        file: has ``read`` and ``readline``.
        where: the file, for messages.
        names: what stands for the classes and functions that a pickle names.
        persistent: returns what stands for a storage that lies outside the pickle; None: there are none.
        trust: import and call whatever ``names`` does not have, as the standard unpickler would.

    Raises:
        UnsupportedFeature: it names a class or function that ``names`` does not have.
        MalformedData: no pickle, or one that no writer of plain values would write.
    """
    machine = _Machine(where, names, persistent, trust)
    try:
        for n, (opcode, argument, _) in enumerate(pickletools.genops(file)):
            if n > MAX_OPCODES:
                raise MalformedData(f"{where}: a pickle of more than {MAX_OPCODES} opcodes")
            _OPCODES[opcode.name](machine, argument)
        (tree,) = machine.stack
    except CkptError as error:
        if machine.refused:  # what comes behind it may be nothing but its consequence
            raise machine.refused[0] from error
        raise
    except Exception as error:
        # Hostile bytes make Python raise anything (RecursionError in a hash, OverflowError, …), trusted ones too.
        raise MalformedData(f"{where}: not a readable pickle ({error!r:.300})") from error
    try:
        check_tree(tree, where, trust)
    except CkptError:
        raise
    except Exception as error:
        raise MalformedData(f"{where}: not a readable pickle ({error!r:.300})") from error
    return tree


class _Machine:
    def __init__(self, where: str, names: Names, persistent: Callable[[Any], Any] | None, trust: bool) -> None:
        self.where, self.trust = where, trust
        self.stack: list[Any] = []
        self._names, self._persistent = names, persistent
        self._memo: dict[int, Any] = {}
        self.refused: list[UnsupportedFeature] = []
        """what could not be made, and is not an error yet"""

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        return self.popped(1)[0]

    def popped(self, count: int) -> list[Any]:
        items = self.stack[-count:]
        del self.stack[-count:]
        if len(items) < count or any(item is _MARK for item in items):
            raise self._wrong("takes more than it has put")
        return items

    def since_mark(self) -> list[Any]:
        """Remove everything above the last mark, and the mark, from the stack; return it."""
        for at in range(len(self.stack) - 1, -1, -1):
            if self.stack[at] is _MARK:
                items = self.stack[at + 1 :]
                del self.stack[at:]
                return items
        raise self._wrong("closes a group that it has not opened")

    def top(self, kind: type[T], what: str) -> T:
        """Return the topmost value. What trusted code made may be anything that has the methods of ``kind``."""
        value = self.stack[-1]
        if type(value) is not kind and not self.trust:
            raise self._wrong(f"{what} a {kind_of(value)}")
        return cast("T", value)

    def memoize(self, number: int | None) -> None:
        self._memo[len(self._memo) if number is None else number] = self.stack[-1]

    def recall(self, number: int) -> None:
        self.push(self._memo[number])

    def extend(self, items: list[Any]) -> None:
        self.top(list, "appends to").extend(items)

    def add(self, items: list[Any]) -> None:
        self.check_keys(items)
        self.top(set, "adds to").update(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.top(dict, "sets items of")
        for key, value in self.pairs(items):
            target[key] = value

    def pairs(self, items: list[Any]) -> list[tuple[Any, Any]]:
        if len(items) % 2:
            raise self._wrong("gives a key without a value")
        self.check_keys(items[::2])
        return list(zip(items[::2], items[1::2], strict=True))

    def frozen(self, items: list[Any]) -> None:
        self.check_keys(items)
        self.push(frozenset(items))

    def check_keys(self, keys: list[Any]) -> None:
        with self._placed():
            check_keys(keys)

    def named(self, name: str) -> None:
        """Push what stands for a class or function. ``name``: module and name, with a space between."""
        module, _, rest = name.partition(" ")
        # The older protocols write the names that Python 2 had.
        module, rest = NAME_MAPPING.get((module, rest), (IMPORT_MAPPING.get(module, module), rest))
        found = self._names.find(module, rest)
        if found is None:
            if not self.trust:
                raise UnsupportedFeature(f"{self.where}: needs {module}.{rest}, {REFUSED}")
            found = _imported(module, rest, self.where)
        self.push(found)

    def call(self, function: Any, arguments: Any, keywords: Any = _NO_KEYWORDS) -> None:
        """Call what :meth:`named` pushed: of ours always, of others only what is trusted."""
        if not isinstance(arguments, tuple) or not isinstance(keywords, dict):
            raise self._wrong(f"calls with {kind_of(arguments)} for arguments")
        if not self.trust and not isinstance(function, Named):
            raise self._wrong(f"calls a {kind_of(function)}")
        broken = next((one for one in (*arguments, *keywords.values()) if isinstance(one, _Refused)), None)
        if broken is not None:  # a parameter of such a tensor, say
            self.push(broken)
            return
        self._make(lambda: function(*arguments, **keywords))

    def _make(self, make: Callable[[], Any]) -> None:
        """Push a value, or what stands for one that cannot be made."""
        try:
            with self._placed():
                self.push(make())
        except UnsupportedFeature as error:
            if self.trust:  # in what trusted code makes, nobody would find it again
                raise
            self.refused.append(error)
            self.push(_Refused(error))

    def new(self, kind: Any, arguments: Any, keywords: Any = _NO_KEYWORDS) -> None:
        if self.trust and isinstance(kind, type):
            self.push(kind.__new__(kind, *arguments, **keywords))
        else:
            self.call(kind, arguments, keywords)

    def build(self) -> None:
        state = self.pop()
        parts = (self.stack[-1], *(state if isinstance(state, tuple) else ()))
        broken = next((one for one in parts if isinstance(one, _Refused)), None)
        if broken is not None:
            self.stack[-1] = broken
            return
        with self._placed():
            done = self._names.set_state(self.stack[-1], state)
        if not done and not self.trust:
            raise self._wrong(f"sets the state of a {kind_of(self.stack[-1])}")
        if not done:
            _set_state(self.stack[-1], state)

    def persistent(self) -> None:
        find, words = self._persistent, self.pop()
        if find is None:
            raise self._wrong("refers to something outside of it")
        self._make(lambda: find(words))

    def refuse(self, opcode: str) -> None:
        raise self._wrong(f"has an opcode {opcode}, which torch.save does not write")

    @contextmanager
    def _placed(self) -> Iterator[None]:
        """Add the file to what is said of a value in it."""
        try:
            yield
        except FormatError as error:
            raise type(error)(f"{self.where}: {error}") from error

    def _wrong(self, what: str) -> MalformedData:
        return MalformedData(f"{self.where}: the pickle {what}")


def _imported(module: str, name: str, where: str) -> Any:
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise MalformedData(f"{where}: needs {module}.{name}, which cannot be imported here: {error}") from error
    return found


def _set_state(instance: Any, state: Any) -> None:
    """As the standard unpickler does it, for what trusted code made."""
    if hasattr(instance, "__setstate__"):
        instance.__setstate__(state)
        return
    slots = None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    vars(instance).update(state or {})
    for key, value in (slots or {}).items():
        setattr(instance, key, value)


def check_tree(tree: Any, where: str, trust: bool = False) -> None:
    """Check that a tree can be walked: not too deep, no part of itself, not more values than memory has room for.

    Raises:
        MalformedData: it cannot, or one of its values is none that a tree may have (``trust``: any will do).
    """
    counted: dict[int, int] = {}
    inside: set[int] = set()

    def visit(value: Any, depth: int) -> int:
        if isinstance(value, PLAIN):
            return 1
        if isinstance(value, _Refused):
            raise _At(value.error)
        key = id(value)
        if key in counted:
            return counted[key]
        if key in inside or depth > MAX_DEPTH:
            raise MalformedData(f"{where}: what the pickle holds is nested more than {MAX_DEPTH} deep, or in itself")
        inside.add(key)
        total = 1
        for child in _children(value, trust):
            try:
                total += visit(child, depth + 1)
            except _At as found:
                found.path += _step(value, child)
                raise
        counted[key] = total
        inside.discard(key)
        return total

    try:
        nodes = visit(tree, 0)
    except _At as found:
        said = str(found.error).removeprefix(f"{where}: ")
        path = ".".join(reversed(found.path))
        raise UnsupportedFeature(f"{where}: {f'{path!r}: ' if path else ''}{said}") from found.error
    if nodes > MAX_NODES:
        raise MalformedData(f"{where}: what the pickle holds has more than {MAX_NODES} values")


def _step(value: Any, child: Any) -> list[str]:
    """Return the key under which something stands in a value, none if it has none."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return [str(key) for key, one in pairs if one is child][:1]


def _children(value: Any, trust: bool) -> Iterator[Any]:
    if isinstance(value, dict):
        return chain(value.keys(), value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return iter(value)
    if isinstance(value, Inert):
        return iter((value.args, value.attributes))
    if not trust:
        name = value.name if isinstance(value, Named) else f"a {kind_of(value)}"
        raise _At(UnsupportedFeature(f"{name} by itself, {REFUSED}"))
    return iter(())


_Do = Callable[[_Machine, Any], None]

_VALUES: dict[str, _Do] = dict.fromkeys(
    (
        "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
        "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
        "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
    ),
    _Machine.push,
) | {
    "NONE": lambda m, _: m.push(None),
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    "MARK": lambda m, _: m.push(_MARK),
}  # fmt: skip

_CONTAINERS: dict[str, _Do] = {
    "EMPTY_LIST": lambda m, _: m.push([]),
    "EMPTY_DICT": lambda m, _: m.push({}),
    "EMPTY_SET": lambda m, _: m.push(set()),
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "LIST": lambda m, _: m.push(m.since_mark()),
    "TUPLE": lambda m, _: m.push(tuple(m.since_mark())),
    "FROZENSET": lambda m, _: m.frozen(m.since_mark()),
    "DICT": lambda m, _: m.push(dict(m.pairs(m.since_mark()))),
    "TUPLE1": lambda m, _: m.push(tuple(m.popped(1))),
    "TUPLE2": lambda m, _: m.push(tuple(m.popped(2))),
    "TUPLE3": lambda m, _: m.push(tuple(m.popped(3))),
    "APPEND": lambda m, _: m.extend(m.popped(1)),
    "APPENDS": lambda m, _: m.extend(m.since_mark()),
    "ADDITEMS": lambda m, _: m.add(m.since_mark()),
    "SETITEM": lambda m, _: m.set_items(m.popped(2)),
    "SETITEMS": lambda m, _: m.set_items(m.since_mark()),
}

_OTHERS: dict[str, _Do] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda m, _: None),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.memoize),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.recall),
    "POP": lambda m, _: _drop(m.popped(1)),
    "POP_MARK": lambda m, _: _drop(m.since_mark()),
    "DUP": lambda m, _: m.push(m.stack[-1]),
    "GLOBAL": _Machine.named,
    "STACK_GLOBAL": lambda m, _: m.named(" ".join(m.popped(2))),
    "REDUCE": lambda m, _: m.call(*m.popped(2)),
    "NEWOBJ": lambda m, _: m.new(*m.popped(2)),
    "NEWOBJ_EX": lambda m, _: m.new(*m.popped(3)),
    "BUILD": lambda m, _: m.build(),
    "BINPERSID": lambda m, _: m.persistent(),
}


def _drop(items: list[Any]) -> None:
    """Leave what was taken from the stack."""


def _refusing(opcode: str) -> _Do:
    return lambda machine, _: machine.refuse(opcode)


_OPCODES: Mapping[str, _Do] = (
    {op.name: _refusing(op.name) for op in pickletools.opcodes} | _VALUES | _CONTAINERS | _OTHERS
)
