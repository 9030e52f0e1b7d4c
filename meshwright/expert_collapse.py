"""Detect expert collapse (a router that stops using experts) in the metrics of a run, for the live view and the report.

Routers tend to reinforce the experts that they already use; the auxiliary loss of Switch (arXiv 2101.03961) counters
that. At first collapse does not show in the loss: the model just trains fewer parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# A step counts as collapsed if this fraction of all experts got no token, or if the busiest expert reached this
# fraction of the highest load possible.
_DEAD = 0.25
_FULL = 0.9
_FEWEST = 20  # steps before any verdict, because a new router may start unevenly


@dataclass
class ExpertUse:
    """Counts the steps in which the router leaves experts unused. Pass the lines of metrics.jsonl to `take` in
    order."""

    num_experts: int = 0
    top_k: int = 1
    num_steps: int = 0
    num_collapsed: int = 0
    _last: str = ""

    def take(self, line: Mapping[str, Any]) -> None:
        """Read one line of metrics.jsonl."""
        if line["kind"] == "start" and "experts" in line:
            self.num_experts, self.top_k = line["experts"]["num"], line["experts"]["top_k"]
        elif line["kind"] == "step" and self.num_experts:
            by_layer, num_dead = line.get("experts/max_over_mean"), line.get("experts/dead")
            if by_layer and None not in by_layer and num_dead is not None:  # None: NaN in JSON
                self._take_step(line["step"], by_layer, num_dead)

    def _take_step(self, step: int, by_layer: list[float], num_dead: int) -> None:
        """Count one step, and keep its description in case it is the last."""
        worst, total = max(by_layer), self.num_experts * len(by_layer)
        self.num_steps += 1
        self.num_collapsed += num_dead >= _DEAD * total or worst >= _FULL * self.limit
        self._last = (
            f"in step {step:,}, {num_dead:,} of {total:,} got no token, and the busiest one, in layer "
            f"{by_layer.index(worst)}, got {worst:.2f} times its share, of {self.limit:.2f} that are possible"
        )

    @property
    def limit(self) -> float:
        """Return the load of an expert that every token chooses, divided by the mean of its layer."""
        return self.num_experts / self.top_k

    def warning(self) -> str:
        """Return one sentence if experts were unused for most of the run, else ""."""
        if self.num_steps < _FEWEST or 2 * self.num_collapsed <= self.num_steps:
            return ""
        return (
            f"experts collapsed in {self.num_collapsed:,} of {self.num_steps:,} steps: {self._last}; "
            "router_aux_loss_coef in config.json of the model evens them out"
        )
