"""A stand-in for the Hugging Face Hub: the part of its HTTP API that uploads and downloads of models use.

It keeps repositories in memory and behaves like the Hub: a commit has a new sha, `main` moves to it, and older commits
stay. Weights go through LFS, which stores an object once. Writing needs a token, and refusals have the Hub's codes.
"""

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

TOKENS = ["hf_" + letter * 34 for letter in "Qz"]  # as long as real tokens
LFS_SUFFIXES = (".safetensors", ".bin")


class Blob(NamedTuple):
    content: bytes
    is_lfs: bool

    @property
    def oid(self) -> str:
        """The name that git LFS or git gives this content."""
        if self.is_lfs:
            return hashlib.sha256(self.content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()


class Repository:
    """Commits, each with all of its files, and the commit of `main`."""

    def __init__(self, reader: str | None):
        self.reader = reader  # the one token that opens a gated repository
        self.commits: dict[str, dict[str, Blob]] = {}
        self.commit({".gitattributes": Blob(b"*.safetensors filter=lfs\n", False)})

    def commit(self, files: dict[str, Blob]):
        content = [str(len(self.commits)), *(f"{path} {blob.oid}" for path, blob in sorted(files.items()))]
        self.main = hashlib.sha1("\n".join(content).encode()).hexdigest()
        self.commits[self.main] = files

    @property
    def files(self) -> dict[str, Blob]:
        return self.commits[self.main]


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
    """Status, `X-Error-Code`, `X-Error-Message` and perhaps another header."""


class Hub(ThreadingHTTPServer):
    """Answers at `endpoint` while its `with` block runs; `requests` lists the requests."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, Repository] = {}
        self.lfs: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.failures: dict[str, int | None] = {}

    def __enter__(self) -> "Hub":
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Refuses connections while the block runs."""
        self.__exit__()
        try:
            yield
        finally:
            self.socket = socket.socket(self.address_family, self.socket_type)
            self.server_bind()
            self.server_activate()
            self.__enter__()

    @contextmanager
    def failing(self, pattern: str, status: int | None) -> Iterator[None]:
        """Requests whose `METHOD /path` matches the pattern get this status; `None` closes the connection."""
        self.failures[pattern] = status
        try:
            yield
        finally:
            del self.failures[pattern]

    def put(self, repo: str, files: dict[str, bytes], reader: str | None = None):
        """Commits files without an upload."""
        repository = self.repositories.setdefault(repo, Repository(reader))
        repository.commit(repository.files | {path: Blob(content, False) for path, content in files.items()})

    def contents(self) -> Iterator[tuple[str, bytes]]:
        """Name and content of all files of all commits."""
        for repo, repository in self.repositories.items():
            for files in repository.commits.values():
                yield from ((f"{repo}/{path}", blob.content) for path, blob in files.items())

    def answer(self, request: Request) -> Answer:
        if request.method == "POST" and request.authorization not in [f"Bearer {token}" for token in TOKENS]:
            raise Refused(401, "", "Invalid username or password.")
        for pattern, method in ROUTES.items():
            if match := re.fullmatch(pattern, f"{request.method} {request.path}"):
                found = method(self, request, **match.groupdict())
                return found if isinstance(found, Answer) else Answer(200, found)
        raise Refused(404, "", f"The stand-in for the Hub has no answer to {request[:2]}.")

    def repository(self, request: Request, repo: str) -> Repository:
        if repo not in self.repositories:
            raise Refused(404 if request.authorization else 401, "RepoNotFound", "Repository not found")
        return self.repositories[repo]

    def files(self, request: Request, repo: str, revision: str | None) -> tuple[str, dict[str, Blob]]:
        """A commit and its files."""
        repository = self.repository(request, repo)
        sha = repository.main if revision in (None, "main") else revision
        if sha not in repository.commits:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha, repository.commits[sha]

    # Uploads

    def create(self, request: Request) -> Answer:
        asked = json.loads(request.body)
        repo = f"{asked['organization']}/{asked['name']}"
        status = 409 if repo in self.repositories else 200
        self.repositories.setdefault(repo, Repository(reader=None))
        return Answer(status, {"url": f"{self.endpoint}/{repo}"})

    def agree(self, _: Request) -> dict[str, Any]:
        """Accepts the metadata of a card, and the report that an object has arrived."""
        return {}

    def preupload(self, request: Request, repo: str, revision: str) -> dict[str, Any]:
        _, there = self.files(request, repo, revision)
        paths = [file["path"] for file in json.loads(request.body)["files"]]
        modes = {path: "lfs" if path.endswith(LFS_SUFFIXES) else "regular" for path in paths}
        oids = {path: there[path].oid if path in there else None for path in paths}
        files = [{"path": path, "uploadMode": modes[path], "shouldIgnore": False, "oid": oids[path]} for path in paths]
        return {"files": files}

    def lfs_batch(self, request: Request, repo: str) -> dict[str, Any]:
        """Gives an address to objects that are not stored yet."""
        self.repository(request, repo)
        objects = [{"oid": each["oid"], "size": each["size"]} for each in json.loads(request.body)["objects"]]
        for each in objects:
            if each["oid"] not in self.lfs:
                href = f"{self.endpoint}/lfs/{each['oid']}"
                each["actions"] = {"upload": {"href": href}, "verify": {"href": f"{href}/verify"}}
        return {"transfer": "basic", "objects": objects}

    def lfs_put(self, request: Request, oid: str) -> dict[str, Any]:
        if hashlib.sha256(request.body).hexdigest() != oid:
            raise Refused(400, "", f"{oid} is not the SHA256 of these {len(request.body)} bytes.")
        self.lfs[oid] = request.body
        return {}

    def commit(self, request: Request, repo: str, revision: str) -> dict[str, Any]:
        files = dict(self.files(request, repo, revision)[1])
        for line in map(json.loads, request.body.splitlines()):
            key, value = line["key"], line["value"]
            if key == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]), False)
            elif key == "lfsFile" and value["oid"] in self.lfs:
                files[value["path"]] = Blob(self.lfs[value["oid"]], True)
            elif key != "header":
                raise Refused(400, "", f"The stand-in for the Hub cannot commit {line}.")
        repository = self.repository(request, repo)
        repository.commit(files)
        return {"commitUrl": f"{self.endpoint}/{repo}/commit/{repository.main}", "commitOid": repository.main}

    # Downloads

    def info(self, request: Request, repo: str, revision: str | None = None) -> dict[str, Any]:
        sha, files = self.files(request, repo, revision)
        return {"id": repo, "sha": sha, "tags": [], "siblings": [{"rfilename": path} for path in files]}

    def tree(self, request: Request, repo: str, revision: str, folder: str | None) -> list[dict[str, Any]]:
        _, files = self.files(request, repo, revision)
        found = {path: blob for path, blob in files.items() if not folder or path.startswith(f"{folder}/")}
        if not found:
            raise Refused(404, "EntryNotFound", f"{folder} does not exist.")
        sizes = {path: {"oid": blob.oid, "size": len(blob.content)} for path, blob in found.items()}
        return [{"type": "file", "path": path, **size} for path, size in sizes.items()]

    def resolve(self, request: Request, repo: str, revision: str, path: str) -> Answer:
        reader = self.repository(request, repo).reader
        if reader and request.authorization != f"Bearer {reader}":
            raise Refused(403 if request.authorization else 401, "GatedRepo", f"Access to model {repo} is restricted.")
        sha, files = self.files(request, repo, revision)
        if path not in files:
            raise Refused(404, "EntryNotFound", "Entry not found", ("X-Repo-Commit", sha))
        return Answer(200, files[path].content, {"X-Repo-Commit": sha, "ETag": f'"{files[path].oid}"'})


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def ask_hub(self):
        path = unquote(urlsplit(self.path).path)
        asked = f"{self.command} {path}"
        failures = [status for pattern, status in [*self.server.failures.items()] if re.search(pattern, asked)]
        if None in failures:  # while the client is still sending
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        request = Request(self.command, path, self.headers["Authorization"], body)
        self.server.requests.append(request)
        try:
            if failures:
                raise Refused(failures[0], "", "This was to fail.")
            answer = self.server.answer(request)
        except Refused as refusal:
            status, code, message, *others = refusal.args
            headers = {"X-Error-Code": code, "X-Error-Message": message, **dict(others)}
            answer = Answer(status, {"error": message}, headers)
        self.send(*answer)

    do_GET = do_HEAD = do_POST = do_PUT = ask_hub

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
    f"POST /{REPO}[.]git/info/lfs/objects/batch": Hub.lfs_batch,
    "PUT /lfs/(?P<oid>[^/]+)": Hub.lfs_put,
    "POST /lfs/[^/]+/verify": Hub.agree,
    f"POST /api/models/{REPO}/commit/{REVISION}": Hub.commit,
    f"GET /api/models/{REPO}(/revision/{REVISION})?": Hub.info,
    f"GET /api/models/{REPO}/tree/{REVISION}(/(?P<folder>.+))?": Hub.tree,
    f"(GET|HEAD) /{REPO}/resolve/{REVISION}/(?P<path>.+)": Hub.resolve,
}
