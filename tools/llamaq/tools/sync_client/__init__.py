"""Generates `llamaq.producer.sync`, the blocking client, from the source of the asyncio client."""
