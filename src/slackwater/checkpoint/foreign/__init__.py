"""Deltas in layouts of other trainers and services, read and written: bytes in, bits out, and back."""
