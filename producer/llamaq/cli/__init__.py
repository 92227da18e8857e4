"""The `llamaq` command."""
