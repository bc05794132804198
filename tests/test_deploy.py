"""The files of deploy/ say nothing that the server does not know: flags, paths, ports, statuses, times."""

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from bulletserve.commands import serve
from bulletserve.server.settings import ServerSettings
from tests.server.conftest import Served, checkpoint, served, standing

DEPLOY = Path(__file__).parents[1] / "deploy"
__all__ = ["checkpoint", "served", "standing"]

STARTS_WITHIN_S = 900
"""For so long `bullet serve` itself waits for its engine."""

GRACE_S = ServerSettings(("x",)).grace_s


def options_of(words: list[str]) -> argparse.Namespace:
    """What `bullet serve` makes of these words; a test fails where it does not know one."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    serve.add_arguments(parser)
    options, unknown = parser.parse_known_args(words)
    assert not unknown
    return options


def instructions(name: str) -> list[tuple[str, str]]:
    """The instructions of a container file, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / name).read_text(), flags=re.M).replace("\\\n", " ")
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in text.splitlines() if line.strip()]


def test_the_container_starts_a_server_that_can_be_reached() -> None:
    found = instructions("Containerfile")
    entry = json.loads(dict(found)["ENTRYPOINT"])
    assert entry[:4] == ["tini", "--", "bullet", "serve"]
    options = options_of([*entry[4:], "model"])
    assert options.host == "0.0.0.0" and options.model == "model"
    assert dict(found)["EXPOSE"] == str(options.port)
    assert f"127.0.0.1:{options.port}/health" in dict(found)["HEALTHCHECK"]
    assert not dict(found)["USER"].startswith("0")
    kinds = [kind for kind, _ in found]
    assert set(kinds) <= {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "USER", "ENV", "VOLUME", "EXPOSE"} | {
        "HEALTHCHECK",
        "STOPSIGNAL",
        "ENTRYPOINT",
    }
    for kind, rest in found:
        if kind == "COPY":
            *sources, _ = rest.split()
            assert all((DEPLOY.parent / source).exists() for source in sources)


def test_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "bullet.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", text, re.M)
    program, subcommand, *words = shlex.split(command)
    assert program.endswith("/bullet") and subcommand == "serve"
    assert [word for word in words if word.startswith("$")] == ["$BULLET_ARGUMENTS", "$BULLET_MODEL"]
    options_of([word for word in words if not word.startswith("$")])
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.M)
    assert int(stop_s) > GRACE_S + 10
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: the unit's words were checked, not its grammar")
    unit = tmp_path / "bullet.service"
    unit.write_text(text.replace(program, str(Path(sys.executable).parent / "bullet")))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False, timeout=60)
    assert "bullet.service" not in done.stderr, done.stderr


@pytest.fixture(scope="module")
def manifest() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def test_the_manifest(manifest: list[dict[str, Any]], served: Served) -> None:
    deployment, service = manifest
    assert (deployment["kind"], service["kind"]) == ("Deployment", "Service")
    spec = deployment["spec"]["template"]["spec"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert service["spec"]["selector"].items() <= labels.items()
    (container,) = spec["containers"]
    entry = json.loads(dict(instructions("Containerfile"))["ENTRYPOINT"])
    options = options_of([*entry[4:], *container["args"]])
    (port,) = container["ports"]
    assert options.port == port["containerPort"] == service["spec"]["ports"][0]["port"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[name]
        assert probe["httpGet"]["port"] == port["name"]
        assert served.http.get(probe["httpGet"]["path"]).status_code == 200
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= STARTS_WITHIN_S
    stop_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] > stop_s + GRACE_S + 10
    uid = dict(instructions("Containerfile"))["USER"].split(":")[0]
    assert spec["securityContext"]["runAsUser"] == int(uid)
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in spec["volumes"]}
