"""Logs of Slackwater's processes."""
