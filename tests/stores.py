"""Stores for the tests of remote sources: an HTTP server that can misbehave, and S3 as moto plays it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest


@dataclass
class Store:
    """A directory that is served, who asked for what, and how requests are answered."""

    root: Path
    url: str = ""
    asked: list[tuple[str, int, int]] = field(default_factory=list)
    """Path, first and last byte of each answer with values, the tiny first questions left out."""
    sent_nbytes: int = 0
    """Of all such answers, also cut ones."""
    misbehave: Callable[[str, int], str] = lambda path, number: ""
    """Given a path and how many requests for it there were, what to do: "cut", "no ranges", a status, or nothing."""
    delay_s: float = 0.0
    requests: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    under_way: int = 0
    most_under_way: int = 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        store: Store = self.server.store
        name = unquote(self.path).partition("?")[0]
        path = store.root / name.lstrip("/")
        with store.lock:
            number = store.requests[name] = store.requests.get(name, 0) + 1
            store.under_way += 1
            store.most_under_way = max(store.most_under_way, store.under_way)
        try:
            time.sleep(store.delay_s)
            self._answer(store, path, name, store.misbehave(name, number))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # whoever asked only wanted the head, or has ended
        finally:
            with store.lock:
                store.under_way -= 1

    def _answer(self, store: Store, path: Path, name: str, how: str) -> None:
        if how.isdigit():
            self._head(int(how), 0)
            return
        if path.is_dir():
            names = sorted(child.name + "/" * child.is_dir() for child in path.iterdir())
            page = "".join(f'<a href="{name}">{name}</a>\n' for name in names).encode()
            self._head(200, len(page), **{"Content-Type": "text/html"})
            self.wfile.write(page)
            return
        if not path.is_file():
            self._head(404, 0)
            return
        size = path.stat().st_size
        version = {"ETag": f'"{path.stat().st_mtime_ns:x}"', "Accept-Ranges": "bytes"}
        wanted = self.headers.get("Range", "")
        if how == "no ranges" or not wanted.startswith("bytes="):
            self._head(200, size, **version)
            self.wfile.write(path.read_bytes())
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last) + 1, size)
        if start >= size:
            self._head(416, 0, **version)
            return
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(stop - start)
        self._head(206, len(data), **version, **{"Content-Range": f"bytes {start}-{stop - 1}/{size}"})
        if how == "cut":
            data = data[: len(data) // 2]
            self.close_connection = True
        if stop - start > 1:
            with store.lock:
                store.asked.append((name, start, stop))
                store.sent_nbytes += len(data)
        self.wfile.write(data)

    def _head(self, status: int, nbytes: int, **headers: str) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(nbytes), **headers}.items():
            self.send_header(key, value)
        self.end_headers()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionResetError):  # a client that has ended
            super().handle_error(request, client_address)


@contextmanager
def http_store(root: Path) -> Iterator[Store]:
    """Serve the directory by HTTP, with ranges, at a port of its own on loopback."""
    server = _Server(("127.0.0.1", 0), _Handler)
    store = Store(root, f"http://127.0.0.1:{server.server_port}")
    server.store = store  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def s3_store(root: Path, bucket: str) -> Iterator[dict[str, str]]:
    """Put the files of the directory into a bucket of an S3 server on loopback; yields the environment to find it."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    boto3 = pytest.importorskip("boto3")
    server.start()
    try:
        host, port = server.get_host_and_port()
        keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
        client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", **keys)
        client.create_bucket(Bucket=bucket)
        for path in root.rglob("*"):
            if path.is_file():
                client.upload_file(str(path), bucket, str(path.relative_to(root)))
        client.close()
        yield {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        server.stop()
