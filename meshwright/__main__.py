"""Run `python -m meshwright`, for when the script of that name is not on the path."""

import sys

from .cli.main import main

sys.exit(main())
