"""One engine that follows its target version while it serves."""
