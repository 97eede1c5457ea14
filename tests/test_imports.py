"""What importing costs, and which names the packages promise."""

from __future__ import annotations

import pytest

import shmserve
import shmserve_client
from shmserve_client import errors
from tests.processes import run_python

HEAVY = "torch, zmq, numpy, msgpack"


def test_importing_the_client_imports_nothing_heavy() -> None:
    done = run_python(f"""
        import sys
        import shmserve, shmserve_client
        found = [name for name in "{HEAVY}".split(", ") if name in sys.modules]
        print(found)
        assert not found
    """)
    assert done.stderr == ""


def test_asking_for_the_dataset_imports_torch() -> None:
    run_python("""
        import sys
        from shmserve import ShmDataset
        assert ShmDataset is sys.modules["shmserve_client"].ShmDataset
        assert "torch" in sys.modules and "zmq" in sys.modules
    """)


def test_without_torch_the_error_says_what_to_install() -> None:
    run_python("""
        import sys
        class Without:
            def find_spec(self, name, path=None, target=None):
                if name == "torch":
                    raise ModuleNotFoundError("No module named 'torch'", name="torch")
        sys.meta_path.insert(0, Without())
        import shmserve_client
        try:
            shmserve_client.ShmDataset
        except ModuleNotFoundError as error:
            assert "pip install 'shmserve[torch]'" in str(error), error
        else:
            raise SystemExit("no error")
    """)


def test_the_names_are_those_promised() -> None:
    assert shmserve.__all__ == ["BatchLoader", "DistributedSampler", "ShmDataset", "__version__"]
    assert shmserve_client.__all__ == [
        "AlreadyRunningError",
        "Batch",
        "BatchLoader",
        "BatchedDataset",
        "BlockSizeError",
        "ConfigError",
        "DaemonStartError",
        "DaemonUnreachableError",
        "DatasetClosedError",
        "DatasetFailedError",
        "DatasetInfo",
        "DatasetNotFoundError",
        "DatasetNotReadyError",
        "DatasetSplit",
        "DistributedSampler",
        "EndpointError",
        "MemoryMonitor",
        "ObjectError",
        "OutOfSharedMemoryError",
        "ProtocolError",
        "SampleIndexError",
        "SampleTypeError",
        "SampleValueError",
        "SegmentFormatError",
        "SegmentNotFoundError",
        "SharedList",
        "ShmDataset",
        "ShmserveError",
        "SourceFormatError",
        "SourceNotFoundError",
        "VocabularyError",
        "__version__",
        "publish",
        "shared_array",
    ]
    assert all(hasattr(shmserve_client, name) for name in shmserve_client.__all__)
    assert set(errors.__all__) - {"ERROR_CLASSES", "printable"} < set(shmserve_client.__all__)


@pytest.mark.parametrize("module", [shmserve, shmserve_client])
def test_other_names_are_attribute_errors(module: object) -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        module.Nothing  # noqa: B018
