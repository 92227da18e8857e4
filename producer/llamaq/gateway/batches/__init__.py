"""OpenAI's Batch API: bulk runs whose rows are in Redis, so that any server continues the runs of a dead server."""
