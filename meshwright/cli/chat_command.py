"""Run `meshwright chat`: a conversation with a model on the terminal, or with questions from a pipe.

On a terminal an error of a question leaves the conversation as it was. In a pipe it ends the command: a script that
continued would match answers with the wrong questions.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, MeshwrightError
from .options import add_command, add_decoding, add_trained

if TYPE_CHECKING:
    from ..train.chat_session import ChatSession

EXAMPLES = """examples:
  meshwright chat runs/first                             newest checkpoint, chat template of the run
  meshwright chat runs/first/best --system "Be brief."   the checkpoint with the lowest held-out loss
  meshwright chat runs/first/adapter --thinking off      a PEFT adapter, added to the base that it names
  meshwright chat Qwen/Qwen3-0.6B --temperature 0.7 --top-p 0.9 --tokens 1000
  meshwright chat runs/first < questions.txt             a question in each line; the answers on standard output
"""
ABOUT = """Chat with a model, in one process. Earlier turns are rendered by its chat template, as a server renders them.

Ctrl-C ends an answer, Ctrl-D or /exit the chat. /reset begins anew. /image PATH shows an image with the next question.
Each token takes a forward pass of the whole conversation: for a look at a model, not for serving it.
"""
_WELCOME = "Ctrl-C ends an answer, Ctrl-D or /exit the chat; /reset begins anew, /image PATH shows an image"


def add_chat(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    chat = add_command(commands, "chat", _chat, "chat with a model on the terminal", about=ABOUT, examples=EXAMPLES)
    add_trained(chat)
    chat.add_argument("--system", default="", metavar="TEXT", help="the system message (default: none)")
    chat.add_argument(
        "--thinking", choices=["on", "off"], help="ask for thinking or not (default: the run and its template decide)"
    )
    add_decoding(chat, 512, "answer")


def _chat(options: argparse.Namespace) -> int:
    """Hold the conversation until the user ends it."""
    from ..engine import Decoding  # imports torch: --help should not wait for it
    from ..train.chat_session import open_chat

    thinking = None if options.thinking is None else options.thinking == "on"
    decoding = Decoding(options.tokens, options.top_p, options.temperature, seed=options.seed)
    session = open_chat(options.model, decoding, system=options.system, thinking=thinking)
    on_terminal = sys.stdin.isatty()
    if on_terminal:
        print(_WELCOME, file=sys.stderr)
    for line in _typed() if on_terminal else sys.stdin:
        try:
            if not _take(session, line.strip()):
                break
        except MeshwrightError as error:
            if not on_terminal:
                raise
            print(f"meshwright: {error}", file=sys.stderr)
    return 0


def _typed() -> Iterator[str]:
    """Yield the lines that a user types. Ctrl-C discards a line, Ctrl-D ends them."""
    with suppress(ImportError):  # not every Python has it
        import readline  # noqa: F401 - gives `input` a history and arrow keys
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print("\n/exit or Ctrl-D ends the chat", file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return


def _take(session: ChatSession, line: str) -> bool:
    """Run a command or answer a question, and return whether the chat goes on.

    Other texts that begin with a slash are messages: Qwen3 reads `/no_think` in one.
    """
    command, _, argument = line.partition(" ")
    if line == "/exit":
        return False
    if line == "/reset":
        session.reset()
    elif command == "/image":
        if not argument.strip():
            raise ConfigError("/image needs the path of an image, such as /image cat.png")
        session.show(argument.strip())
    elif line:
        _answer(session, line)
    return True


def _answer(session: ChatSession, question: str) -> None:
    """Print an answer as it is generated. Ctrl-C ends it after the current token."""
    with _interrupts() as pressed:
        answer = session.answers(question)
        for piece in answer:
            print(piece, end="", flush=True)
            if pressed:
                break
        answer.close()
    print(flush=True)


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Collect the first Ctrl-C in a list, so that no forward pass is cut off. A second one raises KeyboardInterrupt."""
    pressed: list[int] = []

    def note(number: int, _frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
