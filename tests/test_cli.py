"""The command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import numpy as np
import pytest

from shmserve.cli import cli
from shmserve.endpoints import embedded_endpoints
from shmserve_client.endpoint import find_endpoints, log_path
from shmserve_client.version import __version__
from tests.corpora import RAGGED, RAGGED_SAMPLES, write_sparse, write_tokens
from tests.processes import Child, Daemon, environment, run_cli, wait_until

Serve = Callable[..., Daemon]
RunGc = Callable[..., subprocess.CompletedProcess[str]]

OPTIONS = {
    "start": "--data --config --dtype --columns --decode --vocab-size --block-size --stride --mode --warm --endpoint "
    "--shm-dir "
    "--group --lock --checksums --linger --tcp --keys --detach --adopt --ready-fd",
    "stop": "--endpoint",
    "load": "--dtype --columns --decode --vocab-size --block-size --stride --mode --warm --endpoint",
    "reload": "--endpoint",
    "unload": "--endpoint",
    "status": "--endpoint --keys --json --wait",
    "ls": "--endpoint --keys --json",
    "lookup": "--column --block-size --stride --endpoint --keys --json",
    "inspect": "--dtype --vocab-size --columns --json",
    "build": "--dtype --vocab-size --columns --decode --checksums",
    "verify": "--against-source --endpoint --json",
    "monitor": "--output --interval --endpoint --keys",
    "plot": "--output",
    "gc": "--shm-dir --dry-run --json",
    "keys": "--client",
    "demo": "--ranks --workers --steps",
}


def options_of(command: click.Command) -> list[click.Option]:
    return [parameter for parameter in command.params if isinstance(parameter, click.Option)]


def test_the_commands_and_their_options_are_these() -> None:
    found = {name: [option.opts[0] for option in options_of(command)] for name, command in cli.commands.items()}
    assert found == {name: flags.split() for name, flags in OPTIONS.items()}


def test_every_flag_is_an_environment_variable_of_its_name() -> None:
    for command in (cli, *cli.commands.values()):
        for option in options_of(command):
            if not option.hidden and option.name != "version":
                flag = option.opts[0].removeprefix("--")
                assert option.envvar == "SHMSERVE_" + flag.upper().replace("-", "_")


def test_version() -> None:
    assert run_cli("--version").stdout == f"shmserve, version {__version__}\n"


@pytest.mark.parametrize(
    "args", [["start", "--nope"], ["lookup", "corpus"], ["lookup", "c", "x"], ["nope"], ["inspect"]]
)
def test_wrong_usage_exits_with_2(args: list[str]) -> None:
    done = run_cli(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"error: .*: see `shmserve.* --help`\n", done.stderr)


def test_a_path_without_its_option_is_told_where_it_belongs() -> None:
    done = run_cli("start", "my corpus.bin")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: unexpected argument 'my corpus.bin': did you mean --data 'my corpus.bin'?\n"


# Bad input


def truncated(folder: Path, name: str, by: int) -> Path:
    for suffix in (".bin", ".idx"):
        content = RAGGED.with_suffix(suffix).read_bytes()
        (folder / f"pair{suffix}").write_bytes(content[: len(content) - by] if suffix == name else content)
    return folder / "pair.bin"


def with_content(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


BAD_INPUT: dict[str, tuple[Callable[[Path], list[object]], list[str]]] = {
    "a missing file": (lambda folder: [folder / "nope.bin"], ["nope.bin", "no such file"]),
    "an empty headerless file": (lambda folder: [with_content(folder / "empty.bin", b"")], ["empty.bin", "empty"]),
    "an odd size": (lambda folder: [with_content(folder / "odd.bin", b"\0\1\2")], ["odd.bin", "3 bytes"]),
    "a truncated .bin": (lambda folder: [truncated(folder, ".bin", 1)], ["pair.bin", "47 bytes", "48"]),
    "a truncated .idx": (lambda folder: [truncated(folder, ".idx", 1)], ["pair.idx"]),
    "half a pair": (
        lambda folder: [with_content(folder / "half.idx", RAGGED.with_suffix(".idx").read_bytes())],
        ["half"],
    ),
    "a wrong dtype": (lambda folder: [RAGGED, "--dtype", "int32"], ["uint16", "int32"]),
    "an unknown dtype": (lambda folder: [RAGGED, "--dtype", "int33"], ["int33", "int32"]),
    "ids beyond the vocabulary": (
        lambda folder: [write_tokens(folder / "tokens.bin"), "--vocab-size", 999],
        ["999", "999"],
    ),
    "a name already served": (
        lambda folder: [RAGGED, "--data", f"ragged_uint16={RAGGED}"],
        ["two datasets named 'ragged_uint16'"],
    ),
    "no space": (lambda folder: [write_sparse(folder / "huge.bin", 1 << 43)], ["8192.0 GiB", "free"]),
    "a stride alone": (lambda folder: [RAGGED, "--stride", 4], ["stride 4 without a block-size"]),
    "a good dataset and a bad one": (
        lambda folder: [RAGGED, "--data", with_content(folder / "odd.bin", b"\0\1\2")],
        ["odd.bin", "3 bytes"],
    ),
    "a name that is no line": (
        lambda folder: [folder / "a\nb\x1bc\udcff.bin"],
        [r"a\nb\x1bc\udcff.bin", "no such file"],
    ),
    "a window beyond 62 bits": (lambda folder: [RAGGED, "--block-size", 2**70], ["block-size", "less than 2^62"]),
    "an unknown group": (lambda folder: [RAGGED, "--group", "no-such-group"], ["no group 'no-such-group'"]),
    "a shm directory that is none": (lambda folder: [RAGGED, "--shm-dir", folder / "nope"], ["nope", "--shm-dir"]),
    "tcp": (lambda folder: [RAGGED, "--endpoint", "tcp://127.0.0.1:5555"], ["tcp://", "--tcp HOST:PORT"]),
    "a path too long": (lambda folder: [RAGGED, "--endpoint", "/tmp/" + "x" * 120], ["125 bytes"]),
    "a directory open to others": (lambda folder: [RAGGED, "--endpoint", "/tmp/shmserve-x.sock"], ["/tmp"]),
    "a config file that is none": (lambda folder: [RAGGED, "--config", folder / "nope.toml"], ["nope.toml"]),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_3(case: str, runtime_dir: Path, shm_dir: Path, tmp_path: Path) -> None:
    make, words = BAD_INPUT[case]
    args = make(tmp_path)
    files = [path for path in tmp_path.iterdir() if path.stat().st_size < 10_000]
    before = [(path, path.read_bytes(), path.stat().st_mtime_ns) for path in files]
    done = run_cli("start", "--shm-dir", shm_dir, "--data", *args)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert done.stderr.splitlines()[-1] == errors[0]
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in errors[0]
    assert (done.returncode, done.stdout) == (3, "")
    assert list(shm_dir.iterdir()) == []
    assert list((runtime_dir / "shmserve").glob("*")) == []
    assert [(path, path.read_bytes(), path.stat().st_mtime_ns) for path in files] == before


def test_without_data_there_is_nothing_to_serve(runtime_dir: Path) -> None:
    done = run_cli("start")
    assert done.returncode == 3
    assert done.stderr.startswith("error: nothing to serve: give --data PATH")


# start


def test_start_prints_one_line_and_says_what_was_assumed(serve: Serve, tmp_path: Path) -> None:
    daemon = serve("--data", write_tokens(tmp_path / "tokens.bin"))
    assert re.fullmatch(
        rf"ready: tokens \(raw, 1,000 tokens, 8.0 KiB\) on {daemon.endpoint} \(pid {daemon.pid}\)\n", daemon.stdout
    )
    assert re.search(r"^tokens: loading 8.0 KiB$", daemon.stderr, re.MULTILINE)
    assert re.search(r"^tokens: loaded 8.0 KiB in \d+ ms", daemon.stderr, re.MULTILINE)
    assert re.search(r"^tokens: note: .*uint16", daemon.stderr, re.MULTILINE)


def test_paths_that_follow_data_are_shards(serve: Serve, tmp_path: Path) -> None:
    first, second = write_tokens(tmp_path / "part_1.bin", 10), write_tokens(tmp_path / "part_2.bin", 20)
    daemon = serve("--data", first, second, "--dtype", "uint16", f"--data=val={second}", first)
    assert [(dataset.name, dataset.num_samples, dataset.data) for dataset in daemon.status().datasets] == [
        ("part", 30, [str(first), str(second)]),
        ("val", 30, [str(second), str(first)]),
    ]


def test_the_environment_sets_what_the_arguments_do_not(serve: Serve, tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "a b.bin")
    env = {"SHMSERVE_DATA": f"val={path}", "SHMSERVE_BLOCK_SIZE": "8", "SHMSERVE_DTYPE": "uint8"}
    (dataset,) = serve("--dtype", "uint16", env=env).status().datasets
    assert (dataset.name, dataset.data, dataset.num_samples, dataset.block_size) == ("val", [str(path)], 1000, 8)


def test_help_names_the_variables() -> None:
    assert "SHMSERVE_BLOCK_SIZE" in run_cli("start", "--help").stdout


def test_a_config_file_and_arguments_together(serve: Serve, tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens.bin")
    config = tmp_path / "node.toml"
    config.write_text(
        """
        endpoint = "ipc:///nowhere/to/be/seen.sock"
        linger = 3600
        [datasets.tokens]
        data = "tokens.bin"
        dtype = "uint16"
        block_size = 101
        stride = 100
        """
    )
    daemon = serve("--config", config, "--data", f"docs={RAGGED}")
    tokens, docs = daemon.status().datasets
    assert (tokens.name, tokens.block_size, tokens.stride, tokens.data) == (
        "tokens",
        101,
        100,
        [f"{tmp_path}/tokens.bin"],
    )
    assert (docs.name, docs.block_size) == ("docs", 0)


def test_on_a_terminal_there_is_a_bar(runtime_dir: Path, shm_dir: Path, tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    path = write_sparse(tmp_path / "tokens.bin", 512 << 20)
    command = [sys.executable, "-m", "shmserve", "start", "--data", str(path), "--shm-dir", str(shm_dir)]
    daemon = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal, env=environment({"TERM": "xterm"}))
    os.close(terminal)
    try:
        assert daemon.stdout is not None
        assert daemon.stdout.readline().startswith(b"ready: tokens ")
        shown = os.read(controller, 1 << 20).decode(errors="replace")
        assert "tokens" in shown
        assert "iB" in shown
        assert "MB" not in shown  # one kind of unit
        assert not re.search(r"\?(?!25)", shown)  # beside those that hide and show the cursor
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.communicate(timeout=10)
        os.close(controller)
    assert daemon.returncode == 0


# --detach


@pytest.fixture
def detached(runtime_dir: Path, shm_dir: Path) -> Iterator[Path]:
    """The socket of a detached daemon, which is stopped before its directories go."""
    path = runtime_dir / "shmserve" / "daemon.sock"
    yield path
    if path.exists():
        assert run_cli("stop", "--endpoint", path).returncode == 0


@pytest.fixture
def alone(runtime_dir: Path) -> None:
    """Nothing listens in the directories that a test cannot replace: nothing of this user can be stopped by it."""
    if find_endpoints() or embedded_endpoints():
        pytest.skip("a daemon of this user runs on this machine")


def test_detach_returns_when_everything_is_served(detached: Path, shm_dir: Path) -> None:
    done = run_cli("start", "--data", RAGGED, "--shm-dir", shm_dir, "--detach")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ready: ragged_uint16 (megatron, 6 samples, ")
    assert re.match(r"ragged_uint16: loaded 8.0 KiB in \d+ ms", done.stderr)
    report = json.loads(run_cli("status", "--json").stdout)
    assert os.getsid(report["pid"]) == report["pid"]  # a session of its own: no terminal ends it
    assert "ragged_uint16: loaded" in Path(log_path(str(detached))).read_text()
    again = run_cli("start", "--data", RAGGED, "--shm-dir", shm_dir, "--detach")
    assert again.returncode == 3
    assert (
        again.stderr
        == f"error: already running (pid {report['pid']}) at {detached}: stop it first, or give another --endpoint\n"
    )
    status = run_cli("status")
    assert status.returncode == 0
    assert f"log {log_path(str(detached))}\n" in status.stdout


def test_detach_says_what_was_assumed(detached: Path, shm_dir: Path, tmp_path: Path) -> None:
    done = run_cli("start", "--data", write_tokens(tmp_path / "tokens.bin"), "--shm-dir", shm_dir, "--detach")
    assert re.search(r"^tokens: note: .*uint16", done.stderr, re.MULTILINE)


def test_the_log_goes_with_a_daemon_that_lingers_out(runtime_dir: Path, shm_dir: Path) -> None:
    done = run_cli("start", "--data", RAGGED, "--shm-dir", shm_dir, "--detach", "--linger", 0.1)
    assert done.returncode == 0, done.stderr
    wait_until(lambda: list((runtime_dir / "shmserve").iterdir()) == [], what="the end")


def test_gc_removes_the_logs_of_those_that_ended(
    detached: Path, shm_dir: Path, runtime_dir: Path, run_gc: RunGc
) -> None:
    assert run_cli("start", "--data", RAGGED, "--shm-dir", shm_dir, "--detach").returncode == 0
    log = Path(log_path(str(detached)))
    old = detached.with_name("old.sock.log")
    old.write_text("an error\n")
    assert run_gc("--dry-run").stdout == f"would remove {old}\n"
    assert json.loads(run_gc("--json").stdout)["files"] == [str(old)]
    assert log.exists()
    assert not old.exists()
    assert run_cli("stop").returncode == 0
    assert run_gc().stdout == f"removed {log}\n"


def test_detach_tells_why_a_start_failed(detached: Path, shm_dir: Path, tmp_path: Path) -> None:
    done = run_cli("start", "--data", tmp_path / "nope.bin", "--shm-dir", shm_dir, "--detach")
    assert (done.returncode, done.stdout) == (3, "")
    assert re.fullmatch(r"error: .*nope\.bin: no such file.*\n", done.stderr)


def test_giving_up_on_a_detached_start_ends_it(detached: Path, shm_dir: Path, tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "large.bin", 4 << 30)
    command = [sys.executable, "-m", "shmserve", "start", "--data", path, "--shm-dir", shm_dir, "--detach"]
    with Child(command, folder=tmp_path) as starter:
        wait_until(lambda: run_cli("ls").stdout, 20, what="the daemon")
        starter.send_signal(signal.SIGINT)
        starter.wait()
    wait_until(lambda: not detached.exists(), what="the daemon's end")


# status


def test_status_for_people(serve: Serve, tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens.bin")
    daemon = serve("--data", RAGGED, "--data", tokens, "--block-size", 101)
    done = run_cli("status")
    assert (done.returncode, done.stderr) == (0, "")
    for text in (
        f"daemon {daemon.endpoint}",
        f"pid {daemon.pid}, version {__version__}",
        "of its own memory",
        "ragged_uint16: ready, megatron, 6 samples",
        f"data      {RAGGED}",
        f"segment   {daemon.status().datasets[0].path}, loaded in",
        "attached  0 processes",
        "windows   block size 101, stride 101",
        "note      ",
    ):
        assert text in done.stdout
    assert "source changed" not in done.stdout
    write_tokens(tokens, 2000)
    wait_until(lambda: daemon.status().datasets[1].source_changed, what="the daemon to notice")
    assert "source changed since it was loaded" in run_cli("status", "tokens").stdout


def test_status_of_one_dataset(serve: Serve) -> None:
    serve("--data", f"a={RAGGED}", "--data", f"b={RAGGED}")
    report = json.loads(run_cli("status", "b", "--json").stdout)
    assert [dataset["name"] for dataset in report["datasets"]] == ["b"]
    unknown = run_cli("status", "c")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert unknown.stderr == "error: no dataset 'c' here, the daemon serves a, b\n"


def test_status_without_a_daemon(alone: None) -> None:
    done = run_cli("status")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: no daemon at ")
    assert "shmserve start --data" in done.stderr
    assert done.stderr.count("\n") == 1


def test_status_is_a_health_check(serve: Serve, tmp_path: Path) -> None:
    daemon = serve("--data", write_sparse(tmp_path / "large.bin", 2 << 30), wait=False)
    wait_until(daemon.socket.exists, what="the socket")
    loading = run_cli("status")
    assert loading.returncode == 1
    assert "large: loading, " in loading.stdout
    served = run_cli("status", "--wait", 60)
    assert served.returncode == 0, served.stderr
    assert "large: ready, " in served.stdout


def test_status_waits_for_a_daemon_that_does_not_exist_yet(serve: Serve, tmp_path: Path, runtime_dir: Path) -> None:
    with Child([sys.executable, "-m", "shmserve", "status", "--wait", 30], folder=tmp_path) as status:
        serve("--data", RAGGED)
        assert status.wait(timeout_s=20) == 0
        assert "ragged_uint16: ready" in status.stdout


def test_status_gives_up_after_its_time(alone: None) -> None:
    assert run_cli("status", "--wait", 0.3).returncode == 1


# ls, lookup, stop


def test_ls(serve: Serve) -> None:
    serve("--data", f"b={RAGGED}", "--data", f"a={RAGGED}")
    assert run_cli("ls").stdout == "b\na\n"
    assert json.loads(run_cli("ls", "--json").stdout) == ["b", "a"]


def test_lookup_leads_to_the_bytes(serve: Serve) -> None:
    daemon = serve("--data", f"docs={RAGGED}")
    content = daemon.segments()[0].read_bytes()
    done = run_cli("lookup", "docs", 3, 0, 3)
    rows = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert [index for index, _, _ in rows] == [3, 0, 3]
    for index, offset, nbytes in rows:
        assert np.frombuffer(content[offset : offset + nbytes], "<u2").tolist() == RAGGED_SAMPLES[index]
    as_json = json.loads(run_cli("lookup", "docs", 3, "--json").stdout)
    assert as_json == [{"index": 3, "offset": rows[0][1], "nbytes": rows[0][2]}]


def test_lookup_uses_the_default_window_unless_told_otherwise(serve: Serve, tmp_path: Path) -> None:
    serve("--data", write_tokens(tmp_path / "tokens.bin"), "--block-size", 100, "--stride", 50)

    def starts_and_sizes(*args: object) -> list[int]:
        return [int(word) for word in run_cli("lookup", "tokens", 0, 1, *args).stdout.split()]

    _, origin, size, _, second, _ = starts_and_sizes()
    assert (size, second - origin) == (200, 100)
    _, origin, size, _, second, _ = starts_and_sizes("--block-size", 10)
    assert (size, second - origin) == (20, 20)
    stored = run_cli("lookup", "tokens", 0, "--block-size", 0)
    assert stored.returncode == 1
    assert "give a block_size (--block-size)" in stored.stderr


def test_lookup_beyond_the_end(serve: Serve) -> None:
    serve("--data", f"docs={RAGGED}")
    done = run_cli("lookup", "docs", 0, 6)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: index 6 is out of range: there are 6 samples\n"


def test_stop_waits_for_the_end(serve: Serve) -> None:
    daemon = serve("--data", RAGGED)
    done = run_cli("stop")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"stopped the daemon at {daemon.endpoint}\n"
    assert daemon.segments() == []
    assert not daemon.socket.exists()
    assert daemon.wait(timeout_s=2.0) == 0
    again = run_cli("stop", "--endpoint", daemon.endpoint)
    assert again.returncode == 1
    assert again.stderr.startswith("error: no daemon at ")


def test_the_daemons_of_from_path_are_seen_but_not_stopped(alone: None, serve: Serve, runtime_dir: Path) -> None:
    embedded = serve("--data", f"own={RAGGED}", endpoint=f"ipc://{runtime_dir}/shmserve/e-0123456789abcdef.0.sock")
    shown = run_cli("status", "--json")
    assert json.loads(shown.stdout)["pid"] == embedded.pid
    assert shown.returncode == 1, "a health check of the default daemon, which is not there"
    assert shown.stderr.startswith("error: no daemon at ")
    assert run_cli("status", "own").returncode == 0
    elsewhere = run_cli("status", "docs")  # though all that is here is served
    assert (elsewhere.returncode, elsewhere.stdout) == (1, "")
    stopped = run_cli("stop")
    assert stopped.returncode == 1
    assert re.fullmatch(rf"error: no daemon but .*{re.escape(embedded.endpoint)}.*--endpoint\n", stopped.stderr)
    default = serve("--data", f"docs={RAGGED}")
    assert run_cli("ls").stdout == "docs\n"
    assert run_cli("ls", "--endpoint", embedded.endpoint).stdout == "own\n"
    report = json.loads(run_cli("status", "--json").stdout)
    assert [report["pid"], *(other["pid"] for other in report["others"])] == [default.pid, embedded.pid]
    assert f"daemon {embedded.endpoint}\n" in run_cli("status", "own").stdout
    unknown = run_cli("status", "nope")
    assert (unknown.returncode, unknown.stderr) == (1, "error: no dataset 'nope' here, the daemon serves docs\n")
    embedded.send_signal(signal.SIGSTOP)
    try:
        hung = run_cli("status", "--wait", 0.1)
        assert hung.returncode == 1
        assert "docs: ready" in hung.stdout
        assert str(embedded.socket) in hung.stderr
    finally:
        embedded.send_signal(signal.SIGCONT)
    assert run_cli("stop").returncode == 0
    assert default.wait(timeout_s=2.0) == 0
    left = run_cli("status")
    assert (left.returncode, left.stdout.splitlines()[0]) == (1, f"daemon {embedded.endpoint}")


def test_stop_of_a_daemon_that_loads(serve: Serve, tmp_path: Path) -> None:
    daemon = serve("--data", write_sparse(tmp_path / "large.bin", 4 << 30), wait=False)
    wait_until(daemon.socket.exists, what="the socket")
    assert run_cli("stop").returncode == 0
    assert daemon.wait(timeout_s=2.0) == 0
    assert daemon.segments() == []


def test_every_command_works_at_the_longest_endpoint(runtime_dir: Path, shm_dir: Path, serve: Serve) -> None:
    path = f"{runtime_dir}/shmserve/"
    endpoint = path + "x" * (103 - len(path))
    daemon = serve("--data", f"docs={RAGGED}", endpoint=f"ipc://{endpoint}")
    for command in (["status"], ["ls"], ["lookup", "docs", 0], ["stop"]):
        done = run_cli(*command, env={"SHMSERVE_ENDPOINT": endpoint})
        assert done.returncode == 0, done.stderr
    assert daemon.wait(timeout_s=2.0) == 0


# inspect


def test_inspect_for_people() -> None:
    done = run_cli("inspect", RAGGED)
    assert (done.returncode, done.stderr) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    items = sum(map(len, RAGGED_SAMPLES))
    assert (lines["format"], lines["column"], lines["samples"]) == ("megatron", "tokens uint16", "6")
    assert lines["items"] == f"{items} ({2 * items} bytes)"
    assert lines["[1]"] == " ".join(map(str, RAGGED_SAMPLES[1]))


def test_inspect_for_programs() -> None:
    report = json.loads(run_cli("inspect", RAGGED, "--json").stdout)
    assert report["first_samples"] == RAGGED_SAMPLES[:3]
    assert report["arrays"] == {"document_indices": [4]}
    assert {Path(path).name for path in report["files"]} == {"ragged_uint16.bin", "ragged_uint16.idx"}
    assert (report["samples"], report["stream"], report["nbytes"]) == (6, False, 48)
    assert report["columns"] == [{"name": "tokens", "dtype": "uint16", "shape": None}]


def test_inspect_of_a_stream_over_shards(tmp_path: Path) -> None:
    first, second = write_tokens(tmp_path / "a1.bin", 4), write_tokens(tmp_path / "a2.bin", 20, first=4)
    report = json.loads(run_cli("inspect", first, second, "--dtype", "uint16", "--json").stdout)
    assert report["first_samples"] == [list(range(16))]
    assert (report["stream"], report["items"]) == (True, 24)


def test_inspect_of_rows(tmp_path: Path) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    np.save(tmp_path / "rows.npy", rows)
    report = json.loads(run_cli("inspect", tmp_path / "rows.npy", "--json").stdout)
    assert report["first_samples"] == [row.ravel().tolist() for row in rows]


def test_inspect_needs_no_shared_memory_and_no_daemon(tmp_path: Path, runtime_dir: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    done = run_cli("inspect", write_sparse(tmp_path / "large.bin", 1 << 40), "--dtype", "uint16")
    assert done.returncode == 0
    assert "549,755,813,888 (1.0 TiB)" in done.stdout
    assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("shmserve-0-large")}


def test_inspect_of_what_is_not_there(tmp_path: Path) -> None:
    done = run_cli("inspect", tmp_path / "nope.bin")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"error: .*nope\.bin.*\n", done.stderr)


def test_help_names_every_command() -> None:
    shown = run_cli("--help").stdout
    for name in OPTIONS:
        assert re.search(rf"^  {name} ", shown, re.MULTILINE)
