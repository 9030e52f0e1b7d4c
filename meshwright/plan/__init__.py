"""What is known of a model on a mesh without running it: where parameters lie, what a step sends, what cannot be."""

from .about import origin
from .asked import asked_of, cluster_in, coded_in, fp8_of, laid_out, mesh_of, savings_of, state_of, undivided, ways_of
from .devices import Cluster, cluster_of, device_bytes
from .figures import Figures, work_of
from .find import TINY, Say, find
from .html import check_target, write_page
from .page import plan_page
from .refusals import check_devices, check_layout, check_memory, objections, told
from .search import Search
from .tables import ParameterLine, alike, parameter_lines
