"""What an adopter declares in conformance.toml: failures that are known, and budgets that are wider than ours."""
