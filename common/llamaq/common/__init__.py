"""The protocol that producers and workers share: messages, keys, scripts, errors.

This portion imports neither `llamaq.producer` nor `llamaq.worker`.
"""
