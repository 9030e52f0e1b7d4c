"""Hostile and broken sources: each ends in an error of our own that names the thing and a way out, at once."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.weights import open_source
from tests.hostile import INDEX, index, refused


def written(header: object, data: bytes = b"") -> bytes:
    """A safetensors file with any header whatever."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def spec(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8), **more: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


A = spec()
DEEP = 200_000
HEADERS: dict[str, tuple[bytes, str]] = {
    "no bytes": (b"", r"0 bytes, header of -1: truncated"),
    "seven bytes": (b"\0" * 7, r"7 bytes, header of -1"),
    "git-lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", r"is a pointer of git-lfs; .* lfs pull"),
    "length alone": (struct.pack("<Q", 64), r"header of 64: truncated"),
    "length beyond the file": (struct.pack("<Q", 1 << 40) + b"{}", r"header of 1099511627776: truncated"),
    "length of all ones": (b"\xff" * 64, r"header of 18446744073709551615"),
    "zero length": (struct.pack("<Q", 0) + b"{}", r"header of 0"),
    "truncated data": (written({"a": A}, b"\0" * 7), r"speaks of \d+ bytes, it has \d+: truncated"),
    "grown data": (written({"a": A}, b"\0" * 9), r"truncated or grown"),
    "data outside": (written({"a": spec(offsets=(800, 808))}, b"\0" * 8), r"'a' begins at byte \d+, expected"),
    "overlap": (written({"a": A, "b": spec(offsets=(4, 12))}, b"\0" * 12), r"'b' begins .* overlap"),
    "same bytes": (written({"a": A, "b": A}, b"\0" * 8), r"'b' begins .* overlap"),
    "gap": (written({"a": A, "b": spec(offsets=(12, 20))}, b"\0" * 20), r"'b' begins .* a gap"),
    "gap in front": (written({"a": spec(offsets=(4, 12))}, b"\0" * 12), r"'a' begins .* a gap"),
    "doubled key": (
        written(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},' * 1 + b'"a":{"dtype":"U8"}}'),
        r"the key 'a' stands there twice",
    ),
    "doubled field": (written(b'{"a":{"dtype":"U8","dtype":"I8","shape":[0],"data_offsets":[0,0]}}'), r"'dtype' stand"),
    "unknown dtype": (written({"a": spec("F99")}, b"\0" * 8), r"'a' has the unknown dtype 'F99'"),
    "dtype of a list": (written({"a": spec(["F32"])}, b"\0" * 8), r"'a' has the unknown dtype \['F32'\]"),
    "negative size": (written({"a": spec(shape=(-2,))}, b"\0" * 8), r"'a' has shape \[-2\]"),
    "two negative sizes": (written({"a": spec(shape=(-2, -1))}, b"\0" * 8), r"'a' has shape \[-2, -1\]"),
    "float size": (written({"a": spec(shape=(2.0,))}, b"\0" * 8), r"'a' has shape \[2\.0\]"),
    "bool size": (written({"a": spec("U8", (True,), (0, 1))}, b"\0"), r"'a' has shape \[True\]"),
    "size in words": (written({"a": spec(shape=("2",))}, b"\0" * 8), r"'a' has shape \['2'\]"),
    "shape of a number": (written({"a": spec(shape=2)}, b"\0" * 8), r"'a' has shape 2"),
    "huge size": (written({"a": spec(shape=(1 << 70,))}, b"\0" * 8), r"'a' has shape \["),
    "size of 5000 digits": (
        written(b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,0]}}'),
        r"malformed",
    ),
    "product overflows": (written({"a": spec(shape=(1 << 62, 1 << 62))}, b"\0" * 8), r"'a' F32 \[.* takes \d{30,} b"),
    "product wraps to 8": (written({"a": spec(shape=((1 << 62) + 1, 2))}, b"\0" * 8), r"'a' F32 .* takes"),
    "a million dims": (written({"a": spec(shape=[1 << 60] * 1_000_000)}, b"\0" * 8), r"'a' has shape .* at most 64"),
    "negative offset": (written({"a": spec(offsets=(-8, 0))}, b"\0" * 8), r"offsets \[-8, 0\]"),
    "offsets backwards": (written({"a": spec(offsets=(8, 0))}, b"\0" * 8), r"gives? it -8"),
    "float offset": (written({"a": spec(offsets=(0.0, 8))}, b"\0" * 8), r"offsets \[0\.0, 8\]"),
    "bool offset": (written({"a": spec("U8", (1,), (False, True))}, b"\0"), r"offsets \[False, True\]"),
    "huge offset": (written({"a": spec(offsets=(0, 1 << 80))}, b"\0" * 8), r"'a' has shape"),
    "one offset": (written({"a": spec(offsets=(0,))}, b"\0" * 8), r"exactly 2"),
    "three offsets": (written({"a": spec(offsets=(0, 4, 8))}, b"\0" * 8), r"exactly 2"),
    "half a byte": (written({"a": spec("F4", (3,), (0, 2))}, b"\0" * 2), r"takes 12 bits"),
    "no offsets": (written({"a": {"dtype": "F32", "shape": [2]}}, b"\0" * 8), r"must have dtype, shape and data_off"),
    "a field too many": (written({"a": spec(code="import os")}, b"\0" * 8), r"and no more"),
    "tensor of a list": (written({"a": [1, 2]}, b"\0" * 8), r"'a' has \[1, 2\]"),
    "tensor of null": (written({"a": None}), r"'a' has None"),
    "header of a list": (written([1, 2]), r"holds a list"),
    "header of a string": (written("abc"), r"holds a str"),
    "metadata of a list": (written({"__metadata__": ["a"]}), r"__metadata__ is \['a'\]"),
    "metadata of numbers": (written({"__metadata__": {"a": 1}}), r"must map names to strings"),
    "deep lists": (written(b"[" * DEEP + b"]" * DEEP), r"nested too deep|malformed"),
    "deep objects": (written(b'{"a":' * DEEP + b"1" + b"}" * DEEP), r"nested too deep|malformed"),
    "no UTF-8": (written(b'{"\xff\xfe":1}'), r"malformed .*utf-8"),
    "UTF-16": (written('{"a":1}'.encode("utf-16")), r"malformed"),
    "half a surrogate": (written(b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), r"malformed"),
    "NaN": (written(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,0]}}'), r"NaN is no JSON number"),
    "Infinity": (written(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,Infinity]}}'), r"Infinity is no JSON"),
    "no JSON": (written(b"{'a': __import__('os').system('touch x')}"), r"malformed"),
    "cut JSON": (written(b'{"a":{"dtype":"F3'), r"malformed"),
    "two objects": (written(b"{}{}"), r"malformed"),
    "a pickle by another name": (b"\x80\x04cos\nsystem\n(S'touch x'\ntR." + b"\0" * 64, r"header of"),
    "no tensors": (written({}), r"holds no tensor"),
}  # fmt: skip


@pytest.mark.parametrize(("raw", "pattern"), HEADERS.values(), ids=HEADERS.keys())
def test_headers(tmp_path: Path, raw: bytes, pattern: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw)
    with refused(mw.LoadError, pattern, tmp_path):
        open_source(tmp_path)


def good(at: Path, name: str = "a.safetensors", key: str = "a") -> Path:
    (at / name).write_bytes(written({key: A}, b"\0" * 8))
    return at / name


def directory_as_file(at: Path) -> None:
    (at / "model.safetensors").mkdir()


def dangling(at: Path) -> None:
    (at / "model.safetensors").symlink_to(at / "gone")


def pipe(at: Path) -> None:
    os.mkfifo(at / "model.safetensors")


def device(at: Path) -> None:
    (at / "model.safetensors").symlink_to("/dev/zero")


def loop(at: Path) -> None:
    (at / "model.safetensors").symlink_to(at / "model.safetensors")


def sparse_index(at: Path) -> None:
    with (at / INDEX).open("wb") as f:
        f.truncate(1 << 40)


FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda at: None, r"holds no safetensors file"),
    "pickles only": (lambda at: (at / "pytorch_model.bin").write_bytes(b"\x80"), r"is a pickle, which may run code"),
    "a directory as file": (directory_as_file, r"model\.safetensors is no regular file"),
    "a dangling link": (dangling, r"model\.safetensors cannot be read: No such file"),
    "a link to itself": (loop, r"model\.safetensors cannot be read: Too many levels"),
    "a pipe": (pipe, r"is no regular file"),
    "a device": (device, r"is no regular file"),
    "key in two files": (lambda at: (good(at), good(at, "b.safetensors")), r"'a' stands in both a\.saf.* and b\.saf"),
    "index of a directory": (lambda at: (good(at), (at / INDEX).mkdir()), r"is no regular file"),
    "index without end": (sparse_index, r"1099511627776 bytes are too many"),
    "index no JSON": (lambda at: (good(at), (at / INDEX).write_text("{")), r"malformed"),
    "index no UTF-8": (lambda at: (at / INDEX).write_bytes(b"\xff\xfe{"), r"malformed"),
    "index of a list": (lambda at: (at / INDEX).write_text("[]"), r"holds a list"),
    "index too deep": (lambda at: (at / INDEX).write_text('{"a":' * DEEP), r"too deep|malformed"),
    "no weight_map": (lambda at: (good(at), (at / INDEX).write_text("{}")), r"weight_map is None"),
    "weight_map of a list": (lambda at: index(at, ["a"]), r"weight_map is \['a'\]"),
    "weight_map of numbers": (lambda at: index(at, {"a": 1}), r"must map keys to file names"),
    "empty weight_map": (lambda at: (good(at), index(at, {})), r"weight_map is \{\}"),
    "index metadata of a list": (lambda at: (at / INDEX).write_text('{"metadata":[],"weight_map":{"a":"a"}}'), r"not "),
    "doubled key in index": (
        lambda at: (at / INDEX).write_text('{"weight_map":{"a":"a.safetensors","a":"b.safetensors"}}'),
        r"'a' stands there twice",
    ),
    "index leaves upwards": (
        lambda at: (good(at.parent, "x.safetensors"), index(at, {"a": "../x.safetensors"})),
        r"names '\.\./x\.safetensors'",
    ),
    "index leaves absolutely": (lambda at: index(at, {"a": str(good(at).absolute())}), r"names '/.*a\.safetensors'"),
    "index into a folder": (
        lambda at: ((at / "d").mkdir(), good(at / "d"), index(at, {"a": "d/a.safetensors"})),
        r"names 'd/a\.safetensors'",
    ),
    "index names the parent": (lambda at: index(at, {"a": ".."}), r"names '\.\.'"),
    "index names nothing": (lambda at: index(at, {"a": ""}), r"names ''"),
    "index names a NUL": (lambda at: index(at, {"a": "a\0.safetensors"}), r"names 'a"),
    "index names half a surrogate": (lambda at: index(at, {"a": "\ud800.safetensors"}), r"names '"),
    "index names another kind": (lambda at: (good(at, "config.json"), index(at, {"a": "config.json"})), r"names 'conf"),
    "missing shard": (
        lambda at: (good(at), index(at, {"a": "a.safetensors", "b": "b.safetensors"})),
        r"names 'b\.safetensors', which is no",
    ),
    "shard is a dangling link": (
        lambda at: ((at / "a.safetensors").symlink_to("gone"), index(at, {"a": "a.safetensors"})),
        r"names 'a\.safetensors'",
    ),
    "key in index, not in file": (
        lambda at: (good(at), index(at, {"a": "a.safetensors", "b": "a.safetensors"})),
        r"puts 'b' into a\.safetensors, but no file has it",
    ),
    "key in file, not in index": (
        lambda at: (good(at), index(at, {"c": "a.safetensors"})),
        r"puts 'c' into",
    ),
    "a file that the index does not list": (
        lambda at: (good(at), good(at, "b.safetensors", "b"), index(at, {"a": "a.safetensors"})),
        r"holds b\.safetensors, which model\.safetensors\.index\.json does not list",
    ),
    "two files and no index": (
        lambda at: (good(at, "model.safetensors"), good(at, "more.safetensors", "b")),
        r"holds more\.safetensors, which stands beside model\.safetensors without an index",
    ),
    "more in a file than the index says": (
        lambda at: (
            (at / "a.safetensors").write_bytes(written({"a": A, "b": spec(offsets=(8, 16))}, b"\0" * 16)),
            index(at, {"a": "a.safetensors"}),
        ),
        r"holds 'b', which the index does not list",
    ),
    "index swaps files": (
        lambda at: (good(at), good(at, "b.safetensors", "b"), index(at, {"a": "b.safetensors", "b": "a.safetensors"})),
        r"puts 'a' into b\.safetensors, but a\.safetensors has it",
    ),
    "file doubled under the index": (
        lambda at: (good(at), good(at, "b.safetensors"), index(at, {"a": "a.safetensors", "b": "b.safetensors"})),
        r"'a' stands in both",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "pattern"), FOLDERS.values(), ids=FOLDERS.keys())
def test_directories(tmp_path: Path, make: Callable[[Path], object], pattern: str) -> None:
    at = tmp_path / "m"
    at.mkdir()
    make(at)
    with refused(mw.LoadError, pattern, tmp_path):
        open_source(at)


def test_no_directory(tmp_path: Path) -> None:
    with refused(mw.LoadError, r"gone is no directory", tmp_path):
        open_source(tmp_path / "gone")
    file = good(tmp_path)
    with refused(mw.LoadError, r"a\.safetensors is no directory", tmp_path):
        open_source(file)


def test_links_to_regular_files_are_fine(tmp_path: Path) -> None:
    """The hub's cache is made of them."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "a.safetensors").symlink_to(good(tmp_path / "blobs"))
    index(tmp_path / "m", {"a": "a.safetensors"})
    assert list(open_source(tmp_path / "m").entries) == ["a"]


def test_empty_and_scalar_tensors_are_fine(tmp_path: Path) -> None:
    shapes = {"e": ((0, 4), (0, 0)), "s": ((), (0, 4)), "f": ((3, 0), (4, 4))}
    header = {key: spec("F32", shape, offsets) for key, (shape, offsets) in shapes.items()}
    (tmp_path / "model.safetensors").write_bytes(written(header, b"\0" * 4))
    assert {k: e.shape for k, e in open_source(tmp_path).entries.items()} == {k: s for k, (s, _) in shapes.items()}


def test_names_that_no_file_system_takes(tmp_path: Path) -> None:
    with refused(mw.LoadError, "File name too long; check the name", tmp_path):
        mw.load(tmp_path / ("m" * 300))
    index(tmp_path, {"a": "m" * 300 + ".safetensors"})
    with refused(mw.LoadError, "File name too long; check the name", tmp_path):
        open_source(tmp_path)


BYTES = b'{}[]",:0123456789-.eE\\u\x00\x7f\x80\xffabctrufalsn '


def mutated(raw: bytes, draw: random.Random) -> bytes:
    """A few bytes changed, inserted, removed, repeated or cut off."""
    out = bytearray(raw)
    for _ in range(draw.randint(1, 4)):
        at, kind = draw.randrange(len(out) + 1), draw.randrange(5)
        if kind == 0 and at < len(out):
            out[at] = draw.choice(BYTES)
        elif kind == 1:
            out[at:at] = bytes(draw.choices(BYTES, k=draw.randint(1, 9)))
        elif kind == 2:
            del out[at : at + draw.randint(1, 12)]
        elif kind == 3:
            out[at:at] = out[at : at + draw.randint(1, 40)]
        elif draw.random() < 0.2:
            del out[at:]
    return bytes(out)


def outcome(at: Path) -> str:
    """Whatever is no error of ours rises from here."""
    try:
        source = open_source(at)
    except mw.MeshwrightError as error:
        str(error).encode()
        return "refused"
    assert all(0 <= e.start <= e.stop <= (at / e.file).stat().st_size for e in source.entries.values())
    return "read"


@pytest.mark.parametrize("seed", range(4))
def test_fuzzed_headers_and_indexes(tmp_path: Path, seed: int) -> None:
    draw, seen = random.Random(seed), {"read": 0, "refused": 0}
    tensors = {"a.b": spec("BF16", (3, 2), (0, 12)), "c": spec("F4", (4,), (12, 14)), "d": spec("U8", (), (14, 15))}
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    whole = json.dumps({"metadata": {"total_size": 15}, "weight_map": dict.fromkeys(tensors, "a.safetensors")}).encode()
    for round_ in range(300):
        text = mutated(header, draw) if round_ % 3 else header
        raw = written(text, bytes(15))
        (tmp_path / "a.safetensors").write_bytes(mutated(raw[:8], draw) + raw[8:] if round_ % 7 == 0 else raw)
        (tmp_path / INDEX).write_bytes(whole if round_ % 3 else mutated(whole, draw))
        seen[outcome(tmp_path)] += 1
    assert seen["refused"] > 200
    assert seen["read"] > 0
