"""A worker process of a compaction (``python -m ckpt.compact.worker``), started by ``workers``."""

from __future__ import annotations

from typing import IO

from ckpt.convert.crew import Todo, send, serve


def main() -> None:
    """Do what comes in until nobody sends any more, or something fails."""
    serve(_work)


def _work(todo: Todo, says: IO[bytes]) -> None:
    import msgspec
    import torch

    from ckpt.compact.workers import Message
    from ckpt.compact.working import Work, Worker, opened
    from ckpt.store.open import open_store

    work = msgspec.msgpack.decode(todo.get(), type=Work)
    torch.set_num_threads(work.threads)
    store = open_store(work.address)
    worker = Worker(store, opened(store, work), work.prefix, work.memory, lambda _: None)
    while True:
        bundle = msgspec.msgpack.decode(todo.get(), type=Message).bundle
        if bundle is not None:
            send(says, Message(done=worker.run(bundle, resume=work.resume)))


if __name__ == "__main__":
    main()
