"""A server on loopback with those endpoints of the Hugging Face hub that datasets use."""

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """Answers from files in memory; a token is needed to write."""

    protocol_version = "HTTP/1.1"
    repositories: ClassVar[dict[str, dict[str, bytes]]] = {}
    created: ClassVar[list[dict[str, Any]]] = []
    unknown: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        path = urlsplit(self.path).path
        if self.headers.get("authorization") != "Bearer hf_right":
            self._send({"error": "Invalid credentials"}, 401)
        elif path == "/api/repos/create":
            given = json.loads(body)
            self.created.append(given)
            name = f"{given.get('organization') or 'me'}/{given['name']}"
            self.repositories.setdefault(name, {})
            self._send({"url": f"{self._root}/datasets/{name}", "name": name})
        elif found := re.fullmatch(r"/api/\w+/([\w-]+/[\w-]+)/preupload/main", path):
            files = json.loads(body)["files"]
            modes = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files
            ]
            self._send({"files": modes})
        elif found := re.fullmatch(r"/api/\w+/([\w-]+/[\w-]+)/commit/main", path):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.repositories[found[1]][line["value"]["path"]] = content
            self._send({"commitUrl": f"{self._root}/{found[1]}/commit/{SHA}", "commitOid": SHA})
        elif found := re.fullmatch(r"/api/datasets/([\w-]+/[\w-]+)/paths-info/\w+", path):
            wanted = re.findall(r"paths=([^&]+)", body.decode())
            files = self.repositories.get(found[1], {})
            self._send([_entry(p, files[p]) for p in map(unquote, wanted) if p in files])
        else:
            self._lost()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if found := re.fullmatch(r"/api/datasets/([\w-]+/[\w-]+)(/revision/\w+)?", path):
            files = self.repositories.get(found[1])
            if files is None:
                self._send({"error": "Repository not found"}, 404, "RepoNotFound")
                return
            siblings = [{"rfilename": name} for name in files]
            self._send({"id": found[1], "sha": SHA, "siblings": siblings, "private": True})
        elif found := re.fullmatch(r"/api/datasets/([\w-]+/[\w-]+)/tree/\w+/?(.*)", path):
            self._send(_listed(self.repositories.get(found[1], {}), found[2]))
        elif found := re.fullmatch(r"/datasets/([\w-]+/[\w-]+)/resolve/\w+/(.+)", path):
            content = self.repositories.get(found[1], {}).get(found[2])
            if content is None:
                self._send({"error": "Entry not found"}, 404, "EntryNotFound")
            else:
                self._send(content, 200)
        else:
            self._lost()

    do_HEAD = do_GET

    @property
    def _root(self) -> str:
        return f"http://{self.headers['host']}"

    def _lost(self) -> None:
        self.unknown.append(f"{self.command} {self.path}")
        self._send({"error": "no such endpoint"}, 404, "EntryNotFound")

    def _send(self, content: Any, status: int = 200, error: str | None = None) -> None:
        sent = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(sent)))
        self.send_header("x-repo-commit", SHA)
        self.send_header("etag", f'"{sha1(sent).hexdigest()}"')
        if error:
            self.send_header("x-error-code", error)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(sent)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


def _entry(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(content), "oid": sha1(content).hexdigest()}


def _listed(files: dict[str, bytes], folder: str) -> list[dict[str, Any]]:
    """Return what lies directly in a folder: files, and folders."""
    within = f"{folder}/" if folder else ""
    inside = {name.removeprefix(within): name for name in files if name.startswith(within)}
    made = [_entry(name, files[name]) for short, name in inside.items() if "/" not in short]
    folders = dict.fromkeys(short.partition("/")[0] for short in inside if "/" in short)
    oid = sha1(folder.encode()).hexdigest()
    return [*made, *({"type": "directory", "path": within + f, "oid": oid} for f in folders)]


@contextmanager
def running() -> Iterator[tuple[str, type[Hub]]]:
    """Run a server with its own files; yields its address and what it knows."""
    own = type("OwnHub", (Hub,), {"repositories": {}, "created": [], "unknown": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), own)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", own
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
