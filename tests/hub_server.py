"""A stand-in for the Hugging Face Hub: the part of its HTTP API that uploads and downloads of models use.

It keeps the last commit of each repository in memory. Writing needs a token, and refusals have the Hub's codes.
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKENS = ["hf_" + letter * 34 for letter in "Qz"]  # as long as real tokens
ROUTE = re.compile(r"/(?:api/models/)?([^/]+/[^/]+)(?:/(\w+)/([^/]+)(?:/(.+))?)?")  # repository, action, revision, path


def oid(content: bytes) -> str:
    """The name that git gives this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Refused(Exception):
    """Status and `X-Error-Code`."""


class Hub(ThreadingHTTPServer):
    """Answers at `endpoint` while its `with` block runs.

    `requests` lists path and authorization of the requests, `files` the files of each name.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, dict[str, bytes]] = {}
        self.requests: list[tuple[str, str | None]] = []

    def __enter__(self) -> "Hub":
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def put(self, repo: str, files: dict[str, bytes]):
        self.files.setdefault(repo, {".gitattributes": b""}).update(files)

    def commit_of(self, repo: str) -> str:
        return oid(repr(sorted(self.files[repo].items())).encode())

    def answer(self, path: str, body: bytes | None, authorization: str | None) -> Any:
        """Bytes of a file, or what becomes JSON."""
        if body is not None and authorization not in [f"Bearer {token}" for token in TOKENS]:
            raise Refused(401, "")
        if path == "/api/validate-yaml":
            return {}
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}"
            self.put(repo, {})
            return {"url": f"{self.endpoint}/{repo}"}
        repo, action, revision, file = ROUTE.fullmatch(path).groups()
        if repo not in self.files:
            raise Refused(404 if authorization else 401, "RepoNotFound")
        files, main = self.files[repo], self.commit_of(repo)
        if revision not in (None, "main", main):
            raise Refused(404, "RevisionNotFound")
        if action == "preupload":
            paths = [each["path"] for each in json.loads(body)["files"]]
            return {"files": [{"path": each, "uploadMode": "regular", "shouldIgnore": False} for each in paths]}
        if action == "commit":
            lines = [json.loads(line) for line in body.splitlines()]
            new = [line["value"] for line in lines if line["key"] == "file"]
            self.put(repo, {each["path"]: base64.b64decode(each["content"]) for each in new})
            return {"commitUrl": f"{self.endpoint}/{repo}/commit/main", "commitOid": self.commit_of(repo)}
        if action == "resolve" and file in files:
            return files[file]
        if action:
            raise Refused(404, "EntryNotFound")
        return {"id": repo, "sha": main, "tags": [], "siblings": [{"rfilename": name} for name in files]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def ask_hub(self):
        length = self.headers["Content-Length"]
        body = self.rfile.read(int(length)) if length else None
        path, authorization = unquote(urlsplit(self.path).path), self.headers["Authorization"]
        self.server.requests.append((path, authorization))
        headers, status = {}, 200
        try:
            content = self.server.answer(path, body, authorization)
        except Refused as refusal:
            status, code = refusal.args
            content, headers = {}, {"X-Error-Code": code}
        if isinstance(content, bytes):
            headers = {"X-Repo-Commit": self.server.commit_of(ROUTE.fullmatch(path)[1]), "ETag": f'"{oid(content)}"'}
        else:
            content = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_POST = ask_hub

    def log_message(self, *_):
        """Logs nothing to stderr."""
