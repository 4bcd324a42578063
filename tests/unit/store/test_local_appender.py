from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from ckpt.errors import ObjectExists, ObjectNotFound
from ckpt.store import local_appender
from ckpt.store.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KEY = "log/000001/rank00000/000000000001.log"


def _moved(root: Path) -> None:
    root.rename(root.with_name("elsewhere"))


def _replaced(root: Path) -> None:
    path = root / KEY
    path.rename(path.with_suffix(".old"))
    path.write_bytes(b"another")


@pytest.mark.parametrize("change", [shutil.rmtree, lambda root: (root / KEY).unlink(), _moved, _replaced])
def test_a_file_that_is_gone_under_its_name_is_noticed_by_the_next_append(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    one = LocalStore(str(root)).appender(KEY)
    one.append([b"first"])
    one.append([b"second", b"", b"third"])
    assert (root / KEY).read_bytes() == b"firstsecondthird"
    change(root)
    with pytest.raises(ObjectNotFound, match="was removed or moved while it was being written to"):
        one.append([b"fourth"])
    one.close()


def test_an_appended_file_is_begun_once(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    one = store.appender(KEY)
    assert store.in_use(KEY)
    with pytest.raises(ObjectExists):
        store.appender(KEY)
    one.close()
    assert not store.in_use(KEY)


def test_what_is_on_the_disk_is_given_back_but_for_the_page_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(local_appender, "release", lambda fd, start, nbytes: given.append((start, nbytes)))
    store = LocalStore(str(tmp_path))
    one = store.appender(KEY)
    written = b""
    for nbytes in (100, 5000, 3092, 1, 20_000):
        data = os.urandom(nbytes)
        written += data
        one.append([data[:7], data[7:]])
    cached = store.device(one.fd).cached
    one.close()
    assert store.get(KEY) == written
    if cached:
        assert given == [(0, 4096), (4096, 4096), (8192, 16_384)]
