"""Write anew what is made of declarations: docs/train-config.md, the schema of a run file, tables of docs/reference.md.

python -m tests.write_docs
"""

from __future__ import annotations

import json
from pathlib import Path

from meshwright.recipe import ContextParallel, Lora, MemoryOptions, Pipeline, Recipe
from meshwright.train.config_docs import documentation, options_table, schema

ROOT = Path(__file__).parents[1]
TABLES = {
    "load": Recipe,
    "MemoryOptions": MemoryOptions,
    "Pipeline": Pipeline,
    "ContextParallel": ContextParallel,
    "Lora": Lora,
}


def reference(page: str) -> str:
    """Return docs/reference.md with the tables of options as they are declared."""
    for name, options in TABLES.items():
        section = page.index(f"### `mw.{name}(")
        start = page.index("\n| field |", section) + 1
        page = page[:start] + options_table(options) + page[page.index("\n\n", start) :]
    return page


def files() -> dict[Path, str]:
    """Return each file that is made of declarations, and what it should hold."""
    page = ROOT / "docs" / "reference.md"
    return {
        page: reference(page.read_text()),
        ROOT / "docs" / "train-config.md": documentation(),
        ROOT / "examples" / "meshwright.schema.json": json.dumps(schema(), indent=1) + "\n",
    }


if __name__ == "__main__":
    for file, text in files().items():
        file.write_text(text)
