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
from tests.words import words


def written(header: object, data: bytes = b"") -> bytes:
    """A safetensors file with any header whatever."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def spec(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8), **more: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


A = spec()
DEEP = 200_000
SPEC = (r"\bdtype\b", r"\bshape\b", r"\bdata_offsets\b")  # what a tensor must have
HEADERS: dict[str, tuple[bytes, str]] = {
    "no bytes": (b"", words(r"\b0 bytes\b", r"-1\b", "truncated")),
    "seven bytes": (b"\0" * 7, words(r"\b7 bytes\b", r"-1\b")),
    "git-lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", words("git-lfs", "lfs pull")),
    "length alone": (struct.pack("<Q", 64), words(r"\b64\b", "truncated")),
    "length beyond the file": (struct.pack("<Q", 1 << 40) + b"{}", words(r"\b1099511627776\b", "truncated")),
    "length of all ones": (b"\xff" * 64, r"\b18446744073709551615\b"),
    "zero length": (struct.pack("<Q", 0) + b"{}", words("header", r"\b0\b")),
    "truncated data": (written({"a": A}, b"\0" * 7), words(r"\b\d+ bytes\b.*\b\d+\b", "truncated")),
    "grown data": (written({"a": A}, b"\0" * 9), r"\bgrown\b"),
    "data outside": (written({"a": spec(offsets=(800, 808))}, b"\0" * 8), r"'a'.*\bbyte \d+"),
    "overlap": (written({"a": A, "b": spec(offsets=(4, 12))}, b"\0" * 12), r"'b'.*\boverlap"),
    "same bytes": (written({"a": A, "b": A}, b"\0" * 8), r"'b'.*\boverlap"),
    "gap": (written({"a": A, "b": spec(offsets=(12, 20))}, b"\0" * 20), r"'b'.*\ba gap\b"),
    "gap in front": (written({"a": spec(offsets=(4, 12))}, b"\0" * 12), r"'a'.*\ba gap\b"),
    "doubled key": (written(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},' * 1 + b'"a":{"dtype":"U8"}}'),
        r"'a'.*\btwice\b"),
    "doubled field": (written(b'{"a":{"dtype":"U8","dtype":"I8","shape":[0],"data_offsets":[0,0]}}'), r"dtype.*twice"),
    "unknown dtype": (written({"a": spec("F99")}, b"\0" * 8), r"'a'.*\bdtype 'F99'"),
    "dtype of a list": (written({"a": spec(["F32"])}, b"\0" * 8), r"'a'.*\bdtype \['F32'\]"),
    "negative size": (written({"a": spec(shape=(-2,))}, b"\0" * 8), r"'a'.*\bshape \[-2\]"),
    "two negative sizes": (written({"a": spec(shape=(-2, -1))}, b"\0" * 8), r"'a'.*\bshape \[-2, -1\]"),
    "float size": (written({"a": spec(shape=(2.0,))}, b"\0" * 8), r"'a'.*\bshape \[2\.0\]"),
    "bool size": (written({"a": spec("U8", (True,), (0, 1))}, b"\0"), r"'a'.*\bshape \[True\]"),
    "size in words": (written({"a": spec(shape=("2",))}, b"\0" * 8), r"'a'.*\bshape \['2'\]"),
    "shape of a number": (written({"a": spec(shape=2)}, b"\0" * 8), r"'a'.*\bshape 2"),
    "huge size": (written({"a": spec(shape=(1 << 70,))}, b"\0" * 8), r"'a'.*\bshape \["),
    "size of 5000 digits": (written(b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,0]}}'),
        r"malformed"),
    "product overflows": (written({"a": spec(shape=(1 << 62, 1 << 62))}, b"\0" * 8), r"'a'.*\bF32\b.*\b\d{30,} b"),
    "product wraps to 8": (written({"a": spec(shape=((1 << 62) + 1, 2))}, b"\0" * 8), r"'a'.*\bF32\b.*\b\d{19,} b"),
    "a million dims": (written({"a": spec(shape=[1 << 60] * 1_000_000)}, b"\0" * 8), r"'a'.*\bshape .*\b64\b"),
    "negative offset": (written({"a": spec(offsets=(-8, 0))}, b"\0" * 8), r"offsets \[-8, 0\]"),
    "offsets backwards": (written({"a": spec(offsets=(8, 0))}, b"\0" * 8), r"-8\b"),
    "float offset": (written({"a": spec(offsets=(0.0, 8))}, b"\0" * 8), r"offsets \[0\.0, 8\]"),
    "bool offset": (written({"a": spec("U8", (1,), (False, True))}, b"\0"), r"offsets \[False, True\]"),
    "huge offset": (written({"a": spec(offsets=(0, 1 << 80))}, b"\0" * 8), r"'a' has shape"),
    "one offset": (written({"a": spec(offsets=(0,))}, b"\0" * 8), r"exactly 2"),
    "three offsets": (written({"a": spec(offsets=(0, 4, 8))}, b"\0" * 8), r"exactly 2"),
    "half a byte": (written({"a": spec("F4", (3,), (0, 2))}, b"\0" * 2), r"\b12 bits\b"),
    "no offsets": (written({"a": {"dtype": "F32", "shape": [2]}}, b"\0" * 8), words(*SPEC)),
    "a field too many": (written({"a": spec(code="import os")}, b"\0" * 8), words(*SPEC, "code")),
    "tensor of a list": (written({"a": [1, 2]}, b"\0" * 8), r"'a'.*\[1, 2\]"),
    "tensor of null": (written({"a": None}), r"'a'.*\bNone\b"),
    "header of a list": (written([1, 2]), r"\blist\b"),
    "header of a string": (written("abc"), r"\bstr\b"),
    "metadata of a list": (written({"__metadata__": ["a"]}), r"__metadata__.*\['a'\]"),
    "metadata of numbers": (written({"__metadata__": {"a": 1}}), words("__metadata__", r"\bstrings\b")),
    "deep lists": (written(b"[" * DEEP + b"]" * DEEP), r"nested too deep|malformed"),
    "deep objects": (written(b'{"a":' * DEEP + b"1" + b"}" * DEEP), r"nested too deep|malformed"),
    "no UTF-8": (written(b'{"\xff\xfe":1}'), r"malformed .*utf-8"),
    "UTF-16": (written('{"a":1}'.encode("utf-16")), r"malformed"),
    "half a surrogate": (written(b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), r"malformed"),
    "half a surrogate in metadata": (written(b'{"__metadata__":{"a":"\\ud800"}}'), r"malformed header: .*surrogates"),
    "NaN": (written(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,0]}}'), r"\bNaN\b.*\bJSON\b"),
    "Infinity": (written(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,Infinity]}}'), r"\bInfinity\b.*\bJSON\b"),
    "no JSON": (written(b"{'a': __import__('os').system('touch x')}"), r"malformed"),
    "cut JSON": (written(b'{"a":{"dtype":"F3'), r"malformed"),
    "two objects": (written(b"{}{}"), r"malformed"),
    "a pickle by another name": (b"\x80\x04cos\nsystem\n(S'touch x'\ntR." + b"\0" * 64, r"\bheader\b"),
    "no tensors": (written({}), r"\bno tensor"),
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
    "nothing": (lambda at: None, r"\bno safetensors\b"),
    "pickles only": (lambda at: (at / "pytorch_model.bin").write_bytes(b"\x80"), r"pytorch_model\.bin.*pickle"),
    "a directory as file": (directory_as_file, words(r"model\.safetensors", "regular file")),
    "a dangling link": (dangling, words(r"model\.safetensors", "No such file")),
    "a link to itself": (loop, words(r"model\.safetensors", "Too many levels")),
    "a pipe": (pipe, r"\bregular file\b"),
    "a device": (device, r"\bregular file\b"),
    "key in two files": (lambda at: (good(at), good(at, "b.safetensors")), r"'a'.*\ba\.saf.*\bb\.saf"),
    "index of a directory": (lambda at: (good(at), (at / INDEX).mkdir()), r"\bregular file\b"),
    "index without end": (sparse_index, r"\b1099511627776 bytes\b"),
    "index no JSON": (lambda at: (good(at), (at / INDEX).write_text("{")), r"malformed"),
    "index no UTF-8": (lambda at: (at / INDEX).write_bytes(b"\xff\xfe{"), r"malformed"),
    "index of a list": (lambda at: (at / INDEX).write_text("[]"), r"\blist\b"),
    "index too deep": (lambda at: (at / INDEX).write_text('{"a":' * DEEP), r"too deep|malformed"),
    "no weight_map": (lambda at: (good(at), (at / INDEX).write_text("{}")), r"\bweight_map\b.*\bNone\b"),
    "weight_map of a list": (lambda at: index(at, ["a"]), r"\bweight_map\b.*\['a'\]"),
    "weight_map of numbers": (lambda at: index(at, {"a": 1}), words("weight_map", r"\bkeys\b", r"\bnames\b")),
    "weight_map of a number among names": (lambda at: (good(at), index(at, {"a": "a.safetensors", "b": None})), "None"),
    "empty weight_map": (lambda at: (good(at), index(at, {})), r"\bweight_map\b.*\{\}"),
    "index metadata of a list": (lambda at: (at / INDEX).write_text('{"metadata":[],"weight_map":{"a":"a"}}'), r"not "),
    "doubled key in index": (
        lambda at: (at / INDEX).write_text('{"weight_map":{"a":"a.safetensors","a":"b.safetensors"}}'),
        r"'a'.*\btwice\b",
    ),
    "index leaves upwards": (lambda at: (good(at.parent, "x.safetensors"), index(at, {"a": "../x.safetensors"})),
        r"index.*'\.\./x\.safetensors'"),
    "index leaves absolutely": (lambda at: index(at, {"a": str(good(at).absolute())}), r"index.*'/.*a\.safetensors'"),
    "index into a folder": (lambda at: ((at / "d").mkdir(), good(at / "d"), index(at, {"a": "d/a.safetensors"})),
        r"index.*'d/a\.safetensors'"),
    "index names the parent": (lambda at: index(at, {"a": ".."}), r"index.*'\.\.'"),
    "index names nothing": (lambda at: index(at, {"a": ""}), r"index.*''"),
    "index names a NUL": (lambda at: index(at, {"a": "a\0.safetensors"}), r"index.*'a"),
    "index names half a surrogate": (lambda at: index(at, {"a": "\ud800.safetensors"}), r"index.*'"),
    "index names another kind": (lambda at: (good(at, "config.json"), index(at, {"a": "config.json"})), r"ex.*'conf"),
    "missing shard": (lambda at: (good(at), index(at, {"a": "a.safetensors", "b": "b.safetensors"})),
        r"index.*'b\.safetensors'"),
    "shard is a dangling link": (lambda at: ((at / "a.safetensors").symlink_to("gone"),
        index(at, {"a": "a.safetensors"})), r"index.*'a\.safetensors'"),
    "key in index, not in file": (lambda at: (good(at), index(at, {"a": "a.safetensors", "b": "a.safetensors"})),
        words("'b'", r"\ba\.safetensors", r"\bno file\b")),
    "key in file, not in index": (lambda at: (good(at), index(at, {"c": "a.safetensors"})),
        words("'c'", r"\ba\.safetensors", r"\bno file\b")),
    "a file that the index does not list": (lambda at: (good(at), good(at, "b.safetensors", "b"),
        index(at, {"a": "a.safetensors"})), words(r" b\.safetensors", r"model\.safetensors\.index\.json")),
    "two files and no index": (lambda at: (good(at, "model.safetensors"), good(at, "more.safetensors", "b")),
        words(r"more\.safetensors", r"model\.safetensors\b(?!\.)", r"\bindex\b")),
    "more in a file than the index says": (lambda at: ((at / "a.safetensors").write_bytes(written({"a": A,
        "b": spec(offsets=(8, 16))}, b"\0" * 16)), index(at, {"a": "a.safetensors"})), r"'b'.*\bindex\b"),
    "index swaps files": (lambda at: (good(at), good(at, "b.safetensors", "b"),
        index(at, {"a": "b.safetensors", "b": "a.safetensors"})), r"'a'.*\bb\.safetensors.*\ba\.safetensors"),
    "file doubled under the index": (lambda at: (good(at), good(at, "b.safetensors"),
        index(at, {"a": "a.safetensors", "b": "b.safetensors"})), r"'a'.*\ba\.saf.*\bb\.saf"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "pattern"), FOLDERS.values(), ids=FOLDERS.keys())
def test_directories(tmp_path: Path, make: Callable[[Path], object], pattern: str) -> None:
    at = tmp_path / "m"
    at.mkdir()
    make(at)
    with refused(mw.LoadError, pattern, tmp_path):
        open_source(at)


def test_no_directory(tmp_path: Path) -> None:
    with refused(mw.LoadError, r"\bgone\b.*\bdirectory\b", tmp_path):
        open_source(tmp_path / "gone")
    file = good(tmp_path)
    with refused(mw.LoadError, r"a\.safetensors\b.*\bdirectory\b", tmp_path):
        open_source(file)


def test_links_to_regular_files_are_fine(tmp_path: Path) -> None:
    """The hub's cache is made of them."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "a.safetensors").symlink_to(good(tmp_path / "blobs"))
    index(tmp_path / "m", {"a": "a.safetensors"})
    assert list(open_source(tmp_path / "m").entries) == ["a"]


def test_empty_and_scalar_tensors_are_fine(tmp_path: Path) -> None:
    shapes = {"s": ((), (0, 4)), "e": ((0, 4), (0, 0)), "f": ((3, 0), (4, 4))}  # an empty one begins where another does
    header = {key: spec("F32", shape, offsets) for key, (shape, offsets) in shapes.items()}
    (tmp_path / "model.safetensors").write_bytes(written(header, b"\0" * 4))
    assert {k: e.shape for k, e in open_source(tmp_path).entries.items()} == {k: s for k, (s, _) in shapes.items()}


def test_names_that_no_file_system_takes(tmp_path: Path) -> None:
    with refused(mw.LoadError, "File name too long", tmp_path):
        mw.load(tmp_path / ("m" * 300))
    index(tmp_path, {"a": "m" * 300 + ".safetensors"})
    with refused(mw.LoadError, "File name too long", tmp_path):
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
    """Raise every error that is not one of the package."""
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
