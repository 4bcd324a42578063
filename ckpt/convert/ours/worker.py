"""A worker process of a conversion (``python -m ckpt.convert.ours.worker``), started by ``workers``."""

from __future__ import annotations

import gc
from typing import IO

from ckpt.convert.crew import Todo, send, serve


def main() -> None:
    """Do what comes in until nobody sends any more, or something fails."""
    gc.disable()  # nearly all that importing and opening make stays: looking for garbage there only takes time
    serve(_work)


def _work(todo: Todo, says: IO[bytes]) -> None:
    import msgspec

    from ckpt.convert.ours.workers import Message, Work
    from ckpt.store.open import open_store

    work = msgspec.msgpack.decode(todo.get(), type=Work)
    writer = work.writer(work.opened(), open_store(work.target), lambda nbytes: send(says, Message(moved=nbytes)))
    gc.freeze()
    gc.enable()
    while True:
        task = msgspec.msgpack.decode(todo.get(), type=Message).task
        if task is not None:
            send(says, Message(wrote=writer.run(task, resume=work.resume)))


if __name__ == "__main__":
    main()
