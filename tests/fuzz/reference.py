"""Plain readers and writers of every format, made without the sources: what accepted files must be served as."""

from __future__ import annotations

import gzip
import io
import struct
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2", 9: "<u4", 10: "<u8"}


@dataclass(frozen=True)
class Corpus:
    """What a corpus holds: its samples, or, of a stream, all tokens as one."""

    samples: Sequence[NDArray[Any]]
    stream: bool = False
    arrays: Mapping[str, list[int]] = field(default_factory=dict)


def read(corpus_format: str, files: Sequence[bytes], dtype: str) -> Corpus:
    """Return what the files hold, the values' file first, given that they are sound.

    `dtype` is the one that they are served in: two formats leave it to guessing.
    """
    values, *others = files
    match corpus_format:
        case "fairseq-mmap":
            return _mmap(values, others[0], dtype, is_megatron=False)
        case "megatron":
            return _mmap(values, others[0], dtype, is_megatron=True)
        case "fairseq-legacy":
            return _legacy(values, others[0], is_megatron=False, floats=dtype)
        case "megatron-legacy":
            return _legacy(values, others[0], is_megatron=True, floats=dtype)
        case "llm.c":
            magic, _, count = struct.unpack_from("<iii", values)
            stored = {20240520: "<u2", 20240801: "<u4"}[magic]
            return Corpus([np.frombuffer(values, stored, count, 1024)], stream=True)
        case "litpkds":
            code, count = struct.unpack_from("<BQ", values, 15)
            stored = {6: "<f4", 7: "<f8"}.get(code) or DTYPES[code]
            return Corpus([np.frombuffer(values, stored, count, 24)], stream=True)
        case "npy":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what Python 2 wrote
                return Corpus(list(np.load(io.BytesIO(values), allow_pickle=False)))
        case "datatrove":
            ends = np.frombuffer(others[0], "<u8").tolist()
            tokens = np.frombuffer(values, dtype)
            return Corpus([tokens[start:stop] for start, stop in zip([0, *ends], ends, strict=False)])
        case "raw":
            tokens = np.frombuffer(values, dtype)
            if not others:
                return Corpus([tokens], stream=True)
            rows = [row.split(",") for row in gzip.decompress(others[0]).decode(errors="replace").splitlines()]
            return Corpus([tokens[int(row[0]) : int(row[1])] for row in rows if len(row) > 1])
        case _:
            raise AssertionError(f"no plain reader of the format {corpus_format}")


def _mmap(values: bytes, index: bytes, floats: str, *, is_megatron: bool) -> Corpus:
    code, count = struct.unpack_from("<BQ", index, 17)
    position = 26
    documents = 0
    if is_megatron:
        (documents,) = struct.unpack_from("<Q", index, position)
        position += 8
    dtype = np.dtype(DTYPES.get(code, floats))
    lengths = struct.unpack_from(f"<{count}i", index, position)
    pointers = struct.unpack_from(f"<{count}q", index, position + 4 * count)
    samples = [
        np.frombuffer(values[pointer : pointer + length * dtype.itemsize], dtype)
        for pointer, length in zip(pointers, lengths, strict=True)
    ]
    arrays: dict[str, list[int]] = {}
    if is_megatron:
        position += 12 * count
        arrays["document_indices"] = list(struct.unpack_from(f"<{documents}q", index, position))
        position += 8 * documents
        if len(index) > position:
            arrays["modes"] = list(struct.unpack_from(f"<{count}b", index, position))
    return Corpus(samples, arrays=arrays)


def _legacy(values: bytes, index: bytes, *, is_megatron: bool, floats: str) -> Corpus:
    code, _, count, sizes = struct.unpack_from("<QQQQ", index, 16)
    documents = 0
    position = 48
    if is_megatron:
        (documents,) = struct.unpack_from("<Q", index, position)
        position += 8
    numbers = struct.unpack_from(f"<{2 * (count + 1) + sizes + documents}q", index, position)
    dims, starts = numbers[: count + 1], numbers[count + 1 : 2 * count + 2]
    extents = numbers[2 * count + 2 : 2 * count + 2 + sizes]
    items = np.frombuffer(values, DTYPES.get(code, floats))
    if not is_megatron:
        items = items - items.dtype.type(1)
    samples = [items[starts[i] : starts[i + 1]].reshape(extents[dims[i] : dims[i + 1]]) for i in range(count)]
    return Corpus(samples, arrays={"document_indices": list(numbers[-documents:])} if is_megatron else {})


def written(corpus_format: str, samples: Sequence[NDArray[Any]]) -> dict[str, bytes]:
    """Return the files, by name, of a corpus with these samples, which the format can hold; a stream joins them."""
    dtype = samples[0].dtype
    values = b"".join(sample.tobytes() for sample in samples)
    lengths = [sample.size for sample in samples]
    ends = list(accumulate(lengths))
    starts = [0, *ends[:-1]]
    count = len(samples)
    code = next((code for code, name in DTYPES.items() if np.dtype(name) == dtype), 0)
    documents = list(range(count + 1))
    match corpus_format:
        case "fairseq-mmap" | "megatron":
            index = struct.pack("<9sQBQ", b"MMIDIDX\0\0", 1, code, count)
            index += struct.pack("<Q", count + 1) if corpus_format == "megatron" else b""
            index += struct.pack(f"<{count}i{count}q", *lengths, *(start * dtype.itemsize for start in starts))
            index += struct.pack(f"<{count + 1}q", *documents) if corpus_format == "megatron" else b""
            return {"corpus.bin": values, "corpus.idx": index}
        case "fairseq-legacy" | "megatron-legacy":
            extents = [extent for sample in samples for extent in sample.shape]
            dims = accumulate((sample.ndim for sample in samples), initial=0)
            index = struct.pack("<8sQQQQQ", b"TNTIDX\0\0", 1, code, dtype.itemsize, count, len(extents))
            index += struct.pack("<Q", count + 1) if corpus_format == "megatron-legacy" else b""
            index += struct.pack(f"<{2 * (count + 1) + len(extents)}q", *dims, 0, *ends, *extents)
            if corpus_format == "megatron-legacy":
                return {"corpus.bin": values, "corpus.idx": index + struct.pack(f"<{count + 1}q", *documents)}
            one_more = b"".join((sample + dtype.type(1)).tobytes() for sample in samples)
            return {"corpus.bin": one_more, "corpus.idx": index}
        case "llm.c":
            magic, version = {"uint16": (20240520, 1), "uint32": (20240801, 7)}[dtype.name]
            return {"corpus.bin": struct.pack("<iii", magic, version, sum(lengths)).ljust(1024, b"\0") + values}
        case "litpkds":
            return {"corpus.bin": struct.pack("<7sQBQ", b"LITPKDS", 1, code, sum(lengths)) + values}
        case "npy":
            file = io.BytesIO()
            np.save(file, np.stack(samples))
            return {"corpus.npy": file.getvalue()}
        case "datatrove":
            metadata = f"tokenizer|{dtype.itemsize}\n".encode()
            index = struct.pack(f"<{count}Q", *ends)
            return {"corpus.ds": values, "corpus.ds.index": index, "corpus.ds.metadata": metadata}
        case "raw":
            rows = "".join(f"{start},{end}\n" for start, end in zip(starts, ends, strict=True))
            return {"corpus.npy": values, "corpus.csv.gz": gzip.compress(rows.encode())}
        case _:
            raise AssertionError(f"no plain writer of the format {corpus_format}")
