"""A stand-in for the Hugging Face Hub: the part of its HTTP API that uploads and downloads of models use.

It keeps the last commit of each repository in memory. Writing needs a token, and refusals have the Hub's codes.
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

TOKENS = ["hf_" + letter * 34 for letter in "Qz"]  # as long as real tokens
ROUTE = re.compile(r"/(?:api/models/)?([^/]+/[^/]+)(?:/(\w+)/([^/]+)(?:/(.+))?)?")  # repository, action, revision, path


def oid(content: bytes) -> str:
    """The name that git gives this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Request(NamedTuple):
    method: str
    path: str
    authorization: str | None
    body: bytes


class Refused(Exception):
    """Status, `X-Error-Code` and `X-Error-Message`."""


class Hub(ThreadingHTTPServer):
    """Answers at `endpoint` while its `with` block runs; `requests` lists the requests, `files` those of each name."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, dict[str, bytes]] = {}
        self.requests: list[Request] = []

    def __enter__(self) -> "Hub":
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def put(self, repo: str, files: dict[str, bytes]):
        self.files.setdefault(repo, {".gitattributes": b""}).update(files)

    def commit_of(self, repo: str) -> str:
        return oid(repr(sorted(self.files[repo].items())).encode())

    def answer(self, request: Request) -> Any:
        """Bytes of a file, or what becomes JSON."""
        if request.method == "POST" and request.authorization not in [f"Bearer {token}" for token in TOKENS]:
            raise Refused(401, "", "Invalid username or password.")
        if request.path == "/api/validate-yaml":
            return {}
        if request.path == "/api/repos/create":
            asked = json.loads(request.body)
            repo = f"{asked['organization']}/{asked['name']}"
            self.put(repo, {})
            return {"url": f"{self.endpoint}/{repo}"}
        repo, action, revision, path = ROUTE.fullmatch(request.path).groups()
        if repo not in self.files:
            raise Refused(404 if request.authorization else 401, "RepoNotFound", "Repository not found")
        files, main = self.files[repo], self.commit_of(repo)
        if revision not in (None, "main", main):
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if action == "preupload":
            paths = [file["path"] for file in json.loads(request.body)["files"]]
            return {"files": [{"path": each, "uploadMode": "regular", "shouldIgnore": False} for each in paths]}
        if action == "commit":
            lines = map(json.loads, request.body.splitlines())
            new = [line["value"] for line in lines if line["key"] == "file"]
            self.put(repo, {file["path"]: base64.b64decode(file["content"]) for file in new})
            return {"commitUrl": f"{self.endpoint}/{repo}/commit/main", "commitOid": self.commit_of(repo)}
        if action == "tree":
            below = {name: content for name, content in files.items() if not path or name.startswith(f"{path}/")}
            if not below:
                raise Refused(404, "EntryNotFound", f"{path} does not exist.")
            return [{"type": "file", "path": name, "oid": oid(each), "size": len(each)} for name, each in below.items()]
        if action == "resolve":
            if path not in files:
                raise Refused(404, "EntryNotFound", "Entry not found")
            return files[path]
        return {"id": repo, "sha": main, "tags": [], "siblings": [{"rfilename": name} for name in files]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def ask_hub(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        request = Request(self.command, unquote(urlsplit(self.path).path), self.headers["Authorization"], body)
        self.server.requests.append(request)
        headers, status = {}, 200
        try:
            content = self.server.answer(request)
        except Refused as refusal:
            status, code, message = refusal.args
            content, headers = {"error": message}, {"X-Error-Code": code, "X-Error-Message": message}
        if isinstance(content, bytes):
            repo = ROUTE.fullmatch(request.path)[1]
            headers = {"X-Repo-Commit": self.server.commit_of(repo), "ETag": f'"{oid(content)}"'}
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
