"""End-to-end tests. pytest gives fixtures the scope of a package only in a folder with this file."""
