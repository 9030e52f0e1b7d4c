"""Heartbeats and diagnosis of lost ranks: when a collective hangs or fails, say which rank is missing and where."""

from .deferred_signals import deferred_signal
from .diagnosis import LEFT, RAISED, WAITS, WORKS, Heartbeat, diagnose, named, spans
from .heartbeat import Watch, doing, last_seen, names_lost_ranks, position, waiting_at, waits_at
from .trace_regions import region, trace
