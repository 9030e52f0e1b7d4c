"""Chat templates of our own that behave as those of the Qwen models do, and a tokenizer whose tokens cross borders."""

from __future__ import annotations

import functools
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_TEXT = """
{%- macro says(role, text) -%}{{ '<|im_start|>' + role + '\\n' + text + '<|im_end|>\\n' }}{%- endmacro -%}
{%- set ns = namespace(asked=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.asked = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools -%}
  {%- set ns.text = '' -%}
  {%- for tool in tools -%}{%- set ns.text = ns.text + (tool | tojson) + '\\n' -%}{%- endfor -%}
  {{- says('system', (messages[0].content + '\\n' if messages[0].role == 'system' else '') + ns.text) -}}
{%- elif messages[0].role == 'system' -%}{{- says('system', messages[0].content) -}}
{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{{- says('user', m.content) -}}
  {%- elif m.role == 'tool' -%}
    {%- if loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\\n<result>' + m.content + '</result>' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
  {%- elif m.role == 'assistant' -%}
    {%- set ns.content, ns.thought = m.content, '' -%}
    {%- if splits -%}
      {%- set ns.thought = m.reasoning_content | default('') -%}
      {%- if not ns.thought and '</think>' in m.content -%}
        {%- set ns.thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
        {%- set ns.content = m.content.split('</think>')[-1].lstrip('\\n') -%}
      {%- endif -%}
    {%- endif -%}
    {%- if trims -%}{%- set ns.content = ns.content | trim -%}{%- endif -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- set recent = loop.index0 > ns.asked or preserve_thinking | default(false) -%}
    {%- if splits and recent and (ns.thought or always or loop.last) -%}
      {{- '<think>\\n' + ns.thought.strip('\\n') + '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- ns.content -}}
    {%- for call in m.tool_calls | default([]) -%}
      {{- '\\n<call>' + call.function.name + ' ' + (call.function.arguments | tojson) + '</call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant' + header + '\\n' -}}
  {%- if splits and not (enable_thinking | default(true)) and not only -%}{{- '<think>\\n\\n</think>\\n\\n' -}}
  {%- elif opens -%}{{- '<think>\\n' -}}{%- endif -%}
{%- endif -%}
"""


def _template(*true: str, header: str = "", before: str = "") -> str:
    flags = [f"{name}={'true' if name in true else 'false'}" for name in ("splits", "trims", "always", "opens", "only")]
    sets = "".join(f"{{%- set {flag} -%}}\n" for flag in (*flags, f"header='{header}'"))
    return sets + before + _TEXT.strip()


GOOD = {
    "plain": _template(),
    "hybrid": _template("splits"),  # history's thinking dropped, an empty block in the last turn alone
    "block after the question": _template("splits", "trims", "always", "opens"),
    "thinking only": _template("splits", "always", "opens", "only"),
}
KEPT = {"block after the question": {"preserve_thinking": True}}  # as one that keeps thinking on request
REFUSED = {
    "the prompt has another header": _template("splits", header="<|turn|>"),
    "text that depends on the prompt": _template(
        before="{%- if add_generation_prompt -%}{{- '<|im_start|>system\\nAsk.<|im_end|>\\n' -}}{%- endif -%}\n"
    ),
}


@functools.cache
def tokenizer() -> Any:
    """Byte-level, with a token for two newlines: the one that crosses the border of an empty block."""
    result = Tokenizer(models.BPE())
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    result.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )  # fmt: skip
    result.train_from_iterator(["\n\n\n\n", "assistant\n<think>\n\n</think>\n\nyes\n\n", "user\nno\n\n"] * 20, trainer)
    assert "ĊĊ" in result.get_vocab()
    return PreTrainedTokenizerFast(
        tokenizer_object=result, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
