"""Lost ranks: every rank tells the others where it stands, so that one that is lost can be named, with its door."""

from .deferred_signals import deferred
from .diagnosis import LEFT, RAISED, WAITS, WORKS, Heartbeat, diagnose
from .heartbeat import Watch, doing, here, last_seen, names_lost_ranks, waiting_at, waits_at
from .trace_regions import region, trace
