"""Timelines shared by tools: events, Chrome traces, memory counters."""
