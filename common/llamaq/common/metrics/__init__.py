"""The metrics of queues and workers: their names, their buckets, and their form for Prometheus."""
