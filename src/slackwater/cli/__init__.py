"""The only place that composes processes."""
