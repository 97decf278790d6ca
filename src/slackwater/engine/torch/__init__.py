"""The embedded engine: torch, transformers' modelling code, a small continuous-batching loop."""
