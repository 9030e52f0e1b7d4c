"""A conversation with a trained model, as a server would hold it: the whole history goes through the chat template.

Each answer is kept with its thinking apart from its content, and the template drops or keeps earlier thinking. There is
no KV cache: each token of an answer costs a forward of the whole conversation.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..data import Chat, Processor, Request, generation_config_of, message_of_answer, stop_ids_of, tokenizer_of
from ..engine import Decoding, Model, check_prompts, token_stream
from ..errors import DataError, StateError
from ..models import take, text_config
from ..weights import read_config
from .config import SourceSection
from .data_sources import RowReader, chat_of, vocab_size_of
from .trained_model import TrainedModel

_CUT_OFF = "\ufffd"  # what decoders write for a character whose last bytes are still to come


@dataclass
class ChatSession:
    """A conversation. `messages`: its history. `shown`: images that the next question shows."""

    chat: Chat
    model: Model
    decoding: Decoding
    longest: int | None
    system: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    num_questions: int = 0

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start over: only the system message stays."""
        self.messages, self.shown = _system_message(self.system), []

    def show(self, path: str) -> None:
        """Show an image with the next question. Refuse a file that is none, or a model that takes no images."""
        if self.chat.processor is None:
            raise StateError("this model takes no images: it has no vision encoder, or its run did not load it")
        self.chat.processor.image(path)
        self.shown.append(path)

    def answers(self, text: str) -> Generator[str]:
        """Ask a question, and yield the answer piece by piece. The history keeps it even if the caller stops early."""
        content = [*({"type": "image", "image": path} for path in self.shown), {"type": "text", "text": text}]
        messages = [*self.messages, {"role": "user", "content": content if self.shown else text}]
        request, said = self.chat.request(messages), list[int]()
        how = self._decoding(request)
        self.num_questions += 1
        try:
            if request.opens_thinking:
                yield "<think>\n"
            yield from self._pieces(request, how, said)
        finally:
            self._keep(messages, self._text(said), request)

    def _decoding(self, request: Request) -> Decoding:
        """Return how to continue a prompt: with fewer tokens if the model's context is almost full."""
        tokens = self.decoding.tokens
        if self.longest is not None and (tokens := min(tokens, self.longest - len(request.ids))) < 1:
            raise DataError(
                f"the conversation has {len(request.ids):,} tokens, which leave none of the {self.longest:,} positions "
                "of the model for an answer; begin a new one (/reset)"
            )
        # Distinct for each question, and the same again in another conversation with the same questions.
        seed, processor = (self.decoding.seed << 64) + self.num_questions, self.chat.processor
        images = [] if processor is None else [(processor.pixels(view), view.grid) for view in request.views]
        return replace(self.decoding, tokens=tokens, seed=seed, images=[images] if images else None)

    def _pieces(self, request: Request, how: Decoding, said: list[int]) -> Iterator[str]:
        """Yield the text of new tokens as soon as their last character is whole. `said` gets their ids."""
        num_shown = 0
        for (token,) in token_stream(self.model, [request.ids], how):
            assert token is not None, "the stream of one prompt ends with it"
            said.append(token)
            text = self._text(said)
            if not text.endswith(_CUT_OFF):
                yield text[num_shown:]
                num_shown = len(text)
        yield self._text(said)[num_shown:]

    def _text(self, ids: list[int]) -> str:
        """Decode an answer as servers do, without special tokens."""
        return str(self.chat.tokenizer.decode(ids, skip_special_tokens=True))

    def _keep(self, messages: list[dict[str, Any]], text: str, request: Request) -> None:
        """Add a question and its answer to the history. A question without an answer is forgotten."""
        answer = message_of_answer(text, in_thinking=request.opens_thinking)
        if answer["content"] or answer.get("reasoning_content"):
            self.messages, self.shown = [*messages, answer], []


def open_chat(where: str, decoding: Decoding, *, system: str = "", thinking: bool | None = None) -> ChatSession:
    """Load a model on one process for a conversation. `where`: see `TrainedModel.at`.

    `thinking`: whether prompts ask for it; None leaves it to the run and the template. The options and the template are
    tried before the model is loaded.
    """
    trained = TrainedModel.at(where)
    directory, source = trained.directory, _source_of(trained, thinking)
    config, tokenizer = text_config(read_config(directory)), tokenizer_of(directory, "use a model that has them")
    chat = chat_of(source, directory, tokenizer, _processor(trained, source))
    longest = take(config, "max_position_embeddings", int) if config.get("max_position_embeddings") else None
    first = chat.request([*_system_message(system), {"role": "user", "content": "?"}])
    check_prompts([first.ids], 1, vocab_size_of(directory), longest)
    decoding.check()
    how = replace(decoding, stop=stop_ids_of(tokenizer, generation_config_of(directory)))
    return ChatSession(chat, trained.load(tower=trained.can_see), how, longest, system)


def _source_of(trained: TrainedModel, thinking: bool | None) -> SourceSection:
    """Return the first source of chats of the run, else the template of the tokenizer. Relative paths start from the
    working directory."""
    chats = [source for source in trained.sources if source.kind == "chat"]
    source = chats[0] if chats else SourceSection(path=[])
    images = source.images.model_copy(update={"root": str(Path.cwd())})
    if thinking is not None:
        args = {name: value for name, value in source.template_args.items() if name != "enable_thinking"}
        source = source.model_copy(update={"thinking": thinking, "template_args": args})
    return source.model_copy(update={"images": images})


def _processor(trained: TrainedModel, source: SourceSection) -> Processor | None:
    """Return the processor of images, None if the model takes none."""
    return RowReader(trained.directory, Path(), trained.can_see).processor(source)


def _system_message(text: str) -> list[dict[str, Any]]:
    """Return the messages that a conversation begins with."""
    return [{"role": "system", "content": text}] if text else []
