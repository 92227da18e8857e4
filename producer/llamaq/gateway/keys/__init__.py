"""API keys: who may send requests to which queues, and how many."""
