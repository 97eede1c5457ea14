"""Whatever lies in a corpus's files is refused, or served as a plain reader of the format reads it."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shmserve.sources import SourceOptions, flat, resolve
from shmserve_client.errors import ShmserveError, SourceFormatError, SourceNotFoundError
from shmserve_client.layout import DTYPES
from tests.processes import run_python
from tests.segments import CHILD_ENV

from . import reference
from .corpora import PLANNED, Corpus, corpora, packed, smallest, unpacked
from .mutations import mutated
from .targets import check_plan, check_refusal, check_source

pytestmark = pytest.mark.promise("fuzzing")

in_one_folder = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
options = st.builds(
    SourceOptions,
    st.none() | st.sampled_from(sorted(DTYPES)),
    st.none() | st.sampled_from([1, 100, 1 << 16, (1 << 62) - 1]),
)


def test_there_is_a_corpus_of_every_source() -> None:
    assert {corpus.source for corpus in corpora()} == PLANNED


def test_the_plain_readers_agree_about_every_corpus(shm_dir: Path) -> None:
    for corpus in corpora():
        assert check_source(shm_dir, corpus.files), corpus
        assert check_plan(shm_dir, unpacked(corpus.names, packed(corpus.names, corpus.files))), corpus


@st.composite
def damaged(draw: st.DrawFn) -> Corpus:
    """One of the corpora, its bytes damaged, one of its files exchanged for another corpus's, or two for each other."""
    corpus = draw(st.sampled_from(corpora()))
    files = dict(corpus.files)
    name, other = draw(st.sampled_from(corpus.names)), draw(st.sampled_from(corpus.names))
    match draw(st.sampled_from(["mutate", "mutate", "mutate", "swap", "exchange"])):
        case "mutate":
            if draw(st.booleans()):  # within what is compressed
                files = unpacked(corpus.names, draw(mutated(packed(corpus.names, files))))
            else:
                files[name] = draw(mutated(files[name]))
        case "swap":
            files[name], files[other] = files[other], files[name]
        case "exchange":
            files[name] = draw(st.sampled_from([file for each in corpora() for file in each.files.values()]))
    return Corpus(corpus.source, files)


@pytest.mark.promise("F22", "F23", "F24")
@settings(in_one_folder, max_examples=300)
@given(damaged(), options, st.data())
def test_damaged_files_are_refused_or_served_as_they_are(
    shm_dir: Path, corpus: Corpus, options: SourceOptions, data: st.DataObject
) -> None:
    check_source(shm_dir, corpus.files, options, ask_for=data.draw(st.sampled_from(corpus.names)))


@pytest.mark.promise("F24")
@settings(in_one_folder, max_examples=100)
@given(st.sampled_from(smallest()), st.data(), options)
def test_any_bytes_are_refused_or_served_as_they_are(
    shm_dir: Path, corpus: Corpus, data: st.DataObject, options: SourceOptions
) -> None:
    """Under the names that a corpus has, and with what tells its format in front."""
    files = {
        name: content[: data.draw(st.sampled_from([0, 6, 9, 17, 26]))] + data.draw(st.binary(max_size=200))
        for name, content in corpus.files.items()
    }
    check_source(shm_dir, files, options)


@settings(in_one_folder, max_examples=200)
@given(st.lists(st.text(st.sampled_from("ab01._-*?[]!{}~/ \n\0\ud800\udcff\xe9") | st.characters(), max_size=12)))
def test_any_paths_are_found_or_not(tmp_path: Path, names: list[str]) -> None:
    (tmp_path / "index.json").write_text("{}")  # which is looked into for the names
    (tmp_path / "ab").write_bytes(b"\xff" * 4)
    try:
        resolve([f"{tmp_path}/{name}" for name in names], SourceOptions("uint16")).plan()
    except ShmserveError as error:
        check_refusal(error)


def test_a_file_whose_name_is_not_unicode_is_served(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text("{}")
    path = tmp_path / "a\udcff.bin"
    path.write_bytes(bytes(range(128, 160)))
    assert resolve([str(path)], SourceOptions()).plan().num_samples == 16


@pytest.mark.promise("F26")
@pytest.mark.parametrize("dtype", ["int8", "int32", "int64"])
def test_a_negative_id_is_outside_of_any_vocabulary(shm_dir: Path, dtype: str) -> None:
    for values, is_sound in (([1, 2], True), ([1, -2], False)):
        files = {"corpus.bin": np.array(values, dtype).tobytes()}
        assert check_source(shm_dir, files, SourceOptions(dtype, (1 << 62) - 1)) == is_sound


@pytest.mark.parametrize("name", ["a\0", "\ud800", "a\0/b"])
def test_a_name_that_no_file_can_have_is_not_found(tmp_path: Path, name: str) -> None:
    with pytest.raises(SourceNotFoundError, match="no such file"):
        resolve([f"{tmp_path}/{name}"], SourceOptions())


@pytest.mark.parametrize("row", ["\n", "0,0\n"])
def test_bounds_of_nothing_come_to_an_end(tmp_path: Path, row: str) -> None:
    """Two files of a few kilobytes would be read for minutes and become gigabytes."""
    (tmp_path / "c.npy").write_bytes(bytes(4))
    (tmp_path / "c.csv.gz").write_bytes(gzip.compress(row.encode() * (flat.MAX_EMPTY_ROWS + 3)))
    with pytest.raises(SourceFormatError, match=r"c\.csv\.gz: more than 1048578 rows"):
        resolve([f"{tmp_path}/c.npy"], SourceOptions()).plan()


@pytest.mark.parametrize(
    ("shape", "is_sound"), [(b"(3L,)", True), (b"(True,)", False), (b"(3,)+'\\z'", False), (b"(3,", False)]
)
def test_a_header_of_npy_does_not_warn(shm_dir: Path, shape: bytes, is_sound: bool) -> None:
    """Python 2 wrote `3L`; numpy, which evaluates the header, warns of that and of what it cannot read."""
    header = b"{'descr':'<i4','fortran_order':False,'shape':%b}" % shape
    file = b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + bytes(12)
    assert check_plan(shm_dir, {"corpus.npy": file}) == is_sound


KINDS = {
    "megatron": ("uint8", "int8", "int16", "int32", "int64", "uint16"),
    "fairseq-mmap": ("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    "megatron-legacy": ("uint8", "int8", "int16", "int32", "int64", "uint16"),
    "fairseq-legacy": ("uint8", "int8", "int16", "int32", "int64", "uint16"),
    "llm.c": ("uint16", "uint32"),
    "litpkds": ("uint8", "int8", "int16", "int32", "int64", "uint16"),
    "npy": tuple(DTYPES),
    "datatrove": ("uint16", "uint32"),
    "raw": tuple(DTYPES),
}
"""The formats, and the dtypes that each may hold."""


@st.composite
def samples(draw: st.DrawFn, corpus_format: str) -> list[NDArray[Any]]:
    """Return a few samples that the format can hold, empty ones among them."""
    dtype = np.dtype(draw(st.sampled_from(KINDS[corpus_format])))
    count = draw(st.integers(1, 8))
    if corpus_format == "npy":
        shapes = [tuple(draw(st.lists(st.integers(0, 3), max_size=3)))] * count
    elif corpus_format.endswith("-legacy"):
        shapes = [tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))) for _ in range(count)]
    else:
        shapes = [(draw(st.integers(0, 9)),) for _ in range(count)]
    found = []
    for shape in shapes:
        items = int(np.prod(shape))
        bits = draw(st.binary(min_size=items * dtype.itemsize, max_size=items * dtype.itemsize))
        values = np.frombuffer(bytes(byte % 2 for byte in bits) if dtype.kind == "b" else bits, dtype)
        found.append(values.reshape(shape))
    return found


def _is_taken_for_another(path: Path, tokens: bytes) -> bool:
    """Return whether tokens begin as files of another format do."""
    path.write_bytes(tokens)
    try:
        return resolve([str(path)], SourceOptions("uint16")).format != "raw"
    except SourceFormatError:
        return True
    finally:
        path.unlink()


@pytest.mark.promise("F25", "F27")
@pytest.mark.parametrize("corpus_format", KINDS)
@settings(in_one_folder, max_examples=25)
@given(st.data())
def test_samples_come_back_as_they_were_written(shm_dir: Path, corpus_format: str, data: st.DataObject) -> None:
    wanted = data.draw(samples(corpus_format))
    files = reference.written(corpus_format, wanted)
    if corpus_format == "raw" and not sum(sample.size for sample in wanted):
        return  # an empty file without a header is refused
    # Hypothesis tries the constants of our own code: the magics, too, which tokens do not begin with.
    values = next(iter(files.values()))
    assume(not values.startswith((b"MMIDIDX", b"TNTIDX")))
    assume(corpus_format != "raw" or not _is_taken_for_another(shm_dir / "tokens", values))
    dtype = wanted[0].dtype
    is_served = check_source(shm_dir, files, SourceOptions(dtype.name))
    served = reference.read(corpus_format, list(files.values()), dtype.str)
    if served.stream:
        wanted = [np.concatenate(wanted)]
    assert is_served
    assert [(one.shape, one.tobytes()) for one in served.samples] == [(one.shape, one.tobytes()) for one in wanted]


@pytest.mark.promise("F22", "F24")
@pytest.mark.slow
def test_no_number_in_a_file_makes_it_take_memory(shm_dir: Path) -> None:
    """Each number of each head, whatever it is told to be: in a process that cannot take 256 MiB more than it has."""
    done = run_python(
        """
        import resource, sys, warnings
        from pathlib import Path

        from tests.fuzz.corpora import smallest
        from tests.fuzz.mutations import NUMBERS, overwritten
        from tests.fuzz.targets import check_plan

        warnings.simplefilter("error")
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (256 << 20),) * 2)
        tried = taken = 0
        for corpus in smallest():
            for name, content in corpus.files.items():
                for at in range(min(len(content), 72)):
                    for number in NUMBERS:
                        for nbytes in (4, 8):
                            files = {**corpus.files, name: overwritten(content, at, number, nbytes)}
                            taken += check_plan(Path(sys.argv[1]), files)
                            tried += 1
        print(tried, taken)
        """,
        shm_dir,
        timeout_s=110,
        env=CHILD_ENV,
    )
    tried, taken = map(int, done.stdout.split())
    assert done.stderr == ""
    assert tried > 5000
    assert 0 < taken < tried
