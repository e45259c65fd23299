"""`sightline push` to a stub of the Hugging Face hub: what is published, its visibility, and that it loads again."""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import sightline
from sightline.errors import UserError
from sightline.export.push import without_paths
from sightline.load import check_repository_name

from ..commands import SMALL, typed

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ANSWER = "import sys, sightline; print(sightline.load(sys.argv[1]).predict(sys.argv[2]).logits.tolist())"


class StubHub(BaseHTTPRequestHandler):
    """Takes what is pushed to `someone/...`, and gives it back. `nobody` may not write, `stranger` is not known."""

    def do_POST(self):
        length = self.headers.get("Content-Length")
        body, hub = self.rfile.read(int(length)) if length else self.chunks(), self.server
        hub.asked.append(f"POST {self.path}")
        if self.path == "/api/repos/create":
            payload = json.loads(body)
            owner, name = payload["organization"], payload["name"]
            hub.tokens.append(self.headers.get("Authorization"))
            refused = {"nobody": 403, "stranger": 401}
            if owner in refused:
                return self.reply(refused[owner], {"error": "no"})
            visible = payload.get("visibility") or ("private" if payload.get("private") else "public")
            hub.private.setdefault(f"{owner}/{name}", visible == "private")
            return self.reply(200, {"url": f"{hub.address}/{owner}/{name}"})
        if self.path == "/api/validate-yaml":
            hub.cards.append(json.loads(body)["content"])
            return self.reply(200, {"warnings": [], "errors": []})
        if "/preupload/" in self.path:
            files = [{"path": f["path"], "uploadMode": mode(f["path"]), "shouldIgnore": False, "oid": None}
                     for f in json.loads(body)["files"]]  # fmt: skip
            return self.reply(200, {"files": files})
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = [one | {"actions": {"upload": {"href": f"{hub.address}/upload/{one['oid']}"}}}
                       for one in json.loads(body)["objects"]]  # fmt: skip
            return self.reply(200, {"transfer": "basic", "objects": objects})
        assert "/commit/" in self.path
        name = "/".join(self.path.split("/")[3:5])
        repository = hub.files.setdefault(name, {})
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                repository[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            if entry["key"] == "lfsFile":
                repository[entry["value"]["path"]] = hub.uploads[entry["value"]["oid"]]
        return self.reply(
            200, {"success": True, "commitOid": COMMIT, "commitUrl": f"{hub.address}/{name}/commit/{COMMIT}"}
        )

    def do_PUT(self):
        length = self.headers.get("Content-Length")
        self.server.uploads[self.path.split("/")[-1]] = self.rfile.read(int(length)) if length else self.chunks()
        self.reply(200, {})

    def do_HEAD(self):
        self.server.asked.append(f"{self.command} {self.path}")
        parts = self.path.partition("?")[0].split("/")
        if parts[1] == "api":
            name = "/".join(parts[3:5])
            if name not in self.server.files:
                return self.reply(404, {"error": "none"}, {"X-Error-Code": "RepoNotFound"})
            if "tree" in parts:
                listed = self.server.files[name].items()
                return self.reply(200, [{"type": "file", "path": f, "size": len(c), "oid": "0"} for f, c in listed])
            siblings = [{"rfilename": file} for file in self.server.files[name]]
            private = self.server.private[name]
            return self.reply(200, {"id": name, "sha": COMMIT, "private": private, "siblings": siblings})
        content = self.server.files["/".join(parts[1:3])]["/".join(parts[5:])]
        etag = hashlib.sha256(content).hexdigest()
        return self.reply(200, content, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'})

    do_GET = do_HEAD

    def chunks(self) -> bytes:
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def reply(self, status, content, headers=None):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": len(body)} | (headers or {})).items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


def mode(path: str) -> str:
    return "lfs" if path.endswith((".safetensors", ".onnx")) else "regular"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with ThreadingHTTPServer(("127.0.0.1", 0), StubHub) as server:
        server.address, server.home = f"http://127.0.0.1:{server.server_port}", tmp_path_factory.mktemp("home")
        server.asked, server.tokens, server.cards = [], [], []
        server.files, server.uploads, server.private = {}, {}, {}
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def trained(toy, tmp_path_factory):
    run = tmp_path_factory.mktemp("push") / "birds"
    assert typed("train", "probe", toy, *SMALL, "--size", 32, "--out", run)[0] == 0
    return run


def process(hub, *arguments, **settings):
    """In a process of its own, because huggingface_hub reads its settings when it is imported."""
    foreign = re.compile("HF_|HUGGING|.*PROXY", re.IGNORECASE)
    kept = {key: value for key, value in os.environ.items() if not foreign.match(key)}
    own = {"HF_ENDPOINT": hub.address, "HF_HOME": str(hub.home), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_secret"}
    own |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"} | settings
    own = {name: value for name, value in own.items() if value}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=kept | own, timeout=300)


def pushed(hub, run, name, *flags, **settings):
    return process(hub, "-m", "sightline", "push", run, name, "--limit", 2, *flags, **settings)


@pytest.fixture(scope="module")
def birds(hub, trained):
    done = pushed(hub, trained, "someone/birds")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_is_published_as_private(hub, birds):
    assert hub.private["someone/birds"]
    assert hub.tokens[0] == "Bearer hf_secret"
    assert f"{hub.address}/someone/birds (private)" in birds
    assert 'sightline.load("hf:someone/birds")' in birds


def test_only_what_loading_needs_and_a_card_are_published(hub, birds):
    assert set(hub.files["someone/birds"]) == {"README.md", "best.safetensors", "metrics.json", "run.json"}
    readme = hub.files["someone/birds"]["README.md"].decode()
    assert readme.startswith("---\nlibrary_name: sightline\n")
    assert 'sightline.load("hf:someone/birds")' in readme
    assert hub.cards[0] == readme  # the hub was asked whether it is well-formed


def test_no_path_of_this_machine_is_published(hub, birds, trained, toy):
    facts = json.loads(hub.files["someone/birds"]["run.json"])
    assert facts["data"]["path"] == toy.name
    assert str(toy.parent) not in json.dumps(facts)
    assert str(toy) in (trained / "run.json").read_text()  # but in the run itself


def test_a_published_run_loads_and_predicts_the_same_bits(hub, birds, trained, toy):
    image = next(iter(sorted((toy / "test").glob("*.png"))))
    done = process(hub, "-c", ANSWER, "hf:someone/birds", image, HF_TOKEN="")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == sightline.load(trained).predict(image).logits.tolist()
    before = len(hub.asked)
    again = process(hub, "-c", ANSWER, "hf:someone/birds", image, HF_HUB_OFFLINE="1")
    assert again.stdout == done.stdout
    assert len(hub.asked) == before  # from the cache


def test_a_run_can_be_published_publicly(hub, trained):
    done = pushed(hub, trained, "someone/open", "--public")
    assert done.returncode == 0, done.stderr
    assert not hub.private["someone/open"]
    assert "(public)" in done.stdout


@pytest.mark.parametrize(
    ("name", "settings", "complaint"),
    [
        ("nobody/birds", {}, "nobody/birds on the Hugging Face Hub: your token lacks the permission; log in"),
        ("stranger/birds", {}, "stranger/birds on the Hugging Face Hub: your token is not accepted; log in"),
        ("someone/birds", {"HF_TOKEN": ""}, "someone/birds: you are not logged in to the Hugging Face Hub; log in"),
        ("someone/birds", {"HF_HUB_OFFLINE": "1"}, "cannot be reached while HF_HUB_OFFLINE is set"),
        ("birds", {}, "birds: not a repository name; use OWNER/NAME"),
    ],
)
def test_an_error_of_the_hub_is_one_line(hub, trained, name, settings, complaint):
    done = pushed(hub, trained, name, **settings)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "hf_secret" not in done.stderr


def test_a_missing_repository_cannot_be_loaded(hub):
    done = process(hub, "-c", ANSWER, "hf:someone/nothing", "x.png")
    assert "someone/nothing on the Hugging Face Hub: does not exist, or is private" in done.stderr


def test_an_onnx_file_of_other_weights_is_not_published(hub, trained, tmp_path):
    import shutil

    run = shutil.copytree(trained, tmp_path / "run")
    (run / "onnx").mkdir()
    (run / "onnx" / "model.json").write_text('{"weights_sha256": "other"}')
    code, _, errors = typed_as_logged_in("push", run, "someone/birds")
    assert code == 2
    assert "was exported from other weights than the run's; export again" in errors


def typed_as_logged_in(*arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "hf_secret")
        return typed(*arguments)


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("/home/someone/data/birds", "birds"),
        ("found:/home/someone/vit.safetensors", "found:vit.safetensors"),
        ("C:\\Users\\someone\\birds", "birds"),
        ("random:nano", "random:nano"),
        ("3/7", "3/7"),
        ({"a": ["/x/y", 3, None]}, {"a": ["y", 3, None]}),
    ],
)
def test_only_the_last_component_of_a_path_is_published(given, left):
    assert without_paths(given) == left


@pytest.mark.parametrize("name", ["birds", "a/b/c", "a/b c", "-a/b", ""])
def test_odd_names_are_refused(name):
    with pytest.raises(UserError, match="OWNER/NAME"):
        check_repository_name(name)
