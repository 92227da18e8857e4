"""The engine thread: runs one tick after the other and measures them."""
