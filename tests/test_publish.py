"""`publish` and `shared_array`: one build for all processes of a job, and the objects as they were."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from shmserve_client import SharedList, publish, shared_array
from shmserve_client.errors import ConfigError, ObjectError, SampleIndexError, SampleTypeError
from tests.processes import Child, run_cli, run_python, wait_until

Started = Callable[..., Child]

PEOPLE = [
    {"id": number, "name": f"né {number}", "box": [0.5, number * 1.5], "tags": ["a"] * (number % 3), "score": None}
    for number in range(1000)
]


@pytest.fixture(autouse=True)
def shm(shm_dir: Path, stop_embedded: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where published segments go."""
    monkeypatch.setenv("SHMSERVE_SHM_DIR", str(shm_dir))
    return shm_dir


def shm_environment() -> dict[str, str]:
    return {"SHMSERVE_SHM_DIR": os.environ["SHMSERVE_SHM_DIR"]}


LISTS: dict[str, list[Any]] = {
    "dicts of the same keys": PEOPLE,
    "dicts of other keys": [{"a": 1}] * 100 + [{"a": 1, "b": 2}, {"c": None}],
    "dicts with one key": [{"only": number} for number in range(3)],
    "dicts and others": [{"a": np.float32(1)}] * 70 + [None],
    "empty dicts": [{}, {}],
    "numbers": [3, 1, 2],
    "numbers of two types": [1, 2.0, True] * 50,
    "large numbers": [1, 2**64, -(2**80)],
    "strings": ["", "é", "\0"],
    "bytes": [b"", b"\xff" * 1000],
    "tuples": [(1, "a"), (2, "b")],
    "nested lists": [[[1], []], [[2, 3]]],
    "empty": [],
    "nothing": [None, None],
}


@pytest.mark.parametrize("objects", LISTS.values(), ids=LISTS)
def test_a_list_is_as_it_was(objects: list[Any]) -> None:
    shared = publish("objects", objects)
    assert isinstance(shared, SharedList)
    assert len(shared) == len(objects)
    assert repr(list(shared)) == repr(objects)
    assert repr(shared[1:]) == repr(objects[1:])
    assert repr(shared[::-2]) == repr(objects[::-2])
    if objects:
        assert repr(shared[-1]) == repr(objects[-1])
        assert repr(shared.__getitems__([0, len(objects) - 1])) == repr([objects[0], objects[-1]])
        assert objects[0] in shared
        assert repr(next(reversed(shared))) == repr(objects[-1])
    for index in (len(objects), -len(objects) - 1):
        with pytest.raises(SampleIndexError, match="out of range: there are"):
            shared[index]
    with pytest.raises(SampleTypeError):
        shared["0"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.binary()
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(st.sampled_from("ab"), inner),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(VALUES | st.fixed_dictionaries({"a": VALUES, "b": VALUES}), max_size=6))
def test_any_list_is_as_it_was(objects: list[Any]) -> None:
    assert repr(list(publish("any", objects))) == repr(objects)


def test_arrays_and_tensors_keep_dtype_and_shape() -> None:
    objects = [
        {"u": np.arange(n, dtype=np.uint16), "t": torch.full((n, 2), n), "f": np.float32(n), "z": np.zeros((2, 2))}
        for n in range(4)
    ]
    for found, wanted in zip(publish("arrays", objects), objects, strict=True):
        assert type(found["t"]) is torch.Tensor
        assert torch.equal(found["t"], wanted["t"])
        for name in ("u", "f", "z"):
            np.testing.assert_array_equal(found[name], wanted[name])
            assert (type(found[name]), found[name].dtype) == (type(wanted[name]), wanted[name].dtype)


class _Squares(Dataset[int]):
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"square": index * index}  # without an end of its own


@pytest.mark.parametrize("given", [_Squares(), lambda: _Squares(), lambda: iter(_Squares()[i] for i in range(200))])
def test_datasets_functions_and_iterators_are_published(given: Any) -> None:
    shared = publish("squares", given)
    assert list(shared) == [{"square": number * number} for number in range(200)]


def test_a_data_loader_reads_it_in_workers() -> None:
    shared = publish("people", PEOPLE)
    batches = list(DataLoader(shared, batch_size=100, num_workers=2, collate_fn=list, multiprocessing_context="spawn"))
    assert [person for batch in batches for person in batch] == PEOPLE


def test_pickles_hold_the_place_and_not_the_objects() -> None:
    shared = publish("people", PEOPLE)
    packed = pickle.dumps(shared)
    assert len(packed) < 512
    assert list(pickle.loads(packed)) == PEOPLE


def test_what_cannot_be_stored_is_refused_with_the_path_to_it(shm: Path) -> None:
    objects: list[Any] = [{"meta": {"fn": None}} for _ in range(1000)]
    objects[917] = {"meta": {"fn": len}}
    with pytest.raises(ObjectError, match=r"^\[917\]\['meta'\]\['fn'\] cannot be stored: it is a builtins\.builtin"):
        publish("bad", objects)
    assert list(shm.iterdir()) == []
    with pytest.raises(ObjectError, match="a int cannot be published"):
        publish("number", 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="1 to 128 printable characters"):
        publish("a\nb", [])


def test_lists_that_differ_are_never_taken_for_each_other() -> None:
    first = publish("train", [1, 2, 3])
    assert list(publish("train", [1, 2, 4])) == [1, 2, 4]
    assert list(publish("train", [1, 2])) == [1, 2]
    assert list(publish("train", [1, 2, 3], scope="another")) == list(first) == [1, 2, 3]
    many = [0] * 100_000
    assert publish("many", many)[77_777] == 0
    many[77_777] = 1
    assert publish("many", many)[77_777] == 1


def test_functions_of_other_code_are_never_taken_for_each_other() -> None:
    def made(numbers: str) -> Callable[[], list[int]]:
        namespace: dict[str, Any] = {}
        exec(f"def build():\n    return [number for number in ({numbers},)]", namespace)
        return namespace["build"]

    def bound(numbers: list[int]) -> Callable[[], list[int]]:
        return lambda: numbers

    assert list(publish("bound", bound([1]))) == [1]
    assert list(publish("bound", bound([2]))) == [2]
    assert list(publish("made", made("1"))) == [1]
    assert list(publish("made", made("2"))) == [2]
    assert list(publish("made", made("1"))) == [1]


def test_it_is_one_segment_that_goes_with_its_last_reader(shm: Path) -> None:
    first, second = publish("train", PEOPLE, linger=5), publish("train", PEOPLE, linger=5)
    (path,) = shm.iterdir()
    assert first.segment is second.segment
    del first, second
    wait_until(lambda: not path.exists(), 15, "the segment to go")


PROGRAM = """
    import json, os, sys, time
    from pathlib import Path
    from shmserve_client import publish

    folder = Path(sys.argv[1])

    def build():
        (folder / f"built-{os.getpid()}").touch()
        while (folder / "hold").exists():
            time.sleep(0.01)
        return [{"number": number} for number in range(1000)]

    shared = publish("train", build, scope=sys.argv[2] if len(sys.argv) > 2 else None)
    print(json.dumps([len(shared), shared[999], shared.segment.path]), flush=True)
    while (folder / "stay").exists():
        time.sleep(0.01)
"""


def test_of_32_processes_one_builds(tmp_path: Path) -> None:
    (tmp_path / "stay").touch()
    processes = [Child.python(PROGRAM, tmp_path, folder=tmp_path, env=shm_environment()) for _ in range(32)]
    try:
        said = [wait_until(lambda: child.stdout, 60, "the list") for child in processes]  # noqa: B023
        assert len(list(tmp_path.glob("built-*"))) == 1
        assert len(set(said)) == 1
        assert json.loads(said[0])[:2] == [1000, {"number": 999}]
        (tmp_path / "stay").unlink()
        assert [child.wait() for child in processes] == [0] * 32
    finally:
        for child in processes:
            child.close()


def test_when_the_builder_is_killed_another_takes_over(tmp_path: Path, shm: Path) -> None:
    (tmp_path / "hold").touch()
    with Child.python(PROGRAM, tmp_path, folder=tmp_path, env=shm_environment()) as first:
        wait_until(lambda: list(tmp_path.glob("built-*")), 30, "the first to build")
        with Child.python(PROGRAM, tmp_path, folder=tmp_path, env=shm_environment()) as second:
            first.send_signal(signal.SIGKILL)
            wait_until(lambda: len(list(tmp_path.glob("built-*"))) == 2, 5, "the second to build")
            (tmp_path / "hold").unlink()
            assert second.wait() == 0, second.describe()
    assert len(list(shm.iterdir())) == 1


def test_two_jobs_do_not_share(tmp_path: Path) -> None:
    """Each of them is an outermost Python process of its own, though this test started both."""
    program = """
        import json, os, subprocess, sys
        sys.argv[1:]
        code = "from shmserve_client.publishing import _job; print(_job())"
        print(json.dumps([subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
                          for _ in range(2)]))
    """
    scopes = []
    for _ in range(2):
        path = tmp_path / "job.py"
        path.write_text("".join(line[8:] + "\n" for line in program.splitlines()))
        # A shell between: what started the job is no Python process.
        with Child(["sh", "-c", f"{sys.executable} {path}; true"], folder=tmp_path) as job:
            assert job.wait() == 0, job.describe()
            first, second = json.loads(job.stdout)
            assert first == second
            assert first.startswith("process ")
            scopes.append(first)
    assert scopes[0] != scopes[1]


def test_the_ranks_of_torchrun_share(tmp_path: Path) -> None:
    program = tmp_path / "rank.py"
    program.write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        "from shmserve_client import publish\n"
        "def build():\n"
        "    Path(sys.argv[1], f'built-{os.getpid()}').touch()\n"
        "    return list(range(100))\n"
        "assert list(publish('ranks', build)) == list(range(100))\n"
    )
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", program, tmp_path]
    with Child(
        argv, folder=tmp_path, env={**shm_environment(), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    ) as job:
        assert job.wait(90) == 0, job.describe()
    assert len(list(tmp_path.glob("built-*"))) == 1


def test_a_steps_processes_share_under_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shmserve_client.publishing import _job

    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert _job() == "slurm 7.0"


BUILT: list[int] = []


def build_order() -> np.ndarray:
    BUILT.append(os.getpid())
    return np.random.default_rng(0).permutation(1000)


def test_an_array_is_built_once_and_read_only() -> None:
    BUILT.clear()
    first, second = shared_array("train/shuffle", build_order), shared_array("train/shuffle", build_order)
    assert [os.getpid()] == BUILT
    np.testing.assert_array_equal(first, np.random.default_rng(0).permutation(1000))
    assert np.shares_memory(first, second)
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1
    with pytest.raises(ObjectError, match="cannot be shared"):
        shared_array("text", lambda: np.array(["a"]))


def test_neither_torch_nor_zeromq_is_needed_to_read(tmp_path: Path) -> None:
    shared = publish("people", PEOPLE)
    (tmp_path / "pickled").write_bytes(pickle.dumps(shared))
    run_python(
        """
        import pickle, sys
        shared = pickle.loads(open(sys.argv[1], "rb").read())
        assert shared[3]["name"] == "né 3"
        assert not {"torch", "zmq"} & set(sys.modules), set(sys.modules)
        """,
        tmp_path / "pickled",
    )


def test_the_daemon_that_keeps_it_does_not_reload(runtime_dir: Path) -> None:
    shared = publish("people", PEOPLE)
    (endpoint,) = runtime_dir.rglob("e-*.sock")
    refusal = run_cli("reload", "people", "--endpoint", f"ipc://{endpoint}")
    assert refusal.returncode == 1
    assert "was published by training code: publish it there again" in refusal.stderr
    assert len(shared) == 1000
