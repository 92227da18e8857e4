"""Shows queues, workers, jobs and dead letters live: `llamaq top`."""
