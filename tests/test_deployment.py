"""Compose file, Dockerfile and units agree with the code; no container engine is needed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.private_server import free_port, require_program
from support.processes import Process, Processes
from support.processes import command_of as running_command

from ddrl.cli import COMMANDS
from ddrl.store import connection
from ddrl.store.server import server_binary

ROOT = Path(__file__).parents[1]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
UNITS = {path.stem: path.read_text("utf-8") for path in ROOT.glob("workers/*.service")}
DOCKERFILE = (ROOT / "workers" / "Dockerfile").read_text("utf-8")
KUBERNETES = ROOT / "deploy" / "kubernetes"
MANIFESTS = {
    (one["kind"], one["metadata"]["name"]): one
    for file in sorted(KUBERNETES.glob("*/*.yaml"))
    if file.name != "kustomization.yaml"
    for one in yaml.safe_load_all(file.read_text("utf-8"))
}
PODS = {
    name: one["spec"]["template"]["spec"] for (_, name), one in MANIFESTS.items() if "template" in one["spec"]
}
SLURM = ROOT / "deploy" / "slurm"
OTHERS = {"redis", "prometheus", "grafana"}
OWN_SERVICES = {name: service for name, service in SERVICES.items() if name not in OTHERS}  # run ddrl's image
ELSEWHERE = {"HOME", "REDISCLI_AUTH", "MAXMEMORY", "FLOWER_BASIC_AUTH"}  # read by other programs
BARE = {"PATH": os.environ["PATH"]}  # without the variables that `make test` sets
README = (ROOT / "workers" / "README.md").read_text("utf-8")
PINNED = re.compile(r"[a-z0-9./-]+:v?\d+\.\d+\.\d+[a-z0-9.-]*")
SCRIPTS = "|".join(script.name for script in ROOT.glob("workers/*.py"))
START = rf"(python workers/({SCRIPTS})|celery -A ddrl (worker|flower)|ddrl ({'|'.join(COMMANDS)}))"
SECRET = re.compile(r"PASSWORD|SECRET|TOKEN|AUTH|URL")


def run(command: str, *, cwd: Path = ROOT, env: Mapping[str, str] = BARE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command.split(), cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


def command_of(service: dict[str, Any]) -> str:
    """Return the command line that a service runs in the end."""
    command = [*service.get("entrypoint", []), *service.get("command", [])]
    line = re.search(r"^exec (.+)$", command[-1], re.MULTILINE)
    return line[1] if line else " ".join(command)


def is_start(command: str) -> bool:
    """Return whether a command line starts something that this project has."""
    return re.match(rf"(\S*/)?{START}( |$)", command) is not None


def filled_in(text: str, variables: Mapping[str, str]) -> str:
    """Return a value of the compose file as a container gets it: variables or their defaults, and `$$` as `$`."""

    def value(match: re.Match[str]) -> str:
        braced, mark, default, plain = match.groups()
        if match[0] == "$$":
            return "$"
        return variables[braced or plain] if mark != "-" else variables.get(braced) or default

    return re.sub(r"\$\$|\$\{(\w+):([?-])([^}]*)\}|\$(\w+)", value, text)


def options_of(unit: str) -> dict[str, str]:
    """Return the section "Service" of a systemd unit; of an option that stands twice the last one."""
    section = UNITS[unit].partition("[Service]\n")[2].partition("\n[")[0]
    return dict(re.findall(r"^(\w+)=(.*)$", section, re.MULTILINE))


def test_these_checks_can_fail() -> None:
    images = ("redis", "redis:latest", "redis:7", "redis:7.4.5-alpine")
    assert [image for image in images if PINNED.fullmatch(image)] == ["redis:7.4.5-alpine"]
    lines = ("python workers/nobody.py", "ddrl dance", "celery -A other worker", "ddrl submit x")
    assert [line for line in lines if is_start(line)] == ["ddrl submit x"]


def test_commands_exist() -> None:
    commands = [command_of(service) for service in OWN_SERVICES.values()]
    commands += [options_of(unit)["ExecStart"] for unit in UNITS]
    commands += [" ".join(yaml.safe_load(line)) for line in re.findall(r"\nCMD (.+)\n", DOCKERFILE)]
    commands += [" ".join(pod["containers"][0]["command"]) for name, pod in PODS.items() if name != "server"]
    assert len(commands) >= 12
    assert [command for command in commands if not is_start(command)] == []


def test_every_role_has_a_service_a_unit_and_a_line_in_the_readme() -> None:
    started = {command_of(service).split()[1] for service in OWN_SERVICES.values()}
    assert {"workers/rollout.py", "workers/evaluation.py", "workers/learner.py"} <= started
    assert set(UNITS) == {"ddrl-rollout@", "ddrl-evaluation", "ddrl-learner"}
    assert all(f"`python workers/{role}.py" in README for role in ("rollout", "evaluation", "learner"))


def test_variables_that_are_set_are_read_by_the_code() -> None:
    given = {name for service in SERVICES.values() for name in service.get("environment", {})}
    given |= set(re.findall(r"\nEnvironment=(\w+)=", "".join(UNITS.values())))
    given |= set(re.findall(r"`(DDRL_\w+)`", README))
    files = [*ROOT.glob("ddrl/**/*.py"), *ROOT.glob("workers/*.py")]
    code = "\n".join(file.read_text("utf-8") for file in files)
    assert "DDRL_REDIS_URL" in given
    given = {name for name in given - ELSEWHERE if not name.startswith("GF_")}
    assert [name for name in given if f'"{name}"' not in code] == []


def test_files_hold_no_secret() -> None:
    for name, service in SERVICES.items():
        for variable, value in service.get("environment", {}).items():
            if SECRET.search(variable) and value != "false":
                assert "${" in str(value), f"{name}: {variable}"
                assert re.sub(r"\$\{[^}]*\}", "", str(value)) in ("", "redis://:@redis:6379/0")
    for text in (*UNITS.values(), DOCKERFILE):
        assert not re.search(r"(PASSWORD|TOKEN|SECRET)\s*=\s*\S", text)
    assert "EnvironmentFile=/etc/ddrl/env" in "".join(UNITS.values())


def test_the_server_is_safe_and_durable() -> None:
    server = SERVICES["redis"]
    settings = ("appendonly yes", "maxmemory-policy noeviction", "requirepass $$REDISCLI_AUTH")
    assert all(setting in server["command"][-1] for setting in settings)
    assert ":?" in server["environment"]["REDISCLI_AUTH"]
    assert "ports" not in server and "healthcheck" in server and server["volumes"] == ["redis:/data"]


def test_the_services_train_a_run_as_written(processes: Processes) -> None:
    """With the containers' commands and variables, but the server's program and addresses of this machine."""
    require_program()
    given = {"DDRL_REDIS_PASSWORD": "aLongWord", "DDRL_PROCESSES": "1"}
    with tempfile.TemporaryDirectory(prefix="ddrl-t", dir="/tmp") as name:  # a socket's path is short
        programs, home = Path(name), processes.folder
        url = f"unix://:aLongWord@{programs}/s"
        (home / "workers").symlink_to(ROOT / "workers")
        server = programs / "redis-server"
        server.write_text(f'#!/bin/sh\nexec {server_binary()} "$@" --port 0 --unixsocket {programs}/s\n')
        server.chmod(0o755)

        def start(service: str, *arguments: str) -> Process:
            words = [*SERVICES[service].get("entrypoint", []), *(arguments or SERVICES[service]["command"])]
            command = [filled_in(word, given).replace("--dir /data", f"--dir {name}") for word in words]
            variables = SERVICES[service]["environment"].items()
            environment = {name: filled_in(text, given) for name, text in variables}
            path = f"{programs}:{Path(sys.executable).parent}:{BARE['PATH']}"
            environment |= {"PATH": path, "HOME": os.environ["HOME"]}
            environment |= {"DDRL_REDIS_URL": url, "DDRL_METRICS": f"127.0.0.1:{free_port()}"}
            log = home / f"{service}.log"
            processes.started.append(Process(service, command, home, environment, log))
            return processes.started[-1]

        started = {"redis": start("redis")}
        with connection.connect(url) as client:
            processes.until((programs / "s").exists)
            connection.check(client)
            settings = client.config_get("maxmemory", "appendonly", "appendfsync")
            assert settings == {"maxmemory": str(2 * 1024**3), "appendonly": "yes", "appendfsync": "no"}
        with connection.connect(f"unix://{programs}/s") as client, pytest.raises(connection.StoreError):
            connection.check(client)
        assert "aLongWord" not in running_command(started["redis"].pid)
        started |= {name: start(name) for name in ("learner", "rollout", "evaluation")}
        submit = start("submit", str(processes.config()))
        assert submit.wait() == 0 and "solved" in submit.text(), processes.logs()
        (folder,) = (home / "runs").iterdir()
        assert (folder / "policy.safetensors").exists()
        for name, process in reversed(started.items()):
            process.terminate()
            assert process.wait(float(SERVICES[name]["stop_grace_period"].rstrip("s"))) == 0, processes.logs()


def test_published_ports_are_on_the_loopback_and_require_a_login() -> None:
    ports = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert ports == {"flower": ["127.0.0.1:5555:5555"], "grafana": ["127.0.0.1:3000:3000"]}
    for start, refusal in (
        (SERVICES["flower"]["command"], "FLOWER_BASIC_AUTH: set it to user:password"),
        (SERVICES["grafana"]["entrypoint"], "GF_SECURITY_ADMIN_PASSWORD: set GRAFANA_PASSWORD"),
    ):
        command = [filled_in(word, {}) for word in start]
        done = subprocess.run(command, env=BARE, capture_output=True, text=True, timeout=60)
        assert done.returncode != 0 and refusal in done.stderr
    assert SERVICES["grafana"]["environment"]["GF_AUTH_ANONYMOUS_ENABLED"] == "false"
    assert all(SERVICES[name]["profiles"] == ["monitoring"] for name in ("flower", "grafana", "prometheus"))
    assert "UNAUTHENTICATED" not in str(COMPOSE)


def test_prometheus_finds_every_role_where_it_serves() -> None:
    config = yaml.safe_load((ROOT / "workers" / "prometheus.yml").read_text("utf-8"))
    sources = [source for job in config["scrape_configs"] for source in job["dns_sd_configs"]]
    found = {(name, source["port"]) for source in sources for name in source["names"]}
    port = int(SERVICES["learner"]["environment"]["DDRL_METRICS"].rpartition(":")[2])
    assert found == {(name, port) for name in ("learner", "learner-gpu", "rollout", "evaluation")}
    assert all(SERVICES[name]["environment"]["DDRL_METRICS"] == f"0.0.0.0:{port}" for name, _ in found)


def test_mounted_files_are_there_and_volumes_declared() -> None:
    mounts = [mount for service in SERVICES.values() for mount in service.get("volumes", ())]
    files = [mount for mount in mounts if mount.startswith("./")]
    assert len(files) == 4 and all(mount.endswith(":ro") for mount in files)
    assert all((ROOT / mount.split(":")[0]).is_file() for mount in files)
    assert {mount.split(":")[0] for mount in mounts if mount not in files} == set(COMPOSE["volumes"])
    dashboards = yaml.safe_load((ROOT / "workers" / "grafana" / "dashboards.yml").read_text("utf-8"))
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{dashboards['providers'][0]['options']['path']}/ddrl.json"
    assert home in [mount.split(":")[1] for mount in files]


def test_compose_accepts_the_file() -> None:
    with_plugin = shutil.which("docker") and not run("docker compose version").returncode
    program = "docker compose" if with_plugin else shutil.which("docker-compose")
    if program is None:
        pytest.skip("no docker compose")
    command = f"{program} --profile gpu --profile monitoring --profile tools config --quiet"
    assert run(command, env={**BARE, "DDRL_REDIS_PASSWORD": ""}).returncode != 0
    done = run(command, env={**BARE, "DDRL_REDIS_PASSWORD": "x"})
    assert done.returncode == 0, done.stderr


def test_services_wait_for_the_server_and_end_in_order() -> None:
    assert all({"stop_grace_period", "restart"} <= service.keys() for service in SERVICES.values())
    needs = {"redis": {"condition": "service_healthy"}}
    assert all(service["depends_on"] == needs for service in OWN_SERVICES.values())
    assert SERVICES["learner-gpu"]["profiles"] == ["gpu"]
    (device,) = SERVICES["learner-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"] and "deploy" not in SERVICES["learner"]


def test_another_up_keeps_the_number_of_rollout_workers() -> None:
    """`--scale` holds for one command: the next `up`, such as the one for monitoring, would undo it."""
    assert SERVICES["rollout"]["deploy"] == {"replicas": "${DDRL_ROLLOUTS:-1}"}
    assert not re.search(r"^#.*--scale", (ROOT / "docker-compose.yml").read_text("utf-8"), re.MULTILINE)


def test_images_are_pinned_and_ours_does_not_run_as_root_and_copies_files_that_exist() -> None:
    (base,) = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    images = [base, *(service["image"] for service in SERVICES.values())]
    assert all(map(PINNED.fullmatch, images))
    copied = " ".join(re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE)).split()
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    assert all((ROOT / name).exists() for name in copied) and set(copied) == kept
    arguments = dict(re.findall(r"^ARG (\w+)=(.*)$", DOCKERFILE, re.MULTILINE))
    for name, service in OWN_SERVICES.items():  # `up --build` builds for other environments, too
        given = {argument: filled_in(value, {}) for argument, value in service["build"]["args"].items()}
        assert given == arguments | ({"EXTRAS": "flower"} if name == "flower" else {})
    assert "-c constraints.txt" in DOCKERFILE and re.search(r"^USER ddrl$", DOCKERFILE, re.MULTILINE)


@pytest.mark.parametrize("unit", UNITS)
def test_units_restart_end_in_order_and_limit_what_they_may_do(unit: str) -> None:
    service = options_of(unit)
    expected = {"Restart": "always", "KillSignal": "SIGTERM", "User": "ddrl", "LimitCORE": "0"}
    expected |= {"NoNewPrivileges": "yes", "ProtectSystem": "strict"}
    assert {name: service[name] for name in expected} == expected
    assert int(service["TimeoutStopSec"]) > 0 and int(service["TasksMax"]) > 0
    assert service["MemoryMax"].endswith("%")
    keeps_going = unit != "ddrl-learner"  # the worker survives a process of its pool that is killed
    assert service.get("OOMPolicy") == ("continue" if keeps_going else None)
    assert (int(service["OOMScoreAdjust"]) > 0) == keeps_going


def test_the_learner_may_list_the_addresses_of_its_machine() -> None:
    """By netlink, as gloo does where several learners meet."""
    assert "AF_NETLINK" in options_of("ddrl-learner")["RestrictAddressFamilies"].split()


def test_units_serve_metrics_on_ports_of_their_own() -> None:
    pattern = re.compile(r"^Environment=DDRL_METRICS=127\.0\.0\.1:(946[456])$", re.MULTILINE)
    ports = [port for unit in UNITS for port in pattern.findall(UNITS[unit])]
    assert len(ports) == len(set(ports)) == len(UNITS)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    files = [tmp_path / f"{unit}.service" for unit in UNITS]
    for file, text in zip(files, UNITS.values(), strict=True):
        file.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE))
    done = run(" ".join(["systemd-analyze", "verify", *map(str, files)]))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("role", ["rollout", "evaluation"])
def test_role_scripts_start_no_worker_when_imported(role: str) -> None:
    """The processes of the pool import the main file again."""
    code = f"import runpy; runpy.run_path('workers/{role}.py', run_name='__mp_main__')"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_setup_adds_extras_to_a_set_up_clone(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy2(ROOT / name, tmp_path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".set-up").touch()
    assert "Nothing to be done" in run("make --dry-run setup", cwd=tmp_path).stdout
    assert "-e '.[mujoco]'" in run("make --dry-run setup EXTRAS=mujoco", cwd=tmp_path).stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_refuses_an_old_python(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    done = run("make setup PYTHON=false", cwd=tmp_path)  # a program that fails, as an old one does
    assert done.returncode != 0 and "older than Python 3.11" in done.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(
    ("target", "variables", "submitted"),
    [
        ("lunar", {"TIME": "15", "WORKERS": "3", "SEED": "2"}, "lunar --time 15m --workers 3 --seed 2"),
        ("run_lunar", {"TIME": "15", "NWORKERS": "3"}, "lunar --time 15m --workers 3"),
        ("run_cartpole", {"TIME": "90s"}, "cartpole --time 90s"),
        ("run_acrobot run_mountaincar", {}, "acrobot .venv/bin/ddrl submit mountaincar"),
        ("run", {"CONFIG": "own.yaml"}, "own.yaml"),
    ],
)
def test_make_starts_presets_and_passes_its_variables_on(
    target: str, variables: dict[str, str], submitted: str
) -> None:
    done = run(f"make --dry-run --old-file=.venv/.set-up {target}", env={**BARE, **variables})
    line = " ".join(done.stdout.replace("\\\n", " ").split())
    assert line == f".venv/bin/ddrl submit {submitted}"
    help_ = run("make help").stdout
    assert all(f"run_{name}" in help_ for name in ("lunar", "cartpole", "acrobot", "mountaincar"))


SCALED_OBJECT = {  # the part in use of KEDA's custom resource definition, version 2.17
    "spec": {"scaleTargetRef", "minReplicaCount", "maxReplicaCount", "pollingInterval", "cooldownPeriod"}
    | {"fallback", "triggers"},
    "fallback": {"failureThreshold", "replicas", "behavior"},
    "metrics-api": {"url", "format", "valueLocation", "targetValue"},
}


@pytest.mark.parametrize("version", ["1.28", "1.34"])
def test_kubernetes_accepts_the_manifests(version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    plain = [one for (kind, _), one in MANIFESTS.items() if kind != "ScaledObject"]
    assert len(plain) == 7
    for manifest in plain:
        kubernetes_validate.validate(manifest, version, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**plain[0], "sepc": {}}, version, strict=True)


def test_the_scaler_reads_the_gauge_of_the_learner() -> None:
    scaled, rollout = MANIFESTS["ScaledObject", "rollout"]["spec"], PODS["rollout"]["containers"][0]
    assert set(scaled) <= SCALED_OBJECT["spec"] and set(scaled["fallback"]) <= SCALED_OBJECT["fallback"]
    assert ("Deployment", scaled["scaleTargetRef"]["name"]) in MANIFESTS
    (trigger,) = scaled["triggers"]
    metadata = trigger["metadata"]
    assert set(metadata) == SCALED_OBJECT[trigger["type"]]
    assert all(isinstance(value, str) for value in metadata.values())
    (port,) = MANIFESTS["Service", "learner"]["spec"]["ports"]
    assert metadata["url"] == f"http://learner.ddrl:{port['port']}/metrics"
    variables = {one["name"]: one.get("value") for one in rollout["env"]}
    assert metadata["targetValue"] == variables["DDRL_PROCESSES"] == rollout["resources"]["limits"]["cpu"]
    assert f'"{metadata["valueLocation"]}"' in (ROOT / "ddrl/runs/monitoring.py").read_text("utf-8")


def test_pods_hold_no_secret_and_may_do_little() -> None:
    assert set(PODS) == {"server", "learner", "rollout", "evaluation"}
    for name, pod in PODS.items():
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        for variable in container["env"]:
            secret = variable.get("valueFrom", {}).get("secretKeyRef")
            assert secret == {"name": "ddrl", "key": "password"} or "PASSWORD" not in variable["name"]
        if name == "server":
            assert "maxmemory-policy noeviction" in container["command"][-1]
            assert container["image"] == SERVICES["redis"]["image"]
        else:
            assert {
                "name": "DDRL_REDIS_URL",
                "value": "redis://:$(DDRL_REDIS_PASSWORD)@server:6379/0",
            } in container["env"]
            assert pod["terminationGracePeriodSeconds"] == int(
                SERVICES[name].get("stop_grace_period", "90s")[:-1]
            )


@pytest.mark.parametrize("folder", ["base", "autoscaled", "gpu"])
def test_kustomize_builds_them(folder: str) -> None:
    program = shutil.which("kustomize") or shutil.which("kubectl")
    if program is None:
        pytest.skip("neither kustomize nor kubectl is here")
    verb = "build" if program.endswith("kustomize") else "kustomize"
    done = run(f"{program} {verb} {KUBERNETES / folder}")
    assert done.returncode == 0, done.stderr
    built = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(done.stdout)}
    extra = {"autoscaled": {("ScaledObject", "rollout")}}.get(folder, set())
    assert set(built) == {key for key in MANIFESTS if key[0] != "ScaledObject"} | extra
    assert {one["metadata"]["namespace"] for one in built.values()} == {"ddrl"}
    assert ("replicas" in built["Deployment", "rollout"]["spec"]) is (folder != "autoscaled")
    limits = built["Deployment", "learner"]["spec"]["template"]["spec"]["containers"][0]["resources"][
        "limits"
    ]
    assert ("nvidia.com/gpu" in limits) is (folder == "gpu")


@pytest.mark.long
def test_the_batch_scripts_train_a_run_and_end_together(processes: Processes) -> None:
    """As Slurm starts them, on this machine: `srun` only runs its command."""
    home = processes.folder
    (home / ".venv").symlink_to(sys.prefix)
    (home / "bin").mkdir()
    srun = home / "bin" / "srun"
    srun.write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    srun.chmod(0o755)
    environment = {
        **{
            "PATH": f"{home}/bin:{BARE['PATH']}",
            "HOME": str(home),
            "SLURM_JOB_ID": "7",
            "SLURM_CPUS_PER_TASK": "1",
        },
        "DDRL_LISTEN": f"127.0.0.1:{free_port()}",
    }

    def start(name: str, *arguments: str) -> Process:
        command = ["bash", str(SLURM / f"{name}.sbatch"), *arguments]
        processes.started.append(Process(name, command, home, environment, home / f"{name}.log"))
        return processes.started[-1]

    worker = start("worker")
    learner = start("learner", "submit", str(processes.config()), "--workers", "0")
    processes.until((home / "ddrl-server").exists)
    assert (home / "ddrl-server.7").stat().st_mode & 0o777 == 0o600
    assert learner.wait() == 0 and "solved" in learner.text(), processes.logs()
    assert worker.wait() == 0 and "ready" in worker.text(), processes.logs()
    assert not (home / "ddrl-server").exists() and not (home / "ddrl-server.7").exists()
    (folder,) = (home / "runs").iterdir()
    assert (folder / "policy.safetensors").exists()
