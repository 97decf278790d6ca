"""Named quantisers: a trainer's weights as the codes and scales that a release serves, and back."""
