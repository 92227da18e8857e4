"""What the requests of all APIs need: limits, ids, errors, JSON, streams of events."""
