"""Records that need not be read from the store: copies in this host's memory, and what a load has looked at already.

A load looks at every byte of a log before it touches the engine, and then replays it. A file system has the bytes in
its cache by then; from an object store they would come a second time, so they are kept, as far as memory goes.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ckpt.errors import CkptError
from ckpt.format.frames import seal
from ckpt.store.memory import MemoryStore

if TYPE_CHECKING:
    from ckpt.gradlog.copies.memory import HostMemory
    from ckpt.repo.log_files import Place
    from ckpt.store.base import Store

SHARE = 4
"""At most one byte of so many that are free on a host is taken for what was looked at."""


class Near:
    """Where else than in the store a record is, on this rank.

    Args:
        memory: copies on this host, if there are any.
        room: bytes of what is looked at that may be kept.
    """

    def __init__(self, memory: HostMemory | None, room: int) -> None:
        self.memory = memory
        self._looked, self._room = MemoryStore(), room

    def find(self, run: str, rank: int, place: Place) -> tuple[Store, Place] | None:
        """Return where else a sound copy of a record of the store is.

        Args:
            run: of the log, as ``log.json`` says it.
            rank: whose record.
            place: of it in the store; a copy has the same digest.
        """
        key = _name(run, rank, place)
        if key in self._looked.objects:
            return self._looked, place._replace(key=key, start=0)
        twin = None if self.memory is None else self.memory.twin(run, rank, place)
        return None if twin is None or self.memory is None else (self.memory.store, twin)

    def beside(self, run: str, rank: int, place: Place) -> tuple[Store, Place] | None:
        """Return where else a record is, as :meth:`find` does, which was proved a moment ago and is not again."""
        if _name(run, rank, place) in self._looked.objects or self.memory is None:
            return self.find(run, rank, place)
        copy = self.memory.alike(run, rank, place)
        return None if copy is None else (self.memory.store, copy)

    def is_sound(self, store: Store, run: str, rank: int, place: Place) -> bool:
        """Is this record known to be what was written, by a copy or by a look at all of it now? False: not known."""
        if self.find(run, rank, place) is not None:
            return True
        if place.nbytes > self._room:
            return False
        data = memoryview(bytearray(place.nbytes))
        try:
            if store.read_into(place.key, place.start, data) != place.nbytes:
                return False
        except (CkptError, MemoryError):
            return False
        running = seal(place.step, place.nbytes)
        running.add(data)
        if running.raw() != place.digest:
            return False
        self._looked.put(_name(run, rank, place), data)
        self._room -= place.nbytes
        return True

    def forget(self) -> None:
        """Give back the memory of what was looked at."""
        self._looked.objects.clear()


def room_for(url: str, neighbours: int) -> int:
    """Return the bytes that a rank may keep of what it has looked at.

    Args:
        url: of the repository; a file system has a cache of its own.
        neighbours: ranks on this host.
    """
    if "://" not in url:
        return 0
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // SHARE // max(neighbours, 1)


def _name(run: str, rank: int, place: Place) -> str:
    return f"{run or 'log'}/{rank}/{place.step}/{place.digest.hex()}"
