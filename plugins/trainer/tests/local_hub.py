"""A Hugging Face Hub on this machine: it has one repository, whose commit can be found, and its files downloaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs


class LocalHub:
    """What it has, and what was downloaded from it.

    Attributes:
        url: where it answers.
        commits: the commit that each revision of the one repository is.
        downloads: the names of files, once for each download.
    """

    def __init__(self, identifier: str, folder: Path, commits: dict[str, str], kind: str = "model") -> None:
        self.identifier, self.folder, self.commits = identifier, folder, commits
        self.api = f"api/{kind}s/{identifier}"
        self.files = identifier if kind == "model" else f"{kind}s/{identifier}"
        self.downloads: list[str] = []
        self.url = ""

    @contextmanager
    def serving(self) -> Iterator[LocalHub]:
        """Answer on a free port."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: LocalHub

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        """Which of some paths there are."""
        length = int(self.headers["Content-Length"])
        body = parse_qs(self.rfile.read(length).decode()) if length else {}
        names = [each.strip("/") for each in body.get("paths", ())]
        self._send(json.dumps([each for each in self._tree() if each["path"] in names]).encode())

    def _answer(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0].strip("/")
        name = path.rpartition("/")[2]
        if path.startswith(f"{hub.api}/tree/"):
            self._send(json.dumps(self._tree()).encode())
        elif path.startswith(f"{hub.api}/revision/") and name in {*hub.commits, *hub.commits.values()}:
            commit = hub.commits.get(name, name)
            siblings = [{"rfilename": each["path"]} for each in self._tree()]
            self._send(json.dumps({"id": hub.identifier, "sha": commit, "siblings": siblings}).encode())
        elif path.startswith(f"{hub.files}/resolve/") and (file := hub.folder / name).is_file():
            if self.command == "GET":
                hub.downloads.append(name)
            commit = path.removeprefix(f"{hub.files}/resolve/").partition("/")[0]
            self._send(file.read_bytes(), {"ETag": f'"{_oid(file)}"', "X-Repo-Commit": commit})
        else:
            what = "RepoNotFound" if not path.startswith((hub.api, hub.files)) else "EntryNotFound"
            what = "RevisionNotFound" if path.startswith(f"{hub.api}/revision/") else what
            self._send(b"{}", {"X-Error-Code": what}, 404)

    def _tree(self) -> list[dict[str, Any]]:
        files = sorted(each for each in self.hub.folder.iterdir() if each.is_file())
        return [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": _oid(f)} for f in files]

    def _send(self, body: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _oid(file: Path) -> str:
    return sha1(file.read_bytes()).hexdigest()
