r"""Turn chats into training documents whose prompts are exactly what an inference server would send for each turn.

Chat templates render history differently from the turn being generated: Qwen3 drops the thinking of earlier turns and
adds an empty `<think>` block to the last one. Training on one rendering of the whole chat then conditions turns on text
that the model never sees in use. So the prompt of each assistant turn is rendered as a server would render it, and the
tokens of the turn follow. A new document starts where the next prompt does not continue the previous one. This needs no
knowledge of any template.

Example of one document, with trained tokens in brackets:

  <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Hello!<|im_end|>]\n<|im_start|>user\nMore?<|im_end|>\n...
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import DataError
from .chat_formats import Conversation, conversation, unused_fields
from .message_parts import A
from .messages import Message
from .processor import Processor
from .template_sandbox import MOST_CHARACTERS, bounded, install
from .tokenizer import encoded
from .tokens import Tokens, tokens
from .vision_files import View

Turns = Literal["each", "last", "joined"]
_THINK, _END_OF_THINKING = "<think>", "</think>"


@dataclass(frozen=True)
class ChatOptions:
    """Options of a chat source.

    `thinking`: whether the prompt asks for thinking; "auto": if the turn has thinking. `turns`: which assistant turns
    are trained on; "joined" renders the chat once, with the template's own generation marks, whatever a server would
    send.

    `template`: a chat template to use instead of the tokenizer's. `fields`: see `conversation`.
    """

    thinking: Literal["auto"] | bool = "auto"
    turns: Turns = "each"
    template: str | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """The tokens that a server sends to the model for an answer, and the images at their placeholders.

    `opens_thinking`: the prompt ends with `<think>`, so the answer begins inside its thinking.
    """

    ids: list[int]
    views: Sequence[View]
    opens_thinking: bool


class Chat:
    """Turns rows of chats into documents. `tokenizer`: from transformers. `processor`: of a vision-language model."""

    def __init__(
        self, tokenizer: Any, options: ChatOptions | None = None, stop_ids: Collection[int] = (),
        processor: Processor | None = None,
    ) -> None:  # fmt: skip
        self.tokenizer, self.options, self.processor = tokenizer, options or ChatOptions(), processor
        self.stop_ids = frozenset(stop_ids) or stop_ids_of(tokenizer, {})
        self._special = _special_tokens(tokenizer)
        install()
        if not self.options.template and not tokenizer.chat_template:
            raise DataError(
                'the tokenizer has no chat template; give template= of the data, or take texts (kind = "text", --text)'
            )

    def documents(self, row: Mapping[str, Any]) -> list[Tokens]:
        """Return the documents of a row; an empty list if nothing in it is trained on.

        For each trained turn, render its prompt and the turn itself. If the prompt begins with the tokens of the
        current document, that document grows by the difference and the turn. Otherwise a new document starts with the
        whole prompt. A chat without thinking is one document; one with thinking in every turn becomes one document per
        turn.
        """
        chat = conversation(row, self.options.fields, sees=self.processor is not None)
        self._check_texts(chat)
        # Open files before rendering: a missing file is an error of the row, whichever turns are trained on.
        views = [views_of(message, self.processor) for message in chat.messages]
        if self.options.turns == "joined":
            return self._joined(chat, any(views))
        trained_turns = [number for number, trained in enumerate(chat.trained) if trained]
        documents: list[tuple[list[int], list[tuple[int, int]], list[View]]] = []
        for number in trained_turns[-1:] if self.options.turns == "last" else trained_turns:
            views_so_far = [view for of_message in views[:number] for view in of_message]
            prompt, turn = self._turn(chat, number, views_so_far)
            # The prompt of this turn does not continue the tokens so far: the template has changed history, for example
            # dropped earlier thinking. A server would also see a new prefix, so this turn starts a new document.
            if not documents or prompt[: len(documents[-1][0])] != documents[-1][0]:
                documents.append(([], [], []))
            ids, spans, document_views = documents[-1]
            document_views += views_so_far[len(document_views) :]
            ids += prompt[len(ids) :]
            spans.append((len(ids), len(ids) + len(turn)))
            ids += turn
        return [tokens(ids, spans, views_so_far) for ids, spans, views_so_far in documents]

    def document(self, row: Mapping[str, Any]) -> Tokens:
        """Return a whole chat as one untrained document, up to its last stop token if it has one."""
        chat = conversation(row, self.options.fields, sees=self.processor is not None)
        self._check_texts(chat)
        views = [view for message in chat.messages for view in views_of(message, self.processor)]
        flags = {**self.options.template_args, **chat.template_args}
        if self.options.thinking != "auto":
            flags = {"enable_thinking": self.options.thinking, **flags}
        text = bounded(lambda: self._render(chat, len(chat.messages), flags, add_generation_prompt=False))
        ids = self._ids(self._with_places(text, views))
        stop = max((at for at, token in enumerate(ids) if token in self.stop_ids), default=len(ids) - 1)
        return tokens(ids[: stop + 1], [], views)

    def unused(self, row: Mapping[str, Any]) -> set[str]:
        """Return the fields of a row that do not affect its documents."""
        return unused_fields(row, self.options.fields)

    def _check_texts(self, chat: Conversation) -> None:
        """Refuse texts that would not be tokenised as their author meant: special tokens, and thinking that is never
        closed.

        Without this check, user text such as `<|im_end|>` would end the turn: a prompt injection into the training
        data.
        """
        for number, message in enumerate(chat.messages):
            if special_token := next(filter(None, map(self._special.search, _texts_of(message))), None):
                raise DataError(
                    f"message {number} of the {message['role']} holds the special token {special_token[0]!r}, which "
                    "the model would read as the start or end of a turn. Write it differently"
                )
        if special_token := next(filter(None, map(self._special.search, _texts_of(chat.tools))), None):
            raise DataError(
                f"the tools hold the special token {special_token[0]!r}, which the model would not read as text"
            )
        for number, (message, trained) in enumerate(zip(chat.messages, chat.trained, strict=True)):
            content = message["content"]
            if trained and content.lstrip().startswith("<think>") and "</think>" not in content:
                raise DataError(
                    f"message {number} begins with <think> and has no </think>: its thinking was cut off, so the model "
                    "would learn never to answer. Close it, or leave the message out"
                )

    def prompt(self, text: str) -> list[int]:
        """Return what a server would send if a user began with `text`. With thinking="auto" the template decides."""
        return self._request(conversation({"messages": [{"role": "user", "content": text}]})).ids

    def request(self, messages: Sequence[Mapping[str, Any]]) -> Request:
        """Return what a server would send for the next answer. With thinking="auto" the template decides.

        Answers in `messages` hold their thinking in `reasoning_content`: the template drops it, or keeps it.
        """
        chat = conversation({"messages": [*messages]})
        self._check_texts(chat)
        return self._request(chat)

    def _request(self, chat: Conversation) -> Request:
        """Render all messages, with the generation prompt."""
        thinking, views = self.options.thinking, [view for m in chat.messages for view in views_of(m, self.processor)]
        flags = {**({} if thinking == "auto" else {"enable_thinking": thinking}), **self.options.template_args}
        text = bounded(lambda: self._render(chat, len(chat.messages), flags, add_generation_prompt=True))
        return Request(self._ids(self._with_places(text, views)), views, text.rstrip().endswith(_THINK))

    def _turn(self, chat: Conversation, number: int, views: Sequence[View]) -> tuple[list[int], list[int]]:
        """Return the prompt of message `number` as a server would send it, and the turn that should be generated.

        Two renderings: the first `number` messages with the generation prompt (what a server sends), and one message
        more without it (what the chat looks like afterwards). The second must begin with the first; the rest is the
        turn. Otherwise the model would be trained on one text and used with another.
        """
        thinking = self.options.thinking
        enabled = thinks(chat.messages[number]) if thinking == "auto" else thinking
        # Row arguments override options, and both override the guess from the turn.
        flags = {"enable_thinking": enabled, **self.options.template_args, **chat.template_args}
        prompt_text, full_text = bounded(
            lambda: (
                self._render(chat, number, flags, add_generation_prompt=True),
                self._render(chat, number + 1, flags, add_generation_prompt=False),
            )
        )
        if not full_text.startswith(prompt_text):
            at = next(
                (i for i, (a, b) in enumerate(zip(prompt_text, full_text, strict=False)) if a != b),
                min(len(prompt_text), len(full_text)),
            )
            raise DataError(
                f"the chat template renders message {number} differently from its generation prompt: the prompt "
                f"continues with {prompt_text[at : at + 40]!r}, the chat with {full_text[at : at + 40]!r}. Set "
                'thinking=, give a template of your own, or turns="joined"'
            )
        # Tokenised separately: a server's prompt ends where generation starts, so no token may straddle the border.
        turn = self._ids(self._with_places(full_text[len(prompt_text) :], []))
        last = max((at for at, token in enumerate(turn) if token in self.stop_ids), default=None)
        if last is None:
            raise DataError(
                f"no stop token ends message {number}, which ends in {full_text[-40:]!r}, so the model would never "
                "learn to stop. Name the stop tokens in generation_config.json"
            )
        # Train up to the stop token: the model never generates what the template adds after it (a newline in Qwen's).
        return self._ids(self._with_places(prompt_text, views)), turn[: last + 1]

    def _with_places(self, text: str, seen: Sequence[View]) -> str:
        """Expand image marks to placeholder tokens."""
        return text if self.processor is None else self.processor.with_places(text, seen)

    def _render(self, chat: Conversation, num: int, flags: Mapping[str, Any], **how: Any) -> str:
        """Render the first `num` messages as text."""
        text = str(self._apply(chat.messages[:num], tools=chat.tools, tokenize=False, **how, **flags))
        if len(text) > MOST_CHARACTERS:
            raise DataError(
                f"the template writes {len(text):,} characters for the first {num} messages; at most "
                f"{MOST_CHARACTERS:,} are taken"
            )
        return text

    def _apply(self, messages: Sequence[Message], **how: Any) -> Any:
        """Apply the chat template, with its exceptions as DataErrors."""
        try:
            return self.tokenizer.apply_chat_template(list(messages), chat_template=self.options.template, **how)
        except Exception as error:  # a template is a program that may raise anything
            raise DataError(
                f"the template refuses the first {len(messages)} messages: {type(error).__name__}: {error}"
            ) from error

    def _ids(self, text: str) -> list[int]:
        """Tokenise without adding special tokens."""
        return encoded(self.tokenizer, text)

    def _joined(self, chat: Conversation, has_images: bool) -> list[Tokens]:
        """Render the chat once, with the template's generation marks as the mask. This cannot exclude single turns."""
        if has_images:
            raise DataError('turns="joined" does not support images; leave turns= out')
        if not all(trained for trained, m in zip(chat.trained, chat.messages, strict=True) if m["role"] == "assistant"):
            raise DataError('turns="joined" trains every turn of the assistant, and one of them has train=false')
        flags = {**self.options.template_args, **chat.template_args}
        rendered = bounded(
            lambda: self._apply(
                chat.messages,
                tools=chat.tools,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
                **flags,
            )
        )
        # With zeros at both ends, every run of ones has a start and a stop.
        mask = [0, *rendered["assistant_masks"], 0]
        if not any(mask):
            raise DataError(
                'the template has no {% generation %} marks, which turns="joined" needs (Qwen\'s templates have none); '
                "leave turns= out"
            )
        starts = [at for at in range(1, len(mask)) if mask[at] and not mask[at - 1]]
        stops = [at for at in range(1, len(mask)) if not mask[at] and mask[at - 1]]
        return [tokens(rendered["input_ids"], [(a - 1, b - 1) for a, b in zip(starts, stops, strict=True)])]


def views_of(message: Message, processor: Processor | None) -> list[View]:
    """Return the images and videos of a message, in order."""
    parts = [] if isinstance(message["content"], str) else message["content"]
    attachments = [part for part in parts if part["type"] != "text"]
    if attachments and processor is None:
        raise DataError(
            f"a message of the {message['role']} shows {A[attachments[0]['type']]}, which needs the model's vision "
            "tower; set train.tower = true"
        )
    return [
        processor.image(part["image"]) if part["type"] == "image" else processor.video(part["video"], part.get("fps"))
        for part in attachments
        if processor is not None
    ]


def message_of_answer(text: str, *, in_thinking: bool) -> Message:
    """Return a generated answer as a message of the history, with thinking separate from content, as servers do.

    `in_thinking`: the prompt has opened the thinking. An answer that ends inside its thinking has no content.
    """
    before, closed, after = text.partition(_END_OF_THINKING)
    if not closed and not in_thinking and not text.lstrip().startswith(_THINK):
        return {"role": "assistant", "content": text.strip()}
    thinking = before.strip().removeprefix(_THINK).strip()
    return {"role": "assistant", "content": after.strip(), "reasoning_content": thinking}


def thinks(message: Message) -> bool:
    """Return whether a message has thinking, in its own field or inside `<think>`. A raw completion may have only the
    closing tag.

    With thinking="auto" a turn without thinking is prompted with `enable_thinking=False`, so both modes of a hybrid
    model are trained as they are used.
    """
    thinking = message.get("reasoning_content") or ""
    content = message["content"]
    if not thinking and "</think>" in content:
        thinking = content.split("</think>")[0].rpartition("<think>")[2]
    return bool(str(thinking).strip())


def stop_ids_of(tokenizer: Any, generation_config: Mapping[str, Any]) -> frozenset[int]:
    """Return the tokens that end a turn: eos_token_id of generation_config.json and of the tokenizer.

    Qwen's chat models stop at `<|im_end|>` and at `<|endoftext|>`; generation_config.json lists both, the tokenizer
    only one.
    """
    eos_token_id = generation_config.get("eos_token_id")
    stop_ids = [
        each for each in (eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]) if each is not None
    ]
    if not all(type(each) is int and each >= 0 for each in stop_ids):
        raise DataError(
            f"generation_config.json: eos_token_id={eos_token_id!r:.80} must be a token id or a list of token ids; "
            "fetch the file again, or correct it"
        )
    eos = tokenizer.eos_token_id
    return frozenset(stop_ids if eos is None else (*stop_ids, eos))


def _special_tokens(tokenizer: Any) -> re.Pattern[str]:
    """Return a pattern that finds special tokens in text, the longest first."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    names = sorted({*added, *tokenizer.all_special_tokens}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names)) or r"(?!)")


def _texts_of(value: Any) -> Iterator[str]:
    """Yield all strings of a message or of tools, names of fields among them, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for each in [*value, *value.values()] if isinstance(value, Mapping) else value:
            yield from _texts_of(each)
