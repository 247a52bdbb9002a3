"""A stand-in for the Hub on 127.0.0.1: repositories in memory, one write token, and faults on request.

For a repository whose name contains "cut", the connection closes in the middle of a commit.
"""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlparse

import yaml

TOKEN = "hf_may_write"


class Hub:
    """State of the server: the files of every repository, and the paths of every commit."""

    def __init__(self):
        self.files: dict[str, dict[str, bytes]] = {}
        self.commits: dict[str, list[list[str]]] = {}
        self.private: dict[str, bool] = {}

    def sha(self, repo):
        return hashlib.sha1(repr(self.commits[repo]).encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args):
        pass

    def answer(self, status, content=b"", headers=None):
        if not isinstance(content, bytes):
            content, headers = json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})}
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def refused(self):
        """Answer 401 unless the write token came with the request."""
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return False
        self.body()
        self.answer(401, {"error": "Invalid credentials in Authorization header"})
        return True

    def do_POST(self):
        path = urlparse(self.path).path
        if path == "/api/validate-yaml":
            return self.validate(json.loads(self.body()))
        if self.refused():
            return None
        if path == "/api/repos/create":
            return self.create(json.loads(self.body()))
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main", path)
        if match is None or match[1] not in self.hub.files:
            return self.answer(404, {"error": "Not found"}, {"X-Error-Code": "RepoNotFound"})
        if match[2] == "commit":
            return self.commit(match[1])
        requested = json.loads(self.body())["files"]
        modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in requested]
        return self.answer(200, {"files": modes})

    def validate(self, request):
        _, block, _ = request["content"].split("---\n", 2)
        try:
            errors = [] if isinstance(yaml.safe_load(block), dict) else [{"message": "no mapping"}]
        except yaml.YAMLError as error:
            errors = [{"message": str(error)}]
        self.answer(400 if errors else 200, {"errors": errors, "warnings": []})

    def create(self, request):
        repo = f"{request.get('organization') or 'me'}/{request['name']}"
        address = f"http://{self.headers['Host']}/{repo}"
        if repo in self.hub.files:
            return self.answer(409, {"error": "You already created this model repo", "url": address})
        self.hub.files[repo], self.hub.commits[repo] = {".gitattributes": b""}, []
        self.hub.private[repo] = request.get("private") or request.get("visibility") == "private"
        return self.answer(200, {"url": address, "name": repo})

    def commit(self, repo):
        if "cut" in repo:
            self.rfile.read(int(self.headers.get("Content-Length", 0)) // 2)
            self.close_connection = True
            self.connection.close()
            return
        changed = dict(self.hub.files[repo])
        lines = [json.loads(line) for line in self.body().splitlines() if line]
        for line in lines:
            if line["key"] == "file":
                changed[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "deletedFile":
                del changed[line["value"]["path"]]
        self.hub.files[repo] = changed
        self.hub.commits[repo].append([line["value"]["path"] for line in lines if line["key"] != "header"])
        sha = self.hub.sha(repo)
        self.answer(
            200, {"success": True, "commitOid": sha, "commitUrl": f"http://{self.headers['Host']}/{repo}/commit/{sha}"}
        )

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        parsed = urlparse(self.path)
        match = re.fullmatch(r"(?:/api/models)?/([^/]+/[^/]+)(?:/(tree|resolve|revision)/[^/]+)?/?(.*)", parsed.path)
        repo = match[1] if match else None
        if repo not in self.hub.files:
            return self.answer(404, {"error": "Not found"}, {"X-Error-Code": "RepoNotFound"})
        files, sha, rest = self.hub.files[repo], self.hub.sha(repo), match[3]
        if match[2] == "resolve":
            if rest not in files:
                return self.answer(404, {"error": "Not found"}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
            etag = hashlib.sha1(files[rest]).hexdigest()
            return self.answer(200, files[rest], {"ETag": f'"{etag}"', "X-Repo-Commit": sha})
        if match[2] == "tree":
            recursive = parse_qs(parsed.query).get("recursive", ["false"])[0].lower() in ("true", "1")
            names = [name for name in files if name.startswith(rest) and (recursive or "/" not in name)]
            if rest and not names:
                return self.answer(404, {"error": "Not found"}, {"X-Error-Code": "EntryNotFound"})
            listed = [
                {"type": "file", "path": name, "size": len(files[name]), "oid": hashlib.sha1(files[name]).hexdigest()}
                for name in names
            ]
            return self.answer(200, listed)
        siblings = [{"rfilename": name} for name in files]
        info = {"id": repo, "modelId": repo, "sha": sha, "siblings": siblings, "private": self.hub.private[repo]}
        return self.answer(200, {**info, "tags": [], "downloads": 0, "likes": 0})


@contextmanager
def serve():
    """A running server: its address and its `Hub`."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
