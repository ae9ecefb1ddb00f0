"""Drives a runtime through a case and judges what it yields."""
