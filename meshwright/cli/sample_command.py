"""Run `meshwright sample`: generate texts after prompts."""

from __future__ import annotations

import argparse
import json

from .options import add_command, add_decoding, add_json, add_trained

EXAMPLES = """examples:
  meshwright sample runs/first --prompt "Why is the sky blue?"         newest checkpoint, chat template of the run
  meshwright sample runs/first/best --prompt "Why is the sky blue?"    the checkpoint with the lowest held-out loss
  meshwright sample Qwen/Qwen3-0.6B --prompt Hello --prompt Bye --tokens 200 --top-p 0.9
  meshwright sample path/to/Qwen3-8B-Base --text --prompt "Once upon a time"
"""
ABOUT = "Generate text after prompts, in one process. Each token takes a full forward pass: for a quick look only."


def add_sample(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    sample = add_command(
        commands, "sample", _sample, "generate text after prompts",
        about=ABOUT, examples=EXAMPLES,
    )  # fmt: skip
    add_trained(sample)
    sample.add_argument(
        "--prompt", action="append", required=True, metavar="TEXT", help="a message of the user; may be repeated"
    )
    sample.add_argument(
        "--text", action="store_true", help="continue the prompts as plain text, without a chat template"
    )
    add_decoding(sample, 64, "text")
    add_json(sample, "prompts and texts")


def _sample(options: argparse.Namespace) -> int:
    """Print prompts and the texts that a model writes after them."""
    from ..train.config import SampleSection  # imports torch: --help should not wait for it
    from ..train.samples import sample_at

    # `model_construct` skips the checks of a run file: `sample_at` makes its own, which also know the model.
    section = SampleSection.model_construct(
        prompts=options.prompt, tokens=options.tokens, top_p=options.top_p, temperature=options.temperature
    )
    samples = sample_at(options.model, section, seed=options.seed, text=options.text)
    if options.json:
        print(json.dumps([{"prompt": prompt, "text": text} for prompt, text in samples], indent=2))
    else:
        print("\n\n".join(f"> {prompt}\n{text}" for prompt, text in samples))
    return 0
