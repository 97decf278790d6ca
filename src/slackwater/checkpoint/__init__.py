"""The checkpoint format: bytes in, values out. Pure: no file, socket, clock or torch."""
