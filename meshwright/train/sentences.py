"""What is said of a field that is wrong: what was given, what is wanted, which name was probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..axes import OTHER_NAMES
from .config import Config
from .fields import Place, declared, written

_WANTED = {  # by pydantic's type of error; braces take from its context
    "string_type": "text in quotes", "int_type": "a whole number", "float_type": "a number",
    "bool_type": "true or false", "list_type": "a list", "dict_type": "a table", "model_type": "a table",
    "greater_than": "a number above {gt:g}", "greater_than_equal": "a number of {ge:g} or more",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "a number of at most {le:g}", "finite_number": "a finite number",
    "too_short": "a list of {min_length}",
    "too_long": "a list of {max_length}", "string_pattern_mismatch": "a path with a slash",
    "literal_error": "{expected}", "invalid-json-value": "of what JSON has (no dates)",
}  # fmt: skip
# What other trainers call a field.
ELSEWHERE = {
    **{name: ("mesh", axis) for name, axis in OTHER_NAMES.items()},
    **dict.fromkeys(("learning_rate", "max_lr"), ("optim", "lr")),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type", "scheduler"), ("optim", "schedule")),
    **dict.fromkeys(("warmup_ratio", "warmup_steps", "num_warmup_steps"), ("optim", "warmup")),
    **dict.fromkeys(("max_grad_norm", "clip_grad", "gradient_clipping"), ("optim", "max_norm")),
    "wd": ("optim", "weight_decay"),
    **dict.fromkeys(("max_length", "max_seq_length", "seq_len", "sequence_len", "cutoff_len"), ("train", "length")),
    **dict.fromkeys(
        ("batch_size", "global_batch_size", "micro_batch_size", "per_device_train_batch_size",
         "gradient_accumulation_steps", "grad_accum"),
        ("train", "tokens_per_step"),
    ),
    **dict.fromkeys(("num_train_epochs", "num_epochs"), ("train", "epochs")),
    **dict.fromkeys(("max_steps", "num_steps"), ("train", "steps")),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing"), ("train", "recompute")),
    **dict.fromkeys(("bf16", "precision", "torch_dtype"), ("train", "dtype")),
    **dict.fromkeys(("base_model", "model_name_or_path", "model_name"), ("model",)),
    **dict.fromkeys(("output_dir", "out_dir"), ("out",)),
    **dict.fromkeys(("save_steps", "save_interval"), ("save", "every")),
    **dict.fromkeys(("save_total_limit",), ("save", "keep")),
    **dict.fromkeys(("eval_steps", "eval_interval"), ("eval", "every")),
    **dict.fromkeys(("dataset", "datasets", "dataset_path", "train_file"), ("data", "path")),
    **dict.fromkeys(("chat_template",), ("data", "template")),
}  # fmt: skip
# What others have and we refuse, and why.
REFUSED = {
    "streaming": "a stream has no exact plan: what is trained on would depend on the number of ranks and on restarts. "
    "The set is downloaded and tokenised once; of one that is too large for the disk take a part: hf_subset, hf_split, "
    "or some of its files as path",
}


def sentence(place: Place, errors: Sequence[Any], given: Any) -> str:
    """Of all errors of a field: one for each alternative that it has."""
    kind = errors[0]["type"]
    if kind == "extra_forbidden":
        return f"there is no such field{_meant(place)}"
    if kind == "missing":
        return "it is missing, and has no default"
    wanted = list(dict.fromkeys(_wanted(each) for each in errors))
    value = written(given)
    value = value if len(value) <= 60 else f"{value[:57]}..."
    return f"it should be {', or '.join(wanted)}, not {value}{_close(given, wanted)}"


def _wanted(error: Mapping[str, Any]) -> str:
    if error["type"] not in _WANTED:
        return f"otherwise ({error['msg']})"
    return _WANTED[error["type"]].format(**error.get("ctx", {})).replace("'", '"').replace("False", "false")


def _close(given: Any, wanted: Sequence[str]) -> str:
    words = re.findall(r'"([^"]*)"', " ".join(wanted))
    close = difflib.get_close_matches(given, words, 1, 0.6) if isinstance(given, str) else []
    return f"; did you mean {written(close[0])}?" if close else ""


def _meant(place: Place) -> str:
    """A name like it in the section, what others call it, or one like it in another section."""
    name, known = str(place[-1]), [there for there, _ in declared(Config)]
    if name in REFUSED:
        return f": {REFUSED[name]}"
    section = tuple(part for part in place[:-1] if isinstance(part, str))
    here = [there[-1] for there in known if there[:-1] == section]
    close = difflib.get_close_matches(name, here, 1, 0.7)
    if close:
        return f"; did you mean {close[0]}?"
    names = {there[-1]: there for there in reversed(known)}
    elsewhere = difflib.get_close_matches(name, names, 1, 0.75)
    if found := ELSEWHERE.get(name.lower(), names[elsewhere[0]] if elsewhere else ()):
        return f"; did you mean {_in_section(found, section)}?"
    if close := difflib.get_close_matches(name, here, 1, 0.5):
        return f"; did you mean {close[0]}?"
    return f"; there are {', '.join(here)}"


def _in_section(found: tuple[str, ...], section: tuple[str, ...]) -> str:
    if found[:-1] == section:
        return found[-1]
    return f"{found[-1]} of [{'.'.join(found[:-1])}]" if found[:-1] else f"{found[-1]} at the top"
