"""What will be trained, for people."""

from __future__ import annotations

from math import ceil

import numpy as np

from ..errors import counted
from .config import Config
from .sources import Data


def dry_run(config: Config, data: Data) -> str:
    """The data, the streams and the steps."""
    train, plan = config.train, data.plan
    lines = [f"{'source':<28} {'rows':>9} {'documents':>10} {'tokens':>13} {'learnt':>13} {'longest':>8}  an epoch"]
    for documents, weight in zip(data.documents, plan.weights, strict=True):
        found = documents.statistics
        lines.append(
            f"{documents.name[-28:]:<28} {found.rows:>9,} {found.documents:>10,} {found.tokens:>13,} "
            f"{found.targets:>13,} {found.longest:>8,}  {weight:.3g} times"
        )
        left_out = [f"{found.skipped} bad"] * bool(found.skipped)
        left_out += [f"{found.without_targets} without anything to learn"] * bool(found.without_targets)
        if left_out:
            lines.append(f"  rows left out: {', '.join(left_out)}")
    sample = range(0, plan.num_streams, ceil(plan.num_streams / 1000))
    used = float(np.mean([sum(map(len, plan.stream(number))) for number in sample])) / plan.length
    ranks = config.mesh.num_data_ranks
    per_rank = train.streams_per_step // ranks
    lines += [
        f"{counted(plan.num_streams, 'stream')} of {plan.length:,} tokens, {1 - used:.2%} of them filler",
        f"{counted(data.num_steps, 'step')} of {train.streams_per_step * plan.length:,} tokens: "
        f"{counted(per_rank, 'micro-batch', 'micro-batches')} on each of {counted(ranks, 'data rank')}",
    ]
    if used < 0.98:
        lines.append("Packing leaves much room: streams of another length, or more documents, fill better")
    return "\n".join(lines)
