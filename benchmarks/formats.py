"""How fast each format gets into shared memory, against its own library reading the same into a process.

It isolates the decoding: files are in the page cache, and memory was in use a moment ago, by the same contender. The
helper processes of shmserve count; so does what a library does by threads of its own.
"""

from __future__ import annotations

import io
import json
import struct
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from corpora import ragged_lengths, write_ragged
from harness import Case, Report, Result, alternated, benchmark, best, installed, ratio
from load import loaded

NBYTES = 768 << 20
"""About how large a corpus is, unless its format takes long to read."""
ROUNDS = 3
TEXT_NBYTES = 400
TOKENS_PER_ROW = 256
FILE_NBYTES = 64 << 10


@dataclass(frozen=True)
class Format:
    """One format: how a corpus of it is made, and how its own library reads it."""

    title: str
    write: Callable[[Path, int], Path]
    """Given a path without suffix and about how many bytes, makes the corpus and returns what to serve."""
    reader: str
    read: Callable[[Path], object]
    package: str = "numpy"
    nbytes: int = NBYTES


def _texts(nbytes: int) -> list[str]:
    draw = np.random.default_rng(0)
    letters = draw.integers(97, 123, nbytes, dtype=np.uint8).tobytes().decode()
    return [letters[start : start + TEXT_NBYTES] for start in range(0, nbytes, TEXT_NBYTES)]


def _rows(nbytes: int) -> np.ndarray[Any, Any]:
    shape = (nbytes // (2 * TOKENS_PER_ROW), TOKENS_PER_ROW)
    return np.random.default_rng(0).integers(0, 50_000, shape).astype(np.uint16)


def _table(nbytes: int) -> Any:
    """Return a pyarrow table of ids, strings and lists of tokens."""
    import pyarrow as pa

    texts = _texts(nbytes // 2)
    lengths = ragged_lengths(len(texts), TEXT_NBYTES // 4)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = np.random.default_rng(1).integers(0, 50_000, int(offsets[-1]), dtype=np.int32)
    return pa.table({"id": range(len(texts)), "text": texts, "tokens": pa.ListArray.from_arrays(offsets, tokens)})


def _write_tokens(path: Path, nbytes: int) -> Path:
    found = path.with_suffix(".bin")
    _rows(nbytes).tofile(found)
    return found


def _write_pair(path: Path, nbytes: int) -> Path:
    return write_ragged(path, ragged_lengths(nbytes // 2048, 512))


def _read_pair(path: Path) -> object:
    index = path.with_suffix(".idx")
    (count,) = np.fromfile(index, np.int64, 1, offset=18)
    return np.fromfile(path, np.int32), np.fromfile(index, np.int32, count, offset=34)


def _write_npy(path: Path, nbytes: int) -> Path:
    np.save(path.with_suffix(".npy"), _rows(nbytes))
    return path.with_suffix(".npy")


def _write_npz(path: Path, nbytes: int) -> Path:
    np.savez(path.with_suffix(".npz"), tokens=_rows(nbytes))
    return path.with_suffix(".npz")


def _read_npz(path: Path) -> object:
    with np.load(path) as archive:
        return {name: archive[name] for name in archive.files}


def _write_safetensors(path: Path, nbytes: int) -> Path:
    from safetensors.numpy import save_file

    save_file({"tokens": _rows(nbytes)}, path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


def _read_safetensors(path: Path) -> object:
    from safetensors.numpy import load_file

    return load_file(path)


def _write_arrow(path: Path, nbytes: int) -> Path:
    import pyarrow as pa

    table = _table(nbytes)
    with pa.ipc.new_file(str(path.with_suffix(".arrow")), table.schema) as file:
        file.write_table(table, max_chunksize=10_000)
    return path.with_suffix(".arrow")


def _read_arrow(path: Path) -> object:
    import pyarrow as pa

    with pa.OSFile(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def _write_stream(path: Path, nbytes: int) -> Path:
    import pyarrow as pa

    table = _table(nbytes)
    with pa.ipc.new_stream(str(path.with_suffix(".arrow")), table.schema) as file:
        file.write_table(table, max_chunksize=10_000)
    return path.with_suffix(".arrow")


def _read_stream(path: Path) -> object:
    import pyarrow as pa

    with pa.OSFile(str(path)) as file:
        return pa.ipc.open_stream(file).read_all()


def _write_feather(path: Path, nbytes: int) -> Path:
    from pyarrow import feather

    feather.write_feather(_table(nbytes), str(path.with_suffix(".feather")), compression="lz4", chunksize=10_000)
    return path.with_suffix(".feather")


def _read_feather(path: Path) -> object:
    from pyarrow import feather

    return feather.read_table(str(path), memory_map=False)


def _write_parquet(path: Path, nbytes: int) -> Path:
    from pyarrow import parquet

    parquet.write_table(_table(nbytes), str(path.with_suffix(".parquet")), row_group_size=50_000)
    return path.with_suffix(".parquet")


def _read_parquet(path: Path) -> object:
    from pyarrow import parquet

    return parquet.read_table(str(path))


def _write_csv(path: Path, nbytes: int) -> Path:
    import pyarrow as pa
    from pyarrow import csv

    texts = _texts(nbytes * TEXT_NBYTES // (TEXT_NBYTES + 40))
    numbers = np.random.default_rng(1).random((3, len(texts)))
    table = pa.table({"id": range(len(texts)), "x": numbers[0], "y": numbers[1], "text": texts})
    csv.write_csv(table, str(path.with_suffix(".csv")))
    return path.with_suffix(".csv")


def _read_csv(path: Path) -> object:
    from pyarrow import csv

    return csv.read_csv(str(path))


def _write_jsonl(path: Path, nbytes: int) -> Path:
    texts = _texts(nbytes // 2)
    draw = np.random.default_rng(1)
    with path.with_suffix(".jsonl").open("w") as file:
        for number, text in enumerate(texts):
            tokens = draw.integers(0, 50_000, TEXT_NBYTES // 7).tolist()
            file.write(json.dumps({"id": number, "text": text, "tokens": tokens}) + "\n")
    return path.with_suffix(".jsonl")


def _read_jsonl(path: Path) -> object:
    with path.open() as file:
        return [json.loads(line) for line in file]


def _write_text(path: Path, nbytes: int) -> Path:
    path.with_suffix(".txt").write_text("\n".join(_texts(nbytes)))
    return path.with_suffix(".txt")


def _read_text(path: Path) -> object:
    with path.open() as file:
        return [line.rstrip("\n") for line in file]


def _write_hdf5(path: Path, nbytes: int) -> Path:
    import h5py

    with h5py.File(path.with_suffix(".h5"), "w") as file:
        file["tokens"] = _rows(nbytes)
    return path.with_suffix(".h5")


def _read_hdf5(path: Path) -> object:
    import h5py

    with h5py.File(path) as file:
        return file["tokens"][:]


def _write_lmdb(path: Path, nbytes: int) -> Path:
    import lmdb

    with lmdb.open(str(path), map_size=4 * nbytes) as database, database.begin(write=True) as transaction:
        for number, data in enumerate(_files(nbytes)):
            transaction.put(f"{number:012}".encode(), data)
    return path


def _read_lmdb(path: Path) -> object:
    import lmdb

    with lmdb.open(str(path), readonly=True, lock=False) as database, database.begin() as transaction:
        return list(transaction.cursor())


def _files(nbytes: int) -> list[bytes]:
    content = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8).tobytes()
    return [content[start : start + FILE_NBYTES] for start in range(0, nbytes, FILE_NBYTES)]


def _write_tar(path: Path, nbytes: int) -> Path:
    with tarfile.open(path.with_suffix(".tar"), "w") as archive:
        for number, data in enumerate(_files(nbytes)):
            for suffix, part in (("jpg", data), ("cls", b"7")):
                member = tarfile.TarInfo(f"{number:06}.{suffix}")
                member.size = len(part)
                archive.addfile(member, io.BytesIO(part))
    return path.with_suffix(".tar")


def _read_tar(path: Path) -> object:
    with tarfile.open(path) as archive:
        return [(member.name, archive.extractfile(member).read()) for member in archive]  # type: ignore[union-attr]


def _write_folder(path: Path, nbytes: int) -> Path:
    for number, data in enumerate(_files(nbytes)):
        folder = path / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:06}.jpg").write_bytes(data)
    return path


def _read_folder(path: Path) -> object:
    return [file.read_bytes() for file in sorted(path.rglob("*.jpg"))]


def _write_mds(path: Path, nbytes: int) -> Path:
    """Write shards of a column of text, after the layout of MosaicML's streaming."""
    path.mkdir()
    shards = []
    texts = _texts(nbytes)
    per_shard = -(-len(texts) // 4)
    for number, first in enumerate(range(0, len(texts), per_shard)):
        records = [struct.pack("<I", len(text)) + text.encode() for text in texts[first : first + per_shard]]
        head = 4 * (len(records) + 2)
        offsets = head + np.concatenate([[0], np.cumsum(list(map(len, records)))])
        name = f"shard.{number:05}.mds"
        content = struct.pack("<I", len(records)) + offsets.astype("<u4").tobytes() + b"".join(records)
        (path / name).write_bytes(content)
        shards.append(
            {
                **{"format": "mds", "version": 2, "compression": None, "hashes": [], "size_limit": None},
                **{"column_names": ["text"], "column_encodings": ["str"], "column_sizes": [None]},
                **{"samples": len(records), "zip_data": None},
                "raw_data": {"basename": name, "bytes": len(content), "hashes": {}},
            }
        )
    (path / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return path


def _read_mds(path: Path) -> object:
    found = []
    for shard in sorted(path.glob("*.mds")):
        with shard.open("rb") as file:
            (count,) = struct.unpack("<I", file.read(4))
            offsets = np.frombuffer(file.read(4 * (count + 1)), "<u4")
            for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
                file.seek(start)
                found.append(file.read(stop - start)[4:].decode())
    return found


def _write_tfrecord(path: Path, nbytes: int) -> Path:
    from shmserve.sources.tfrecord import masked_crc

    with path.with_suffix(".tfrecord").open("wb") as file:
        for image in _files(nbytes):
            data = _example({"image": image})
            length = struct.pack("<Q", len(data))
            file.write(length + struct.pack("<I", masked_crc(length)))
            file.write(data + bytes(4))  # of the values' own checksum, which neither reader looks at
    return path.with_suffix(".tfrecord")


def _example(features: dict[str, bytes]) -> bytes:
    """Return a tf.train.Example of features that are one string each, as protocol buffers have it."""

    def field(data: bytes) -> bytes:
        length = len(data)
        encoded = b""
        while length > 0x7F:
            encoded += bytes([length & 0x7F | 0x80])
            length >>= 7
        return b"\x0a" + encoded + bytes([length]) + data

    entries = b""
    for name, value in features.items():
        entries += field(field(name.encode()) + b"\x12" + field(field(field(value))[1:])[1:])
    return field(entries)


def _read_tfrecord(path: Path) -> object:
    found = []
    with path.open("rb") as file:
        while head := file.read(12):
            found.append(file.read(struct.unpack("<Q", head[:8])[0]))
            file.read(4)
    return found


def _write_saved(path: Path, nbytes: int) -> Path:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset(_table(nbytes)).save_to_disk(str(path))
    return path


def _read_saved(path: Path) -> object:
    import datasets

    return datasets.load_from_disk(str(path), keep_in_memory=True)


FORMATS = {
    "tokens": Format("flat tokens", _write_tokens, "np.fromfile", lambda path: np.fromfile(path, np.uint16)),
    "pair": Format("Megatron pair", _write_pair, "np.fromfile", _read_pair),
    "npy": Format(".npy", _write_npy, "np.load", np.load),
    "npz": Format(".npz", _write_npz, "np.load", _read_npz),
    "safetensors": Format("safetensors", _write_safetensors, "load_file", _read_safetensors, "safetensors"),
    "arrow": Format("Arrow file", _write_arrow, "pyarrow.ipc", _read_arrow, "pyarrow"),
    "stream": Format("Arrow stream", _write_stream, "pyarrow.ipc", _read_stream, "pyarrow"),
    "feather": Format("Feather (lz4)", _write_feather, "pyarrow.feather", _read_feather, "pyarrow", NBYTES),
    "parquet": Format("Parquet (snappy)", _write_parquet, "pyarrow.parquet", _read_parquet, "pyarrow", NBYTES // 2),
    "csv": Format("CSV", _write_csv, "pyarrow.csv", _read_csv, "pyarrow", NBYTES // 4),
    "jsonl": Format("JSON Lines", _write_jsonl, "json.loads", _read_jsonl, nbytes=NBYTES // 8),
    "text": Format("text lines", _write_text, "a loop", _read_text, nbytes=NBYTES // 2),
    "hdf5": Format("HDF5", _write_hdf5, "h5py", _read_hdf5, "h5py"),
    "lmdb": Format("LMDB", _write_lmdb, "lmdb", _read_lmdb, "lmdb"),
    "tar": Format("webdataset tar", _write_tar, "tarfile", _read_tar),
    "folder": Format("folder of files", _write_folder, "read_bytes", _read_folder),
    "mds": Format("MDS", _write_mds, "a loop", _read_mds),
    "tfrecord": Format("TFRecord", _write_tfrecord, "a loop", _read_tfrecord),
    "saved": Format("Hugging Face directory", _write_saved, "datasets", _read_saved, "datasets"),
}


def measure(case: Case) -> Result:
    """Return the seconds that one way of reading a corpus takes, once the same has been done before."""
    chosen, path = FORMATS[case["format"]], Path(case["path"])
    if case["by"] == "shmserve":
        for _ in range(2):
            with loaded([str(path)]) as ready:
                found = ready.load_seconds
        return {"s": found}
    for _ in range(2):
        started = time.perf_counter()
        content = chosen.read(path)
        found = time.perf_counter() - started
        del content
    return {"s": found}


def run(quick: bool) -> Report:
    """Measure all formats whose libraries are installed."""
    names = [name for name, chosen in FORMATS.items() if installed(chosen.package)]
    rows = []
    data: dict[str, Any] = {}
    for name in names:
        chosen = FORMATS[name]
        with tempfile.TemporaryDirectory(prefix="shmserve-benchmark-") as folder:
            path = chosen.write(Path(folder, "corpus"), (1 << 20) if quick else chosen.nbytes)
            files = path.rglob("*") if path.is_dir() else [path]
            gb = sum(file.stat().st_size for file in files if file.is_file()) / 1e9
            cases = [{"format": name, "path": str(path), "by": by} for by in ("shmserve", "library")]
            ours, theirs = alternated(__file__, cases, 1 if quick else ROUNDS)
        data[name] = {"gb": gb, "shmserve": ours, "library": theirs}
        rows.append(
            [
                chosen.title,
                f"{gb:.2f}",
                f"{gb / best(ours, 's'):.2f}",
                chosen.reader,
                f"{gb / best(theirs, 's'):.2f}",
                f"{ratio(ours, theirs, 's'):.2f}x",
            ]
        )
    missing = ", ".join(chosen.title for name, chosen in FORMATS.items() if name not in names)
    return Report(
        question="How fast does each format get into shared memory, against its own library?",
        isolates=(
            "From a path in the page cache to a segment that is served, helper processes included, against the "
            "library reading every value into a process of its own. Bytes are those of the files. The second of two "
            f"times in fresh processes, the best of {ROUNDS}, in turn; the ratio is the median of their pairs."
        ),
        columns=["format", "GB", "shmserve, GB/s", "library", "GB/s", "shmserve against it"],
        rows=rows,
        notes=[
            "MDS and TFRecord have readers of their own here, which hand out the bytes or strings of each record; "
            "those of their projects do no less.",
            "Helper processes take 0.2 s to start, and 0.4 s with pyarrow in them: all of it counts.",
            f"Files, and values of LMDB, tar and TFRecord, have {FILE_NBYTES >> 10} KiB; texts {TEXT_NBYTES} bytes.",
            *([f"not installed, see benchmarks/peers: {missing}"] if missing else []),
        ],
        data=data,
    )


if __name__ == "__main__":
    benchmark(__file__, measure, run)
