"""A stub in the place of the Hugging Face hub: what is fetched, what is cached, what is said when it cannot be had."""

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

HUB = pytest.mark.xdist_group("hub")  # its two processes run once
COMMIT = "0123456789abcdef0123456789abcdef01234567"
INDEX = {"file": "model.safetensors.index.json"}
LICENCE = "asks you to accept its licence there and to log in with `hf auth login`$"
OFFLINE = "is neither in the local cache nor reachable: download it once while online, or give a file$"
LOADS = {"pinned": {"revision": COMMIT}, "newest": {}, "sharded": INDEX}
REFUSES = {  # the known backbone, and what is said of it online
    "gated-401": ({}, LICENCE),
    "gated-403": ({}, LICENCE),
    "private": ({}, "does not exist, or is private: then log in with `hf auth login`$"),
    "down": ({}, OFFLINE),
    "no-revision": ({"revision": COMMIT, "asked": "v9"}, "has no revision v9$"),
    "no-file": ({"revision": COMMIT}, r"has no model\.safetensors$"),
    "no-shard": (INDEX, r"has no b\.safetensors$"),
    "no-index": (INDEX, "not an index of safetensors shards"),
    "cut": ({}, r"could not be fetched \(.+\)$"),
}
ERRORS = {  # the stub's status and X-Error-Code
    "gated-401": (401, "GatedRepo"),
    "gated-403": (403, "GatedRepo"),
    "private": (401, "RepoNotFound"),
    "down": (500, ""),
}
CASES = LOADS | {case: known for case, (known, _) in REFUSES.items()}
LOADER = """
import json, sys, time
from dataclasses import asdict
from pathlib import Path
time.sleep = lambda seconds: None  # between the hub's retries
from sightline.vit.backbones import BY_REPOSITORY, KNOWN, Known
from sightline.errors import UserError
from sightline.vit.weights import config_from_json, load_backbone, save_backbone
config, cases, out = json.load(sys.stdin)
answers = {}
for case, known in cases.items():
    asked, repository = known.pop("asked", None), f"someone/{case}"
    KNOWN["tiny"] = BY_REPOSITORY[repository] = Known("tiny", config_from_json(config, "here"), repository, **known)
    try:
        vit = load_backbone(repository if case == "newest" else "tiny", revision=asked)
        save_backbone(vit, Path(out, f"{case}.safetensors"))
        answers[case] = asdict(vit.origin)
    except UserError as error:
        answers[case] = str(error)
print(json.dumps(answers))
"""


class StubHub(BaseHTTPRequestHandler):
    """Serves `/someone/{case}/resolve/{revision}/{file}` from a folder per case."""

    def do_HEAD(self):
        self.server.asked.append(f"{self.command} {self.path}")
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
    """What the loader answered online and then offline, and what it asked for."""
    folder = tmp_path_factory.mktemp("hub")
    vit = small_vit()
    for case in CASES:
        (folder / case).mkdir()
        torch.save(vit.state_dict(), folder / case / "pytorch_model.bin")  # to be left alone
    for case in ("pinned", "newest", "no-revision", "cut"):
        stored(vit.state_dict(), folder / case / "model.safetensors")
    for case in ("sharded", "no-shard"):
        in_shards(vit, folder / case)
    (folder / "no-shard" / "b.safetensors").unlink()
    (folder / "no-index" / "model.safetensors.index.json").write_text("[]")
    with ThreadingHTTPServer(("127.0.0.1", 0), StubHub) as server:
        server.asked, server.folder, server.vit = [], folder, vit
        threading.Thread(target=server.serve_forever, daemon=True).start()
        server.online = ask_loader(server, offline="0")
        server.asked_online = list(server.asked)
        server.offline = ask_loader(server, offline="1")
        yield server
        server.shutdown()


def ask_loader(server, offline):
    """In a process of its own, because huggingface_hub reads its settings when it is imported."""
    foreign = re.compile("HF_|HUGGING|.*PROXY", re.IGNORECASE)
    kept = {key: value for key, value in os.environ.items() if not foreign.match(key)}
    settings = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(server.folder / "home")}
    settings |= {"HF_HUB_OFFLINE": offline, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    out = server.folder / f"out-{offline}"
    out.mkdir()
    job = json.dumps([json.dumps(asdict(server.vit.config)), CASES, str(out)])
    command = [sys.executable, "-c", LOADER]
    done = subprocess.run(command, input=job, capture_output=True, text=True, env=kept | settings, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@HUB
@pytest.mark.parametrize("case", LOADS)
def test_the_hub_is_asked_once_and_then_the_cache(hub, case):
    file, revision = LOADS[case].get("file", "model.safetensors"), LOADS[case].get("revision", "main")
    origin = {"name": "tiny", "file": file, "repository": f"someone/{case}", "revision": COMMIT}
    assert hub.online[case] == hub.offline[case] == origin
    for out in ("out-0", "out-1"):
        assert_same_bits(load_backbone(hub.folder / out / f"{case}.safetensors"), hub.vit)
    files = [f"{revision}/{file}"]
    if case == "sharded":
        files += [f"{COMMIT}/a.safetensors", f"{COMMIT}/b.safetensors"]  # of the index's commit, whatever is newest now
    asked = [f"{verb} /someone/{case}/resolve/{name}" for name in files for verb in ("HEAD", "GET")]
    assert [request for request in hub.asked_online if f"/{case}/" in request] == asked
    assert hub.asked == hub.asked_online  # and nothing offline


@HUB
@pytest.mark.parametrize("case", REFUSES)
def test_what_the_hub_refuses_is_explained(hub, case):
    assert re.search(REFUSES[case][1], hub.online[case])
    assert "\n" not in hub.online[case]
    assert f"someone/{case}" in hub.online[case] or case == "no-index"


@HUB
@pytest.mark.parametrize("case", [case for case in REFUSES if case != "no-index"])
def test_offline_without_the_file_in_the_cache(hub, case):
    assert re.fullmatch(f"tiny: someone/{case} on the Hugging Face hub {OFFLINE}", hub.offline[case])


@HUB
def test_no_pickle_is_ever_asked_for(hub):
    assert hub.asked
    assert not [request for request in hub.asked if not request.endswith((".safetensors", ".json"))]
