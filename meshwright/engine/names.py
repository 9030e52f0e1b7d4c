"""Names that users know from other libraries, and what does their work here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

_WEIGHTS = "mw.gather(model) gives whole tensors, model.stored() this rank's pieces"
_CHECKPOINT = "there are no checkpoints yet: mw.export(engine.model, directory) writes the weights"
_SAMPLE = "export the model, or hand its weights to an inference engine (mw.stream)"

OF_MODEL = {
    **dict.fromkeys(("parameters", "named_parameters", "state_dict"), _WEIGHTS),
    **dict.fromkeys(("save", "save_pretrained", "export"), "mw.export(model, directory)"),
    **dict.fromkeys(("load_state_dict", "from_pretrained"), "mw.load(source, mesh)"),
    **dict.fromkeys(("train", "eval"), "a model has no modes; train= of mw.load chooses what is trained"),
    **dict.fromkeys(("to", "half", "bfloat16"), "mw.Mesh(device=) and dtype= of mw.load"),
    **dict.fromkeys(("forward", "logits"), "mw.logits(model, batch), or mw.logprobs(model, batch)"),
    **dict.fromkeys(("backward", "zero_grad"), "mw.Engine(model, lr=...).step(batches)"),
    "generate": _SAMPLE,
    "gradient_checkpointing_enable": "mw.load(..., savings=mw.Savings(recompute='full'))",
    "compile": "mw.load(..., savings=mw.Savings(compiled=True))",
    "requires_grad_": "train= of mw.load",
}
OF_ENGINE = {
    **dict.fromkeys(("save", "save_checkpoint", "state_dict"), _CHECKPOINT),
    **dict.fromkeys(("resume", "load", "load_checkpoint", "load_state_dict"), _CHECKPOINT),
    **dict.fromkeys(("train", "train_batch", "train_step", "fit"), "engine.step(batches)"),
    **dict.fromkeys(("eval", "eval_batch"), "engine.evaluate(batches)"),
    "export": "mw.export(engine.model, directory)",
    "forward": "mw.logits(engine.model, batch), or engine.backward(batches)",
    "generate": _SAMPLE,
    "zero_grad": "engine.discard(); update() does it too",
    "parameters": "mw.gather(engine.model), or engine.model.stored()",
}


def refusing(owner: str, instead: Mapping[str, str]) -> Callable[[object, str], NoReturn]:
    """`__getattr__` of a class: it is asked only for names that the class has not."""

    def missing(_self: object, name: str) -> NoReturn:
        hint = f"; instead: {instead[name]}" if name in instead else ""
        raise AttributeError(f"mw.{owner} has no {name!r}{hint}")

    return missing
