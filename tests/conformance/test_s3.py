"""S3, on SeaweedFS and on moto."""

from __future__ import annotations

import pytest
from botocore.exceptions import ClientError

from ckpt.store.s3 import S3Store
from tests.conformance.store_suite import StoreSuite


@pytest.mark.usefixtures("s3_environment")
class OnServer(StoreSuite):
    """``server``: set by a fixture of the subclass. Every test has a prefix of its own."""

    def make(self):
        self.bucket, self.prefix = self.server.place()
        return S3Store.from_url(f"s3://{self.bucket}/{self.prefix}?endpoint={self.server.url}")

    def again(self, store):
        return S3Store.from_url(store.url)

    def raw(self, store, key):
        try:
            return self.server.client.get_object(Bucket=self.bucket, Key=f"{self.prefix}/{key}")["Body"].read()
        except ClientError as error:
            if error.response["Error"]["Code"] == "NoSuchKey":
                return None
            raise


class TestWeed(OnServer):
    @pytest.fixture(autouse=True)
    def _server(self, weed):
        self.server = weed


class TestMoto(OnServer):
    keeps_in_memory = True  # the server is in this process

    @pytest.fixture(autouse=True)
    def _server(self, moto):
        self.server = moto
