"""The `llamaq` command line."""
