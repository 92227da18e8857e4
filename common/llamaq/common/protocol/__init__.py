"""What producers and workers exchange through Redis: messages, keys and scripts."""
