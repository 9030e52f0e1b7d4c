"""Predict what a model does on a mesh without running it: placement, memory, collectives, step time, and refusals.

Everything is computed on the meta device from the declarations that a run also uses. So a plan needs no device and no
process group, and `verify` can compare its bill with the collectives that ran.
"""

from ..provenance import origin
from .devices import Cluster, cluster_of, device_bytes
from .figures import Figures, work_of
from .html import check_page, write_page
from .mesh_checks import check_devices, check_layout, check_memory, objections, reasons
from .page import plan_page
from .requested import (
    cluster_in,
    mesh_of,
    optimizer_of,
    search_request,
)
from .resolve_model import TINY, Say, find
from .search import Search
from .tables import ParameterLine, identical_params, parameter_lines
