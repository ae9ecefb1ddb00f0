"""What stands between a runtime of your own and the suite: arrays, views, hooks, capabilities, and the boundary."""
