"""The commands of the HTTP server: `llamaq serve` and `llamaq keys`.

They are in the distribution `llamaq-serve`, which they need. `llamaq.cli` imports them only if it is installed.
"""
