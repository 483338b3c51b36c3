"""A server of the S3 API on this machine."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from .processes import listening

SERVER = """
import sys
from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication, MotoRequestHandler, create_backend_app
)
from werkzeug.serving import make_server
app, fd = DomainDispatcherApplication(create_backend_app), int(sys.argv[1])
handler = MotoRequestHandler
make_server("127.0.0.1", 0, app, threaded=True, request_handler=handler, fd=fd).serve_forever()
"""


@contextmanager
def serving() -> Iterator[dict[str, str]]:
    """Start a server with a bucket `lake`, and yield the storage options of stores on it."""
    import boto3

    with listening([sys.executable, "-c", SERVER]) as address:
        boto3.client(
            "s3",
            endpoint_url=address,
            aws_access_key_id="key",
            aws_secret_access_key="secret",
            region_name="us-east-1",
        ).create_bucket(Bucket="lake")
        yield {
            "endpoint": address,
            "allow_http": "true",
            "aws_access_key_id": "key",
            "aws_secret_access_key": "secret",
            "region": "us-east-1",
        }
