"""Renders the Helm chart and validates what it renders: `make check-chart`."""
