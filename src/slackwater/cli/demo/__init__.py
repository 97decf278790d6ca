"""`slackwater demo`: a trainer, a fleet and a bucket on this machine, before your eyes."""
