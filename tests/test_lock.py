"""requirements.lock, which `make test` and `make demo` install from: complete, and of the pinned versions."""

import importlib.util
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("lock", ROOT / ".ci" / "lock.py")
lock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lock)

PINS = lock.pins((ROOT / "constraints.txt").read_text())


def entries() -> dict[str, tuple[str, list[str]]]:
    text = (ROOT / "requirements.lock").read_text()
    found = re.findall(r"^([a-z0-9-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", text, re.MULTILINE)
    return {name: (version, re.findall(r"[0-9a-f]{64}", digests)) for name, version, digests in found}


def test_every_pin_but_torch_is_locked_with_hashes_and_nothing_else():
    found = entries()
    assert {name: version for name, (version, _) in found.items()} | {"torch": PINS["torch"]} == PINS
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == sum(1 + len(digests) for _, digests in found.values()), "a line that is no pin and no hash"


def test_everything_that_the_package_needs_is_pinned():
    """To run, to be developed, and to be built: the installation does not look for dependencies by itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["dev"]]
    for requirement in map(Requirement, [*needed, *project["build-system"]["requires"]]):
        version = PINS.get(lock.normalized(requirement.name))
        assert version is not None, f"{requirement.name} is not in constraints.txt"
        assert requirement.specifier.contains(version, prereleases=True), str(requirement)


def test_the_installation_checks_hashes():
    recipe = (ROOT / "Makefile").read_text()
    assert "--require-hashes --no-deps -r requirements.lock" in recipe
    assert "--no-deps --no-build-isolation -e ." in recipe


def test_the_files_of_one_version_are_found_on_a_page_of_the_index():
    digests = ["a" * 64, "b" * 64, "c" * 64, "d" * 64]
    names = ["my_pkg-1.0-py3-none-any.whl", "my-pkg-1.0.tar.gz", "my_pkg-1.0.1-py3-none-any.whl", "my_pkg-1.0.exe"]
    page = "".join(
        f'<a href="https://host/{name}#sha256={digest}" data-requires-python="&gt;=3.11">{name}</a><br/>\n'
        for name, digest in zip(names, digests, strict=True)
    )
    assert lock.hashes(page, "my-pkg", "1.0") == digests[:2]
    assert lock.pins("My_Pkg==1.0  # why\n\n# nothing\nb==2\n") == {"my-pkg": "1.0", "b": "2"}
