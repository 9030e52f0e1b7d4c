"""Train Qwen-family models on any mesh of devices, and prove the run right before renting the devices."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .api import *  # noqa: F403 - a type checker reads the names where they are declared
    from .api import __all__ as __all__

else:

    def __getattr__(name: str) -> Any:
        """Import a module of the package, or all public names, on first use: `meshwright --help` needs no torch."""
        if name.startswith("__") and name != "__all__":  # the import system and inspect look up special names
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        # Try modules first: else `from .. import parallel` would import all public names, which import `parallel`.
        try:
            return importlib.import_module(f".{name}", __name__)
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
        api = importlib.import_module(".api", __name__)
        globals().update({each: getattr(api, each) for each in api.__all__}, __all__=api.__all__)
        if name not in globals():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
        return globals()[name]
