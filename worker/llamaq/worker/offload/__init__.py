"""Moves KV blocks between the device, host memory and disk."""
