"""The scripts of a store that survives its masters, run as an operator runs them, on the loopback."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from etcd import EtcdServer, needs_etcd, running_etcd
from ha_store import spawn
from serving import Server, runs, wait_for
from tiny_models import make

from xllm_hier.embedded_store import binary, free_ports

FOLDER = Path(__file__).parent.parent / "scripts" / "kvcache_store"
MASTER, CLIENT, ARGS = (
    FOLDER / name for name in ("start_mooncake_ha_service.sh", "start_mooncake_client.sh", "xllm_mooncake_ha_args.sh")
)
BARE = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}


def run(script: Path, *words: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(script), *words], env=environ, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


def settings(etcd: EtcdServer, folder: Path, cluster: str) -> dict[str, str]:
    """What an operator exports on each machine."""
    rpc, metrics, client, endpoint = map(str, free_ports(4))
    return {
        **BARE,
        "MOONCAKE_BIN_DIR": str(Path(binary("mooncake_master")).parent),
        "MOONCAKE_ETCD_ENDPOINTS": etcd.address,
        "MOONCAKE_RPC_ADDRESS": "127.0.0.1",
        "MOONCAKE_CLIENT_HOST": f"127.0.0.1:{endpoint}",
        "MOONCAKE_CLUSTER_ID": cluster,
        "MOONCAKE_RPC_PORT": rpc,
        "MOONCAKE_METRICS_PORT": metrics,
        "MOONCAKE_CLIENT_PORT": client,
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "64MB",
        "MOONCAKE_LOG_DIR": str(folder),
        "MOONCAKE_STOP_TIMEOUT_SECONDS": "10",
    }


@pytest.fixture
def environ(etcd: EtcdServer, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Settings of a cluster of the test's own, whose processes are gone afterwards."""
    made = settings(etcd, tmp_path / "logs", tmp_path.name)
    try:
        yield made
    finally:
        for script in (CLIENT, MASTER):
            run(script, "stop", environ=made)


def pid_of(environ: dict[str, str], name: str) -> int:
    return int((Path(environ["MOONCAKE_LOG_DIR"]) / f"{name}.pid").read_text().split()[0])


@needs_etcd
def test_master_and_client_start_serve_an_instance_and_stop(environ: dict[str, str], tmp_path: Path) -> None:
    assert run(MASTER, "status", environ=environ).returncode == 3
    master = subprocess.Popen(["bash", str(MASTER), "start"], env=environ)
    assert run(CLIENT, "start", environ=environ).returncode == 0, "it outlasts the leader's warm-up"
    assert master.wait(120) == 0
    for script, name in ((MASTER, "mooncake_master"), (CLIENT, "mooncake_client")):
        told = run(script, "status", environ=environ)
        assert told.returncode == 0 and f"running as {pid_of(environ, name)}" in told.stderr
        assert Path(f"/proc/{pid_of(environ, name)}/exe").resolve() == Path(binary(name)).resolve()
        again = run(script, "start", environ=environ)
        assert again.returncode == 0 and "already running" in again.stderr
    flags = Path(f"/proc/{pid_of(environ, 'mooncake_master')}/cmdline").read_text().split("\0")
    given = next(flag for flag in flags if flag.startswith("--client_ttl="))
    assert int(given.split("=")[1]) > 15, "a leader whom etcd left must be gone before it takes clients for dead"

    own = f"127.0.0.1:{free_ports(1)[0]}"
    for client_address in ("", f"127.0.0.1:{environ['MOONCAKE_CLIENT_PORT']}"):
        args = {"XLLM_STORE_LOCAL_HOSTNAME": own, "XLLM_STORE_CLIENT_ADDRESS": client_address}
        shown = subprocess.run(
            ["bash", "-c", f'. {ARGS} && printf "%s\\n" "$MC_STORE_CLUSTER_ID" "${{XLLM_MOONCAKE_HA_ARGS[@]}}"'],
            env=environ | args,
            capture_output=True,
            text=True,
            check=True,
        )
        cluster, *flags = shown.stdout.split("\n")[:-1]
        assert cluster == environ["MOONCAKE_CLUSTER_ID"] and "--host_blocks_factor=4" in flags
        model = make(tmp_path / f"model{len(client_address)}" / "tiny", "llama")
        more = ["--block_size=16", "--max_cache_size=4MB"]
        with Server(model, *more, *flags, environ={"MC_STORE_CLUSTER_ID": cluster}) as server:
            wait_for(lambda: server.health()["store"] == "attached")
            first = server.ask(list(range(3, 103)))
            server.wait_quiet()
            server.clear("device", "host")
            reread = server.ask(list(range(3, 103)))
            assert reread.bits == first.bits and reread.tiers["store"] == 96

    pids = [pid_of(environ, name) for name in ("mooncake_master", "mooncake_client")]
    for script in (CLIENT, MASTER):
        assert run(script, "stop", environ=environ).returncode == 0
        assert "not running" in run(script, "stop", environ=environ).stderr
    assert not any(runs(pid) for pid in pids)


@needs_etcd
def test_run_stays_in_the_foreground_and_a_signal_ends_the_program_itself(
    environ: dict[str, str], tmp_path: Path
) -> None:
    process = spawn(["bash", str(MASTER), "run"], tmp_path / "run.log", **environ)
    try:
        wait_for(lambda: Path(f"/proc/{process.pid}/exe").resolve() == Path(binary("mooncake_master")).resolve())
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) is not None


@needs_etcd
def test_a_start_that_fails_shows_the_log_and_leaves_nothing_behind(environ: dict[str, str]) -> None:
    impatient = environ | {"MOONCAKE_START_TIMEOUT_SECONDS": "3"}
    done = run(CLIENT, "start", environ=impatient)  # there is no master
    assert done.returncode == 1
    assert "did not come up within 3 s" in done.stderr and "mooncake_client.log" in done.stderr
    assert run(CLIENT, "status", environ=environ).returncode == 3
    refused = run(MASTER, "start", "--no_such_flag=1", environ=environ)
    assert refused.returncode == 1 and "no_such_flag" in refused.stderr


@needs_etcd
def test_a_program_that_does_not_stop_is_killed(tmp_path: Path, environ: dict[str, str]) -> None:
    """A stand-in that ignores SIGTERM."""
    sleeper, deaf = tmp_path / "bin" / "mooncake_client", tmp_path / "deaf"
    sleeper.parent.mkdir()
    sleeper.write_text(f"#!/bin/bash\ntrap '' TERM\ntouch {deaf}\nwhile :; do sleep 0.2; done\n")
    sleeper.chmod(0o755)
    stubborn = environ | {"MOONCAKE_BIN_DIR": str(sleeper.parent), "MOONCAKE_STOP_TIMEOUT_SECONDS": "1"}
    start = subprocess.Popen(["bash", str(CLIENT), "start"], env=stubborn, stderr=subprocess.DEVNULL)
    pid_file = Path(environ["MOONCAKE_LOG_DIR"]) / "mooncake_client.pid"
    wait_for(lambda: deaf.exists() and pid_file.exists() and len(pid_file.read_text().split()) == 2)
    start.kill()
    start.wait(10)
    pid = pid_of(environ, "mooncake_client")
    assert runs(pid)
    done = run(CLIENT, "stop", environ=stubborn)
    assert "is killed" in done.stderr and not runs(pid)


@pytest.mark.parametrize("content", ["1\n0\n", "999999999\n5\n", "rubbish\n", ""])
def test_a_stale_pid_file_is_noticed_and_harms_nobody(tmp_path: Path, content: str) -> None:
    environ = BARE | {"MOONCAKE_LOG_DIR": str(tmp_path), "MOONCAKE_PID_FILE": str(tmp_path / "own.pid")}
    (tmp_path / "own.pid").write_text(content)
    done = run(MASTER, "stop", environ=environ)
    assert done.returncode == 0 and "stale" in done.stderr and "not running" in done.stderr
    assert not (tmp_path / "own.pid").exists()


def test_a_pid_that_now_is_another_program_is_not_signalled(tmp_path: Path) -> None:
    other: Any = subprocess.Popen(["sleep", "60"])
    try:
        environ = BARE | {"MOONCAKE_LOG_DIR": str(tmp_path)}
        (tmp_path / "mooncake_master.pid").write_text(f"{other.pid}\n1\n")
        done = run(MASTER, "stop", environ=environ)
        assert f"{other.pid} is now another program: sleep 60" in done.stderr
        assert other.poll() is None
    finally:
        other.kill()
        other.wait(10)


@pytest.mark.parametrize(
    ("script", "given", "named"),
    [
        (MASTER, {}, "MOONCAKE_ETCD_ENDPOINTS MOONCAKE_RPC_ADDRESS"),
        (MASTER, {"MOONCAKE_RPC_ADDRESS": "127.0.0.1"}, "set MOONCAKE_ETCD_ENDPOINTS\n"),
        (CLIENT, {"MOONCAKE_ETCD_ENDPOINTS": "h:1"}, "set MOONCAKE_CLIENT_HOST\n"),
        (ARGS, {}, "is to be sourced"),
    ],
)
def test_what_is_missing_is_named_and_the_code_is_two(script: Path, given: dict[str, str], named: str) -> None:
    done = run(script, "start", environ=BARE | given)
    assert done.returncode == 2 and named in done.stderr


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "MOONCAKE_ETCD_ENDPOINTS XLLM_STORE_LOCAL_HOSTNAME"),
        ({"MOONCAKE_ETCD_ENDPOINTS": "nowhere", "XLLM_STORE_LOCAL_HOSTNAME": "h:1"}, "nowhere is not host:port"),
    ],
)
def test_the_sourced_script_returns_two_and_leaves_the_shell_alive(given: dict[str, str], named: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f". {ARGS}; echo code $?"], env=BARE | given, capture_output=True, text=True, check=True
    )
    assert done.stdout == "code 2\n" and named in done.stderr


def test_endpoints_may_be_written_as_other_programs_want_them() -> None:
    given = {"MOONCAKE_ETCD_ENDPOINTS": "http://a:1, http://b:2", "XLLM_STORE_LOCAL_HOSTNAME": "h:1"}
    done = subprocess.run(
        ["bash", "-c", f'set -euo pipefail; . {ARGS}; printf "%s\\n" "${{XLLM_MOONCAKE_HA_ARGS[@]}}"'],
        env=BARE | given,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--store_master_server_address=etcd://a:1;b:2" in done.stdout.split("\n")


def test_a_program_that_is_nowhere_is_an_error_that_says_where_it_was_looked_for(tmp_path: Path) -> None:
    given = {"MOONCAKE_ETCD_ENDPOINTS": "h:1", "MOONCAKE_RPC_ADDRESS": "127.0.0.1", "MOONCAKE_BIN_DIR": str(tmp_path)}
    done = run(MASTER, "start", environ=BARE | given)
    assert done.returncode == 2 and "MOONCAKE_BIN_DIR" in done.stderr


def test_the_program_is_taken_from_the_wheel_not_from_the_script_around_it(tmp_path: Path) -> None:
    """A signal to pip's script would end that one alone."""
    wheel = tmp_path / "lib" / "python3.11" / "site-packages" / "mooncake" / "mooncake_master"
    wrapper = tmp_path / "bin" / "mooncake_master"
    for file, text in ((wheel, "#!/bin/sh\necho from the wheel\n"), (wrapper, "#!/bin/sh\necho the wrapper\n")):
        file.parent.mkdir(parents=True)
        file.write_text(text)
        file.chmod(0o755)
    given = {"MOONCAKE_ETCD_ENDPOINTS": "h:1", "MOONCAKE_RPC_ADDRESS": "127.0.0.1"}
    done = run(MASTER, "run", environ=BARE | given | {"PATH": f"{wrapper.parent}:{BARE['PATH']}"})
    assert done.stdout == "from the wheel\n"
