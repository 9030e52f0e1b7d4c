"""Documents of the token cache from several files and record batches, and the batches that a feed makes of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash

import meshwright as mw
from meshwright.data import token_cache
from meshwright.data.cached_documents import Documents, Statistics
from meshwright.data.feed import Feed, source_of
from meshwright.data.packing_plan import Plan
from meshwright.data.row_files import Row
from meshwright.data.token_cache import TokenizeSpec, prepare
from meshwright.data.tokens import Tokens, scored, together, tokens
from meshwright.data.vision_files import View

GRID = (1, 2, 2)
# Each line is a row, and each word a document of its group; a word in capitals has a class and no span.
FIRST, SECOND = ["", "abc de", "f", "gh IJK"], ["LMNOP", "q", "rs", "tuvw x"]


def words(row: Mapping[str, Any]) -> list[Tokens]:
    """Make one group of the words of a row; a row "!" cannot be used."""
    if row["text"] == "!":
        raise mw.DataError("it is no word")
    ids = [[ord(char) for char in word] for word in row["text"].split()]
    made = [scored(tokens(word, []), 7) if word[0] < 97 else tokens(word, [(0, len(word))]) for word in ids]
    group = together(made) if len(made) > 1 else made[0]
    return [replace(group, views=tuple(View.read([Path(image)], GRID) for image in row.get("images", [])))]


def cached(at: Path, *files: list[Any], **options: Any) -> Documents:
    """Prepare files of rows, given as texts or as JSON objects."""
    paths = tuple(at / f"{number}.{'jsonl' if '{' in rows[0] else 'txt'}" for number, rows in enumerate(files))
    for path, rows in zip(paths, files, strict=True):
        text = "".join(f"{row}\n" for row in rows)
        if not path.exists() or path.read_text() != text:  # a file that is written again has another cache
            path.write_text(text)
    made = dict(name="d", files=paths, make=words, settings_key="s", split="line", on_bad="skip")
    return prepare(TokenizeSpec(**{**made, **options}), at / "cache")


@pytest.fixture
def documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Documents:
    """Return six groups in several record batches; the rows "!" and "f", a document without targets, are left out."""
    monkeypatch.setattr(token_cache, "_BATCH_TOKENS", 4)
    return cached(tmp_path, [*FIRST, "!"], SECOND)


def test_documents_of_several_batches_and_files(documents: Documents, tmp_path: Path) -> None:
    assert len(documents._ids) == 4
    assert not documents.tokens(0).ids.flags.owndata, "they stay in the file"
    made = [documents.tokens(number) for number in range(len(documents))]
    assert ["".join(map(chr, each.ids)) for each in made] == ["abcde", "ghIJK", "LMNOP", "rs", "tuvwx"]
    assert [each.spans for each in made] == [((1, 3), (4, 5)), ((1, 2),), (), ((0, 2),), ((1, 4),)]
    assert [each.parts for each in made] == [(3, 2), (2, 3), (), (), (4, 1)]
    assert [each.classes for each in made] == [(), (7,), (7,), (), ()]
    assert documents.num_parts.tolist() == [2, 2, 1, 1, 2]
    assert documents.num_views.tolist() == [0] * 5
    places = [f"{tmp_path}/0.txt:2", f"{tmp_path}/0.txt:4", *(f"{tmp_path}/1.txt:{line}" for line in (1, 3, 4))]
    assert [documents.place(number) for number in range(5)] == places


def test_statistics_of_the_documents_that_are_kept(documents: Documents) -> None:
    """Targets are the trained tokens and the classes."""
    assert documents.statistics == Statistics(8, 1, 2, 5, 22, 10, 5)
    kept = documents.statistics_of(np.array([False, True, False, True, False]))
    assert kept == Statistics(8, 1, 2, 2, 7, 3, 5, 3)
    assert documents.statistics_of(np.array([False, False, False, True, False])).longest == 2


def test_documents_of_a_row_share_its_number(tmp_path: Path) -> None:
    """Rows at the same place of two files are two rows."""
    one = cached(tmp_path, ["ab", "cd"], ["ef", "gh ij kl", "mn"])
    assert one.row_numbers().tolist() == [[n] * 3 for n in range(5)]
    (tmp_path / "b").mkdir()
    assert cached(tmp_path / "b", ["ab", "cd"], ["ef"]).row_numbers().tolist() == [[0], [1], [2]]


def test_more_values_leave_the_documents_as_they_were(documents: Documents) -> None:
    more = documents.with_values({"a": np.ones((5, 2))})
    assert (dict(documents.values), [*more.values]) == ({}, ["a"])
    assert more.lengths is documents.lengths


def test_an_image_of_any_batch_that_changes_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "_BATCH_TOKENS", 1)
    for name in "abc":
        (tmp_path / name).write_text(name)
    images = [[], ["a"], ["b", "c"]]
    rows = [{"text": "xy", "images": [str(tmp_path / name) for name in names]} for names in images]
    made = cached(tmp_path, [str(row).replace("'", '"') for row in rows])
    assert (made.num_views.tolist(), made.changed_image()) == ([0, 1, 2], "")
    assert [[Path(view.files[0]).name for view in made.tokens(n).views] for n in range(3)] == images
    (tmp_path / "c").write_text("d")
    assert made.changed_image() == f"{tmp_path / 'c'} has other bytes than when the data were read"


def test_the_checksum_of_documents_covers_all_that_is_trained_on(tmp_path: Path) -> None:
    """It does not depend on the paths of files and images."""

    def content(name: str, make: Any, rows: int = 2) -> str:
        (tmp_path / name).mkdir(exist_ok=True)
        return cached(tmp_path / name, ["x"] * rows, settings_key=name, make=make).content

    view = View(("a.png",), GRID, 5, "ends")
    made = Tokens(np.arange(4, dtype=np.int32), ((1, 3),), (view,), (2, 2), (5, 6))
    changes: list[dict[str, Any]] = [
        dict(ids=np.array([0, 1, 2, 4], np.int32)), dict(spans=((1, 4),)), dict(parts=(1, 3)), dict(classes=(5, 7)),
        dict(views=(replace(view, num_bytes=6),)), dict(views=(replace(view, ends="other"),)), dict(views=()),
        dict(views=(replace(view, taken=(0, 1)),)), dict(views=(replace(view, grid=(1, 4, 2)),)),
    ]  # fmt: skip
    same = content("same", lambda _: [made])
    assert content("moved", lambda _: [replace(made, views=(replace(view, files=("b.png",)),))]) == same
    others = [content(f"{n}", lambda _, c=change: [replace(made, **c)]) for n, change in enumerate(changes)]
    others.append(content("longer", lambda _: [made], 3))
    # The same tokens and spans, cut into other documents.
    cuts = [([*range(at)], [*range(at, 5)]) for at in (2, 3)]
    others += [content(f"cut{pair}", lambda _, p=pair: [tokens(ids, [(1, 2)]) for ids in p]) for pair in cuts]
    assert len({same, *others}) == len(others) + 1


@pytest.mark.parametrize(
    ("note", "counts"), [(None, False), ("", False), ("x", False), ("100", False), ("100.5", True), ("200", True),
                         ("200.5", False)],
)  # fmt: skip
def test_a_note_counts_if_it_is_of_this_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, note: str | None, counts: bool
) -> None:
    """The run began at 100, and now it is 200."""
    monkeypatch.setattr(token_cache, "BEGAN", 100.0)
    monkeypatch.setattr(token_cache, "time", SimpleNamespace(time=lambda: 200.0))
    if note is not None:
        (tmp_path / "note").write_text(note)
    assert token_cache._is_of_this_run(tmp_path / "note") is counts


def test_each_source_is_verified_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "_check", lambda file, _: verified.append(file.parent.name))
    verified, keys = list[str](), ("s", "t")
    for key in keys:
        cached(tmp_path, ["ab"], settings_key=key)
    monkeypatch.setattr(token_cache, "BEGAN", token_cache.time.time())
    for key in (*keys, *keys):
        cached(tmp_path, ["ab"], settings_key=key)
    assert len(verified) == len({*verified}) == 2


def test_reasons_that_differ_by_names_and_numbers_are_of_one_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_cache, "_NAMED", 2)
    (tmp_path / "a.txt").write_text("\n" * 9)
    spec = TokenizeSpec("d", (tmp_path / "a.txt",), words, "")
    reasons = ["no text", "message 3 of a/b.png has 1,024.5", "odd", "message 12 of c/d has 7", "odd 'x'", "odd 'y z'"]
    lines = token_cache._group_by_reason(spec, [(0, at, why) for at, why in enumerate(reasons)]).splitlines()
    where = f"the first {tmp_path / 'a.txt'}"
    assert lines == [
        f"  2 rows, {where}:2: {reasons[1]}", f"  2 rows, {where}:5: odd 'x'", "  and 2 more kinds",
    ]  # fmt: skip
    assert token_cache._one_line("a\n  b \ud800\tc\n") == "a b \\ud800 c"


def test_the_checksum_of_a_file_covers_all_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "_PART_BYTES", 3)
    (tmp_path / "a").write_bytes(b"1234567")
    assert token_cache._checksum_of(tmp_path / "a") == xxhash.xxh3_128_hexdigest(b"1234567")


def test_the_checksum_of_documents_covers_every_file(tmp_path: Path) -> None:
    made = []
    for name in ("cd", "ce"):
        (tmp_path / name).mkdir()
        made.append(cached(tmp_path / name, ["ab"], [name]).content)
    assert made[0] != made[1]


def test_rows_that_are_left_out_are_listed_in_their_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A list of an earlier run is removed. Fields that any file has and no document uses are named."""
    cache = tmp_path / "cache"
    cached(tmp_path, ["f", "ab", "!"], ["!", "g"], unused=lambda row: {f"field {row['text']}"})
    [listing] = cache.glob("*.rows.txt")
    places = [line.rpartition(": ")[0] for line in listing.read_text().splitlines()]
    assert places == [f"{tmp_path}/{place}" for place in ("0.txt:1", "0.txt:3", "1.txt:1", "1.txt:2")]
    assert "fields of d that are not used: field ab, field f, field g" in caplog.messages
    token_cache._list_rows(TokenizeSpec("d", (), words, ""), [], listing)
    assert not listing.exists()


@pytest.mark.parametrize("rows", [["!", "!"], ["f", "g"], ["f", "!"]])
def test_a_source_without_a_row_to_train_on_is_refused(tmp_path: Path, rows: list[str]) -> None:
    with pytest.raises(mw.DataError, match="no row of d can be trained on: 2 were read"):
        cached(tmp_path, rows)


def test_a_cache_with_a_changed_image_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = tmp_path / "a"
    image.write_text("a")
    before = cached(tmp_path, [f'{{"text": "xy", "images": ["{image}"]}}']).tokens(0).views[0].ends
    image.write_text("b")
    monkeypatch.setattr(token_cache, "BEGAN", token_cache.time.time())
    assert cached(tmp_path, [f'{{"text": "xy", "images": ["{image}"]}}']).tokens(0).views[0].ends != before


def feed_of(*documents: Documents, micro_batches: int = 1, **options: Any) -> Feed:
    plan = Plan([source_of(each, 8) for each in documents], length=8, epochs=1)
    return Feed(documents, plan, micro_batches=micro_batches, rank=0, num_ranks=1, **options)


def test_values_of_a_group_become_fields_of_its_documents(documents: Documents) -> None:
    """A field has one number for each document that a group has, and each source has its own numbers."""
    values = [np.arange(10.0).reshape(5, 2) + shift for shift in (1, 101)]
    feed = feed_of(*(documents.with_values({"a": each}) for each in values), micro_batches=10)
    try:
        for number, batch in enumerate(feed.step(0).batches[: feed.plan.num_streams]):
            wanted, sources = list[float](), list[int]()
            for piece in feed.plan.stream(number):
                for part, size in enumerate(documents.tokens(piece.document).sizes):
                    wanted += [values[piece.source][piece.document, part]] * size
                    sources += [piece.source] * size
            assert batch.fields["a"].tolist() == wanted + [0] * batch.num_filler
            assert batch.fields["source"].tolist() == sources + [0] * batch.num_filler
    finally:
        feed.close()


def test_a_jump_to_another_step_has_the_streams_of_that_step(documents: Documents) -> None:
    """The step that was prepared is not the one that is asked for."""
    feed = feed_of(documents)
    try:
        assert feed.plan.num_streams == 4
        for number in (0, 2, 1, 2, 3):
            ids = [documents.tokens(piece.document).ids for piece in feed.plan.stream(number)]
            [batch] = feed.step(number).batches
            assert batch.tokens.tolist()[: 8 - batch.num_filler] == np.concatenate(ids).tolist()
    finally:
        feed.close()


def test_a_stream_names_the_rows_of_all_its_sources(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    feed = feed_of(cached(tmp_path / "a", ["ab"]), cached(tmp_path / "b", ["f", "cde"], ["fg"]))
    feed.close()
    start, _, places = feed.place(0).partition(": ")
    assert start == "stream 0"
    assert sorted(places.split(", ")) == [f"{tmp_path}/{place}" for place in ("a/0.txt:1", "b/0.txt:2", "b/1.txt:1")]


def test_an_image_that_cannot_be_read_is_named_by_its_row(tmp_path: Path) -> None:
    """The row is one of the source that shows the image."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    plain = cached(tmp_path / "a", ["ab", "cd"])
    row = f'{{"text": "xyz", "images": ["{tmp_path / "a" / "0.txt"}"]}}'
    shows = cached(tmp_path / "b", ['{"text": "uv"}', row])

    def fail(_: View) -> Any:
        raise mw.DataError("broken")

    feed = feed_of(plain, shows, micro_batches=4, processor=SimpleNamespace(pixels=fail))
    try:
        with pytest.raises(mw.DataError, match=f"{tmp_path}/b/0.jsonl:2: broken"):
            feed.step(0)
    finally:
        feed.close()


def test_a_source_keeps_its_weight_share_and_checksum(documents: Documents) -> None:
    made = source_of(documents, 4, weight=1.5, share=0.25, too_long="drop")
    assert (made.name, made.weight, made.share, made.cut, made.content) == ("d", 1.5, 0.25, False, documents.content)
    assert made.lengths.tolist() == [0, 0, 0, 2, 0]
    assert source_of(documents, 5, too_long="drop").lengths.tolist() == [5, 5, 5, 2, 5]


def test_documents_without_targets_are_left_out_next_to_others() -> None:
    some = [tokens([1, 2], [(0, 2)]), tokens([3, 4], []), tokens([5], [(0, 1)]), scored(tokens([6], []))]
    result = token_cache._ShardResult(0, "", "", [], [], set())
    spec = TokenizeSpec("d", (), lambda row: some[row["at"] :], "")
    made = token_cache._documents(spec, Row(7, {"at": 0}), 4, result)
    assert [each.ids.tolist() for each in made] == [[1, 2], [6]]
    assert (result.empty, result.bad) == ([], [])
    assert token_cache._documents(replace(spec, make=lambda _: some[1:3]), Row(8, {}), 4, result) == []
    assert result.empty == [(4, 8, "no token of it is trained on")]


def _make(_row: Any) -> Sequence[Any]:
    return []


def test_whatever_changes_documents_changes_their_cache_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for file in (first, second):
        file.write_text("{}\n")
    made = dict(name="d", files=(first,), make=_make, settings_key="s")
    key = lambda **changes: TokenizeSpec(**{**made, **changes}).fingerprint  # noqa: E731 - short
    same = key()
    assert key(name="e", unused=lambda _: set()) == same
    others = [
        key(settings_key="t"), key(split="line"), key(on_bad="skip"), key(files=(second,)), key(files=(first, second)),
        key(files=(second, first)),
    ]  # fmt: skip
    at = first.stat()
    for text in ("[]\n", "{}  \n"):  # of the same size and time, then of another size
        first.write_text(text)
        os.utime(first, ns=(at.st_atime_ns, at.st_mtime_ns))
        others.append(key())
    os.utime(first, ns=(at.st_atime_ns, at.st_mtime_ns + 1))
    others.append(key())
    with monkeypatch.context() as patched:
        patched.setattr(token_cache, "_VERSION", "another")
        others.append(key())
    assert len({same, *others}) == 1 + len(others)
    assert len(same) == 32
