"""Messages, keys and scripts that producers and workers exchange through Redis."""
