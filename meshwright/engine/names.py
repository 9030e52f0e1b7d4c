"""Names that users know from other libraries, and what does their work here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NoReturn, ParamSpec, TypeVar

from ..errors import ConfigError

Given = ParamSpec("Given")
Returned = TypeVar("Returned")

_WEIGHTS = "mw.gather(model) gives whole tensors, model.stored() this rank's pieces"
_SAVE = "mw.save(engine, directory) for a checkpoint, mw.export(engine.model, directory) for weights alone"
_RESUME = "mw.resume(engine, directory)"
_UPLOAD = "mw.export(model, directory), then `hf upload org/name directory`"
_SAMPLE = (
    "mw.sample(model, prompts, tokens=64) for a look; for more an inference engine, which takes its weights (mw.stream)"
)

OF_MODEL = {
    **dict.fromkeys(("parameters", "named_parameters", "state_dict"), _WEIGHTS),
    **dict.fromkeys(("save", "save_pretrained", "export"), "mw.export(model, directory)"),
    **dict.fromkeys(("load_state_dict", "from_pretrained"), "mw.load(source, mesh)"),
    **dict.fromkeys(("train", "eval"), "a model has no modes; train= of mw.load chooses what is trained"),
    **dict.fromkeys(("to", "half", "bfloat16"), "mw.Mesh(device=) and dtype= of mw.load"),
    **dict.fromkeys(("forward", "logits"), "mw.logits(model, batch), or mw.logprobs(model, batch)"),
    **dict.fromkeys(("backward", "zero_grad"), "mw.Engine(model, lr=...).step(batches)"),
    "generate": _SAMPLE,
    "push_to_hub": _UPLOAD,
    "resize_token_embeddings": "sizes are those of the files; resize with transformers before mw.load",
    "gradient_checkpointing_enable": "mw.load(..., memory=mw.MemoryOptions(recompute='full'))",
    "compile": "mw.load(..., memory=mw.MemoryOptions(compiled=True))",
    "requires_grad_": "train= of mw.load",
}
OF_ENGINE = {
    **dict.fromkeys(("save", "save_checkpoint"), _SAVE),
    **dict.fromkeys(("resume", "load", "load_checkpoint"), _RESUME),
    **dict.fromkeys(("train", "train_batch", "train_step", "fit"), "engine.step(batches)"),
    **dict.fromkeys(("eval", "eval_batch"), "engine.evaluate(batches)"),
    **dict.fromkeys(("save_model", "save_pretrained", "export"), "mw.export(engine.model, directory)"),
    "push_to_hub": _UPLOAD.replace("model", "engine.model"),
    "forward": "mw.logits(engine.model, batch), or engine.backward(batches)",
    "generate": _SAMPLE,
    "zero_grad": "engine.discard(); update() does it too",
    "parameters": "mw.gather(engine.model), or engine.model.stored()",
}
OF_PACKAGE = {
    **dict.fromkeys(("save_checkpoint", "checkpoint"), "mw.save(engine, directory)"),
    **dict.fromkeys(("load_checkpoint", "load_state_dict"), _RESUME),
    **dict.fromkeys(("from_pretrained", "from_config"), "mw.load(source, mesh), or mw.init for random weights"),
    **dict.fromkeys(("save_pretrained", "save_model"), "mw.export(model, directory)"),
    **dict.fromkeys(("fit",), "mw.Engine(model, lr=...).step(batches)"),
    "push_to_hub": _UPLOAD,
    "generate": _SAMPLE,
}
ARGUMENTS_OF_LOAD = {
    "torch_dtype": "dtype=torch.bfloat16",
    **dict.fromkeys(("device", "device_map"), "mesh=mw.Mesh(fsdp=4, device='cpu')"),
}
ARGUMENTS_OF_ENGINE = {
    "learning_rate": "lr=",
    "optimizer": "lr=, betas=, eps= and weight_decay= of AdamW, which is the only one",
    **dict.fromkeys(("scheduler", "lr_scheduler"), "lr=, which may be a function: lr=lambda step: 1e-5 / (step + 1)"),
    **dict.fromkeys(("max_grad_norm", "grad_clip"), "max_norm="),
    **dict.fromkeys(("loss_fn", "criterion"), "loss="),
}


def refusing(owner: str, instead: Mapping[str, str]) -> Callable[[object, str], NoReturn]:
    """`__getattr__` of a class: it is asked only for names that the class has not."""

    def missing(_self: object, name: str) -> NoReturn:
        refuse(f"mw.{owner}", instead, name, _self)

    return missing


def refuse(owner: str, instead: Mapping[str, str], name: str, of: object) -> NoReturn:
    if name in instead:
        raise AttributeError(f"{owner} has no {name!r}; instead: {instead[name]}")
    raise AttributeError(f"{owner} has no {name!r}", name=name, obj=of)  # of these Python tells a name that is alike


def refusing_arguments(
    owner: str, instead: Mapping[str, str], options: type[Any] | None = None
) -> Callable[[Callable[Given, Returned]], Callable[Given, Returned]]:
    """Refuse arguments of a function that users know from other libraries; any other unknown one is left to Python.
    `options`: the dataclass whose fields its `**fields` are, which `help()` then spells out."""

    def refusing_them(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
        @functools.wraps(function)
        def call(*args: Given.args, **named: Given.kwargs) -> Returned:
            for name in named:
                if name in instead:
                    raise ConfigError(f"mw.{owner} has no {name!r}; instead: {instead[name]}")
            return function(*args, **named)

        if options is not None:
            vars(call)["__signature__"] = _spelled_out(inspect.signature(function), options)
        return call

    return refusing_them


def _spelled_out(own: inspect.Signature, options: type[Any]) -> inspect.Signature:
    *kept, _ = own.parameters.values()
    more = [inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default) for f in fields(options)]
    return own.replace(parameters=[*kept, *more])
