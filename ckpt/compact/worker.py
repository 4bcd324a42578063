"""A worker process of a compaction (``python -m ckpt.compact.worker``), started by ``workers``."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from typing import IO


def main() -> None:
    """Do what comes in until nobody sends any more (:func:`_listen`), or something fails."""
    from ckpt.compact.workers import Message
    from ckpt.convert.ours.workers import send
    from ckpt.errors import to_wire

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # on the way out it removes files that are not whole
    told = os.fdopen(os.dup(0), "rb")
    says = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not end up among the messages
    todo: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(told, todo), daemon=True).start()
    try:
        _work(todo, says)
    except Exception as error:
        send(says, Message(error=to_wire(error)))


def _work(todo: queue.SimpleQueue[bytes], says: IO[bytes]) -> None:
    import msgspec
    import torch

    from ckpt.compact.workers import Message
    from ckpt.compact.working import Work, Worker, opened
    from ckpt.convert.ours.workers import send
    from ckpt.store.open import open_store

    work = msgspec.msgpack.decode(todo.get(), type=Work)
    torch.set_num_threads(work.threads)
    store = open_store(work.address)
    worker = Worker(store, opened(store, work), work.prefix, work.memory, lambda _: None)
    while True:
        bundle = msgspec.msgpack.decode(todo.get(), type=Message).bundle
        if bundle is not None:
            send(says, Message(done=worker.run(bundle, resume=work.resume)))


def _listen(told: IO[bytes], todo: queue.SimpleQueue[bytes]) -> None:
    """Hand on what comes. When the pipe ends, whoever started this is gone, and there is nobody to work for."""
    from ckpt.convert.ours.workers import receive

    while (data := receive(told)) is not None:
        todo.put(data)
    os._exit(1)


if __name__ == "__main__":
    main()
