"""What is known of a model on a mesh without running it: where parameters lie, what a step sends, what cannot be."""

from ..provenance import origin
from .devices import Cluster, cluster_of, device_bytes
from .figures import Figures, work_of
from .html import check_page, write_page
from .mesh_checks import check_devices, check_layout, check_memory, objections, reasons
from .page import plan_page
from .requested import (
    asked_of,
    cluster_in,
    mesh_of,
    optimizer_of,
)
from .resolve_model import TINY, Say, find
from .search import Search
from .tables import ParameterLine, alike, parameter_lines
