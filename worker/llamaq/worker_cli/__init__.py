"""The commands of a host that runs workers: `llamaq worker`, `llamaq up` and `llamaq demo`.

They are in the distribution `llamaq-worker`, which they need. `llamaq.cli` finds them by an entry point.
"""
