"""The inference engine seam, and the engines behind it."""
