"""A stand-in for the Hugging Face Hub: the part of its HTTP API that uploads and downloads of models use.

It keeps the last commit of each repository in memory. Writing needs a token, and refusals have the Hub's codes.
Gated repositories, histories and LFS are the affair of huggingface_hub.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

TOKENS = ["hf_" + letter * 34 for letter in "Qz"]  # as long as real tokens


class Repository:
    """The files of its last commit, and the name of this commit."""

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.commit({".gitattributes": b""})

    def commit(self, files: dict[str, bytes]):
        self.files |= files
        names = "\n".join(f"{path} {oid(content)}" for path, content in sorted(self.files.items()))
        self.main = hashlib.sha1(names.encode()).hexdigest()


def oid(content: bytes) -> str:
    """The name that git gives this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Request(NamedTuple):
    method: str
    path: str
    authorization: str | None
    body: bytes


class Answer(NamedTuple):
    status: int
    content: Any
    headers: dict[str, str] = {}


class Refused(Exception):
    """Status, `X-Error-Code` and `X-Error-Message`."""


class Hub(ThreadingHTTPServer):
    """Answers at `endpoint` while its `with` block runs; `requests` lists the requests."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []

    def __enter__(self) -> "Hub":
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def put(self, repo: str, files: dict[str, bytes]):
        """Commits files without an upload."""
        self.repositories.setdefault(repo, Repository()).commit(files)

    def answer(self, request: Request) -> Answer:
        if request.method == "POST" and request.authorization not in [f"Bearer {token}" for token in TOKENS]:
            raise Refused(401, "", "Invalid username or password.")
        for pattern, method in ROUTES.items():
            if match := re.fullmatch(pattern, f"{request.method} {request.path}"):
                found = method(self, request, **match.groupdict())
                return found if isinstance(found, Answer) else Answer(200, found)
        raise Refused(404, "", f"The stand-in for the Hub has no answer to {request[:2]}.")

    def repository(self, request: Request, repo: str, revision: str | None = None) -> Repository:
        if repo not in self.repositories:
            raise Refused(404 if request.authorization else 401, "RepoNotFound", "Repository not found")
        if revision not in (None, "main", self.repositories[repo].main):
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return self.repositories[repo]

    # Uploads

    def create(self, request: Request) -> Answer:
        asked = json.loads(request.body)
        repo = f"{asked['organization']}/{asked['name']}"
        status = 409 if repo in self.repositories else 200
        self.put(repo, {})
        return Answer(status, {"url": f"{self.endpoint}/{repo}"})

    def agree(self, _: Request) -> dict[str, Any]:
        """Accepts the metadata of a card."""
        return {}

    def preupload(self, request: Request, repo: str, revision: str) -> dict[str, Any]:
        self.repository(request, repo, revision)
        paths = [file["path"] for file in json.loads(request.body)["files"]]
        return {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]}

    def commit(self, request: Request, repo: str, revision: str) -> dict[str, Any]:
        repository = self.repository(request, repo, revision)
        lines = map(json.loads, request.body.splitlines())
        new = [line["value"] for line in lines if line["key"] == "file"]
        repository.commit({file["path"]: base64.b64decode(file["content"]) for file in new})
        return {"commitUrl": f"{self.endpoint}/{repo}/commit/{repository.main}", "commitOid": repository.main}

    # Downloads

    def info(self, request: Request, repo: str, revision: str | None = None) -> dict[str, Any]:
        repository = self.repository(request, repo, revision)
        siblings = [{"rfilename": path} for path in repository.files]
        return {"id": repo, "sha": repository.main, "tags": [], "siblings": siblings}

    def tree(self, request: Request, repo: str, revision: str, folder: str | None) -> list[dict[str, Any]]:
        files = self.repository(request, repo, revision).files
        found = {path: content for path, content in files.items() if not folder or path.startswith(f"{folder}/")}
        if not found:
            raise Refused(404, "EntryNotFound", f"{folder} does not exist.")
        return [{"type": "file", "path": path, "oid": oid(file), "size": len(file)} for path, file in found.items()]

    def resolve(self, request: Request, repo: str, revision: str, path: str) -> Answer:
        repository = self.repository(request, repo, revision)
        if path not in repository.files:
            raise Refused(404, "EntryNotFound", "Entry not found")
        content = repository.files[path]
        return Answer(200, content, {"X-Repo-Commit": repository.main, "ETag": f'"{oid(content)}"'})


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def ask_hub(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        request = Request(self.command, unquote(urlsplit(self.path).path), self.headers["Authorization"], body)
        self.server.requests.append(request)
        try:
            answer = self.server.answer(request)
        except Refused as refusal:
            status, code, message = refusal.args
            answer = Answer(status, {"error": message}, {"X-Error-Code": code, "X-Error-Message": message})
        self.send(*answer)

    do_GET = do_HEAD = do_POST = ask_hub

    def send(self, status: int, content: Any, headers: dict[str, str]):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_):
        """Logs nothing to stderr."""


REPO, REVISION = r"(?P<repo>[^/]+/[^/]+)", r"(?P<revision>[^/]+)"
ROUTES: dict[str, Callable[..., Any]] = {
    "POST /api/repos/create": Hub.create,
    "POST /api/validate-yaml": Hub.agree,
    f"POST /api/models/{REPO}/preupload/{REVISION}": Hub.preupload,
    f"POST /api/models/{REPO}/commit/{REVISION}": Hub.commit,
    f"GET /api/models/{REPO}(/revision/{REVISION})?": Hub.info,
    f"GET /api/models/{REPO}/tree/{REVISION}(/(?P<folder>.+))?": Hub.tree,
    f"(GET|HEAD) /{REPO}/resolve/{REVISION}/(?P<path>.+)": Hub.resolve,
}
