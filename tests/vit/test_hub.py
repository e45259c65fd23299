"""Loading from the Hugging Face hub, replaced by a stub: downloads, cache and error messages."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from sightline.vit.weights import load_backbone

from ..conftest import small_vit
from ..weight_files import assert_same_bits, in_shards, stored

COMMIT = "0123456789abcdef0123456789abcdef01234567"
INDEX = {"file": "model.safetensors.index.json"}
LICENCE = "requires accepting its licence there and logging in with `hf auth login`$"
OFFLINE = (
    r"is neither cached nor reachable: download it while online, use a weights FILE or sightline-nano .*pretrain.*$"
)
LOADS = {"pinned": {"revision": COMMIT}, "newest": {}, "sharded": INDEX}
ERRORS_ONLINE = {  # the backbone's settings, and the error online
    "gated-401": ({}, LICENCE),
    "gated-403": ({}, LICENCE),
    "private": ({}, "does not exist or is private; for a private one log in with `hf auth login`$"),
    "down": ({}, OFFLINE),
    "no-revision": ({"revision": COMMIT, "requested": "v9"}, "has no revision v9$"),
    "no-file": ({"revision": COMMIT}, r"has no model\.safetensors$"),
    "no-shard": (INDEX, r"has no b\.safetensors$"),
    "no-index": (INDEX, "not an index of safetensors shards"),
    "cut": ({}, r"could not be downloaded \(.+\)$"),
}
ERRORS = {  # the stub's status and X-Error-Code
    "gated-401": (401, "GatedRepo"),
    "gated-403": (403, "GatedRepo"),
    "private": (401, "RepoNotFound"),
    "down": (500, ""),
}
CASES = LOADS | {case: settings for case, (settings, _) in ERRORS_ONLINE.items()}
LOADER = """
import json, sys, time
from dataclasses import asdict
from pathlib import Path
time.sleep = lambda seconds: None  # between the hub's retries
from sightline.vit.backbones import BACKBONES, BY_REPOSITORY, Backbone
from sightline.errors import UserError
from sightline.vit.weights import config_from_json, load_backbone, save_backbone
config, cases, out = json.load(sys.stdin)
results = {}
for case, settings in cases.items():
    revision, repository = settings.pop("requested", None), f"someone/{case}"
    vit_config = config_from_json(config, "here")
    BACKBONES["tiny"] = BY_REPOSITORY[repository] = Backbone("tiny", vit_config, repository, **settings)
    try:
        vit = load_backbone(repository if case == "newest" else "tiny", revision=revision)
        save_backbone(vit, Path(out, f"{case}.safetensors"))
        results[case] = asdict(vit.origin)
    except UserError as error:
        results[case] = str(error)
print(json.dumps(results))
"""


class StubHub(BaseHTTPRequestHandler):
    """Serves `/someone/{case}/resolve/{revision}/{file}` from a folder per case."""

    def do_HEAD(self):
        self.server.requests.append(f"{self.command} {self.path}")
        _, _, case, _, revision, file = self.path.split("/")
        path = self.server.folder / case / file
        if case in ERRORS:
            status, code = ERRORS[case]
        elif revision not in ("main", COMMIT):
            status, code = 404, "RevisionNotFound"
        else:
            status, code = (200, "") if path.exists() else (404, "EntryNotFound")
        content = path.read_bytes() if status == 200 else b""
        etag = hashlib.sha256(content).hexdigest()
        headers = {"X-Error-Code": code, "X-Repo-Commit": COMMIT, "Content-Length": len(content), "ETag": f'"{etag}"'}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET" and case != "cut":
            self.wfile.write(content)

    do_GET = do_HEAD

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """The results of the loader online and then offline, and its requests."""
    folder = tmp_path_factory.mktemp("hub")
    vit = small_vit()
    for case in CASES:
        (folder / case).mkdir()
        torch.save(vit.state_dict(), folder / case / "pytorch_model.bin")  # must not be read
    for case in ("pinned", "newest", "no-revision", "cut"):
        stored(vit.state_dict(), folder / case / "model.safetensors")
    for case in ("sharded", "no-shard"):
        in_shards(vit, folder / case)
    (folder / "no-shard" / "b.safetensors").unlink()
    (folder / "no-index" / "model.safetensors.index.json").write_text("[]")
    with ThreadingHTTPServer(("127.0.0.1", 0), StubHub) as server:
        server.requests, server.folder, server.vit = [], folder, vit
        threading.Thread(target=server.serve_forever, daemon=True).start()
        server.online = run_loader(server, offline="0")
        server.requests_online = list(server.requests)
        server.offline = run_loader(server, offline="1")
        yield server
        server.shutdown()


def run_loader(server, offline):
    """In a process of its own, because huggingface_hub reads its settings when it is imported."""
    inherited = re.compile("HF_|HUGGING|.*PROXY", re.IGNORECASE)
    kept = {key: value for key, value in os.environ.items() if not inherited.match(key)}
    settings = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(server.folder / "home")}
    settings |= {"HF_HUB_OFFLINE": offline, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    out = server.folder / f"out-{offline}"
    out.mkdir()
    job = json.dumps([json.dumps(asdict(server.vit.config)), CASES, str(out)])
    command = [sys.executable, "-c", LOADER]
    done = subprocess.run(command, input=job, capture_output=True, text=True, env=kept | settings, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", LOADS)
def test_files_are_downloaded_once_and_then_cached(hub, case):
    file, revision = LOADS[case].get("file", "model.safetensors"), LOADS[case].get("revision", "main")
    origin = {"name": "tiny", "file": file, "repository": f"someone/{case}", "revision": COMMIT}
    assert hub.online[case] == hub.offline[case] == origin
    for out in ("out-0", "out-1"):
        assert_same_bits(load_backbone(hub.folder / out / f"{case}.safetensors"), hub.vit)
    files = [f"{revision}/{file}"]
    if case == "sharded":
        files += [f"{COMMIT}/a.safetensors", f"{COMMIT}/b.safetensors"]  # of the index's commit
    expected = [f"{verb} /someone/{case}/resolve/{name}" for name in files for verb in ("HEAD", "GET")]
    assert [request for request in hub.requests_online if f"/{case}/" in request] == expected
    assert hub.requests == hub.requests_online  # none offline


@pytest.mark.parametrize("case", ERRORS_ONLINE)
def test_errors_of_the_hub_are_explained(hub, case):
    assert re.search(ERRORS_ONLINE[case][1], hub.online[case])
    assert "\n" not in hub.online[case]
    assert f"someone/{case}" in hub.online[case] or case == "no-index"


@pytest.mark.parametrize("case", [case for case in ERRORS_ONLINE if case != "no-index"])
def test_offline_without_the_file_in_the_cache(hub, case):
    assert re.fullmatch(f"tiny: someone/{case} on the Hugging Face hub {OFFLINE}", hub.offline[case])


def test_no_pickle_is_ever_requested(hub):
    assert hub.requests
    assert not [request for request in hub.requests if not request.endswith((".safetensors", ".json"))]
