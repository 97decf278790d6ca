"""Frozen settings of each process, with units and bounds."""
