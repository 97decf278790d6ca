"""The trainer's side of the bucket: anchors, deltas, and the commit."""
