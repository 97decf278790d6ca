"""Compiled kernels of the forward pass, and the threads that share them."""
