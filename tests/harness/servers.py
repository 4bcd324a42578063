"""Real S3 servers for tests, on the loopback interface, ended with the tests.

SeaweedFS (``weed mini``) has the semantics: conditional writes, checksums, access rights, a disk to crash on. moto is a
second opinion that starts in a millisecond; it keeps everything in memory, knows no rights and stores damaged bodies.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY, SECRET = "testkey0", "testsecret0"
BUCKET = "checkpoints"
_libc = ctypes.CDLL(None)
_numbers = itertools.count()


def environment(key: str = KEY, secret: str = SECRET) -> dict[str, str]:
    """Return variables by which boto3 finds these credentials and nothing of the user's own."""
    return {
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
    }


class S3Server:
    """A running server. ``url``: its endpoint."""

    url: str

    @cached_property
    def client(self) -> Any:
        """A plain boto3 client, by which a test looks behind a store's back."""
        import boto3
        from botocore.config import Config

        session = boto3.session.Session(KEY, SECRET, region_name="us-east-1")
        retries = {"mode": "standard", "total_max_attempts": 1}
        return session.client("s3", endpoint_url=self.url, config=Config(retries=retries, read_timeout=20))

    def place(self) -> tuple[str, str]:
        """Return a bucket and a prefix in it that nobody else has. (For SeaweedFS a new bucket is new volumes: slow,
        and after some dozens there is no room for more.)
        """
        with suppress(Exception):  # it is there
            self.client.create_bucket(Bucket=BUCKET)
        return BUCKET, f"test-{os.getpid()}-{next(_numbers)}/root"

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rpartition(":")[2])


class Weed(S3Server):
    """SeaweedFS in a process of its own, on a folder. Its acknowledgements outlive a kill, not a power loss."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "data").mkdir(parents=True)
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        reader = {
            "name": "reader",
            "credentials": [{"accessKey": "readonly0", "secretKey": SECRET}],
            "actions": ["Read", "List"],
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity, reader]}))
        self.ports = _free_ports(10)
        self.url = f"http://127.0.0.1:{self.ports[0]}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Weed:
        """Start it, again after a kill if need be, and wait until it stores and gives back."""
        s3, s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc, admin, admin_grpc = self.ports
        command = [
            str(Path(sys.executable).with_name("weed")), "-logtostderr=true", "mini",
            f"-dir={self.folder}/data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            f"-s3.port={s3}", f"-s3.port.grpc={s3_grpc}", f"-s3.config={self.folder}/s3.json", "-s3.port.iceberg=0",
            f"-master.port={master}", f"-master.port.grpc={master_grpc}",
            f"-volume.port={volume}", f"-volume.port.grpc={volume_grpc}",
            f"-filer.port={filer}", f"-filer.port.grpc={filer_grpc}", "-webdav=false", "-admin.ui=false",
            f"-admin.port={admin}", f"-admin.port.grpc={admin_grpc}",
        ]  # fmt: skip
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.folder, stdout=log, stderr=log, start_new_session=True, preexec_fn=_die_with_parent
            )
        self._wait_ready()
        return self

    def _wait_ready(self, seconds: float = 60.0) -> None:
        deadline, client = time.monotonic() + seconds, self.client
        while True:
            try:
                with suppress(client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou):
                    client.create_bucket(Bucket=BUCKET)
                # Not a listing: right after a restart that works before objects can be read.
                client.put_object(Bucket=BUCKET, Key="ready", Body=b"ready")
                if client.get_object(Bucket=BUCKET, Key="ready")["Body"].read() == b"ready":
                    return
                last: object = "other bytes"
            except Exception as error:
                last = error
            if self.process is None or self.process.poll() is not None or time.monotonic() > deadline:
                log = (self.folder / "log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"weed did not get ready: {last}\n{log}")
            time.sleep(0.05)

    def kill(self) -> None:
        """End it as a crash would."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for port in self.ports:  # it leaves sockets behind
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)


class Moto(S3Server):
    """moto in a thread of this process."""

    def __init__(self) -> None:
        import logging

        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for every request
        self.server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self.server.start()
        self.url = "http://{}:{}".format(*self.server.get_host_and_port())

    def stop(self) -> None:
        """End its thread."""
        self.server.stop()


def running_weed(folder: Path) -> Iterator[Weed]:
    """Yield a started SeaweedFS, for a fixture."""
    weed = Weed(folder)
    try:
        yield weed.start()
    finally:
        weed.kill()


def running_moto() -> Iterator[Moto]:
    """Yield a started moto, for a fixture."""
    moto = Moto()
    try:
        yield moto
    finally:
        moto.stop()


def _die_with_parent() -> None:
    PR_SET_PDEATHSIG = 1
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago: all are bound at once, so that none is given twice."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports
