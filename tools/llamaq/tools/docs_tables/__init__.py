"""Generates the tables of fields in the documentation from the descriptions in the models."""
