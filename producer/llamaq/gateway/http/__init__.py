"""What every request needs, whatever its API: limits, ids, errors, JSON, streams of events."""
