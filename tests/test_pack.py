"""Batches, and what `pack`, `cut` and the feed make of documents, against values written out by hand."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

import meshwright as mw
from meshwright.data.batch import Batch
from meshwright.data.feed import batch_of, piece_of
from meshwright.data.field_values import joined, to_terms
from meshwright.data.images import Frame, Images
from meshwright.data.pack import cut, filled, joined_batches
from meshwright.data.pack_checks import check_experts, check_shifted
from meshwright.data.tokens import Tokens, scored, together, tokens

IMAGE, VIDEO = 70, 71


def three(**changes: Any) -> Batch:
    """Three documents of 3, 1 and 2 tokens, and two tokens of padding."""
    made = dict(tokens=torch.arange(8), labels=torch.arange(1, 9), bounds=(0, 3, 4, 6, 8), num_filler=2)
    return Batch(**{**made, **changes})


def pixels(*sizes: tuple[int, int, int]) -> list[Any]:
    """Make images of these sizes; the pixels of image n are n + 1."""
    return [(torch.full((t * h * w, 2), n + 1.0), (t, h, w)) for n, (t, h, w) in enumerate(sizes)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(tokens=torch.arange(8)[:, None]), "tokens has shape"), (dict(tokens=torch.tensor(1)), "tokens has shape"),
        (dict(labels=torch.arange(8)[:, None]), "labels has shape"), (dict(labels=torch.tensor(1)), "labels has shape"),
        (dict(fields={"tokens": torch.ones(8)}), "field cannot be named 'tokens'.*another"),
        (dict(bounds=()), "bounds of the batch must rise from 0 to 8"), (dict(bounds=None), "bounds of the batch"),
        (dict(fields={"a": torch.ones(8, dtype=torch.complex64)}), "a of the batch is not a tensor of real"),
        (dict(fields={"a": torch.ones(9)}), "a has shape"), (dict(fields={"a": torch.ones(7)}), "a has shape"),
        (dict(fields={"a": torch.ones(8, 1, 1)}), "a has shape"),
        (dict(labels=torch.ones(8, dtype=torch.uint8)), "labels of the batch are torch.uint8"),
        (dict(num_filler=3), "the last document begins at 6"), (dict(num_filler=1), "the last document begins at 6"),
        (dict(num_filler=9), "num_filler=9"), (dict(num_filler=-1), "num_filler=-1"),
        (dict(bounds=(0, 3, 3, 6, 8)), "bounds of the batch"), (dict(bounds=(0, 3, 4, 6)), "bounds of the batch"),
        (dict(bounds=(1, 3, 4, 6, 8)), "bounds of the batch"),
        (dict(numbers=(0, 1)), "numbers has 2 entries for 3"), (dict(groups=(0, 1, 1, 2)), "groups has 4 entries"),
        (dict(groups=(0, 1, 1.5)), "must be whole numbers"),
        (dict(experts=torch.ones(8, 2)), "experts of the batch"), (dict(experts=torch.ones(7, 2, 2)), "for 8 tokens"),
        (dict(images=Images(torch.ones(4, 1), (Frame(2, 2, 6),))), "frame 0 of the batch is not inside"),
        (dict(images=Images(torch.ones(8, 1), (Frame(4, 2, 2),))), "frame 0 of the batch is not inside"),
        (dict(images=Images(torch.ones(4, 1), (Frame(2, 2, -1),))), "frame 0 of the batch is not inside"),
    ],
)  # fmt: skip
def test_a_batch_refuses_parts_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(mw.DataError, match=message):
        three(**changes)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_batch_takes_parts_up_to_its_borders(dtype: torch.dtype) -> None:
    images = Images(torch.ones(16, 1), (Frame(2, 2, 0), Frame(2, 2, 3), Frame(2, 4, 4)))
    made = three(tokens=torch.arange(8, dtype=dtype), labels=torch.arange(8, dtype=dtype), images=images)
    assert made.num_documents == 3


@pytest.mark.parametrize(
    ("given", "numbers", "groups"),
    [
        ({}, (0, 1, 2), (0, 1, 2)), (dict(numbers=(4, 1, 9)), (4, 1, 9), (4, 1, 9)),
        (dict(groups=(7, 7, 3)), (0, 1, 2), (7, 7, 3)),
        (dict(numbers=[4, 1, 9], groups=[2, 2, 0]), (4, 1, 9), (2, 2, 0)),
        (dict(numbers=torch.tensor([4, 1, 9]), groups=np.array([2, 2, 0])), (4, 1, 9), (2, 2, 0)),
    ],
)  # fmt: skip
def test_a_document_is_a_group_of_its_own_by_default(given: Any, numbers: Any, groups: Any) -> None:
    made = three(**given)
    assert (made.numbers, made.groups) == (numbers, groups)
    assert {type(each) for each in (*made.numbers, *made.groups)} == {int}


def test_join_is_the_inverse_of_split() -> None:
    values = torch.arange(16.0).view(8, 2)
    split = three().split(values)
    assert [part[:, 0].tolist() for part in split] == [[0, 2, 4], [6], [8, 10]]
    assert torch.equal(three().join(split), torch.cat([values[:6], torch.zeros(2, 2)]))
    empty = Batch(torch.zeros(2, dtype=torch.long), torch.full((2,), -100), (0, 2), num_filler=2)
    assert empty.split(torch.ones(2)) == []
    assert empty.join([]).tolist() == [0, 0]
    with pytest.raises(mw.DataError, match=r"values of \[3, 2, 1\] tokens for documents of \[3, 1, 2\]"):
        three().join([[1, 2, 3], [4, 5], [6]])
    with pytest.raises(mw.DataError, match=r"\(5,\).*8 tokens"):
        three().split(torch.zeros(5))


def test_more_fields_leave_the_others_as_they_are() -> None:
    """Values over tokens move within their document; the padding is a document too."""
    made = three(fields={"a": torch.ones(8)}).with_fields(b=range(8), c=mw.over_tokens(torch.arange(8)))
    assert made.fields["a"].tolist() == [1] * 8
    assert made.with_fields(a=torch.zeros(8)).fields["a"].tolist() == [0] * 8
    assert made.fields["b"].tolist() == [*range(8)]
    assert made.fields["c"].tolist() == [1, 2, 0, 0, 5, 0, 7, 0]
    wide = three().with_fields(a=mw.over_tokens(torch.arange(16).view(8, 2))).fields["a"]
    assert wide[:, 1].tolist() == [3, 5, 0, 0, 11, 0, 15, 0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.ones(8, requires_grad=True), "a requires grad"),
        (mw.over_tokens(torch.ones(8, requires_grad=True)), "a requires grad"),
        (torch.ones(3), r"a has shape \(3,\) for 8 tokens"),
        (mw.over_tokens(torch.ones(7)), "a has shape"), (mw.over_tokens(torch.ones(9)), "a has shape"),
        ([[1, 2, 3], [4], [5, 6]], "a is a list by document"), (([1, 2, 3], [4], [5, 6]), "a is a list by document"),
        (["x"] * 8, "a is a list by document"), ([None] * 8, "a must be numbers"),
        ([torch.ones(3), torch.ones(3)], "a is a list by document"),
    ],
)  # fmt: skip
def test_fields_that_a_batch_refuses(values: Any, message: str) -> None:
    with pytest.raises(mw.DataError, match=message):
        three().with_fields(a=values)


def test_a_copy_on_another_device_is_whole() -> None:
    made = three(fields={"a": torch.ones(8, 2)}, experts=torch.arange(16).view(8, 2, 1), numbers=(4, 1, 9),
                 groups=(0, 0, 1))  # fmt: skip
    moved = made.to(torch.device("cpu"))
    for name in ("tokens", "labels", "experts"):
        assert torch.equal(getattr(moved, name), getattr(made, name))
    assert torch.equal(moved.fields["a"], made.fields["a"])
    assert made.to(torch.device("meta")).experts.device.type == "meta"
    assert (moved.bounds, moved.num_filler, moved.numbers, moved.groups) == ((0, 3, 4, 6, 8), 2, (4, 1, 9), (0, 0, 1))


def test_values_move_by_one_token_in_every_column() -> None:
    values = torch.tensor([[1, 10], [2, 20], [3, 30], [4, 40], [5, 50]])
    assert to_terms(values, (0, 2, 5), -7).tolist() == [[2, 20], [-7, -7], [4, 40], [5, 50], [-7, -7]]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([torch.ones(2, dtype=torch.float64), torch.ones(1, dtype=torch.float64)], torch.float64),
        ([torch.ones(2, dtype=torch.bfloat16)], torch.float32), ([np.ones(2, np.float16)], torch.float32),
        ([torch.ones(2, dtype=torch.int8)], torch.int8), ([np.ones(2, np.float64)], torch.float64),
        ([torch.ones(2), (2.0, 3.0)], torch.float32),
        ([np.arange(3)[::-1]], torch.int64), ([[1, 2], [3]], torch.int64), ([[True], [False]], torch.bool),
    ],
)  # fmt: skip
def test_values_keep_their_dtype_from_32_bits_on(values: Any, dtype: torch.dtype) -> None:
    flat = joined(values, "a")
    assert flat.dtype == dtype
    assert flat.tolist() == [x for each in values for x in (each.tolist() if hasattr(each, "tolist") else each)]


def test_python_numbers_are_32_bit_whatever_torch_prefers() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert joined([[1.001], [2.0]], "a").dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_batch_does_not_share_memory_with_arrays() -> None:
    array = np.ones(2)
    flat = joined([array], "a")
    array[:] = 5
    assert flat.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ({}, [6, 7, -100, 9, -100, -100]), (dict(labels=[[1, 2, 3], [4, -100]]), [1, 2, 3, 4, -100, -100]),
        (dict(labels=mw.over_tokens([[1, 2, 3], [4, 5]])), [2, 3, -100, 5, -100, -100]),
        (dict(trained=[[1, 0, 1], [0, 1]]), [-100, 7, -100, 9, -100, -100]),
        (dict(trained=[[True, True, False], [True, False]]), [6, -100, -100, -100, -100, -100]),
        (dict(trained=[np.array([1, 0, 1]), torch.tensor([True, True])]), [-100, 7, -100, 9, -100, -100]),
    ],
)  # fmt: skip
def test_labels_of_documents(options: dict[str, Any], labels: list[int]) -> None:
    made = mw.pack([np.array([5, 6, 7], np.int16), torch.tensor([8, 9], dtype=torch.int32)], length=6, **options)
    assert made.tokens.tolist() == [5, 6, 7, 8, 9, 0]
    assert made.labels.tolist() == labels
    assert made.tokens.dtype == made.labels.dtype == torch.int64


def test_no_image_token_has_or_is_a_label() -> None:
    documents = [[5, IMAGE, 6, 7], [VIDEO, 8, 9], [4, 3]]
    images = [pixels((1, 2, 2)), pixels((1, 2, 2)), []]
    made = mw.pack(documents, images=images, placeholders=[IMAGE, VIDEO])
    assert made.labels.tolist() == [-100, -100, 7, -100, -100, 9, -100, 3, -100]
    assert mw.pack(documents, placeholders=[IMAGE, VIDEO]).labels.tolist()[:3] == [IMAGE, 6, 7]
    labels = [[-100, -100, VIDEO, 7], [-100, 8, 9], [4, 3]]
    with pytest.raises(mw.DataError, match=f"the label at token 2 is {VIDEO}"):
        mw.pack(documents, images=images, placeholders=[IMAGE, VIDEO], labels=labels)


def test_outputs_of_a_processor_and_of_a_tokenizer_mix() -> None:
    """Placeholders are those of all documents, with and without images."""
    text = dict(input_ids=[5, 6], attention_mask=[1, 1])
    shows = [
        dict(input_ids=[[4, token, 3]], mm_token_type_ids=[[0, kind, 0]],
             **{f"pixel_values{name}": torch.ones(4, 2), f"{grid}_grid_thw": torch.tensor([[1, 2, 2]])})
        for token, kind, name, grid in ((IMAGE, 1, "", "image"), (VIDEO, 2, "_videos", "video"))
    ]  # fmt: skip
    made = mw.pack([text, *shows])
    assert made.tokens.tolist() == [5, 6, 4, IMAGE, 3, 4, VIDEO, 3]
    assert made.labels.tolist() == [6, -100, *[-100] * 6]
    assert [frame.start for frame in made.frames] == [3, 6]
    with pytest.raises(mw.DataError, match="not text or dicts"):
        mw.pack([[5, 6], shows[0]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(labels={"a": [1]}), "must be a list for each document"), (dict(fields=[[1]]), "fields must be a dict"),
        (dict(length=True), "length=True must be a whole number"), (dict(length=4), "length=4 has no room"),
        (dict(groups=[0, 0, 1]), "groups has 3 numbers"), (dict(groups=[0]), "groups has 1"),
        (dict(groups=[0, 0.5]), "must be a whole number"), (dict(groups=7), "must be a whole number"),
        (dict(trained=[[[1], [0], [1]], [[0], [1]]]), "trained must be True or False"),
        (dict(trained=[[1, 2, 1], [0, 1]]), "trained must be True or False"),
        (dict(labels=[[True, False, True], [True, False]]), "labels must be whole numbers"),
        (dict(labels=[[[1], [2], [3]], [[4], [5]]]), "labels must be a list of numbers"),
        (dict(fields={"a": [torch.ones(3), torch.ones(2, requires_grad=True)]}), "requires grad"),
        (dict(fields={"a": [[1, 2, 3]]}), "1 list for 2 documents"),
        (dict(fields={"a": [[1, 2, 3], [4, 5, 6]]}), "document 1 differs in length"),
        (dict(labels=[[1, 2, 3], [4, 5]], trained=[[1, 1, 1], [1, 1]]), "two ways.*one of them"),
        (dict(trained=mw.over_tokens([[1] * 3, [1] * 2])), "trained is a mask over tokens already"),
        (dict(trained=[[1, 1], [1, 1]]), "trained: document 0.*2 values for 3 tokens"),
        (dict(trained=[[1] * 3, [1] * 2, [1]]), "trained: 3 lists for 2 documents;.*one for each"),
        (dict(labels=8), "labels=8.*length=8"),
        (dict(fields={"a": mw.over_tokens([[1.0, 2.0], [1.0]])}), r"\['a'\].*2 values for 3 tokens"),
        (dict(labels=mw.over_tokens([[0.5] * 3, [0.5] * 2])), "labels must be whole numbers"),
        (dict(fields={"labels": [[1] * 3, [1] * 2]}), "field cannot be named 'labels'.*another"),
    ],
)  # fmt: skip
def test_arguments_that_pack_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(mw.DataError, match=message):
        mw.pack([[5, 6, 7], [8, 9]], **options)


@pytest.mark.parametrize(
    "documents", ["ab", ["ab"], b"ab", [b"ab"], [{5, 6}], [[5, 6], {7}], {"input_ids": [5]}, [{"input_ids": [1]}]]
)
def test_documents_are_lists_of_ids(documents: Any) -> None:
    with pytest.raises(mw.DataError, match=r'lists of token ids, not text.*dict.*tokenizer\(texts\)\["input_ids"\]'):
        mw.pack(documents)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ([torch.ones(3, 2, 1), torch.ones(2, 2, 1)], "whole numbers"),
        ([torch.ones(3, 2, 1).int(), torch.ones(2, 2, 1)], "whole numbers"),
        ([["a"] * 3, [1, 2]], "whole numbers for each"),
        ([torch.ones(3, 2, 1).int(), torch.ones(2, 1, 1).int()], "has the shapes"),
        ([torch.ones(3, 2, 1).int(), torch.ones(1, 2, 1).int()], "has the shapes"),
        ([torch.ones(3, 2).int(), torch.ones(2, 2).int()], "whole numbers"),
        ([torch.full((3, 1, 1), -2), torch.ones(2, 1, 1).long()], "from -1, not -2 to 1"),
        ([torch.full((3, 1, 1), 2**31), torch.ones(2, 1, 1).long()], "from -1, not 1 to 2147483648"),
    ],
)
def test_experts_that_are_refused(experts: Any, message: str) -> None:
    with pytest.raises(mw.DataError, match=message):
        check_experts(experts, [3, 2])


def test_experts_are_small_numbers() -> None:
    made = check_experts([[[[-1, 4]]] * 3, torch.full((2, 1, 2), 2**31 - 1)], [3, 2])
    assert made.dtype == torch.int32
    assert made[:, 0, 1].tolist() == [4, 4, 4, 2**31 - 1, 2**31 - 1]


@pytest.mark.parametrize(
    ("labels", "refused"),
    [
        ([1, 2, -100, -100, -100], True), ([-100, -100, -100, -100, 5], False), ([-100, 2, 3, -100, -100], True),
        ([2, 3, -100, 5, -100], False), ([1, 3, -100, -100, -100], False), ([-100, 2, -100, 4, -100], True),
        ([-100, -100, 3, -100, 5], False),
    ],
)  # fmt: skip
def test_labels_that_repeat_their_tokens_are_refused(labels: list[int], refused: bool) -> None:
    """At the last token of a document there is no next token that a label could differ from."""
    check_labels([[1, 2, 3], [4, 5]], [labels[:3], labels[3:]], refused)


@pytest.mark.parametrize(
    ("documents", "labels", "refused"),
    [
        ([[3, 9, 9]], [[-100, 9, -100]], False), ([[3, 4, 4, 4]], [[-100, -100, 4, -100]], False),
        ([[9]], [[9]], False), ([[9, 9]], None, False), ([[7, 7], [7, 7]], [[7, 7], [7, -100]], False),
        ([[3, 3, 3], [4, 5, 6], [7, 8, 9]], [[3, 3, 3], [4, 5, 6], [7, 8, 9]], True),
        ([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 7]], False),
    ],
)  # fmt: skip
def test_labels_in_a_run_of_one_token_say_nothing(documents: Any, labels: Any, refused: bool) -> None:
    check_labels(documents, labels, refused)


def check_labels(documents: Any, labels: Any, refused: bool) -> None:
    batch = mw.pack(documents, labels=labels)
    if not refused:
        check_shifted(batch)
        return
    for batches in ([batch], [rich(), batch], [batch, rich()]):
        with pytest.raises(mw.DataError, match=r"the labels are the tokens .*trained=.*over_tokens\(labels\)"):
            check_shifted(*batches)


def rich() -> Batch:
    """Four documents with all parts and one token of padding. The second and the fourth show images."""
    documents = [[5, 6], [IMAGE, 7, 8], [9], [4, IMAGE, IMAGE]]
    images = [[], pixels((1, 2, 2)), [], pixels((1, 2, 4))]
    made = mw.pack(documents, images=images, placeholders=[IMAGE], length=10, groups=[3, 3, 1, 8],
                   fields={"a": [[[n, n]] * len(d) for n, d in enumerate(documents)]},
                   experts=[torch.full((len(d), 1, 2), n) for n, d in enumerate(documents)])  # fmt: skip
    return Batch(**{**{name: getattr(made, name) for name in made.__dataclass_fields__}, "numbers": (6, 2, 5, 0)})


def test_documents_move_to_another_batch_with_all_they_have() -> None:
    made = cut(rich(), [3, 0], 7)
    assert made.tokens.tolist() == [4, IMAGE, IMAGE, 5, 6, 0, 0]
    assert made.labels.tolist() == [-100, -100, -100, 6, -100, -100, -100]
    assert made.fields["a"].tolist() == [[3, 3]] * 3 + [[0, 0]] * 4
    assert made.experts is not None
    assert made.experts[:, 0, 1].tolist() == [3, 3, 3, 0, 0, -1, -1]
    assert (made.bounds, made.num_filler, made.numbers, made.groups) == ((0, 3, 5, 7), 2, (0, 6), (8, 3))
    assert made.frames == (Frame(2, 4, 1),)
    assert cut(rich(), [1], 3).frames == (Frame(2, 2, 0),)
    padding = cut(rich(), [4], 1)
    assert (padding.num_documents, padding.numbers, padding.groups) == (1, (0,), (0,))


def test_frames_that_move_take_their_patches_along() -> None:
    """Two frames of one size, and a third."""
    frames = (Frame(2, 2, 1), Frame(2, 2, 4), Frame(2, 4, 6))
    images = Images(torch.arange(16.0)[:, None], frames)
    assert images.of([2, 0]).flatten().tolist() == [*range(8, 16), *range(4)]
    moved = images.within(4, 8, 3)
    assert moved.frames == (Frame(2, 2, 3), Frame(2, 4, 5))
    assert moved.patches_PC.flatten().tolist() == [*range(4, 16)]
    assert images.within(2, 4, 0).patches_PC.shape == (0, 1)


def test_joined_batches_lose_their_padding_alone() -> None:
    """Where one batch has no experts, the router chooses, and the first batch says which fields there are."""
    plain = mw.pack([[1, 2], [3]], length=5, fields={"a": [[[7, 8]] * 2, [[9, 9]]]})
    made = joined_batches([plain, rich(), plain])
    assert made.tokens.tolist() == [1, 2, 3, 5, 6, IMAGE, 7, 8, 9, 4, IMAGE, IMAGE, 1, 2, 3]
    assert (made.bounds, made.num_filler) == ((0, 2, 3, 5, 8, 9, 12, 14, 15), 0)
    assert made.frames == (Frame(2, 2, 5), Frame(2, 4, 10))
    assert made.experts is not None
    assert made.experts[:, 0, 0].tolist() == [-1, -1, -1, 0, 0, 1, 1, 1, 2, 3, 3, 3, -1, -1, -1]
    assert made.experts.dtype == torch.int32
    assert made.fields["a"][:, 1].tolist() == [8, 8, 9, 0, 0, 1, 1, 1, 2, 3, 3, 3, 8, 8, 9]
    with_more = joined_batches([plain, plain.with_fields(b=torch.ones(5))])
    assert [*with_more.fields] == ["a"]
    assert joined_batches([plain, plain]).experts is None


def test_padding_is_a_document_without_targets() -> None:
    batch = mw.pack([[1, 2], [3]], fields={"a": [[True] * 2, [True]]}, experts=[[[[4]]] * 2, [[[4]]]])
    made = filled(batch, 5)
    assert (made.bounds, made.num_filler) == ((0, 2, 3, 5), 2)
    assert made.fields["a"].tolist() == [True, True, True, False, False]
    assert made.experts is not None
    assert made.experts.flatten().tolist() == [4, 4, 4, -1, -1]
    assert filled(batch, 3).bounds == (0, 2, 3)


def test_a_group_is_packed_as_its_documents() -> None:
    """The first token of a document is never a target, and a class is the label of a last token."""
    views: Any = ("v", "w")
    pair = together([tokens([1, 2, 3], [(0, 2)], views[:1]), tokens([4, 5], [(0, 1)], views[1:])])
    assert (pair.spans, pair.parts, pair.views, pair.num_targets) == (((1, 2),), (3, 2), ("v", "w"), 1)
    classed = together([scored(tokens([6], [], views), 9), scored(tokens([7, 8], []), 0)])
    assert (classed.classes, classed.views, classed.num_targets) == ((9, 0), views, 2)
    alone = tokens([1, 2, 3], [(0, 1), (1, 3)])
    made = batch_of([pair, alone, classed], 13, [2, 0, 1], None, {"p": [[0.5, 0.25], [1.5], [2.5, 3.5]]})
    assert made.tokens.tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 8, 0, 0]
    assert made.labels.tolist() == [2, -100, -100, -100, -100, 2, 3, -100, 9, -100, 0, -100, -100]
    assert (made.bounds, made.groups) == ((0, 3, 5, 8, 9, 11, 13), (0, 0, 1, 2, 2))
    assert made.fields["source"].tolist() == [2] * 5 + [0] * 3 + [1] * 3 + [0] * 2
    assert made.fields["p"].tolist() == [0.5] * 3 + [0.25] * 2 + [1.5] * 3 + [2.5] + [3.5] * 2 + [0] * 2
    assert made.fields["p"].dtype == torch.float64


def test_a_piece_has_the_spans_inside_it() -> None:
    document = Tokens(np.arange(10, dtype=np.int32), ((1, 3), (4, 8), (9, 10)))
    piece = piece_of(document, 2, 6)
    assert (piece.ids.tolist(), piece.spans) == ([2, 3, 4, 5], ((0, 1), (2, 4)))
    assert piece_of(document, 0, 10) is document
    assert piece_of(document, 3, 4).spans == ()


@pytest.mark.parametrize("images", [7, "ab", [[], 7], [7, []], [[], None], [[], "a"]])
def test_images_are_a_list_of_lists(images: Any) -> None:
    with pytest.raises(mw.DataError, match=r"images must be a list of lists: of each document"):
        mw.pack([[5, 6], [7]], images=images, placeholders=[IMAGE])
    for good in ([[], []], ([], ()), [(), []]):
        assert mw.pack([[5, 6], [7]], images=cast(Any, good), placeholders=[IMAGE]).images is None
