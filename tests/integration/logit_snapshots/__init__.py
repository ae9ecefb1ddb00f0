"""Snapshots of logit statistics: what is run, what is kept of it, and how far it may move."""
